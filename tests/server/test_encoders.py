# SPDX-License-Identifier: Apache-2.0
"""Embeddings over a real server: ready folders unmodified, a real checkpoint, and the requests of other systems."""

import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
from transformers import AutoTokenizer

from hf_triton.testing import LoopbackHub, TritonServer
from tests.support.client import get, post
from tests.support.gateway import wait_until
from tests.support.graphs import write_graph_folder
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import (
    TEXTS,
    real_checkpoint,
    reference_embeddings,
    save_plain,
    save_sentence_model,
)
from tests.support.sparse_checkpoints import expected_lexical, expected_splade, save_lexical, save_splade

BGE = "BAAI/bge-large-zh-v1.5"
LEXICAL = "BAAI/bge-m3"
"""On the first start no file of it is on disk."""
NEIGHBOURS = {0: [1], 3: [4]}
"""In TEXTS, the texts that mean nearly the same."""
TOLERANCE = 1e-5
READY = ("bge", "examples/bge_tokenizer", "examples/bge_apart")


@pytest.fixture(scope="module")
def bge_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_model(tmp_path_factory.mktemp("bge") / "model", pooling="cls", dense=[16])


@pytest.fixture(scope="module")
def splade_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_splade(tmp_path_factory.mktemp("splade") / "model")


@pytest.fixture(scope="module")
def lexical_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lexical(tmp_path_factory.mktemp("lexical") / "model")


@pytest.fixture(scope="module")
def server(
    bge_checkpoint: Path,
    splade_checkpoint: Path,
    lexical_checkpoint: Path,
    make_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    *copy, _ = shlex.split(line_of_document("cp -r bge/ "))
    subprocess.run([*copy, repository], cwd=ROOT, check=True)
    minilm = real_checkpoint()
    make_folder(repository, "minilm", huggingface_model=minilm)
    make_folder(repository, "batched", config="max_batch_size: 8\ndynamic_batching { }", huggingface_model=minilm)
    own = make_folder(repository, "similarity", huggingface_model=minilm)
    (own / "1" / "model.py").write_text(example("task_class"))
    plain = save_plain(tmp_path_factory.mktemp("plain") / "model")
    make_folder(repository, "features", huggingface_model=plain, task="feature-extraction")
    make_folder(repository, "splade", huggingface_model=splade_checkpoint)  # its files say what it does
    make_folder(repository, "lexical", huggingface_model=LEXICAL, task="sparse-embeddings", allow_pickle="true")
    copy = shutil.copytree(bge_checkpoint, tmp_path_factory.mktemp("copy") / "model")
    folder = make_folder(copy.parent, "tiny", huggingface_model=copy)
    write_graph_folder(folder, repository / "graph")
    shutil.rmtree(copy.parent)
    with LoopbackHub() as hub:
        hub.add(BGE, bge_checkpoint)
        hub.add(LEXICAL, lexical_checkpoint)
        home = {"HF_HOME": str(tmp_path_factory.mktemp("home"))}
        with TritonServer(repository, environment=hub.environment() | home, ready_timeout_s=280) as server:
            yield server


def example(word: str) -> str:
    """The Python example of docs/hooks.md that has a word."""
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    [block] = [block for block in re.findall(r"^```python\n(.*?)^```\n", text, flags=re.S | re.M) if word in block]
    return str(block)


@pytest.fixture(scope="module")
def expected() -> npt.NDArray[np.float32]:
    return reference_embeddings(real_checkpoint(), TEXTS)


def line_of_document(beginning: str) -> str:
    """The command of docs/encoders.md that begins so."""
    lines = (ROOT / "docs" / "encoders.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(beginning)]
    return line


def ask(server: TritonServer, model: str, name: str, data: list[str], **body: Any) -> Any:
    """POST /infer with one BYTES tensor; the outputs by name."""
    shape = body.pop("shape", [len(data)])
    tensor = {"name": name, "datatype": "BYTES", "shape": shape, "data": data}
    reply = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor], **body})
    assert reply.status == 200, reply.body
    return {output["name"]: output for output in reply.json()["outputs"]}


def vectors_of(outputs: Any) -> npt.NDArray[np.float64]:
    (output,) = outputs.values()
    assert (output["name"], output["datatype"]) == ("embedding", "FP32")
    return np.array(output["data"]).reshape(output["shape"])


# --- ready folders ---------------------------------------------------------------------------------------------------


def test_ready_folder_is_served_as_it_is(server: TritonServer, bge_checkpoint: Path) -> None:
    for folder in READY:
        name = Path(folder).name
        served = (server.model_repository / name / "config.pbtxt").read_bytes()
        assert served == (ROOT / folder / "config.pbtxt").read_bytes()
        assert server.is_model_ready(name), server.log_tail()
    vectors = vectors_of(ask(server, "bge", "text", TEXTS))
    np.testing.assert_allclose(vectors, reference_embeddings(bge_checkpoint, TEXTS), atol=TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"truncate": True, "dimensions": 8}])
def test_tokenizer_apart_gives_the_folder_s_vectors(server: TritonServer, options: dict[str, Any]) -> None:
    texts = [*TEXTS, "word " * 300] if options else TEXTS
    single = vectors_of(ask(server, "bge", "text", texts, parameters=options))
    (apart,) = ask(server, "bge_apart", "TEXT", texts, parameters=options).values()
    assert (apart["name"], apart["shape"]) == ("output", list(single.shape))
    np.testing.assert_allclose(np.array(apart["data"]).reshape(single.shape), single, atol=1e-6)


def test_request_of_the_documents_gets_a_vector(server: TritonServer) -> None:
    line = line_of_document("curl -X POST localhost:8000/v2/models/bge_apart/")
    command = shlex.split(line.replace("localhost:8000", server.http_url))
    done = subprocess.run([*command, "--silent"], capture_output=True, text=True, check=True)
    (output,) = json.loads(done.stdout)["outputs"]
    assert (output["name"], output["shape"]) == ("output", [1, 16])


def test_error_of_the_tokenizer_reaches_the_client(server: TritonServer) -> None:
    reply = post(server, "/v2/models/bge_apart/generate", {"TEXT": "word " * 300})
    assert reply.status == 400
    assert reply.error.startswith("in ensemble 'bge_apart', context_exceeded: the text has ")


def test_batching_folder_takes_the_tokens_of_transformers(
    server: TritonServer, expected: npt.NDArray[np.float32]
) -> None:
    tokens = AutoTokenizer.from_pretrained(real_checkpoint())(TEXTS, padding=True, return_tensors="np")
    tensors = [
        {"name": name, "datatype": "INT64", "shape": list(ids.shape), "data": ids.tolist()}
        for name, ids in tokens.items()
    ]
    names = [{"name": "embedding"}, {"name": "num_input_tokens"}]
    reply = post(server, "/v2/models/batched/infer", {"inputs": tensors, "outputs": names})
    assert reply.status == 200, reply.body
    embedding, counts = reply.json()["outputs"]
    np.testing.assert_allclose(np.array(embedding["data"]).reshape(embedding["shape"]), expected, atol=TOLERANCE)
    assert (counts["shape"], counts["data"][0]) == ([len(TEXTS), 1], 10)


def test_optimized_folder_needs_no_hub_and_no_weights(server: TritonServer, bge_checkpoint: Path) -> None:
    expected = reference_embeddings(bge_checkpoint, TEXTS)
    np.testing.assert_allclose(vectors_of(ask(server, "graph", "text", TEXTS)), expected, atol=TOLERANCE)
    reply = post(server, "/v2/models/graph/generate", {"text": "word " * 200})
    assert (reply.status, "context_exceeded" in str(reply.body)) == (400, True)


# --- a real checkpoint -----------------------------------------------------------------------------------------------


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


def test_nearest_texts_are_those_that_mean_the_same(server: TritonServer) -> None:
    vectors = vectors_of(ask(server, "minilm", "text", TEXTS))
    likeness = vectors @ vectors.T - 2 * np.eye(len(TEXTS))
    for text, (nearest,) in NEIGHBOURS.items():
        assert likeness[text].argmax() == nearest
        assert likeness[nearest].argmax() == text


def test_texts_of_many_clients_get_their_own_vectors(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    def embed(place: int) -> npt.NDArray[np.float64]:
        return vectors_of(ask(server, "minilm", "text", [TEXTS[place % len(TEXTS)]]))[0]

    with ThreadPoolExecutor(16) as pool:
        vectors = list(pool.map(embed, range(60)))
    for place, vector in enumerate(vectors):
        np.testing.assert_allclose(vector, expected[place % len(TEXTS)], atol=TOLERANCE)


def test_batching_folder_gives_a_row_for_each_text(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    outputs = ask(server, "batched", "text", TEXTS, shape=[len(TEXTS), 1])
    np.testing.assert_allclose(vectors_of(outputs), expected, atol=TOLERANCE)


def test_generate_takes_a_text_and_options(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    reply = post(server, "/v2/models/minilm/generate", {"text": TEXTS[0], "dimensions": 8}).json()
    wanted = expected[0, :8] / np.linalg.norm(expected[0, :8])
    np.testing.assert_allclose(reply["embedding"], wanted, atol=TOLERANCE)


def test_json_comes_where_it_is_asked_for(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    names = [{"name": "output"}, {"name": "num_input_tokens"}]
    outputs = ask(server, "minilm", "args", TEXTS[:1], outputs=names)
    np.testing.assert_allclose(json.loads(outputs["output"]["data"][0]), expected[0], atol=TOLERANCE)
    assert outputs["num_input_tokens"]["data"] == [10]


# --- the requests of other systems -----------------------------------------------------------------------------------


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


# --- a task of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_angle", [False, True])
def test_task_of_the_documents_compares_texts(
    as_angle: bool, server: TritonServer, expected: npt.NDArray[np.float32]
) -> None:
    texts = {"first": TEXTS[:1], "second": TEXTS[1:]}
    tensors = [{"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data} for name, data in texts.items()]
    body = {"inputs": tensors, "parameters": {"as_angle": as_angle}, "outputs": [{"name": "similarity"}]}
    reply = post(server, "/v2/models/similarity/infer", body)
    assert reply.status == 200, reply.body
    (output,) = reply.json()["outputs"]
    cosines = expected[1:] @ expected[0]
    assert output["shape"] == [len(TEXTS) - 1]
    wanted = np.degrees(np.arccos(cosines)) if as_angle else cosines
    np.testing.assert_allclose(output["data"], wanted, rtol=1e-4, atol=TOLERANCE)


# --- sparse embeddings -----------------------------------------------------------------------------------------------


def test_sparse_embeddings_by_the_document_s_request(server: TritonServer, splade_checkpoint: Path) -> None:
    *_, url, _, body = shlex.split(line_of_document("curl -X POST localhost:8000/v2/models/splade/infer"))
    reply = post(server, url.removeprefix("localhost:8000"), json.loads(body))
    assert reply.status == 200, reply.body
    outputs = {output["name"]: output for output in reply.json()["outputs"]}
    texts = json.loads(body)["inputs"][0]["data"]
    expected = expected_splade(splade_checkpoint, texts, **json.loads(body)["parameters"])
    indices, values = (
        np.split(np.array(outputs[name]["data"]), np.cumsum(outputs["num_values"]["data"])[:-1])
        for name in ("indices", "values")
    )
    for row, own_indices, own_values in zip(expected, indices, values, strict=True):
        assert own_indices.tolist() == np.flatnonzero(row).tolist()
        np.testing.assert_allclose(own_values, row[own_indices], atol=TOLERANCE)


def test_a_layer_beside_the_model_comes_from_the_hub(server: TritonServer, lexical_checkpoint: Path) -> None:
    (output,) = ask(server, "lexical", "text", TEXTS).values()
    for text, row in zip(output["data"], expected_lexical(lexical_checkpoint, TEXTS), strict=True):
        assert json.loads(text)["indices"] == np.flatnonzero(row).tolist()
        np.testing.assert_allclose(json.loads(text)["values"], row[np.flatnonzero(row)], atol=TOLERANCE)


# --- feature extraction, errors --------------------------------------------------------------------------------------


def test_features_as_json_and_as_a_tensor(server: TritonServer) -> None:
    (json_output,) = ask(server, "features", "args", TEXTS[:2]).values()
    nested = [np.array(json.loads(text)) for text in json_output["data"]]
    names = [{"name": "last_hidden_state"}, {"name": "num_input_tokens"}]
    outputs = ask(server, "features", "args", TEXTS[:2], outputs=names)
    counts = outputs["num_input_tokens"]["data"]
    assert [array.shape for array in nested] == [(1, count, 32) for count in counts]
    states = np.array(outputs["last_hidden_state"]["data"]).reshape(outputs["last_hidden_state"]["shape"])
    np.testing.assert_allclose(states, np.concatenate([array[0] for array in nested]), atol=TOLERANCE)


REFUSED = {
    "too long": ({"text": "word " * 300}, "the text has 302 tokens, more than the 256 of the model"),
    "a generation parameter": ({"text": "a", "max_new_tokens": 4}, "of text generation"),
    "no text": ({"dimensions": 4}, "there is no text"),
    "too many dimensions": ({"text": "a", "dimensions": 385}, "dimensions must be an integer >= 1 and <= 384"),
    "another prompt": ({"text": "a", "prompt_name": "query"}, "prompt_name must be a prompt of the model"),
}


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
