# SPDX-License-Identifier: Apache-2.0
"""Triton's model repository over gRPC: what it holds, loading, unloading; a stream door goes with its model.

With `sleeps`, a model that is to leave falls asleep, counts as unloaded from then on, and loading it wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.errors import clip
from hf_triton.protocol.durations import FOR_EVER, read_duration
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton.protocol.validation import parse_boolean
from hf_triton_gateway.http.api_errors import ApiError, load_reason, logged_reason
from hf_triton_gateway.triton.calls import Calls
from hf_triton_gateway.triton.endpoint import Endpoint, wait_for_attempt
from hf_triton_gateway.triton.model_infos import set_sleeping
from hf_triton_gateway.triton.on_demand import Activity, Terms
from hf_triton_gateway.triton.triton_messages import DOOR_SUFFIX
from hf_triton_gateway.triton.triton_models import CONTROL_TIMEOUT_S, call_failure, read_config, unreachable
from hf_triton_gateway.triton.triton_words import says

LOG: Final = logging.getLogger("hf_triton_gateway")
UNLOAD_LIMIT_S: Final = 60.0
"""A model that Triton has not unloaded by then is not waited for: Triton 24.10 may miss the end of a stream."""
UNLOAD_POLL_S: Final = 0.05
NO_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PRESENT: Final = ("READY", "UNLOADING", "LOADING")
IN_FLIGHT: Final = "requests_in_flight"
SLEEPING: Final = "sleeping"
GAUGES: Final = re.compile(
    rf'^hf_triton_({IN_FLIGHT}|{SLEEPING})\{{[^}}]*model="([^"]*)"[^}}]*\}} (\S+)$', re.MULTILINE
)
LAG_S: Final = 3.0
"""A model's gauges may be so old, in seconds."""


class TritonRepository:
    """The repository of one Triton. Belongs to one event loop.

    Args:
        endpoint: Triton's gRPC.
        metrics: Its metrics address, HOST:PORT; None: requests in flight that are not the gateway's are not seen, nor
            who else has models sleep or wake.
        sleeps: Whether models fall asleep in place of being unloaded.
    """

    def __init__(self, endpoint: Endpoint, metrics: str | None, *, sleeps: bool = False) -> None:
        self._channel = endpoint.channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metrics = metrics
        self._headers = tuple(endpoint.headers.items())
        self._calls = Calls(self._stub)
        self._sleeps = sleeps
        self._gauges: dict[tuple[str, str], int] = {}
        self._told: dict[str, tuple[bool, float]] = {}
        """Whether a model sleeps, as it has told the gateway, and when."""
        self._num_instances: dict[str, int] = {}

    async def close(self) -> None:
        """Disconnect; Triton finishes a load under way."""
        await self._calls.close()
        await self._channel.close()

    async def check(self) -> None:
        """Check that Triton loads and unloads on request."""
        await wait_for_attempt(self._channel)
        request = service_pb2.RepositoryModelUnloadRequest(model_name="")  # refused or ignored, by the mode
        try:
            await self._stub.RepositoryModelUnload(request, timeout=CONTROL_TIMEOUT_S, metadata=self._headers)
        except grpc.aio.AioRpcError as error:
            if says(error.details(), "not_explicit"):
                raise ApiError(503, NOT_EXPLICIT, code="not_loaded") from None
            if error.code() is grpc.StatusCode.UNAVAILABLE or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _error(error) from None

    async def loaded(self) -> Mapping[str, bool]:
        """Each model, and whether it is loaded. Stream doors are part of their models."""
        states = await self._states()
        names = [name for name in states if not _is_door(name, states)]
        self._told = {name: told for name, told in self._told.items() if states.get(name) == "READY"}
        return {name: states[name] == "READY" and not (self._sleeps and self.is_sleeping(name)) for name in names}

    def is_sleeping(self, name: str) -> bool:
        """Whether a loaded model sleeps: as it has told the gateway, or by its gauge, which tells of others' doing."""
        told, told_s = self._told.get(name, (False, -math.inf))
        gauge = self._gauges.get((SLEEPING, name))
        if gauge is None or time.monotonic() - told_s < LAG_S:
            return told
        return gauge >= self._num_instances.get(name, 1)  # a request to Triton's ports wakes one instance

    def note_sleep(self, name: str, *, is_sleeping: bool) -> bool:
        """Take note that a model was put to sleep, or woken; whether it is unloaded to `loaded` now."""
        self._told[name] = (is_sleeping, time.monotonic())
        return self._sleeps and is_sleeping

    async def terms(self, name: str) -> Terms:
        """The terms of a loaded model, by its config; those of another library's folder may be none."""
        config = await self._config(name)
        self._num_instances[name] = sum(group.count * (len(group.gpus) or 1) for group in config.instance_group) or 1
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        keep_alive_s = None
        with contextlib.suppress(ValueError):
            keep_alive_s = read_duration(parameters.get("keep_alive"))
        is_pinned = parse_boolean(parameters.get("pinned", "")) is True
        return Terms(math.inf if keep_alive_s == FOR_EVER else keep_alive_s, is_pinned)

    async def _config(self, name: str) -> Any:
        try:
            return await read_config(self._stub, name, self._headers)
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None

    async def _states(self) -> dict[str, str]:
        """Triton's state of each folder; empty if it was never loaded."""
        await wait_for_attempt(self._channel)
        try:
            index = await self._stub.RepositoryIndex(
                service_pb2.RepositoryIndexRequest(), timeout=CONTROL_TIMEOUT_S, metadata=self._headers
            )
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        states: dict[str, str] = {}
        for entry in index.models:  # one for each version
            if states.get(entry.name) != "READY":
                states[entry.name] = entry.state
        return states

    async def activity(self) -> Mapping[str, Activity]:
        """The activity of loaded models, by Triton's statistics and the models' gauges; empty if they are changing."""
        try:
            answer = await self._stub.ModelStatistics(
                service_pb2.ModelStatisticsRequest(), timeout=CONTROL_TIMEOUT_S, metadata=self._headers
            )
        except grpc.aio.AioRpcError:
            return {}
        if self._metrics is not None:
            self._gauges = await asyncio.to_thread(_read_gauges, self._metrics)
        idle_s = {
            stats.name: max(0.0, time.time() - stats.last_inference / 1e3)
            for stats in answer.model_stats
            if stats.last_inference
        }
        return {
            name: Activity(
                self._gauges.get((IN_FLIGHT, name), 0),
                min(idle_s.get(name, float("inf")), idle_s.get(name + DOOR_SUFFIX, float("inf"))),
            )
            for name in {stats.name for stats in answer.model_stats}
        }

    async def load(self, name: str) -> str:
        """Load a model and its stream door, or wake it; return when they are ready."""
        is_there = self._sleeps and (await self._states()).get(name) == "READY"
        if is_there and await self._set_sleeping(name, is_sleeping=False) is not None:
            return "woke"
        await self._load(name)
        try:
            await self.load_door(name)
        except ApiError as error:  # the model answers whole responses all the same
            LOG.warning("%s", error.logged)
        return "loaded"

    async def load_door(self, name: str) -> None:
        """Load a model's stream door, if there is one; raises as `load`."""
        if (door := name + DOOR_SUFFIX) in await self._states():
            await self._load(door)

    async def _load(self, name: str) -> None:
        await wait_for_attempt(self._channel)
        try:
            await self._stub.RepositoryModelLoad(
                service_pb2.RepositoryModelLoadRequest(model_name=name), metadata=self._headers
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not says(error.details(), "not_explicit"):
                raise _error(error) from None
            sentence, details = f"the model {clip(name)} cannot be loaded", error.details() or ""
            raise ApiError(
                503,
                f"{sentence}: {load_reason(details)}",
                code="not_loaded",
                logged=f"{sentence}: {logged_reason(details)}",
            ) from None

    async def unload(self, name: str) -> str:
        """Unload a model and its stream door, or put it to sleep; return when they are unloaded."""
        if self._sleeps and (answer := await self._set_sleeping(name, is_sleeping=True)) is not None:
            if not answer.is_sleeping:
                raise ApiError(409, "requests that bypass the gateway keep it awake")
            return "put to sleep"
        states = await self._states()
        folders = [folder for folder in (name + DOOR_SUFFIX, name) if states.get(folder) in PRESENT]
        try:
            for folder in folders:
                request = service_pb2.RepositoryModelUnloadRequest(model_name=folder)
                await self._stub.RepositoryModelUnload(request, timeout=UNLOAD_LIMIT_S, metadata=self._headers)
            async with asyncio.timeout(UNLOAD_LIMIT_S):
                while await self._is_present(folders):
                    await asyncio.sleep(UNLOAD_POLL_S)
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        except TimeoutError:
            raise ApiError(504, f"Triton has not unloaded {clip(name)} within {UNLOAD_LIMIT_S:g} s") from None
        return "unloaded"

    async def _set_sleeping(self, name: str, *, is_sleeping: bool) -> SleepAnswer | None:
        """Have a loaded model sleep or wake; None: it cannot."""
        config = await self._config(name)
        try:
            answer = await set_sleeping(
                self._calls, name, config, UNLOAD_LIMIT_S, self._headers, is_sleeping=is_sleeping
            )
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        except TimeoutError:
            raise ApiError(504, f"{clip(name)} has not answered within {UNLOAD_LIMIT_S:g} s") from None
        if answer is not None:
            self.note_sleep(name, is_sleeping=answer.is_sleeping)
        return answer

    async def _is_present(self, folders: Iterable[str]) -> bool:
        states = await self._states()
        return any(states.get(folder) in PRESENT for folder in folders)


NOT_EXPLICIT: Final = (
    "--on-demand needs a Triton that loads models on request: start it with --model-control-mode=explicit"
)


def _is_door(name: str, names: Mapping[str, str]) -> bool:
    return name.endswith(DOOR_SUFFIX) and name.removesuffix(DOOR_SUFFIX) in names


def _read_gauges(metrics: str) -> dict[tuple[str, str], int]:
    """The values of GAUGES by gauge and model; empty if the metrics cannot be read."""
    counts: dict[tuple[str, str], int] = {}
    with contextlib.suppress(OSError, ValueError):
        request = urllib.request.Request(f"http://{metrics}/metrics", headers={"Connection": "close"})
        with NO_PROXY.open(request, timeout=CONTROL_TIMEOUT_S) as answer:
            for gauge, name, count in GAUGES.findall(answer.read().decode(errors="replace")):
                counts[gauge, name] = counts.get((gauge, name), 0) + int(float(count))
    return counts


def _error(error: grpc.aio.AioRpcError) -> ApiError:
    if (failure := call_failure(error.code(), error.details())) is not None:
        return failure
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return unreachable()
    return ApiError(503, f"Triton refused to tell its models: {load_reason(error.details() or '')}", code="not_loaded")
