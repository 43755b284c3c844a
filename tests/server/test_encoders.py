# SPDX-License-Identifier: Apache-2.0
"""Encoders over a real server: a ready folder unmodified, a real checkpoint, and the requests of other systems."""

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc

from hf_triton.testing import LoopbackHub, TritonServer
from tests.support.client import get, post
from tests.support.gateway import wait_until
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import TEXTS, real_checkpoint, reference_embeddings, save_sentence_model
from tests.support.vectors import TOLERANCE, ask, vectors_of

BGE = "BAAI/bge-large-zh-v1.5"


@pytest.fixture(scope="module")
def bge_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_model(tmp_path_factory.mktemp("bge") / "model", pooling="cls", dense=[16])


@pytest.fixture(scope="module")
def server(
    bge_checkpoint: Path, make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "bge", repository / "bge")
    make_folder(repository, "minilm", huggingface_model=real_checkpoint())
    with LoopbackHub() as hub:
        hub.add(BGE, bge_checkpoint)
        home = {"HF_HOME": str(tmp_path_factory.mktemp("home"))}
        with TritonServer(repository, environment=hub.environment() | home, ready_timeout_s=280) as server:
            yield server


@pytest.fixture(scope="module")
def expected() -> npt.NDArray[np.float32]:
    return reference_embeddings(real_checkpoint(), TEXTS)


def test_ready_folder_is_served_as_it_is(server: TritonServer, bge_checkpoint: Path) -> None:
    assert (server.model_repository / "bge" / "config.pbtxt").read_bytes() == (ROOT / "bge/config.pbtxt").read_bytes()
    vectors = vectors_of(ask(server, "bge", "text", TEXTS))
    np.testing.assert_allclose(vectors, reference_embeddings(bge_checkpoint, TEXTS), atol=TOLERANCE)


def test_infer_equals_sentence_transformers(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    np.testing.assert_allclose(vectors_of(ask(server, "minilm", "text", TEXTS)), expected, atol=TOLERANCE)


def test_grpc_equals_sentence_transformers(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    texts = tritonclient.grpc.InferInput("text", [len(TEXTS)], "BYTES")
    texts.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=np.object_))
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    try:
        vectors = client.infer("minilm", [texts]).as_numpy("embedding")
    finally:
        client.close()
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


def test_texts_of_many_clients_get_their_own_vectors(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    def embed(place: int) -> npt.NDArray[np.float64]:
        return vectors_of(ask(server, "minilm", "text", [TEXTS[place % len(TEXTS)]]))[0]

    with ThreadPoolExecutor(16) as pool:
        vectors = list(pool.map(embed, range(60)))
    for place, vector in enumerate(vectors):
        np.testing.assert_allclose(vector, expected[place % len(TEXTS)], atol=TOLERANCE)


def test_generate_takes_a_text_and_options(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    reply = post(server, "/v2/models/minilm/generate", {"text": TEXTS[0], "dimensions": 8}).json()
    wanted = expected[0, :8] / np.linalg.norm(expected[0, :8])
    np.testing.assert_allclose(reply["embedding"], wanted, atol=TOLERANCE)


def test_json_comes_where_it_is_asked_for(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    names = [{"name": "output"}, {"name": "num_input_tokens"}]
    outputs = ask(server, "minilm", "args", TEXTS[:1], outputs=names)
    np.testing.assert_allclose(json.loads(outputs["output"]["data"][0]), expected[0], atol=TOLERANCE)
    assert outputs["num_input_tokens"]["data"] == [10]


def test_litellm_reads_a_matrix(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    """`litellm.embedding("triton/...")` sends `input_text` alone and reads every output as rows of a matrix."""
    tensor = {"name": "input_text", "shape": [len(TEXTS)], "datatype": "BYTES", "data": TEXTS}
    reply = post(server, "/v2/models/minilm/infer", {"inputs": [tensor]}).json()
    (output,) = reply["outputs"]
    assert output["shape"] == [len(TEXTS), 384]
    np.testing.assert_allclose(np.array(output["data"]).reshape(output["shape"]), expected, atol=TOLERANCE)


def test_frontend_of_the_vllm_backend_reads_its_form(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    request = json.dumps({"input": TEXTS[0], "pooling_params": {"dimensions": [8]}})
    flags = [
        {"name": name, "datatype": "BOOL", "shape": [1], "data": [True]}
        for name in ("return_num_input_tokens", "return_num_output_tokens")
    ]
    tensor = {"name": "embedding_request", "datatype": "BYTES", "shape": [1], "data": [request]}
    reply = post(server, "/v2/models/minilm/infer", {"inputs": [tensor, *flags]})
    assert reply.status == 200, reply.body
    outputs = {output["name"]: output for output in reply.json()["outputs"]}
    assert sorted(outputs) == ["num_input_tokens", "num_output_tokens", "text_output"]
    wanted = expected[0, :8] / np.linalg.norm(expected[0, :8])
    np.testing.assert_allclose(json.loads(outputs["text_output"]["data"][0]), wanted, atol=TOLERANCE)
    assert [outputs[name]["datatype"] for name in ("num_input_tokens", "num_output_tokens")] == ["UINT32"] * 2
    assert [outputs[name]["data"] for name in ("num_input_tokens", "num_output_tokens")] == [[10], [0]]


REFUSED = {"too long": ({"text": "word " * 300}, "the text has 302 tokens, more than the 256 of the model")}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_gets_a_sentence_and_harms_nothing(
    case: str, server: TritonServer, expected: npt.NDArray[np.float32]
) -> None:
    body, sentence = REFUSED[case]
    reply = post(server, "/v2/models/minilm/generate", body)
    assert reply.status == 400
    assert sentence in reply.error
    np.testing.assert_allclose(vectors_of(ask(server, "minilm", "text", TEXTS)), expected, atol=TOLERANCE)


def test_inputs_and_outputs_are_in_the_model_s_metadata(server: TritonServer) -> None:
    metadata = get(server, "/v2/models/minilm").json()
    assert {"text", "args", "token_ids", "embedding_request"} <= {port["name"] for port in metadata["inputs"]}
    assert {"embedding", "output"} <= {port["name"] for port in metadata["outputs"]}


def test_metrics_have_the_time_in_the_queue(server: TritonServer) -> None:
    ask(server, "minilm", "text", TEXTS)

    def count(name: str) -> float:
        with urllib.request.urlopen(server.metrics_url) as answer:
            lines = answer.read().decode().splitlines()
        own = [line for line in lines if line.startswith(f"{name}{{") and 'model="minilm"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in own)

    names = ("hf_triton_queue_time_seconds_count", "hf_triton_e2e_request_latency_seconds_count")
    wait_until(lambda: count(names[0]) == count(names[1]) > 0)
    assert count("hf_triton_queue_time_seconds_sum") < count("hf_triton_e2e_request_latency_seconds_sum")
