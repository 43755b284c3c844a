# SPDX-License-Identifier: Apache-2.0
"""Asks the processes behind model folders what their models are, see `hf_triton.protocol.model_info`."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from hf_triton.protocol.model_info import MODEL_INFO, ModelInfo
from hf_triton.protocol.names import JSON_OUTPUT
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
            request = None if folder.stream_of else info_request(folder.name, config)
            info = None if request is None else await self._ask(folder, request)
            is_final = request is None or info is not None
            told = _Told(state, info, math.inf if is_final else time.monotonic() + RETRY_S)
            self._told[folder.name] = told
        return told.info

    def forget(self, name: str) -> None:
        """A model may have been loaded again."""
        self._told.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other models: they are not loaded."""
        self._told = {name: told for name, told in self._told.items() if name in names}

    async def _ask(self, folder: Folder, request: Any) -> ModelInfo | None:
        try:
            if folder.is_decoupled:
                stream = self._calls.stream(request, TIMEOUT_S, self._headers, takes_cancel=True)
                first, *_ = [each async for each in stream]
                answer = first.infer_response
            else:
                answer = await self._calls.infer(request, TIMEOUT_S, self._headers, takes_cancel=True)
            return ModelInfo.from_json(read_outputs(answer)[JSON_OUTPUT][0])
        except (grpc.aio.AioRpcError, TimeoutError, AttributeError, LookupError, ValueError):
            return None  # it is of an older release, or does not answer in time


def info_request(name: str, config: Any) -> Any:
    """The gRPC message that asks what the model is; None for a folder of another library, which would compute."""
    if config.backend != "python" or not {port.name for port in config.output} >= {JSON_OUTPUT, NUM_INPUT_TOKENS}:
        return None
    message = service_pb2.ModelInferRequest(model_name=name)
    message.parameters[MODEL_INFO].bool_param = True
    message.outputs.add(name=JSON_OUTPUT)
    required = [port for port in config.input if not port.optional]
    for port in required or (list(config.input[:1]) if config.max_batch_size else []):
        datatype = model_config_pb2.DataType.Name(port.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        batch = [1] if config.max_batch_size else []
        shape = [*batch, *(1 if size < 0 else size for size in port.dims)]
        message.inputs.add(name=port.name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(bytes(math.prod(shape) * BYTES[datatype]))
    return message
