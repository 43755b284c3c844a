# SPDX-License-Identifier: Apache-2.0
"""Asks the processes behind model folders what their models are, and has them sleep or wake.

See `hf_triton.protocol.model_info` and `hf_triton.protocol.sleep`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from hf_triton.protocol.model_info import MODEL_INFO, ModelInfo
from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton.protocol.sleep import SLEEP, SleepAnswer
from hf_triton_gateway.http.api_errors import ApiError, triton_error
from hf_triton_gateway.http.client_names import ClientNames
from hf_triton_gateway.triton.triton_messages import Folder, read_outputs

if TYPE_CHECKING:
    from hf_triton_gateway.triton.calls import Calls

TIMEOUT_S: Final = 1.0
"""Limit of a call."""
RETRY_S: Final = 30.0
"""A model that did not answer is asked again after this time."""
NUM_INPUT_TOKENS: Final = "num_input_tokens"
"""This library adds the output to every folder, with JSON_OUTPUT."""
BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32", "BYTES"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
}
"""The bytes of a zero or an empty string, by datatype."""


@dataclass(frozen=True)
class _Told:
    config: bytes
    """The folder's config then."""
    info: ModelInfo | None
    until_s: float
    """The folder is asked again then, by `time.monotonic()`."""


class ModelInfos:
    """What models say they are. Belongs to one event loop."""

    def __init__(self, calls: Calls, headers: tuple[tuple[str, str], ...]) -> None:
        self._calls = calls
        self._headers = headers
        self._told: dict[str, _Told] = {}

    async def of(self, folder: Folder, config: Any) -> ModelInfo | None:
        """What a folder's model is; asked once for each config, and again after `forget`. None: it does not say."""
        state, told = config.SerializeToString(deterministic=True), self._told.get(folder.name)
        if told is None or told.config != state or told.until_s < time.monotonic():
            request = None if folder.stream_of else control_request(folder.name, config, MODEL_INFO)
            info = None if request is None else await self._ask(folder, request)
            is_final = request is None or info is not None
            told = _Told(state, info, math.inf if is_final else time.monotonic() + RETRY_S)
            self._told[folder.name] = told
        return told.info

    async def asked_again(self, folder: Folder, config: Any) -> ModelInfo | None:
        """What a folder's model is now; if it does not answer in time, what it was, but not whether it sleeps."""
        if (told := await self.of(folder, config)) is None:
            return None
        now = await self._ask(folder, control_request(folder.name, config, MODEL_INFO))
        return now or dataclasses.replace(told, is_sleeping=None)

    def forget(self, name: str) -> None:
        """A model may have been loaded again."""
        self._told.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other models: they are not loaded."""
        self._told = {name: told for name, told in self._told.items() if name in names}

    async def _ask(self, folder: Folder, request: Any) -> ModelInfo | None:
        try:
            answer = await _ask(self._calls, request, TIMEOUT_S, self._headers, is_decoupled=folder.is_decoupled)
            return ModelInfo.from_json(answer)
        except (ApiError, grpc.aio.AioRpcError, TimeoutError, AttributeError, LookupError, ValueError):
            return None  # it is of an older release, or does not answer in time


async def _ask(
    calls: Calls, request: Any, timeout_s: float, headers: tuple[tuple[str, str], ...], *, is_decoupled: bool
) -> str:
    """What a model's process answers to a `control_request`."""
    if is_decoupled:
        stream = calls.stream(request, timeout_s, headers, takes_cancel=True)
        first, *_ = [each async for each in stream]
        if first.error_message:
            raise triton_error(first.error_message, ClientNames())
        answer = first.infer_response
    else:
        answer = await calls.infer(request, timeout_s, headers, takes_cancel=True)
    return str(read_outputs(answer)[JSON_OUTPUT][0])


async def set_sleeping(
    calls: Calls,
    name: str,
    config: Any,
    timeout_s: float,
    headers: tuple[tuple[str, str], ...],
    *,
    is_sleeping: bool,
) -> SleepAnswer | None:
    """Have a loaded model sleep once no request is in flight, or wake. None: it cannot.

    A process of an older release knows no such request. One of several instances tells the others.

    Raises:
        ApiError: It failed.
        grpc.aio.AioRpcError: Triton refuses the request, or cannot be reached.
        TimeoutError: Requests in flight took longer.
    """
    request = control_request(name, config, SLEEP, is_sleeping)
    if request is None:
        return None
    is_decoupled = config.model_transaction_policy.decoupled
    try:
        return SleepAnswer.from_json(await _ask(calls, request, timeout_s, headers, is_decoupled=is_decoupled))
    except (LookupError, ValueError):
        return None
    except ApiError as error:
        failure = error
    except grpc.aio.AioRpcError as error:
        failure = triton_error(error.details() or "", ClientNames())
        if failure.code is None:
            raise
    if failure.status_code == 400:  # it knows no such parameter
        return None
    raise failure


def control_request(name: str, config: Any, parameter: str, value: bool = True) -> Any:
    """The gRPC message that a process answers by itself; None for a folder of another library, which would compute."""
    if config.backend != "python" or not {port.name for port in config.output} >= {JSON_OUTPUT, NUM_INPUT_TOKENS}:
        return None
    message = service_pb2.ModelInferRequest(model_name=name)
    message.parameters[parameter].bool_param = value
    message.outputs.add(name=JSON_OUTPUT)
    required = [port for port in config.input if not port.optional]
    for port in required or (list(config.input[:1]) if config.max_batch_size else []):
        datatype = model_config_pb2.DataType.Name(port.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        batch = [1] if config.max_batch_size else []
        shape = [*batch, *(1 if size < 0 else size for size in port.dims)]
        message.inputs.add(name=port.name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(bytes(math.prod(shape) * BYTES[datatype]))
    return message
