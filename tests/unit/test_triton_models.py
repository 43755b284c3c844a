# SPDX-License-Identifier: Apache-2.0
"""The gateway's view of a Triton that stops, unloads a model, or loads it anew between two requests to it."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.triton.endpoint import Endpoint
from hf_triton_gateway.triton.triton_messages import EMBEDDING, EMBEDDINGS, TextRequest
from hf_triton_gateway.triton.triton_models import TritonModels

NAME = "vectors"
UNKNOWN = f"Request for unknown model: '{NAME}' is not found"
ASKED = TextRequest(NAME, "a", EMBEDDINGS, {"text": ["a"]}, [EMBEDDING])


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A Triton of one model, which it does not know when it is first asked."""

    def __init__(self) -> None:
        self.states = ["READY"]
        """What its lists say of the model, one after the other; the last stays."""
        self.num_requests = 0

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state == "EXITING":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Server not ready")
        answer = service_pb2.RepositoryIndexResponse()
        if state == "READY":
            answer.models.add(name=NAME, state=state)
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.ModelConfigResponse()
        answer.config.input.add(name="text")
        answer.config.output.add(name=EMBEDDING)
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_requests += 1
        if self.num_requests == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, UNKNOWN)
        answer = service_pb2.ModelInferResponse()
        answer.outputs.add(name=EMBEDDING, datatype="FP32", shape=[1, 1])
        answer.raw_output_contents.append(b"\0\0\0\0")
        return answer


@pytest.fixture
def triton() -> Iterator[tuple[Triton, str]]:
    servicer, server = Triton(), grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    ("states", "status", "code"),
    [
        (["READY", "EXITING"], 503, "unavailable"),
        (["READY", "UNAVAILABLE"], 404, "model_not_found"),
        (["READY"], 200, None),
    ],
    ids=["it stops", "the model is unloaded", "the model is loaded anew"],
)
def test_a_model_that_was_there(triton: tuple[Triton, str], states: list[str], status: int, code: str | None) -> None:
    servicer, address = triton
    servicer.states = states

    async def ask() -> Any:
        models = TritonModels(Endpoint(address), 10.0, None)
        try:
            return await models.generate(ASKED)
        except ApiError as error:
            return error
        finally:
            await models.close()

    found = asyncio.run(ask())
    if status == 200:
        assert found[EMBEDDING] == [0.0]
    else:
        assert (found.status_code, found.code) == (status, code)
