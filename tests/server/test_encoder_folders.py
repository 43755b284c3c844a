# SPDX-License-Identifier: Apache-2.0
"""Encoders' folders in their other forms: a tokenizer apart, batching, a graph, a task of one's own, sparse vectors."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer

from hf_triton.testing import LoopbackHub, TritonServer
from tests.support.client import post
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
from tests.support.vectors import TOLERANCE, ask, vectors_of

pytestmark = pytest.mark.full

BGE = "BAAI/bge-large-zh-v1.5"
LEXICAL = "BAAI/bge-m3"
"""On the first start no file of it is on disk."""
READY = ("examples/bge_tokenizer", "examples/bge_apart")
"""Beside `bge`."""


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


def test_ready_folders_are_served_as_they_are(server: TritonServer) -> None:
    for folder in READY:
        name = Path(folder).name
        served = (server.model_repository / name / "config.pbtxt").read_bytes()
        assert served == (ROOT / folder / "config.pbtxt").read_bytes()
        assert server.is_model_ready(name), server.log_tail()


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


def test_batching_folder_gives_a_row_for_each_text(server: TritonServer, expected: npt.NDArray[np.float32]) -> None:
    outputs = ask(server, "batched", "text", TEXTS, shape=[len(TEXTS), 1])
    np.testing.assert_allclose(vectors_of(outputs), expected, atol=TOLERANCE)


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


def test_features_as_json_and_as_a_tensor(server: TritonServer) -> None:
    (json_output,) = ask(server, "features", "args", TEXTS[:2]).values()
    nested = [np.array(json.loads(text)) for text in json_output["data"]]
    names = [{"name": "last_hidden_state"}, {"name": "num_input_tokens"}]
    outputs = ask(server, "features", "args", TEXTS[:2], outputs=names)
    counts = outputs["num_input_tokens"]["data"]
    assert [array.shape for array in nested] == [(1, count, 32) for count in counts]
    states = np.array(outputs["last_hidden_state"]["data"]).reshape(outputs["last_hidden_state"]["shape"])
    np.testing.assert_allclose(states, np.concatenate([array[0] for array in nested]), atol=TOLERANCE)
