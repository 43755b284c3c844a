# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a Triton whose models sleep and wake, over gRPC. They give a text's length as its vector."""

import dataclasses
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.sleep import SleepAnswer

BYTES = 1234
INFO = ModelInfo("embeddings", "tiny", 64, "torch", "float32", "cpu", 1000, 8, 8, inputs=("text",))


class SleepyTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Its models, by name, with the parameters of their configs; `old` ones know nothing of sleep."""

    def __init__(self, models: Mapping[str, Mapping[str, str]], old: tuple[str, ...] = ()) -> None:
        self.models = models
        self.old = old
        self.loaded: set[str] = set()
        self.asleep: set[str] = set()
        self.num_sleeps = self.num_wakes = self.most_awake = 0
        self._in_flight = dict.fromkeys(models, 0)
        self._used_s = dict.fromkeys(models, 0.0)
        self._changed = threading.Condition()

    @property
    def awake(self) -> set[str]:
        return self.loaded - self.asleep

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.RepositoryIndexResponse()
        for name in self.models:
            if not request.ready or name in self.loaded:
                answer.models.add(name=name, state="READY" if name in self.loaded else "")
        return answer

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._wake(request.model_name)
        return service_pb2.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.loaded.discard(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.ModelStatisticsResponse()
        for name in sorted(self.loaded):
            answer.model_stats.add(name=name, last_inference=int(self._used_s[name] * 1e3))
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._check(request.name, context)
        answer = service_pb2.ModelConfigResponse()
        answer.config.backend = "python"
        answer.config.input.add(name="text", data_type="TYPE_STRING", dims=[-1], optional=True)
        for name in ("embedding", "num_input_tokens", "output"):
            answer.config.output.add(name=name)
        answer.config.instance_group.add(count=int(self.models[request.name].get("instances", 1)))
        for key, text in self.models[request.name].items():
            answer.config.parameters[key].string_value = text
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        name, answer = request.model_name, service_pb2.ModelInferResponse()
        self._check(name, context)
        self._used_s[name] = time.time()
        if "model_info" in request.parameters:
            told = dataclasses.replace(INFO, is_sleeping=name in self.asleep).to_json()
        elif "sleep" in request.parameters and name in self.old:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unknown_parameter: there is no parameter 'sleep'")
        elif "sleep" in request.parameters:
            is_sleeping = request.parameters["sleep"].bool_param
            told = (self._sleep(name) if is_sleeping else self._wake(name)).to_json()
        else:
            return self._embed(request)
        answer.outputs.add(name="output", datatype="BYTES", shape=[1])
        answer.raw_output_contents.append(struct.pack("<I", len(told)) + told.encode())
        return answer

    def _check(self, name: str, context: Any) -> None:
        if name not in self.loaded:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"Request for unknown model: '{name}' is not found")

    def _sleep(self, name: str) -> SleepAnswer:
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight[name])
            if name in self.asleep:
                return SleepAnswer(is_sleeping=True)
            self.asleep.add(name)
            self.num_sleeps += 1
        return SleepAnswer(is_sleeping=True, seconds=0.01, given_back_bytes=BYTES)

    def _wake(self, name: str) -> SleepAnswer:
        with self._changed:
            slept = name in self.asleep
            self.num_wakes += slept
            self.asleep.discard(name)
            self.loaded.add(name)
            self.most_awake = max(self.most_awake, len(self.awake))
        return SleepAnswer(is_sleeping=False, seconds=0.02 * slept)

    def _embed(self, request: Any) -> Any:
        name = request.model_name
        with self._changed:
            self._in_flight[name] += 1
        self._wake(name)
        time.sleep(0.002)
        [content] = request.raw_input_contents
        answer = service_pb2.ModelInferResponse()
        answer.outputs.add(name="embedding", datatype="FP32", shape=[1, 1])
        answer.outputs.add(name="num_input_tokens", datatype="INT32", shape=[1])
        answer.raw_output_contents.extend([struct.pack("<f", len(content) - 4), struct.pack("<i", 1)])
        with self._changed:
            self._in_flight[name] -= 1
            self._changed.notify_all()
        return answer


@contextmanager
def sleepy_triton(*, old: tuple[str, ...] = (), **models: Mapping[str, str]) -> Iterator[tuple[SleepyTriton, str]]:
    """The stand-in and its address."""
    triton, server = SleepyTriton(models, old), grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield triton, f"127.0.0.1:{port}"
    finally:
        server.stop(None)
