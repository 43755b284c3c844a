# SPDX-License-Identifier: Apache-2.0
"""Refusals of encoders as each API tells them: in its names, with the client's rows."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hf_triton.protocol.request_options import PARAMETERS
from hf_triton.testing import TritonServer
from hf_triton_gateway.encoders import classify, cohere, embeddings, reranking, tei
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

LONG = "abc def " * 900
APIS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "/v1/embeddings": (embeddings.EmbeddingRequest, {"model": "minilm"}, "input"),
    "/v1/rerank": (reranking.RerankRequest, {"model": "reranker", "query": "a"}, "documents"),
    "/v1/score": (reranking.ScoreRequest, {"model": "reranker", "text_1": "a"}, "text_2"),
    "/v1/classify": (classify.ClassifyRequest, {"model": "sentiment"}, "input"),
    "/embed": (tei.EmbedRequest, {"model": "minilm"}, "inputs"),
    "/embed_all": (tei.EmbedAllRequest, {"model": "states"}, "inputs"),
    "/embed_sparse": (tei.EmbedSparseRequest, {"model": "splade"}, "inputs"),
    "/predict": (tei.PredictRequest, {"model": "sentiment"}, "inputs"),
    "/v2/embed": (cohere.EmbedRequest, {"model": "minilm", "input_type": "search_query"}, "texts"),
}
"""Each endpoint's fields, the least of a request beside its texts, and the field of those."""
OURS = {"token_ids", "query_ids", "prompt_name", "top_k", "aggregation_strategy", "lora_name", "truncate", "dimensions"}
"""Inputs and parameters of encoders' tasks that are no words of English."""
WRONG: tuple[Any, ...] = (-7, "words", [[]], {"type": "frobnicate"}, 2**40)


@pytest.fixture(scope="module")
def gateway(encoders: TritonServer) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=encoders.grpc_url, port=0)) as running:
        yield running


def message_of(answer: httpx.Response) -> str:
    body = answer.json()
    error = body.get("error", body.get("message"))
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", APIS)
def test_no_refusal_names_a_field_that_the_api_lacks(gateway: GatewayThread, path: str) -> None:
    model, least, texts = APIS[path]
    fields = set(model.model_fields)
    unsent = {name for name in {*PARAMETERS, *OURS} if "_" in name or name in OURS} - fields
    bodies: list[dict[str, Any]] = [{name: value} for name in fields - {"model"} for value in WRONG]
    bodies += [{texts: []}, {texts: [""]}, {texts: [[]]}, {texts: [[10**9]]}, {texts: LONG}, {texts: ["a"] * 10_001}]
    if "truncate" in fields:
        bodies += [{texts: [LONG], "truncate": "NONE" if path.startswith("/v2") else False}]
    num_refused = 0
    for body in bodies:
        answer = httpx.post(gateway.url + path, json={**least, texts: ["a"], **body}, timeout=60)
        if answer.status_code < 400:
            continue
        num_refused += 1
        assert answer.status_code in (400, 404, 413), (body, answer.text)
        found = set(re.findall(r"[a-z_]{2,}", message_of(answer))) & unsent
        assert not found, (path, body, answer.text)
        assert "\\ufdd" not in answer.text
    assert num_refused > 10


@pytest.mark.parametrize("path", [path for path in APIS if path not in ("/v1/score", "/predict", "/embed_all")])
def test_a_text_of_a_part_is_told_by_the_clients_row(gateway: GatewayThread, path: str) -> None:
    """Texts reach Triton in parts of 128."""
    _, least, texts = APIS[path]
    told = {"truncate": "NONE"} if path.startswith("/v2") else {"truncate": False}
    rows = ["a"] * 150 + [LONG]
    answer = httpx.post(gateway.url + path, json={**least, texts: rows, **told}, timeout=60)
    assert answer.status_code in (400, 413), answer.text
    assert re.search(r"\brow 150\b", message_of(answer)), answer.text
    for alone, row in (([*["a"] * 128, LONG], "128"), ([LONG], None)):  # to the model it is the only text of a request
        answer = httpx.post(gateway.url + path, json={**least, texts: alone, **told}, timeout=60)
        found = re.search(r"\brow (\d+)\b", message_of(answer))
        assert (answer.status_code in (400, 413), found and found[1]) == (True, row), answer.text


@pytest.mark.parametrize("num_sentences", [1, 127, 128])
@pytest.mark.parametrize("is_source", [False, True])
def test_a_sentence_is_told_by_its_own_place(gateway: GatewayThread, num_sentences: int, is_source: bool) -> None:
    sentences = ["a"] * (num_sentences - 1)
    inputs = {"source_sentence": LONG if is_source else "a", "sentences": [*sentences, "b" if is_source else LONG]}
    answer = httpx.post(f"{gateway.url}/similarity", json={"model": "minilm", "inputs": inputs, "truncate": False})
    place = "source_sentence" if is_source else f"sentences[{num_sentences - 1}]"
    assert (answer.status_code, message_of(answer)[-len(place) - 3 :]) == (413, f" ({place})"), answer.text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/embed", "/predict"])
def test_a_side_is_told_by_the_name_that_the_client_gave_it(gateway: GatewayThread, path: str) -> None:
    _, least, texts = APIS[path]
    body = {**least, texts: ["a"], "truncation_direction": "up"}
    answer = httpx.post(gateway.url + path, json=body, timeout=60)
    assert (answer.status_code in (400, 413), "truncation_direction" in message_of(answer)) == (True, True), answer.text
    assert "truncation_side" not in answer.text
