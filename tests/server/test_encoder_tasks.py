# SPDX-License-Identifier: Apache-2.0
"""The ready folders of encoders' tasks, unmodified, and other servers' requests as printed."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from hf_triton.testing import LoopbackHub, TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.client import post
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT
from tests.support.published_tensors import publish
from tests.support.tasks import TEXTS, reference, save_task_checkpoint

pytestmark = pytest.mark.full

READY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sentiment": ("distilbert/distilbert-base-uncased-finetuned-sst-2-english", "sequence", {"num_labels": 2}),
    "ner": ("dslim/bert-base-NER", "tokens", {"num_labels": 3}),
    "qa": ("deepset/roberta-base-squad2", "answers", {}),
    "reranker": ("BAAI/bge-reranker-base", "sequence", {"num_labels": 1}),
}
"""Folders: the model that each names, the head that it needs and its config."""
FAMILIES = {"sentiment": "distilbert", "ner": "bert", "qa": "roberta", "reranker": "xlm-roberta"}
MASKS = "acme/masks"
"""A name on the Hub: on the first start no file of it is on disk."""
LABELS = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {
        name: publish(save_task_checkpoint(root / name, FAMILIES[name], head, **config), name)
        for name, (_, head, config) in READY.items()
    }
    made["masks"] = save_task_checkpoint(root / "masks", "bert", "masks")
    made["labels"] = save_task_checkpoint(root / "labels", "bert", "sequence", num_labels=2, **LABELS)
    return made


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name in READY:
        shutil.copytree(ROOT / name, repository / name)
    make_folder(repository, "masks", huggingface_model=MASKS)  # its files say what it does
    make_folder(repository, "labels", huggingface_model=checkpoints["labels"], task="zero-shot-classification")
    shutil.copytree(ROOT / "qa", repository / "transformer")
    with LoopbackHub() as hub:
        hub.add(MASKS, checkpoints["masks"])
        for name, (model, _, _) in READY.items():
            hub.add(model, checkpoints[name])
        home = {"HF_HOME": str(tmp_path_factory.mktemp("home"))}
        with TritonServer(repository, environment=hub.environment() | home, ready_timeout_s=280) as running:
            yield running


def tensor(name: str, *texts: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}


def infer(server: TritonServer, model: str, *inputs: dict[str, Any], **body: Any) -> dict[str, Any]:
    reply = post(server, f"/v2/models/{model}/infer", {"inputs": list(inputs), **body})
    assert reply.status == 200, reply.body
    return {output["name"]: output for output in reply.json()["outputs"]}


def generate(server: TritonServer, model: str, **fields: Any) -> dict[str, Any]:
    reply = post(server, f"/v2/models/{model}/generate", fields)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize("name", READY)
def test_ready_folders_are_served_as_they_are(server: TritonServer, name: str) -> None:
    for file in ("config.pbtxt", "1/model.py"):
        assert (server.model_repository / name / file).read_bytes() == (ROOT / name / file).read_bytes()
    assert server.is_model_ready(name), server.log_tail()


def test_sentiment_has_labels_and_scores(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    expected = [answer for (answer,) in reference(checkpoints["sentiment"], "text-classification", TEXTS)]
    outputs = infer(server, "sentiment", tensor("text", *TEXTS))
    assert outputs["label"]["data"] == [each["label"] for each in expected]
    np.testing.assert_allclose(outputs["score"]["data"], [each["score"] for each in expected], atol=1e-5)
    assert outputs["score"]["shape"] == [4, 1]


def test_entities_of_a_text(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    [expected] = reference(checkpoints["ner"], "token-classification", TEXTS[:1], aggregation_strategy="simple")
    found = json.loads(generate(server, "ner", text=TEXTS[0], aggregation_strategy="simple")["output"])
    assert [each["word"] for each in found] == [each["word"] for each in expected]
    np.testing.assert_allclose(
        [each["score"] for each in found], [float(each["score"]) for each in expected], atol=1e-5
    )


def test_reranked_documents_over_grpc(server: TritonServer) -> None:
    inputs = []
    for name, texts in (("query", TEXTS[:1]), ("documents", TEXTS)):
        given = tritonclient.grpc.InferInput(name, [len(texts)], "BYTES")
        given.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
        inputs.append(given)
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    try:
        scores = client.infer("reranker", inputs).as_numpy("score")
    finally:
        client.close()
    assert (scores.shape, scores.dtype) == ((4,), np.float32)
    alone = [infer(server, "reranker", tensor("query", TEXTS[0]), tensor("documents", text)) for text in TEXTS]
    np.testing.assert_allclose(scores, [each["score"]["data"][0] for each in alone], atol=1e-6)


def test_masks_are_filled_and_labels_entailed(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    [expected] = reference(checkpoints["masks"], "fill-mask", ["the <mask> was bad"], top_k=2)
    found = json.loads(generate(server, "masks", text="the <mask> was bad", top_k=2)["output"])
    assert [each["sequence"] for each in found] == [each["sequence"] for each in expected]
    answer = generate(server, "labels", text=TEXTS[0], candidate_labels=["good", "bad", "a boat"])
    assert sorted(answer["label"]) == ["a boat", "bad", "good"]
    assert sum(answer["score"]) == pytest.approx(1, abs=1e-5)


def test_mlserver_asks_a_question(server: TritonServer) -> None:
    request = {
        "inputs": [
            {"name": "question", "shape": [1], "datatype": "BYTES", "data": ["what is your name?"]},
            {"name": "context", "shape": [1], "datatype": "BYTES", "data": ["Hello, I am Seldon, how is it going"]},
        ]
    }
    reply = post(server, "/v2/models/transformer/infer", request)
    assert reply.status == 200, reply.body
    outputs = {output["name"]: output["data"] for output in reply.json()["outputs"]}
    assert [*outputs] == ["output", "answer", "score", "start", "end"]
    answer = json.loads(outputs["output"][0])
    assert answer.keys() == {"score", "start", "end", "answer"}
    assert answer["answer"] == "Hello, I am Seldon, how is it going"[answer["start"] : answer["end"]]
    assert outputs["answer"] == [answer["answer"]]


@pytest.mark.parametrize("name", ["args", "text_inputs"])
def test_mlserver_sends_args(server: TritonServer, checkpoints: dict[str, Path], name: str) -> None:
    """Its own library names the codec among the request's parameters."""
    texts = ["This is terrible!", "two boats"]
    request = {
        "parameters": {"content_type": "hf"},
        "inputs": [{"name": name, "shape": [2], "datatype": "BYTES", "data": texts}],
    }
    reply = post(server, "/v2/models/sentiment/infer", request)
    assert reply.status == 200, reply.body
    [output] = reply.json()["outputs"]
    assert (output["name"], output["shape"]) == ("output", [2, 1])
    expected = reference(checkpoints["sentiment"], "text-classification", texts)
    for found, [best] in zip(map(json.loads, output["data"]), expected, strict=True):
        assert found == {"label": best["label"], "score": pytest.approx(best["score"], abs=1e-5)}


@pytest.mark.parametrize("model", ["ner", "masks", "labels"])
def test_mlserver_gets_json_of_each_task(server: TritonServer, model: str) -> None:
    texts = {"masks": "the <mask> boats"}
    tensor = {"name": "args", "shape": [1], "datatype": "BYTES", "data": [texts.get(model, "two boats")]}
    request: dict[str, Any] = {"inputs": [tensor]}
    if model == "labels":
        request["parameters"] = {"candidate_labels": "boats, trains"}
    reply = post(server, f"/v2/models/{model}/infer", request)
    assert reply.status == 200, reply.body
    [output] = reply.json()["outputs"]
    assert (output["name"], output["shape"]) == ("output", [1, 1])
    json.loads(output["data"][0])


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no text": ("sentiment", {}, "text is missing"),
    "generation": ("sentiment", {"text": "a", "max_tokens": 5}, "max_tokens is a parameter of text generation"),
    "question alone": ("qa", {"question": "Who?"}, "context is missing"),
    "no documents": ("reranker", {"query": "a", "documents": []}, ""),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_in_a_sentence(server: TritonServer, case: str) -> None:
    model, fields, sentence = BAD[case]
    reply = post(server, f"/v2/models/{model}/generate", fields)
    assert reply.status == 400, reply.body
    assert sentence in reply.json()["error"]
    assert server.is_model_ready(model)


def test_ten_thousand_documents_are_refused_in_a_sentence(server: TritonServer) -> None:
    body = {"inputs": [tensor("query", "a"), tensor("documents", *["b"] * 10_000)]}
    reply = post(server, "/v2/models/reranker/infer", body)
    assert reply.status == 400
    assert "documents holds 10000 texts, more than the " in reply.json()["error"]
    assert infer(server, "reranker", tensor("query", "a"), tensor("documents", "b"))["score"]["shape"] == [1]


def test_the_gateway_says_where_another_task_is_asked(server: TritonServer) -> None:
    with GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/classify", json={"model": "qa", "input": "Who?"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "wrong_task")
    assert error["message"].endswith("is for question-answering, not for text-classification: POST /")
