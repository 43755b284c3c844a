# SPDX-License-Identifier: Apache-2.0
"""The forms of Text Embeddings Inference and of Cohere, against sentence-transformers and transformers."""

import base64
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient
from sentence_transformers import SentenceTransformer, quantize_embeddings
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import TEXTS, real_checkpoint, reference_embeddings
from tests.support.sparse_checkpoints import expected_splade

pytestmark = pytest.mark.full

TOLERANCE = 1e-5
QUERY = "Where does Anna live?"
DOCUMENTS = ["bad", "Anna lives in Berlin.", "two boats and one lighthouse"]
SENTENCES = {"source_sentence": "a", "sentences": ["b", "a " * 900, "c"]}
PAIR = ["Anna lives in Berlin.", "Where does Anna live?"]


@pytest.fixture(scope="module")
def gateway(encoders: TritonServer) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=encoders.grpc_url, port=0)) as running:
        yield running


def ask(gateway: GatewayThread, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{gateway.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logits_of(checkpoint: Path, entries: list[list[str]]) -> Any:
    """Of texts and pairs, one at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    with torch.inference_mode():
        return np.array([model(**tokenizer(*entry, return_tensors="pt")).logits[0].numpy() for entry in entries])


def refusal(gateway: GatewayThread, path: str, **body: Any) -> tuple[int, Any]:
    answer = httpx.post(f"{gateway.url}{path}", json=body, timeout=60)
    return answer.status_code, answer.json()


# --- Text Embeddings Inference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [TEXTS, TEXTS[0]])
def test_embed_gives_vectors(gateway: GatewayThread, inputs: Any) -> None:
    vectors = ask(gateway, "/embed", model="minilm", inputs=inputs, truncate=True)
    expected = reference_embeddings(real_checkpoint(), [inputs] if isinstance(inputs, str) else inputs)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


def test_a_prompt_and_dimensions_are_the_models(gateway: GatewayThread, encoder_checkpoints: dict[str, Path]) -> None:
    model = SentenceTransformer(str(encoder_checkpoints["prompted"]), device="cpu")
    expected = model.encode(TEXTS, prompt_name="query", truncate_dim=64, normalize_embeddings=True)
    vectors = ask(gateway, "/embed", model="prompted", inputs=TEXTS, prompt_name="query", dimensions=64)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


def test_the_hubs_client_finds_a_server_of_tei(gateway: GatewayThread) -> None:
    client = InferenceClient(f"{gateway.url}/embed")
    with pytest.raises(
        Exception, match=r"there are 2 models for embeddings: name one in the field model, or by \?model=NAME"
    ):
        client.feature_extraction(TEXTS[0])
    states = InferenceClient(f"{gateway.url}/embed_all").feature_extraction(TEXTS[0])  # one folder has this task
    assert np.array(states).ndim == 3
    expected = reference_embeddings(real_checkpoint(), TEXTS[:1])
    for path in ("/", "/embed"):  # TEI answers its address itself, too
        vectors = InferenceClient(f"{gateway.url}{path}?model=minilm").feature_extraction(TEXTS[0])
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)


def test_the_vectors_of_tokens_are_the_models(gateway: GatewayThread, encoder_checkpoints: dict[str, Path]) -> None:
    found = ask(gateway, "/embed_all", inputs=TEXTS[:2])
    expected = SentenceTransformer(str(encoder_checkpoints["states"]), device="cpu").encode(
        TEXTS[:2], output_value="token_embeddings", convert_to_tensor=True
    )
    for rows, own in zip(found, expected, strict=True):
        np.testing.assert_allclose(rows, own.numpy(), atol=TOLERANCE)


def test_sparse_vectors_are_weights_of_tokens(gateway: GatewayThread, encoder_checkpoints: dict[str, Path]) -> None:
    vectors = ask(gateway, "/embed_sparse", inputs=TEXTS)
    for vector, row in zip(vectors, expected_splade(encoder_checkpoints["splade"], TEXTS), strict=True):
        found = np.zeros_like(row)
        found[[each["index"] for each in vector]] = [each["value"] for each in vector]
        np.testing.assert_allclose(found, row, atol=TOLERANCE)


@pytest.mark.parametrize("raw_scores", [False, True])
def test_rerank_ranks_texts(gateway: GatewayThread, encoder_checkpoints: dict[str, Path], raw_scores: bool) -> None:
    ranks = ask(gateway, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=raw_scores, return_text=True)
    assert sorted(each["index"] for each in ranks) == [0, 1, 2]
    assert [each["text"] for each in ranks] == [DOCUMENTS[each["index"]] for each in ranks]
    logits = logits_of(encoder_checkpoints["reranker"], [[QUERY, text] for text in DOCUMENTS])[:, 0]
    expected = logits if raw_scores else 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose([each["score"] for each in ranks], np.sort(expected)[::-1], atol=TOLERANCE)


def test_the_other_form_of_rerank_stays(gateway: GatewayThread) -> None:
    answer = ask(gateway, "/rerank", model="reranker", query=QUERY, documents=DOCUMENTS, top_n=1)
    assert len(answer["results"]) == 1
    assert refusal(gateway, "/rerank", query=QUERY)[1]["error"]["message"] == "documents is required"
    assert refusal(gateway, "/rerank", model="nothing", query=QUERY, documents=["a"])[1]["error"]["param"] == "model"


def test_predict_gives_all_labels_of_texts_and_pairs(
    gateway: GatewayThread, encoder_checkpoints: dict[str, Path]
) -> None:
    single = ask(gateway, "/predict", inputs=TEXTS[0])
    pair = ask(gateway, "/predict", inputs=PAIR)
    batch = ask(gateway, "/predict", inputs=[[TEXTS[0]], PAIR, [TEXTS[1]]])
    assert [each["label"] for each in batch[0]] == [each["label"] for each in single]
    np.testing.assert_allclose([e["score"] for e in batch[1]], [e["score"] for e in pair], atol=TOLERANCE)
    [logits] = logits_of(encoder_checkpoints["sentiment"], [[TEXTS[0]]])
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose([each["score"] for each in single], np.sort(expected)[::-1], atol=TOLERANCE)
    assert {each["label"] for each in single} == {"LABEL_0", "LABEL_1", "LABEL_2"}
    raw = ask(gateway, "/predict", inputs=TEXTS[0], raw_scores=True)
    np.testing.assert_allclose([each["score"] for each in raw], np.sort(logits)[::-1], atol=TOLERANCE)


def test_similarity_is_the_cosine(gateway: GatewayThread) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    cosines = ask(gateway, "/similarity", model="minilm", inputs=inputs)
    vectors = reference_embeddings(real_checkpoint(), TEXTS)
    np.testing.assert_allclose(cosines, vectors @ vectors[0], atol=TOLERANCE)


def test_info_says_what_a_model_is(gateway: GatewayThread) -> None:
    about = httpx.get(f"{gateway.url}/info", params={"model": "reranker"}).json()
    assert (about["model_type"], about["model_id"]) == ({"reranker": {}}, "reranker")
    assert about["max_input_length"] > 0
    several = httpx.get(f"{gateway.url}/info")
    assert several.status_code == 400
    assert several.json()["error"].startswith(
        "model is required, as there are 7 models: name one by ?model=NAME; there are 'minilm', "
    )


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/embed", {"model": "minilm"}, "inputs is required"),
        ("/embed", {"model": "minilm", "inputs": []}, "inputs is an empty list"),
        ("/embed", {"model": "nothing", "inputs": "a"}, "the model 'nothing' does not exist"),
        ("/embed", {"model": "reranker", "inputs": "a"}, "the model 'reranker' is for rerank, not for embeddings"),
        ("/embed", {"model": "minilm", "inputs": ["a " * 900], "truncate": False}, "the text has 902 tokens"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "inputs must be a text, a pair of texts, or a list of [text]"),
        ("/similarity", {"model": "minilm", "inputs": {"source_sentence": "a"}}, "inputs.sentences is required"),
        ("/similarity", {"model": "minilm", "inputs": SENTENCES}, "the text has 902 tokens"),
        ("/embed_sparse", {"inputs": "a", "normalize": True}, "there is no field 'normalize'"),
        ("/embed_all", {"inputs": ["a"] * 33}, "inputs has 33 items, more than the 32 that are accepted"),
        ("/rerank", {"model": "nothing", "query": "a", "texts": ["a"]}, "the model 'nothing' does not exist"),
        ("/rerank", {"query": "a", "texts": []}, "texts is an empty list"),
        ("/rerank", {"query": "a", "texts": ["a"], "top_n": 1}, "top_n is of another form of this request"),
        ("/rerank", {"query": "a", "texts": ["a"], "documents": ["b"]}, "documents is of another form of this "),
        ("/?model=minilm", {"inputs": []}, "inputs is an empty list"),
    ],
)
def test_a_wrong_request_gets_an_error_of_tei(gateway: GatewayThread, path: str, body: Any, sentence: str) -> None:
    status, answer = refusal(gateway, path, **body)
    assert status == (404 if "'nothing'" in sentence else 413 if "902 tokens" in sentence else 400)
    assert answer.keys() == {"error", "error_type"}
    assert answer["error"].startswith(sentence)
    assert answer["error_type"] == "Validation"


def test_the_pages_requests_are_answered(gateway: GatewayThread) -> None:
    page = (ROOT / "docs" / "moving" / "text-embeddings-inference.md").read_text(encoding="utf-8")
    lines = re.findall(r"^curl localhost:9000(/\S+) .* -d '(.*)'$", page, re.MULTILINE)
    assert [path for path, _ in lines] == ["/embed", "/rerank", "/predict", "/embed_sparse"]
    for path, text in lines:
        body = json.loads(text) | ({"model": "minilm"} if path == "/embed" else {})
        assert len(ask(gateway, path, **body))


LONG = "one two three four five six seven eight nine ten eleven twelve " * 50
CUT_AT_THE_START: dict[str, tuple[str, dict[str, Any]]] = {
    "TEI": ("/embed", {"inputs": LONG, "truncate": True, "truncation_direction": "Left"}),
    "Cohere": ("/v2/embed", {"texts": [LONG], "truncate": "START"}),
    "NIM": ("/v1/embeddings", {"input": LONG, "truncate": "START"}),
    "vLLM": ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": -1, "truncation_side": "left"}),
}


def vector_of(answer: Any) -> Any:
    """The vector of an answer of TEI, Cohere or OpenAI."""
    if isinstance(answer, list):
        return answer[0]
    return answer["embeddings"]["float"][0] if "embeddings" in answer else answer["data"][0]["embedding"]


def cut_vector(side: str, num_tokens: int) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(real_checkpoint(), truncation_side=side)
    ids = tokenizer(LONG, truncation=True, max_length=num_tokens).input_ids
    return reference_embeddings(real_checkpoint(), [tokenizer.decode(ids[1:-1])])[0]


@pytest.mark.parametrize("name", CUT_AT_THE_START)
def test_each_api_cuts_at_the_start(gateway: GatewayThread, name: str) -> None:
    path, body = CUT_AT_THE_START[name]
    found = vector_of(ask(gateway, path, model="minilm", **body))
    np.testing.assert_allclose(found, cut_vector("left", 256), atol=TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_cut_to_as_many_tokens_as_asked_for(gateway: GatewayThread, side: str) -> None:
    more = {"truncation_side": side} if side == "left" else {}  # vLLM's default for models that pool
    answer = ask(gateway, "/v1/embeddings", model="minilm", input=LONG, truncate_prompt_tokens=20, **more)
    assert answer["usage"]["prompt_tokens"] == 20
    np.testing.assert_allclose(vector_of(answer), cut_vector(side, 20), atol=TOLERANCE)


def test_words_and_sides_that_contradict_each_other_are_refused(gateway: GatewayThread) -> None:
    body = {"model": "minilm", "input": "a", "truncate": "START", "truncation_side": "right"}
    status, answer = refusal(gateway, "/v1/embeddings", **body)
    assert (status, answer["error"]["param"]) == (400, "truncate")
    assert answer["error"]["message"] == "truncate START and truncation_side right contradict each other"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/score"])
def test_documents_are_cut_to_their_first_tokens(
    gateway: GatewayThread, encoder_checkpoints: dict[str, Path], path: str
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder_checkpoints["reranker"])
    num_tokens = len(tokenizer("Anna lives", add_special_tokens=False).input_ids)
    names = {"queries": QUERY} if path == "/v1/score" else {"query": QUERY}

    def scores(document: str, **more: Any) -> list[float]:
        answer = ask(gateway, path, **names, documents=[document], **more)
        return [each.get("relevance_score", each.get("score")) for each in answer.get("results", answer.get("data"))]

    whole = scores("Anna lives")
    assert scores("Anna lives in Berlin.", max_tokens_per_doc=num_tokens) == pytest.approx(whole, abs=TOLERANCE)
    assert scores("Anna lives", max_tokens_per_doc=0) == pytest.approx(whole, abs=TOLERANCE)


# --- Cohere ----------------------------------------------------------------------------------------------------------


def test_cohere_embeds_in_each_form(gateway: GatewayThread) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    assert len(ask(gateway, "/v2/embed", model="minilm", texts=["boat " * 900])["embeddings"]["float"]) == 1
    answer = ask(gateway, "/v2/embed", model="minilm", texts=TEXTS, input_type="clustering", embedding_types=kinds)
    expected = reference_embeddings(real_checkpoint(), TEXTS)
    np.testing.assert_allclose(answer["embeddings"]["float"], expected, atol=TOLERANCE)
    for text, vector in zip(answer["embeddings"]["base64"], answer["embeddings"]["float"], strict=True):
        assert struct.unpack("<384f", base64.b64decode(text)) == pytest.approx(vector)
    for kind in ("binary", "ubinary"):
        quantised = quantize_embeddings(np.array(answer["embeddings"]["float"]), kind)
        assert (np.array(answer["embeddings"][kind]) == quantised).all()
    assert answer["texts"] == TEXTS
    assert answer["meta"]["billed_units"]["input_tokens"] > len(TEXTS)


@pytest.mark.parametrize(
    ("input_type", "prompt"), [("search_query", "query"), ("search_document", "passage"), ("classification", None)]
)
def test_the_type_of_input_chooses_the_models_prompt(
    gateway: GatewayThread, encoder_checkpoints: dict[str, Path], input_type: str, prompt: str | None
) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = ask(gateway, "/v2/embed", model="prompted", inputs=inputs, input_type=input_type, output_dimension=32)
    model = SentenceTransformer(str(encoder_checkpoints["prompted"]), device="cpu")
    expected = model.encode(TEXTS, prompt_name=prompt, truncate_dim=32, normalize_embeddings=True)
    np.testing.assert_allclose(answer["embeddings"]["float"], expected, atol=TOLERANCE)


def test_cohere_reranks(gateway: GatewayThread) -> None:
    long = "boat " * 900  # is cut, as Cohere does
    answer = ask(gateway, "/v2/rerank", model="reranker", query=QUERY, documents=[*DOCUMENTS, long], top_n=2)
    assert len(answer["results"]) == 2
    assert answer["meta"]["api_version"] == {"version": "2"}


def test_coheres_documented_request_is_answered(gateway: GatewayThread) -> None:
    page = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")
    [body] = re.findall(r"^curl localhost:9000/v2/embed .* -d '(.*)'$", page, re.MULTILINE)
    assert ask(gateway, "/v2/embed", **json.loads(body) | {"model": "prompted"})["embeddings"].keys() == {"float"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "give the texts as texts or as inputs, one of them"),
        ({"texts": ["a"], "inputs": []}, "give the texts as texts or as inputs, one of them"),
        ({"texts": []}, "texts is an empty list"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0].type must be "),
        ({"inputs": [{"content": []}]}, "inputs[0] is empty"),
        ({"texts": ["a"], "truncate": "LEFT"}, "truncate must be "),
        ({"texts": ["a " * 900], "truncate": "NONE"}, "the text has 902 tokens"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0] must be 'float', 'base64', "),
        ({"texts": ["a"], "output_dimension": 9999}, "output_dimension must be "),
    ],
)
def test_a_wrong_request_gets_an_error_of_cohere(gateway: GatewayThread, body: Any, sentence: str) -> None:
    status, answer = refusal(gateway, "/v2/embed", model="minilm", **body)
    assert status == 400
    assert answer.keys() == {"message"}
    assert answer["message"].startswith(sentence)
