# SPDX-License-Identifier: Apache-2.0
"""Triton's words and what they mean, as the pinned server says them. `not_healthy` is in `server/test_faults.py`."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.testing import TritonServer
from hf_triton_gateway.triton.triton_words import MEANINGS, Meaning, first_line, says, unknown_name

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server without a loaded model, whose folder `broken` cannot be read, and whose statistics are restricted."""
    repository = tmp_path_factory.mktemp("words")
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "config.pbtxt").write_text("what: [")
    flags = ["--model-control-mode=explicit", "--grpc-restricted-protocol=statistics:x-api-key=k"]
    with TritonServer(repository, arguments=flags) as server:
        yield server


def words(server: TritonServer, call: Callable[[Any], Any]) -> str:
    with grpc.insecure_channel(server.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        call(service_pb2_grpc.GRPCInferenceServiceStub(channel))
    return str(caught.value.details())  # type: ignore[attr-defined]


def infer(name: str) -> Callable[[Any], Any]:
    return lambda stub: stub.ModelInfer(service_pb2.ModelInferRequest(model_name=name))


def load(name: str) -> Callable[[Any], Any]:
    return lambda stub: stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=name))


CALLS: dict[Meaning, Callable[[Any], Any]] = {
    "unknown_model": infer("none"),
    "is_decoupled": infer("decoupled"),
    "not_explicit": load("demo"),
}


@pytest.mark.parametrize("meaning", CALLS)
def test_a_server_that_loads_nothing_on_request(triton: TritonServer, meaning: Meaning) -> None:
    said = words(triton, CALLS[meaning])
    assert {other for other in MEANINGS if says(said, other)} == {meaning}, said
    assert unknown_name(said) == ("none" if meaning == "unknown_model" else None)


def test_a_folder_that_cannot_be_read(explicit: TritonServer) -> None:
    said = words(explicit, load("broken"))
    assert {other for other in MEANINGS if says(said, other)} == {"unreadable"}, said


def test_a_restricted_api(explicit: TritonServer) -> None:
    said = words(explicit, lambda stub: stub.ModelStatistics(service_pb2.ModelStatisticsRequest()))
    assert {other for other in MEANINGS if says(said, other)} == {"restricted"}, said


def test_a_request_id_is_no_part_of_the_sentence(triton: TritonServer) -> None:
    request = service_pb2.ModelInferRequest(model_name="batching", id="mine")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[9, 1])
    request.raw_input_contents.append(9 * bytes(4))
    said = words(triton, lambda stub: stub.ModelInfer(request))
    assert "mine" in said
    assert "mine" not in first_line(said)


def test_what_triton_does_not_say_means_nothing() -> None:
    assert not any(says(said, meaning) for said in (None, "", "a model's own sentence") for meaning in MEANINGS)
