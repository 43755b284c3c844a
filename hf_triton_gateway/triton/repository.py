# SPDX-License-Identifier: Apache-2.0
"""Triton's model repository over gRPC: what it holds, loading, unloading; a stream door goes with its model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Final

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.errors import clip
from hf_triton_gateway.http.api_errors import ApiError, load_reason, logged_reason
from hf_triton_gateway.triton.endpoint import Endpoint, wait_for_attempt
from hf_triton_gateway.triton.on_demand import Activity
from hf_triton_gateway.triton.triton_messages import DOOR_SUFFIX
from hf_triton_gateway.triton.triton_models import CONTROL_TIMEOUT_S, call_failure, unreachable
from hf_triton_gateway.triton.triton_words import says

LOG: Final = logging.getLogger("hf_triton_gateway")
UNLOAD_LIMIT_S: Final = 60.0
"""A model that Triton has not unloaded by then is not waited for: Triton 24.10 may miss the end of a stream."""
UNLOAD_POLL_S: Final = 0.05
NO_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PRESENT: Final = ("READY", "UNLOADING", "LOADING")
IN_FLIGHT: Final = re.compile(r'^hf_triton_requests_in_flight\{[^}]*model="([^"]*)"[^}]*\} (\S+)$', re.MULTILINE)


class TritonRepository:
    """The repository of one Triton. Belongs to one event loop.

    Args:
        endpoint: Triton's gRPC.
        metrics: Its metrics address, HOST:PORT; None: requests in flight that are not the gateway's are not seen.
    """

    def __init__(self, endpoint: Endpoint, metrics: str | None) -> None:
        self._channel = endpoint.channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metrics = metrics
        self._headers = tuple(endpoint.headers.items())

    async def close(self) -> None:
        """Disconnect; Triton finishes a load under way."""
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
        return {name: states[name] == "READY" for name in names}

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
        in_flight = {} if self._metrics is None else await asyncio.to_thread(_read_gauges, self._metrics)
        idle_s = {
            stats.name: max(0.0, time.time() - stats.last_inference / 1e3)
            for stats in answer.model_stats
            if stats.last_inference
        }
        return {
            name: Activity(
                in_flight.get(name, 0),
                min(idle_s.get(name, float("inf")), idle_s.get(name + DOOR_SUFFIX, float("inf"))),
            )
            for name in {stats.name for stats in answer.model_stats}
        }

    async def load(self, name: str) -> None:
        """Load a model and its stream door; return when they are ready."""
        await self._load(name)
        try:
            await self.load_door(name)
        except ApiError as error:  # the model answers whole responses all the same
            LOG.warning("%s", error.logged)

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

    async def unload(self, name: str) -> None:
        """Unload a model and its stream door; return when they are unloaded."""
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

    async def _is_present(self, folders: Iterable[str]) -> bool:
        states = await self._states()
        return any(states.get(folder) in PRESENT for folder in folders)


NOT_EXPLICIT: Final = (
    "--on-demand needs a Triton that loads models on request: start it with --model-control-mode=explicit"
)


def _is_door(name: str, names: Mapping[str, str]) -> bool:
    return name.endswith(DOOR_SUFFIX) and name.removesuffix(DOOR_SUFFIX) in names


def _read_gauges(metrics: str) -> dict[str, int]:
    """Requests in flight by model; empty if the metrics cannot be read."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        request = urllib.request.Request(f"http://{metrics}/metrics", headers={"Connection": "close"})
        with NO_PROXY.open(request, timeout=CONTROL_TIMEOUT_S) as answer:
            for name, count in IN_FLIGHT.findall(answer.read().decode(errors="replace")):
                counts[name] = counts.get(name, 0) + int(float(count))
    return counts


def _error(error: grpc.aio.AioRpcError) -> ApiError:
    if (failure := call_failure(error.code(), error.details())) is not None:
        return failure
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return unreachable()
    return ApiError(503, f"Triton refused to tell its models: {load_reason(error.details() or '')}", code="not_loaded")
