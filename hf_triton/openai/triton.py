# SPDX-License-Identifier: Apache-2.0
"""Triton over gRPC: which models it has, generating, streaming. The only module that knows tritonclient."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.openai.errors import ApiError, model_not_found, triton_error
from hf_triton.openai.on_demand import OnDemand, Use
from hf_triton.openai.tracing import caller
from hf_triton.protocol.chat import MESSAGES
from hf_triton.protocol.ports import TEXT_OUTPUTS
from hf_triton.protocol.prompts import PROMPT, PROMPT_TOKEN_IDS

MAX_AGE_S: Final = 2.0
"""How long the list of models is believed."""
CONTROL_TIMEOUT_S: Final = 5.0
"""Limit of a call that lists models or asks for their state."""
MAX_LOADS: Final = 3
"""Loads for one request, whose model others may unload meanwhile."""
LOST: Final = ("model_not_found", "not_loaded", "shutting_down")
"""Codes of a model that is not loaded any more."""
DOOR_SUFFIX: Final = "_stream"
RESTRICTED: Final = "This protocol is restricted"
"""Triton's words to a call without the header of `--grpc-restricted-protocol`; the name of the header follows."""
TEXT_GENERATION: Final = "text-generation"
CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the Hub
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),  # Triton drops a connection at the third ping without data
    ("grpc.keepalive_timeout_ms", 10_000),
)
FORMATS: Final[Mapping[str, str]] = {"UINT32": "I", "INT32": "i", "FP32": "f", "INT64": "q", "UINT64": "Q"}

Outputs: TypeAlias = dict[str, list[Any]]
"""The outputs of a response by name: strings or numbers, one for each sequence."""


@dataclass(frozen=True)
class Folder:
    """A model folder that is ready, by its completed config."""

    name: str
    max_batch_size: int
    is_decoupled: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    parameters: Mapping[str, str]

    @classmethod
    def from_config(cls, name: str, config: Any) -> Folder:
        """The folder of a `ModelConfig` message."""
        return cls(
            name,
            config.max_batch_size,
            config.model_transaction_policy.decoupled,
            frozenset(port.name for port in config.input),
            frozenset(port.name for port in config.output),
            {key: value.string_value for key, value in config.parameters.items()},
        )

    @property
    def task(self) -> str | None:
        """What the folder's model does; None if the gateway has no endpoint for it."""
        generates = PROMPT in self.inputs and not self.outputs.isdisjoint(TEXT_OUTPUTS)
        return TEXT_GENERATION if generates else None

    @property
    def stream_of(self) -> str | None:
        """The folder that this one streams from, if it is a stream door."""
        if not self.is_decoupled or "huggingface_model" in self.parameters:
            return None
        named = self.parameters.get("stream_of")
        return named or (self.name.removesuffix(DOOR_SUFFIX) if self.name.endswith(DOOR_SUFFIX) else None)


@dataclass(frozen=True)
class Model:
    """A model that clients can name."""

    folder: Folder
    door: Folder | None
    """The folder that streams; None if requests with `stream` are refused."""
    created_s: int
    """When the gateway first saw it, in seconds since 1970."""
    is_loaded: bool | None = None
    """With loading on demand: whether it is loaded."""

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Generation:
    """One request for generated text, in the names of `hf_triton.protocol`."""

    model: str
    request_id: str
    sampling: Mapping[str, object]
    """Generation parameters."""
    options: Mapping[str, bool | int | str]
    """Request options and chat options."""
    prompts: Sequence[str] = ()
    messages: object = None
    """OpenAI's list of messages, instead of prompts."""
    prompt_token_ids: Sequence[int] | None = None
    """One prompt's token ids, instead of prompts."""
    returns: Collection[str] = ("finish_reason", "num_input_tokens", "num_output_tokens")
    """Outputs to fill beside the text, if the folder declares them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The client's names of our parameters, for error messages."""
    fields: Collection[str] = ()
    """The client's names of all fields."""


class TritonModels:
    """The models of one Triton. Belongs to one event loop.

    Args:
        address: Triton's gRPC address, HOST:PORT.
        timeout_s: Longest time of a generation, in seconds.
        headers: Sent with each call, for a Triton with restricted APIs; names are in lower case.
        on_demand: Loads and unloads models; None: the models are those that are ready.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        on_demand: OnDemand | None = None,
    ) -> None:
        self._address = address
        self._headers = tuple((headers or {}).items())
        self._timeout_s = timeout_s
        self._on_demand = on_demand
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._models: dict[str, Model] = {}
        self._listed_s = float("-inf")
        self._listing: asyncio.Task[None] | None = None
        self._seen: dict[str, Model] = {}
        self._changes: dict[str, int] = {}

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        await self._channel.close()

    def _call_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of a generation's call."""
        return (*self._headers, *caller().items())

    async def is_ready(self) -> bool:
        """Whether Triton answers that it is ready; with loading on demand, that it lives."""
        try:
            if self._on_demand is not None:  # Triton is not ready while a model is loading, or has failed
                request = service_pb2.ServerLiveRequest()
                alive = await self._stub.ServerLive(request, timeout=CONTROL_TIMEOUT_S, metadata=self._headers)
                return bool(alive.live)
            answer = await self._stub.ServerReady(
                service_pb2.ServerReadyRequest(), timeout=CONTROL_TIMEOUT_S, metadata=self._headers
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def models(self) -> list[Model]:
        """The models that are ready, by name; with loading on demand, all in the repository.

        Raises:
            ApiError: Triton cannot be reached.
        """
        if time.monotonic() - self._listed_s > MAX_AGE_S:
            await asyncio.shield(self._list())
        models = dict(self._models)
        if self._on_demand is not None:
            for name, is_loaded in (await self._on_demand.names()).items():
                model = models.get(name) or self._seen.get(name) or _unknown_model(name)
                self._seen[name] = models[name] = dataclasses.replace(model, is_loaded=is_loaded)
        return sorted(models.values(), key=lambda model: model.name)

    async def model(self, name: str) -> Model:
        """The model of a name, loaded or not.

        Raises:
            ApiError: There is none, or Triton cannot be reached.
        """
        if self._on_demand is not None and name in await self._on_demand.names():
            return self._seen.get(name) or _unknown_model(name)
        return await self._model(name)

    async def _model(self, name: str) -> Model:
        is_old = time.monotonic() - self._listed_s > MAX_AGE_S
        if name in self._models:
            if is_old:
                self._list()  # the next request will know
            return self._models[name]
        await asyncio.shield(self._list())
        if name not in self._models:
            raise model_not_found(name)
        return self._models[name]

    async def folder(self, name: str, *, is_stream: bool = False) -> Folder:
        """The folder that answers a model's requests; with loading on demand, as it was when it was last loaded.

        Raises:
            ApiError: The model does not exist or does not stream, or Triton cannot be reached.
        """
        seen = self._seen.get(name) if self._on_demand is not None else None
        if seen is not None and (folder := seen.door if is_stream else seen.folder) is not None and folder.inputs:
            return folder
        async with self._in_use(name):
            return await self._folder(name, is_stream=is_stream)

    async def _folder(self, name: str, *, is_stream: bool) -> Folder:
        model = await self._model(name)
        if not is_stream:
            return model.folder
        if model.door is None:
            await asyncio.shield(self._list())  # it may have come meanwhile
            model = await self._model(name)
        if model.door is None:
            raise ApiError(
                400,
                f"the model '{model.name}' does not stream: copy the folder `stream_door/` into the model repository "
                f"as `{model.name}{DOOR_SUFFIX}`, or start Triton with `hf-triton serve`, which adds it",
                param="stream",
                code="stream_not_available",
            )
        return model.door

    @contextlib.asynccontextmanager
    async def _in_use(self, name: str) -> AsyncIterator[Use]:
        """Where requests enter: with loading on demand, the model is loaded, and stays so meanwhile."""
        if self._on_demand is None:
            yield Use(name, 0, self._timeout_s)
            return
        async with self._on_demand.in_use(name, self._timeout_s) as use:
            if self._changes.get(name) != use.change:
                if self._listing is not None and not self._listing.done():
                    await asyncio.wait([self._listing])  # it began before the load
                await asyncio.shield(self._list())
                self._changes[name] = use.change
            yield use

    def _is_lost(self, use: Use, error: ApiError) -> bool:
        """Whether a request failed since its model is not loaded any more; it will be loaded again."""
        if self._on_demand is None or error.code not in LOST:
            return False
        self._on_demand.lost(use)
        return True

    def _list(self) -> asyncio.Task[None]:
        """Start listing the models, or join those who wait for the list."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.ensure_future(self._read_models())
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait
        return self._listing

    async def _read_models(self) -> None:
        try:
            index = await self._stub.RepositoryIndex(
                service_pb2.RepositoryIndexRequest(ready=True), timeout=CONTROL_TIMEOUT_S, metadata=self._headers
            )
            folders = await asyncio.gather(*map(self._read_folder, sorted({entry.name for entry in index.models})))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        by_name = {folder.name: folder for folder in folders if folder is not None}
        self._models = _models(by_name, self._seen)
        self._seen.update(self._models)
        self._listed_s = time.monotonic()

    async def _read_folder(self, name: str) -> Folder | None:
        try:
            answer = await self._stub.ModelConfig(
                service_pb2.ModelConfigRequest(name=name), timeout=CONTROL_TIMEOUT_S, metadata=self._headers
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "unknown model" not in (error.details() or ""):
                raise
            return None  # unloaded meanwhile
        return Folder.from_config(name, answer.config)

    async def generate(self, generation: Generation) -> Outputs:
        """Generate, and return the whole response. Cancelling the task cancels the request.

        Raises:
            ApiError: The request is refused, or failed.
        """
        for _ in range(MAX_LOADS - 1):
            async with self._in_use(generation.model) as use:
                try:
                    return await self._generate(generation, use.left_s)
                except ApiError as error:
                    if not self._is_lost(use, error):
                        raise
        async with self._in_use(generation.model) as use:
            return await self._generate(generation, use.left_s)

    async def _generate(self, generation: Generation, timeout_s: float) -> Outputs:
        folder = await self._folder(generation.model, is_stream=False)
        if folder.is_decoupled:  # such folders refuse ModelInfer
            responses = [response async for response in self._stream(folder, generation, timeout_s, is_stream=False)]
            return responses[-1]
        message = _infer_request(folder, generation, is_stream=False)
        try:
            return _read_outputs(await self._stub.ModelInfer(message, timeout=timeout_s, metadata=self._call_headers()))
        except grpc.aio.AioRpcError as error:
            raise self._error(error, generation) from None

    async def stream(self, generation: Generation) -> AsyncGenerator[Outputs]:
        """Start generating; the iterator gives the responses as they come. Closing it cancels the request.

        The text is a delta; finish reasons, counts and log probabilities are in the last response.

        Raises:
            ApiError: The model does not exist or does not stream, the request is refused or fails, or Triton cannot be
                reached; by the iterator.
        """
        for num_loads in range(1, MAX_LOADS + 1):
            has_started = False
            async with self._in_use(generation.model) as use:
                try:
                    folder = await self._folder(generation.model, is_stream=True)
                    async with contextlib.aclosing(
                        self._stream(folder, generation, use.left_s, is_stream=True)
                    ) as responses:
                        async for outputs in responses:
                            has_started = True
                            yield outputs
                    return
                except ApiError as error:
                    if has_started or num_loads == MAX_LOADS or not self._is_lost(use, error):
                        raise

    async def _stream(
        self, folder: Folder, generation: Generation, timeout_s: float, *, is_stream: bool
    ) -> AsyncGenerator[Outputs]:
        message = _infer_request(folder, generation, is_stream=is_stream)
        call = self._stub.ModelStreamInfer(timeout=timeout_s, metadata=self._call_headers())
        try:
            await call.write(message)
            await call.done_writing()
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.error_message:
                    raise self._triton_error(response.error_message, 500, generation)
                if response.infer_response.outputs:
                    yield _read_outputs(response.infer_response)
            if await call.code() is not grpc.StatusCode.OK:
                raise self._status_error(await call.code(), await call.details(), generation)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, generation) from None
        except asyncio.InvalidStateError:  # a write to a call that has failed
            raise self._status_error(await call.code(), await call.details(), generation) from None
        finally:
            call.cancel()

    def _error(self, error: grpc.aio.AioRpcError, generation: Generation | None = None) -> ApiError:
        return self._status_error(error.code(), error.details(), generation)

    def _status_error(
        self, status: grpc.StatusCode, details: str | None, generation: Generation | None = None
    ) -> ApiError:
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ApiError(504, "the server did not answer in time", code="deadline_exceeded")
        if RESTRICTED in (details or ""):
            return ApiError(403, f"Triton restricts this API: {details}", code="restricted")
        coded = self._triton_error(details or "", _HTTP_STATUS.get(status, 500), generation)
        if coded.code is None and coded.status_code == 503:
            return ApiError(503, "the server cannot be reached: send the request again later", code="unavailable")
        return coded

    def _triton_error(self, message: str, status: int, generation: Generation | None) -> ApiError:
        """Triton's message as an error; one that is not our model's own may mean that the list of models is old."""
        if generation is None:
            return triton_error(message, {}, (), status)
        error = triton_error(message, generation.names, generation.fields, status)
        if error.code is None:
            self._models.pop(generation.model, None)  # the next request lists the models first
        if f"unknown model: '{generation.model}'" in message:
            return model_not_found(generation.model)
        if "unknown model" in message or "decoupled transaction policy" in message:
            return ApiError(
                503,
                f"the model '{generation.model}' is being loaded or unloaded: send the request again later",
                code="not_loaded",
            )
        return error


_HTTP_STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 400,
    grpc.StatusCode.UNAVAILABLE: 503,
}


def _unknown_model(name: str) -> Model:
    """A model that was never loaded: its config is not known."""
    return Model(Folder(name, 0, False, frozenset(), frozenset(), {}), None, int(time.time()))


def _models(folders: Mapping[str, Folder], known: Mapping[str, Model]) -> dict[str, Model]:
    """The models among folders: a stream door is part of its model."""
    doors = {folder.stream_of: folder for folder in folders.values() if folder.stream_of}
    models = {}
    for name, folder in folders.items():
        if folder.task is None or folder.stream_of:
            continue
        created_s = known[name].created_s if name in known else int(time.time())
        models[name] = Model(folder, folder if folder.is_decoupled else doors.get(name), created_s)
    return models


def _infer_request(folder: Folder, generation: Generation, *, is_stream: bool) -> Any:
    """The gRPC message of a generation.

    Raises:
        ApiError: A string is not Unicode.
    """
    request = service_pb2.ModelInferRequest(model_name=folder.name, id=generation.request_id)
    returns = {f"return_{name}": True for name in generation.returns if name in folder.outputs}
    parameters: dict[str, object] = {"stream": is_stream, **returns, **generation.options, **caller()}
    try:
        if generation.sampling:
            parameters["sampling_parameters"] = json.dumps(generation.sampling)
        if generation.messages is not None:
            text = json.dumps(generation.messages, ensure_ascii=False)
            if MESSAGES in folder.inputs:
                _add_strings(request, folder, MESSAGES, [text])
            else:
                parameters[MESSAGES] = text
        elif generation.prompt_token_ids is not None:
            if PROMPT_TOKEN_IDS in folder.inputs:
                _add_ids(request, folder, generation.prompt_token_ids)
            else:
                parameters[PROMPT_TOKEN_IDS] = json.dumps(list(generation.prompt_token_ids))
        else:
            _add_strings(request, folder, PROMPT, generation.prompts)
        for name, value in parameters.items():
            kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "string"
            setattr(request.parameters[name], f"{kind}_param", value)
    except (UnicodeEncodeError, RecursionError):
        raise ApiError(400, "the request holds half of a surrogate pair, which is not Unicode") from None
    return request


def _add_strings(request: Any, folder: Folder, name: str, texts: Sequence[str]) -> None:
    shape = [len(texts), 1] if folder.max_batch_size else [len(texts)]
    request.inputs.add(name=name, datatype="BYTES", shape=shape)
    encoded = [text.encode() for text in texts]
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))


def _add_ids(request: Any, folder: Folder, token_ids: Sequence[int]) -> None:
    """Add a prompt's token ids as an input, which Triton demands of folders with a batch size.

    Raises:
        ApiError: An id is beyond 64 bits.
    """
    shape = [1, len(token_ids)] if folder.max_batch_size else [len(token_ids)]
    request.inputs.add(name=PROMPT_TOKEN_IDS, datatype="INT64", shape=shape)
    try:
        request.raw_input_contents.append(struct.pack(f"<{len(token_ids)}q", *token_ids))
    except struct.error:
        raise ApiError(400, "prompt holds a token id that no model has", param="prompt") from None


def _read_outputs(response: Any) -> Outputs:
    contents = response.raw_output_contents
    return {
        output.name: _read_tensor(output.datatype, contents[index]) for index, output in enumerate(response.outputs)
    }


def _read_tensor(datatype: str, content: bytes) -> list[Any]:
    if datatype != "BYTES":
        form = FORMATS[datatype]
        return list(struct.unpack(f"<{len(content) // struct.calcsize(form)}{form}", content))
    texts, start = [], 0
    while start < len(content):
        end = start + 4 + int.from_bytes(content[start : start + 4], "little")
        texts.append(content[start + 4 : end].decode(errors="replace"))
        start = end
    return texts
