# SPDX-License-Identifier: Apache-2.0
"""Triton over gRPC: which models it has, generating, streaming, encoding."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.errors import clip
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton_gateway.http.api_errors import ApiError, load_reason, model_not_found, out_of_shared_memory, triton_error
from hf_triton_gateway.http.bodies import beside
from hf_triton_gateway.http.client_names import ClientNames
from hf_triton_gateway.http.gateway_tracer import caller
from hf_triton_gateway.http.hints import pass_over
from hf_triton_gateway.http.keep_alive import KEEP_ALIVE_S
from hf_triton_gateway.keys.accounts import Tally, allows_model, check_model, with_salt
from hf_triton_gateway.triton.calls import Calls
from hf_triton_gateway.triton.endpoint import Endpoint, wait_for_attempt
from hf_triton_gateway.triton.model_infos import ModelInfos, set_sleeping
from hf_triton_gateway.triton.on_demand import OnDemand, Use
from hf_triton_gateway.triton.triton_messages import (
    ADAPTER_MARK,
    DOOR_SUFFIX,
    ENDPOINTS,
    LORA_NAME,
    TEXT_GENERATION,
    Folder,
    Generation,
    Outputs,
    TextRequest,
    base_name,
    infer_request,
    read_outputs,
)
from hf_triton_gateway.triton.triton_words import says, unknown_name

LOG: Final = logging.getLogger("hf_triton_gateway")
T = TypeVar("T")

MAX_AGE_S: Final = 2.0
"""Maximum age of the list of models."""
CONTROL_TIMEOUT_S: Final = 5.0
"""Limit of a call that lists models or asks for their state."""
MAX_LOADS: Final = 3
"""Loads for one request, whose model others may unload meanwhile."""
LOST: Final = ("not_loaded", "shutting_down")
"""Codes of a model that is not loaded any more."""


@dataclass(frozen=True)
class Model:
    """A model that clients can name."""

    folder: Folder
    door: Folder | None
    """The folder that streams; None if requests with `stream` are refused."""
    created_s: int
    """The gateway first saw it then, in seconds since 1970."""
    is_loaded: bool | None = None
    """Whether it is loaded, with loading on demand."""

    @property
    def name(self) -> str:
        return self.folder.name


class TritonModels:
    """The models of one Triton. Belongs to one event loop.

    Args:
        endpoint: Triton's gRPC.
        timeout_s: Longest time of a generation, in seconds.
        on_demand: Loads and unloads models; None: the models are those that are ready.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float, on_demand: OnDemand | None = None) -> None:
        self._endpoint = endpoint
        self._misfit: str | None = None
        self._headers = tuple(endpoint.headers.items())
        self._timeout_s = timeout_s
        self._on_demand = on_demand
        self._channel = endpoint.channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._folders: dict[str, Folder] = {}
        self._models: dict[str, Model] = {}
        self._listed_s = float("-inf")
        self._listing: asyncio.Task[None] | None = None
        self._seen: dict[str, Model] = {}
        self._changes: dict[str, int] = {}
        self._asleep: frozenset[str] = frozenset()
        self._asleep_s = -math.inf
        self._calls = Calls(self._stub)
        self._infos = ModelInfos(self._calls, self._headers)

    async def close(self) -> None:
        """Disconnect; what is in flight is cancelled."""
        if self._listing is not None:  # its callers may be gone
            self._listing.cancel()
            await asyncio.wait([self._listing])
        await self._calls.close()
        await self._channel.close()

    def _call_headers(self) -> tuple[tuple[str, str], ...]:
        return (*self._headers, *caller().items())

    async def is_ready(self) -> bool:
        """Whether Triton answers that it is ready; with loading on demand, that it lives."""
        await wait_for_attempt(self._channel)
        try:
            if self._on_demand is not None:  # Triton is not ready while a model is loading, or has failed
                request = service_pb2.ServerLiveRequest()
                alive = await self._stub.ServerLive(request, timeout=CONTROL_TIMEOUT_S, metadata=self._headers)
                return bool(alive.live)
            answer = await self._stub.ServerReady(
                service_pb2.ServerReadyRequest(), timeout=CONTROL_TIMEOUT_S, metadata=self._headers
            )
        except grpc.aio.AioRpcError as error:
            self._note_misfit(error.details())
            return False
        return bool(answer.ready)

    async def models(self) -> list[Model]:
        """The models that are ready and the client may use, by name; with loading on demand, all in the repository."""
        if time.monotonic() - self._listed_s > MAX_AGE_S:
            await asyncio.shield(self._list())
        models = dict(self._models)
        if self._on_demand is not None:
            for name, is_loaded in (await self._on_demand.names()).items():
                model = models.get(name) or self._seen.get(name) or _unknown_model(name)
                self._seen[name] = models[name] = dataclasses.replace(model, is_loaded=is_loaded)
        return sorted((model for model in models.values() if allows_model(model.name)), key=lambda model: model.name)

    async def asleep(self) -> Collection[str]:
        """The models that are ready and sleep, whose processes are asked; with loading on demand, as that knows."""
        if self._on_demand is not None:
            return {name for name in self._seen if self._on_demand.is_sleeping(name)}
        if time.monotonic() - self._asleep_s > MAX_AGE_S:
            able = [name for name, folder in self._folders.items() if folder.info is not None]
            infos = await asyncio.gather(*map(self._asked_again, able))
            self._asleep = frozenset(name for name, info in zip(able, infos, strict=True) if info and info.is_sleeping)
            self._asleep_s = time.monotonic()
        return self._asleep

    async def is_sleeping(self, name: str) -> bool:
        """Whether a model sleeps; its process is asked, and does not wake."""
        await self._loaded_folder(name)
        info = await self._asked_again(name)
        return info is not None and info.is_sleeping is True

    async def set_sleeping(self, name: str, *, is_sleeping: bool) -> SleepAnswer:
        """Have a model sleep once no request is in flight, or wake it; with loading on demand, within its limits."""
        await self._loaded_folder(name)
        start_s, on_demand = time.monotonic(), self._on_demand
        if is_sleeping:
            answer = await self._set_sleeping(name, self._timeout_s, is_sleeping=True)
        else:
            slept = on_demand is not None and on_demand.is_sleeping(name)
            async with self._in_use(name, start_s + self._timeout_s) as use:
                answer = await self._set_sleeping(name, use.left_s, is_sleeping=False)
            if slept:  # it woke to be in use
                answer = dataclasses.replace(answer, seconds=time.monotonic() - start_s)
        if on_demand is not None:
            on_demand.note_sleep(name, is_sleeping=answer.is_sleeping)
        self._asleep_s = -math.inf
        return answer

    async def _set_sleeping(self, name: str, timeout_s: float, *, is_sleeping: bool) -> SleepAnswer:
        try:
            config = await self._read_config(name)
            answer = await set_sleeping(
                self._calls, name, config, timeout_s, self._call_headers(), is_sleeping=is_sleeping
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except TimeoutError:
            raise _time_is_up() from None
        if answer is None:
            message = f"the model {clip(name)} cannot sleep: its process is of an older release, or of another library"
            raise ApiError(400, message, param="model", code="cannot_sleep")
        return answer

    async def _loaded_folder(self, name: str) -> Folder:
        """The folder of a model whose process runs."""
        check_model(name)
        try:
            if (folder := await self._read_folder(name)) is not None and not folder.stream_of:
                return folder
            names = {entry.name for entry in await self._index()}
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        if name in names and folder is None:
            message = f"the model {clip(name)} is not loaded, so that it neither sleeps nor wakes"
            raise ApiError(400, message, param="model", code="not_loaded")
        raise model_not_found(name, self._models)

    async def _asked_again(self, name: str) -> ModelInfo | None:
        try:
            config = await self._read_config(name)
        except grpc.aio.AioRpcError:
            return None
        return await self._infos.asked_again(Folder.from_config(name, config), config)

    async def folders(self) -> Mapping[str, Folder]:
        """All folders that are ready, stream doors and those without an endpoint here among them, by name."""
        await asyncio.shield(self._list())
        return self._folders

    async def only(
        self, task: str | None, default: str | None = None, way: str = "in the field model, or by ?model=NAME"
    ) -> Model:
        """The model of a request that names none: the default, or the only one of a task, or of all.

        Args:
            task: What it must do; None: anything.
            default: Taken if it does, where several do.
            way: How a request names a model.
        """
        models = await self.models()
        found = [model for model in models if task in (None, model.folder.task)]
        found = found or [model for model in models if model.folder.task is None]  # never loaded on demand so far
        chosen = [model for model in found if model.name == default] or found
        if len(chosen) == 1:
            return chosen[0]
        names = ", ".join(clip(model.name) for model in found or models)
        if task is not None and not found:
            message = f"no model for {task} is served; there are {names or 'none'}"
            raise ApiError(404, message, param="model", code="model_not_found")
        what = f"{len(found)} models" + (f" for {task}" if task else "")
        message = f"model is required, as there are {what}: name one {way}; there are {names or 'none'}"
        raise ApiError(400, message, param="model", code="missing_required_parameter")

    async def named(self, name: str) -> Model | None:
        """A model that is ready, without Triton's list of all, which may need a key; None: it is none."""
        try:
            folders = await asyncio.gather(*map(self._read_folder, (name, f"{name}{DOOR_SUFFIX}")))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        found = _models({folder.name: folder for folder in folders if folder is not None}, self._seen)
        self._models |= found
        return found.get(name)

    async def _model(self, name: str) -> Model:
        is_old = time.monotonic() - self._listed_s > MAX_AGE_S
        if name in self._models:
            if is_old:
                self._list()  # the next request will know
            return self._models[name]
        await asyncio.shield(self._list())
        if name not in self._models:
            error = await self.missing(name)
            if error.code == "wrong_task":  # or it has become ready since the list
                await asyncio.shield(self._list())
            if name not in self._models:
                raise self._unknown(name) if error.status_code == 404 else error
        return self._models[name]

    async def missing(self, name: str) -> ApiError:
        """Why a model is not served: it has a task without an endpoint, is not loaded, or does not exist."""
        try:
            entries = await self._index()
        except grpc.aio.AioRpcError as error:
            return self._error(error)
        for entry in entries:
            if entry.name != name or entry.reason == "unloaded":
                continue
            if entry.state == "READY" and not name.endswith(DOOR_SUFFIX):
                message = f"the model {clip(name)} has no endpoint here: POST Triton's /v2/models/{name}/infer"
                return ApiError(400, message, param="model", code="wrong_task")
            reason = load_reason(entry.reason) or ("it is being loaded" if entry.state == "LOADING" else "")
            if reason:
                return ApiError(503, f"the model {clip(name)} is not ready: {reason}", param="model", code="not_loaded")
        return model_not_found(name, self._models)

    async def _index(self, *, is_ready: bool = False) -> Sequence[Any]:
        """Triton's index: every folder with its state, or those that are ready."""
        await wait_for_attempt(self._channel)
        request = service_pb2.RepositoryIndexRequest(ready=is_ready)
        answer = await self._stub.RepositoryIndex(request, timeout=CONTROL_TIMEOUT_S, metadata=self._headers)
        return list(answer.models)

    async def _without_stream(self, name: str) -> ApiError:
        """Why a model does not stream: its door is not ready, or there is none."""
        door = f"{name}{DOOR_SUFFIX}"
        try:
            has_door = any(entry.name == door for entry in await self._index())
        except grpc.aio.AioRpcError as error:
            return self._error(error)
        if has_door:
            message = f"the model '{name}' streams through '{door}', which is not ready: load it, or send again later"
            return ApiError(503, message, param="stream", code="not_loaded")
        return ApiError(
            400,
            f"the model '{name}' does not stream: copy the folder `stream_door/` into the model repository as "
            f"`{door}`, or start Triton with `hf-triton serve`, which adds it",
            param="stream",
            code="stream_not_available",
        )

    def _unknown(self, name: str) -> ApiError:
        """Triton does not know a request's model; with loading on demand the folder exists, and others unloaded it."""
        if self._on_demand is None:
            return model_not_found(name, self._models)
        return ApiError(503, f"the model {clip(name)} was unloaded: send the request again later", code="not_loaded")

    async def folder(self, name: str, *, task: str | None = TEXT_GENERATION, is_stream: bool = False) -> Folder:
        """The folder that answers a model's requests; with loading on demand, as it was when it was last loaded."""
        check_model(name)
        name = base_name(name)
        seen = self._seen.get(name) if self._on_demand is not None else None
        if seen is not None and (folder := seen.door if is_stream else seen.folder) is not None and folder.inputs:
            _check_task(folder, task)
            return folder
        return await self._loaded(name, lambda timeout_s: self._folder(name, task, is_stream=is_stream))

    async def _folder(self, name: str, task: str | None, *, is_stream: bool) -> Folder:
        model = await self._model(name)
        _check_task(model.folder, task)
        if not is_stream:
            return model.folder
        if model.door is None:
            await asyncio.shield(self._list())  # it may have come meanwhile
            model = await self._model(name)
        if model.door is None and self._on_demand is not None:
            await self._on_demand.load_door(model.name)
            await self._refresh()
            model = await self._model(name)
        if model.door is None:
            raise await self._without_stream(model.name)
        return model.door

    @contextlib.asynccontextmanager
    async def _in_use(self, name: str, deadline_s: float) -> AsyncIterator[Use]:
        """Requests enter here: with loading on demand, the model is loaded, and stays so meanwhile."""
        timeout_s = max(0.001, deadline_s - time.monotonic())
        if self._on_demand is None:
            yield Use(name, 0, timeout_s)
            return
        async with self._on_demand.in_use(name, timeout_s, KEEP_ALIVE_S.get()) as use:
            if self._changes.get(name) != use.change:
                self._infos.forget(name)
                await self._refresh()
                self._changes[name] = use.change
            yield use

    async def _is_repaired(self, use: Use, error: ApiError) -> bool:
        """Whether a request that failed may be sent again: others have unloaded its model, or its stream door alone."""
        if self._on_demand is None or error.code not in LOST:
            return False
        with contextlib.suppress(ApiError):
            if error.code == "not_loaded":
                await self._refresh()
                if use.name in self._models:  # its door is loaded with the next try
                    return True
        self._on_demand.lost(use)
        return True

    async def _has_changed(self, folder: Folder | None, error: ApiError) -> bool:
        """Whether Triton refused a request that was made for a folder as it was before others loaded it anew.

        Raises:
            ApiError: Triton stops: to it, models that it has unloaded for that do not exist.
        """
        if folder is None:
            return False
        is_unknown = error.status_code == 404 and (folder.stream_of or folder.name) not in self._models
        if error.code is not None and not is_unknown:
            return False
        await self._refresh()
        found = self._folders.get(folder.name)
        return found is not None and (is_unknown or found != folder)

    async def _refresh(self) -> None:
        if self._listing is not None and not self._listing.done():
            await asyncio.wait([self._listing])  # it may have asked Triton before
        await asyncio.shield(self._list())

    def _list(self) -> asyncio.Task[None]:
        """Start listing the models, or join those who wait for the list."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.ensure_future(self._read_models())
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())  # none may wait for it
        return self._listing

    async def _read_models(self) -> None:
        try:
            names = {entry.name for entry in await self._index(is_ready=True)}
            folders = await asyncio.gather(*map(self._read_folder, sorted(names)))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        by_name = {folder.name: folder for folder in folders if folder is not None}
        self._infos.keep(by_name)
        self._folders = by_name
        self._models = _models(by_name, self._seen)
        self._seen.update(self._models)
        self._listed_s, self._misfit = time.monotonic(), None

    async def _read_folder(self, name: str) -> Folder | None:
        try:
            config = await self._read_config(name)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not says(error.details(), "unknown_model"):
                raise
            return None  # unloaded meanwhile
        folder = Folder.from_config(name, config)
        return dataclasses.replace(folder, info=await self._infos.of(folder, config))

    async def _read_config(self, name: str) -> Any:
        return await read_config(self._stub, name, self._headers)

    async def generate(self, generation: Generation | TextRequest) -> Outputs:
        """Generate or encode, and return the whole response. Cancelling the task cancels the request."""
        check_model(generation.model_name)
        if isinstance(generation, Generation):
            generation = with_salt(generation)
        outputs = await self._loaded(generation.model_name, partial(self._generate, generation))
        Tally(generation).read(outputs)
        return outputs

    async def _loaded(self, name: str, call: Callable[[float], Awaitable[T]]) -> T:
        """Make a call with its time in seconds, and again with the model loaded again if others unload it meanwhile."""
        deadline_s = time.monotonic() + self._timeout_s
        for _ in range(MAX_LOADS - 1):
            async with self._in_use(name, deadline_s) as use:
                try:
                    return await call(use.left_s)
                except ApiError as error:
                    if not await self._is_repaired(use, error):
                        raise
        async with self._in_use(name, deadline_s) as use:
            return await call(use.left_s)

    async def _generate(self, generation: Generation | TextRequest, timeout_s: float) -> Outputs:
        folder = await self._folder(generation.model_name, generation.task, is_stream=False)
        await beside(generation.size, self._note_hints, generation)
        try:
            return await self._infer(folder, generation, timeout_s)
        except ApiError as error:
            if not await self._has_changed(folder, error):
                raise
        folder = await self._folder(generation.model_name, generation.task, is_stream=False)
        return await self._infer(folder, generation, timeout_s)

    async def _infer(self, folder: Folder, generation: Generation | TextRequest, timeout_s: float) -> Outputs:
        if folder.is_decoupled:  # such folders refuse ModelInfer
            responses = [response async for response in self._stream(folder, generation, timeout_s, is_stream=False)]
            return _last(responses)
        message = await beside(generation.size, infer_request, folder, generation, is_stream=False)
        await wait_for_attempt(self._channel)
        try:
            answer = await self._calls.infer(message, timeout_s, self._call_headers(), takes_cancel=folder.takes_cancel)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, generation) from None
        except TimeoutError:
            raise _time_is_up() from None
        return _last([await _read(answer)])

    async def stream(self, generation: Generation) -> AsyncGenerator[Outputs]:
        """Start generating; the iterator gives the responses as they come. Closing it cancels the request.

        The text is a delta; finish reasons, counts and log probabilities are in the last response.
        """
        check_model(generation.model_name)
        generation = with_salt(generation)
        tally, deadline_s = Tally(generation), time.monotonic() + self._timeout_s
        if tally.counts:  # the tokens of a stream that is cancelled are known from its responses
            generation = dataclasses.replace(generation, returns={*generation.returns, "token_ids"})
        for num_loads in range(1, MAX_LOADS + 1):
            has_started, folder = False, None
            async with self._in_use(generation.model_name, deadline_s) as use:
                try:
                    folder = await self._folder(generation.model_name, generation.task, is_stream=True)
                    await beside(generation.size, self._note_hints, generation)
                    async with contextlib.aclosing(
                        self._stream(folder, generation, use.left_s, is_stream=True)
                    ) as responses:
                        async for outputs in responses:
                            has_started = True
                            tally.read(outputs)
                            yield outputs
                    return
                except ApiError as error:
                    if has_started or num_loads == MAX_LOADS:
                        raise
                    if not (await self._is_repaired(use, error) or await self._has_changed(folder, error)):
                        raise

    async def _stream(
        self, folder: Folder, generation: Generation | TextRequest, timeout_s: float, *, is_stream: bool
    ) -> AsyncGenerator[Outputs]:
        message = await beside(generation.size, infer_request, folder, generation, is_stream=is_stream)
        await wait_for_attempt(self._channel)
        responses = self._calls.stream(message, timeout_s, self._call_headers(), takes_cancel=folder.takes_cancel)
        failure = None
        try:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    if response.error_message:
                        failure = self._triton_error(response.error_message, 500, generation)
                    elif response.infer_response.outputs:
                        yield await _read(response.infer_response)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, generation) from None
        except TimeoutError:
            raise _time_is_up() from None
        if failure is not None:
            raise failure

    def _note_hints(self, generation: Generation | TextRequest) -> None:
        """Name the variables that the model's chat template does not read; its process passes them over."""
        model = self._models.get(generation.model_name)
        if isinstance(generation, Generation) and model is not None and model.folder.info is not None:
            for name in generation.unread_variables(model.folder.info):
                pass_over(name)

    def _error(self, error: grpc.aio.AioRpcError, generation: Generation | TextRequest | None = None) -> ApiError:
        return self._status_error(error.code(), error.details(), generation)

    def _status_error(
        self, status: grpc.StatusCode, details: str | None, generation: Generation | TextRequest | None = None
    ) -> ApiError:
        if (failure := call_failure(status, details)) is not None:
            return failure
        coded = self._triton_error(details or "", _HTTP_STATUS.get(status, 500), generation)
        if coded.code is None and coded.status_code == 503:
            self._note_misfit(details)
            return unreachable()
        return coded

    def _note_misfit(self, details: str | None) -> None:
        """Log why Triton cannot be reached, once, if that is for someone to mend."""
        misfit = self._endpoint.misfit(details or "")
        if misfit is not None and misfit != self._misfit:
            self._misfit = misfit
            LOG.error("Triton cannot be reached at %s: %s", self._endpoint.address, misfit)

    def _triton_error(self, message: str, status: int, generation: Generation | TextRequest | None) -> ApiError:
        """Triton's message as an error; one that is not our model's own may mean that the list of models is old."""
        if generation is None:
            return triton_error(message, ClientNames(), status)
        error = triton_error(message, generation.names, status)
        if error.code is None:
            self._models.pop(generation.model_name, None)  # the next request lists the models first
            self._infos.forget(generation.model_name)
        if error.code == "adapter_not_found":
            is_of_model = ADAPTER_MARK in generation.model
            param = "model" if is_of_model else generation.names.param(LORA_NAME)
            return ApiError(404, error.message, param=param, code="model_not_found")
        if unknown_name(message) == generation.model_name:
            return self._unknown(generation.model)
        if says(message, "unknown_model") or says(message, "is_decoupled"):
            return ApiError(
                503,
                f"the model '{generation.model_name}' is being loaded or unloaded: send the request again later",
                code="not_loaded",
            )
        return error


def _time_is_up() -> ApiError:
    return ApiError(504, "the server did not answer in time", code="deadline_exceeded")


async def read_config(stub: Any, name: str, headers: Any) -> Any:
    """A loaded model's config; raises as the call does."""
    request = service_pb2.ModelConfigRequest(name=name)
    return (await stub.ModelConfig(request, timeout=CONTROL_TIMEOUT_S, metadata=headers)).config


def unreachable() -> ApiError:
    return ApiError(503, "the server cannot be reached: send the request again later", code="unavailable")


def call_failure(status: grpc.StatusCode, details: str | None) -> ApiError | None:
    """Why a call failed, whatever it asked for; None: its words say more."""
    if says(details, "restricted"):
        return ApiError(403, f"Triton restricts this API: {details}", code="restricted")
    return _time_is_up() if status is grpc.StatusCode.DEADLINE_EXCEEDED else None


async def _read(answer: Any) -> Outputs:
    return await beside(sum(map(len, answer.raw_output_contents)), read_outputs, answer)


_HTTP_STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 400,
    grpc.StatusCode.UNAVAILABLE: 503,
}


def _last(responses: Sequence[Outputs]) -> Outputs:
    """The outputs of the last response; without any, Triton 24.10 could not pass it on."""
    if not (responses and responses[-1]):
        raise out_of_shared_memory()
    return responses[-1]


def _check_task(folder: Folder, task: str | None) -> None:
    """Refuse a request to a model of another task, and say where such a model is asked."""
    if task is None or folder.task in (task, None):
        return
    raise ApiError(
        400,
        f"the model '{folder.name}' is for {folder.task}, not for {task}: POST {ENDPOINTS[folder.task]}",
        param="model",
        code="wrong_task",
    )


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
        door = doors.get(name)
        door = None if door is None else dataclasses.replace(door, info=folder.info)  # it hands requests on
        models[name] = Model(folder, folder if folder.is_decoupled else door, created_s)
    return models
