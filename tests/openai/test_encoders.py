# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings, /v1/rerank, /v1/score and /v1/classify, by the real `openai` client and as JSON."""

import base64
import itertools
import json
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoModelForSequenceClassification

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.adapters import wrap
from tests.support.client import post
from tests.support.clients import CLIENTS, has, run
from tests.support.commands import hf_triton
from tests.support.gateway import GatewayThread, wait_until
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import TEXTS, real_checkpoint, reference_embeddings
from tests.support.serving import running
from tests.support.tasks import reference

pytestmark = pytest.mark.full

NEIGHBOURS = {0: 1, 3: 4}
TOLERANCE = 1e-5
QUERY = "Where does Anna live?"
DOCUMENTS = ["Anna lives in Berlin.", "bad", "two boats and one lighthouse"]


@pytest.fixture(scope="module")
def gateway(encoders: TritonServer) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=encoders.grpc_url, port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def ask(gateway: GatewayThread, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{gateway.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    loaded: dict[str, Any] = answer.json()
    return loaded


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [openai.NOT_GIVEN, "float", "base64"])
def test_vectors_equal_those_of_sentence_transformers(client: openai.OpenAI, encoding: Any) -> None:
    answer = client.embeddings.create(model="minilm", input=TEXTS, encoding_format=encoding)
    vectors = [
        list(struct.unpack("<384f", base64.b64decode(each.embedding))) if encoding == "base64" else each.embedding
        for each in answer.data
    ]
    np.testing.assert_allclose(vectors, reference_embeddings(real_checkpoint(), TEXTS), atol=TOLERANCE)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert answer.model == "minilm"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    likeness = np.array(vectors) @ np.array(vectors).T - 2 * np.eye(len(TEXTS))
    assert {text: int(likeness[text].argmax()) for text in NEIGHBOURS} == NEIGHBOURS


def test_one_text_token_ids_and_dimensions(client: openai.OpenAI, gateway: GatewayThread) -> None:
    [whole] = client.embeddings.create(model="minilm", input=TEXTS[0]).data
    [cut] = client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=8).data
    assert len(cut.embedding) == 8
    np.testing.assert_allclose(
        cut.embedding, np.array(whole.embedding[:8]) / np.linalg.norm(whole.embedding[:8]), atol=TOLERANCE
    )
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(real_checkpoint())(TEXTS[:2])["input_ids"]
    answer = client.embeddings.create(model="minilm", input=ids)
    np.testing.assert_allclose(answer.data[0].embedding, whole.embedding, atol=TOLERANCE)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    [alone] = ask(gateway, "/v1/embeddings", model="minilm", input=ids[0])["data"]
    np.testing.assert_allclose(alone["embedding"], whole.embedding, atol=TOLERANCE)


def test_two_thousand_texts_are_one_request(client: openai.OpenAI) -> None:
    texts = [f"{number}" for number in range(2000)]
    answer = client.embeddings.create(model="minilm", input=texts)
    assert [each.index for each in answer.data] == list(range(2000))
    for number in (0, 127, 128, 1999):
        [alone] = client.embeddings.create(model="minilm", input=texts[number]).data
        np.testing.assert_allclose(answer.data[number].embedding, alone.embedding, atol=TOLERANCE)


# --- rerank, score, classify -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_sorted_by_their_score(gateway: GatewayThread, encoders: TritonServer, path: str) -> None:
    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        for name, texts in (("query", [QUERY]), ("documents", DOCUMENTS))
    ]
    [scores] = post(encoders, "/v2/models/reranker/infer", {"inputs": tensors}).json()["outputs"]
    order = np.argsort(-np.array(scores["data"]))
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    answer = ask(gateway, path, model="reranker", query=QUERY, documents=documents)
    assert [each["index"] for each in answer["results"]] == order.tolist()
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in order]
    np.testing.assert_allclose(
        [each["relevance_score"] for each in answer["results"]], np.array(scores["data"])[order], atol=1e-6
    )
    best = ask(gateway, path, model="reranker", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert best["results"] == [
        {"index": int(order[0]), "relevance_score": pytest.approx(scores["data"][order[0]], abs=1e-6)}
    ]
    assert answer["usage"]["total_tokens"] > 0


def test_pairs_have_scores_in_their_order(gateway: GatewayThread) -> None:
    ranked = ask(gateway, "/v1/rerank", model="reranker", query=QUERY, documents=DOCUMENTS)["results"]
    by_index = {each["index"]: each["relevance_score"] for each in ranked}
    pairs = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
    for first, (one, other) in itertools.product((QUERY, [QUERY] * 3), pairs):
        answer = ask(gateway, "/v1/score", model="reranker", **{one: first, other: DOCUMENTS})
        assert [each["score"] for each in answer["data"]] == pytest.approx([by_index[index] for index in range(3)])


def test_texts_are_classified(gateway: GatewayThread, encoder_checkpoints: dict[str, Path]) -> None:
    expected = reference(encoder_checkpoints["sentiment"], "text-classification", DOCUMENTS, top_k=3)
    answer = ask(gateway, "/v1/classify", model="sentiment", input=DOCUMENTS, top_k=3)
    assert [each["label"] for each in answer["data"]] == [row[0]["label"] for row in expected]
    for entry, row in zip(answer["data"], expected, strict=True):
        assert [each["label"] for each in entry["labels"]] == [each["label"] for each in row]
        assert [each["score"] for each in entry["labels"]] == pytest.approx([each["score"] for each in row], abs=1e-5)
    [alone] = ask(gateway, "/v1/classify", model="sentiment", input=DOCUMENTS[0])["data"]
    assert alone["label"] == expected[0][0]["label"]
    assert alone["score"] == max(alone["probs"]) == pytest.approx(expected[0][0]["score"])
    assert (alone["num_classes"], sum(alone["probs"])) == (3, pytest.approx(1))
    assert alone["probs"][int(alone["label"][-1])] == alone["score"], "in the order of the model's labels"


def test_token_ids_are_classified_as_their_texts_are(
    gateway: GatewayThread, encoder_checkpoints: dict[str, Path]
) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(encoder_checkpoints["sentiment"])(DOCUMENTS)["input_ids"]
    texts, tokens = (ask(gateway, "/v1/classify", model="sentiment", input=given) for given in (DOCUMENTS, ids))
    assert tokens["usage"] == texts["usage"]
    for entry, expected in zip(tokens["data"], texts["data"], strict=True):
        assert (entry["index"], entry["label"]) == (expected["index"], expected["label"])
        assert entry["probs"] == pytest.approx(expected["probs"], abs=1e-6)
    [alone] = ask(gateway, "/v1/classify", model="sentiment", input=ids[0])["data"]
    assert alone["probs"] == pytest.approx(texts["data"][0]["probs"], abs=1e-6)


def test_litellm(gateway: GatewayThread, tmp_path: Path) -> None:
    asked = {"texts": TEXTS[:2], "query": QUERY, "documents": DOCUMENTS}
    script = Path(__file__).parent / "clients" / "litellm_encoders.py"
    command = [str(has(CLIENTS / "litellm" / "bin" / "python")), str(script), gateway.url, json.dumps(asked)]
    found = json.loads(run(command, tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True").splitlines()[-1])
    np.testing.assert_allclose(found["embeddings"], reference_embeddings(real_checkpoint(), TEXTS[:2]), atol=TOLERANCE)
    ours = ask(gateway, "/v1/rerank", model="reranker", query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in found["results"]] == [each["index"] for each in ours]


def test_retrieval_clients(gateway: GatewayThread, tmp_path: Path) -> None:
    asked = {"texts": TEXTS[:2], "query": QUERY, "documents": DOCUMENTS}
    script = Path(__file__).parent / "clients" / "retrieval_encoders.py"
    command = [str(has(CLIENTS / "frameworks" / "bin" / "python")), str(script), gateway.url, json.dumps(asked)]
    found = json.loads(run(command, tmp_path).splitlines()[-1])
    expected = reference_embeddings(real_checkpoint(), TEXTS[:2])
    for client in ("cohere", "hub", "llama_index"):
        np.testing.assert_allclose(found[client], expected, atol=TOLERANCE)
    ours = ask(gateway, "/v1/rerank", model="reranker", query=QUERY, documents=DOCUMENTS)["results"]
    for ranks in found["ranks"].values():
        assert [index for index, _ in ranks] == [each["index"] for each in ours]
        assert [score for _, score in ranks] == pytest.approx([each["relevance_score"] for each in ours])
    assert found["error"] == [404, "the model 'nobody' does not exist; known are minilm, reranker, sentiment, writer"]


def test_documented_requests_are_answered(gateway: GatewayThread) -> None:
    text = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^curl localhost:9000(/v1/\S+) .* -d '(\{\"model\":\"(?:bge|reranker)\".*)'$", text, re.MULTILINE
    )
    assert [path for path, _ in lines] == ["/v1/embeddings", "/v1/rerank"]
    for path, body in lines:
        answer = ask(gateway, path, **{**json.loads(body), "model": OWN[path]})
        assert len(answer.get("data") or answer["results"]) == 2


# --- keys and metrics -------------------------------------------------------------------------------------------------


def test_keys_pay_for_the_tokens_of_texts(encoders: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a name=a tokens_per_day=100000\n")
    config = GatewayConfig(triton=encoders.grpc_url, port=0, api_key_file=tmp_path / "keys")
    requests: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "minilm:law", "input": TEXTS},
        "/v1/rerank": {"model": "reranker", "query": QUERY, "documents": DOCUMENTS},
        "/v1/classify": {"model": "sentiment", "input": TEXTS},
    }
    with GatewayThread(config) as running, httpx.Client(base_url=running.url, headers={"x-api-key": "sk-a"}) as client:
        answers = [client.post(path, json=body, timeout=60) for path, body in requests.items()]
        num_tokens = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
        assert num_tokens > 0
        assert answers[-1].headers["x-ratelimit-remaining-tokens"] == str(100_000 - num_tokens)
        assert f'hf_triton_openai_key_prompt_tokens_total{{key="a"}} {num_tokens:.1f}' in client.get("/metrics").text
        embedded = client.post("/embed", json={"model": "minilm", "inputs": "a text"})
        assert int(embedded.headers["x-ratelimit-remaining-tokens"]) < 100_000 - num_tokens
    own = 'hf_triton_prompt_tokens_total{adapter="law",model="minilm",version="1"} '
    line = next_line(encoders, own)
    assert float(line.removeprefix(own)) >= answers[0].json()["usage"]["total_tokens"]


def next_line(server: TritonServer, beginning: str) -> str:
    """The line of Triton's metrics with this beginning, once it is there."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [line for line in httpx.get(server.metrics_url).text.splitlines() if line.startswith(beginning)]
        return bool(found)

    wait_until(is_there)
    return found[0]


# --- adapters --------------------------------------------------------------------------------------------------------


def test_vectors_of_an_adapter_equal_those_of_sentence_transformers(
    client: openai.OpenAI, encoder_adapters: dict[str, Path]
) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(real_checkpoint()), device="cpu")
    model.load_adapter(str(encoder_adapters["law"]))
    expected = {"minilm": reference_embeddings(real_checkpoint(), TEXTS), "minilm:law": model.encode(TEXTS)}
    assert np.abs(expected["minilm"] - expected["minilm:law"]).max() > 0.01

    def vectors(name: str) -> list[list[float]]:
        return [each.embedding for each in client.embeddings.create(model=name, input=TEXTS).data]

    with ThreadPoolExecutor(8) as pool:
        names = [*expected] * 8
        for name, found in zip(names, pool.map(vectors, names), strict=True):
            np.testing.assert_allclose(found, expected[name], atol=TOLERANCE)


def test_labels_of_an_adapter_with_a_head_of_its_own(
    gateway: GatewayThread,
    encoders: TritonServer,
    encoder_checkpoints: dict[str, Path],
    encoder_adapters: dict[str, Path],
) -> None:
    from transformers import AutoTokenizer, pipeline

    model = wrap(
        AutoModelForSequenceClassification.from_pretrained(encoder_checkpoints["sentiment"]), encoder_adapters["own"]
    )
    tokenizer = AutoTokenizer.from_pretrained(encoder_checkpoints["sentiment"])
    pipe: Any = pipeline("text-classification", model=model.get_base_model(), tokenizer=tokenizer, device="cpu")
    expected = pipe(DOCUMENTS, top_k=1)
    for named in ({"model": "sentiment:own"}, {"model": "sentiment", "lora_name": "own"}):
        answer = ask(gateway, "/v1/classify", input=DOCUMENTS, **named)
        for entry, [wanted] in zip(answer["data"], expected, strict=True):
            assert (entry["label"], entry["score"]) == (wanted["label"], pytest.approx(wanted["score"], abs=1e-5))
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    [(path, body)] = re.findall(
        r"^curl -X POST localhost:8000(/v2/models/sentiment/\S+) -d '(.*)'$", text, re.MULTILINE
    )
    [[wanted]] = pipe([json.loads(body)["text"]], top_k=1)
    assert post(encoders, path, json.loads(body)).json()["score"] == pytest.approx(wanted["score"], abs=1e-5)
    plain = ask(gateway, "/v1/classify", model="sentiment", input=DOCUMENTS)["data"]
    assert plain[0]["score"] != pytest.approx(expected[0][0]["score"], abs=1e-3)


NO_ADAPTER: dict[str, tuple[int, dict[str, str], str, str]] = {
    "unknown": (404, {"model": "minilm:lav"}, "model", "there is no adapter 'lav', did you mean 'law'?"),
    "unknown by its name": (404, {"model": "minilm", "lora_name": "lav"}, "lora_name", "there is no adapter 'lav'"),
    "two": (400, {"model": "minilm:law", "lora_name": "own"}, "lora_name", "model names the adapter law, and"),
}


@pytest.mark.parametrize("case", NO_ADAPTER)
def test_an_adapter_that_is_not_there(gateway: GatewayThread, case: str) -> None:
    status, body, param, sentence = NO_ADAPTER[case]
    answer = httpx.post(f"{gateway.url}/v1/embeddings", json={"input": "a", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert sentence in answer.json()["error"]["message"]


# --- models and tasks ------------------------------------------------------------------------------------------------


def test_models_are_listed_with_their_tasks(client: openai.OpenAI) -> None:
    assert client.models.retrieve("minilm").model_dump()["max_model_len"] == 256  # as its modules cut texts
    assert {model.id: model.model_dump()["task"] for model in client.models.list()} == {
        "minilm": "embeddings",
        "minilm:law": "embeddings",
        "prompted": "embeddings",
        "states": "feature-extraction",
        "splade": "sparse-embeddings",
        "reranker": "rerank",
        "sentiment": "text-classification",
        "writer": "text-generation",
    }


BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
OWN = {
    "/v1/embeddings": "minilm",
    "/v1/rerank": "reranker",
    "/v1/score": "reranker",
    "/v1/classify": "sentiment",
    "/v1/completions": "writer",
    "/v1/chat/completions": "writer",
}


@pytest.mark.parametrize("path", BODIES)
def test_a_model_of_another_task_is_refused(gateway: GatewayThread, path: str) -> None:
    for model in set(OWN.values()) - {OWN[path]}:
        answer = httpx.post(f"{gateway.url}{path}", json={"model": model, **BODIES[path]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "wrong_task", "model"), error
        assert f"the model '{model}' is for " in error["message"]
    unknown = httpx.post(f"{gateway.url}{path}", json={"model": "nothing", **BODIES[path]})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_the_command_for_texts_names_an_encoders_task(encoders: TritonServer) -> None:
    done = hf_triton("generate", "minilm", "hello", f"--triton={encoders.grpc_url}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "wrong_task: the model 'minilm' is for embeddings, and generates no text: POST " in done.stderr


BAD: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no input": ("/v1/embeddings", {}, "input", "input is required"),
    "an empty list": ("/v1/embeddings", {"input": []}, "input", "input is an empty list"),
    "an empty text": ("/v1/embeddings", {"input": ""}, "input", "input is empty"),
    "an empty text of several": ("/v1/embeddings", {"input": ["a", ""]}, "input", "input[1] is empty"),
    "a number": ("/v1/embeddings", {"input": 1.5}, "input", "input must be"),
    "mixed": ("/v1/embeddings", {"input": ["a", 1]}, "input", "input[1] must be a string or a JSON object, got 1"),
    "a large token": ("/v1/embeddings", {"input": [1, 10**7]}, "input", "token ids must be in 0 to"),
    "an unknown encoding": ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "`base64`"),
    "a generation parameter": ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature", "no field"),
    "too long": ("/v1/embeddings", {"input": "a b " * 400}, "input", "tokens, more than the"),
    "half a pair of surrogates": ("/v1/embeddings", {"input": "\ud800"}, "", "not Unicode"),
    "no documents": ("/v1/rerank", {"query": "a", "documents": []}, "documents", "documents is an empty list"),
    "no query": ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "query must be a non-empty string"),
    "a long document": ("/v1/rerank", {"query": "a", "documents": ["b", "bad " * 200]}, "documents", "(row 1)"),
    "one side": ("/v1/score", {"queries": "a"}, "queries", "give text_1 and text_2, or queries and documents"),
    "two pairs": (
        "/v1/score",
        {"text_1": "a", "text_2": "b", "documents": "c"},
        "documents",
        "got documents and text_1 and text_2",
    ),
    "unequal queries": ("/v1/score", {"queries": ["a"] * 2, "documents": ["c"] * 3}, "queries", "documents 3"),
    "unequal numbers": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "2 texts and text_2 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_name_the_field(gateway: GatewayThread, case: str) -> None:
    path, body, param, words = BAD[case]
    content = (
        httpx.Request("POST", "http://x", json={"model": OWN[path], **body}).content
        if case[:4] != "half"
        else (b'{"model": "minilm", "input": "\\ud800"}')
    )
    answer = httpx.post(f"{gateway.url}{path}", content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert words in error["message"]
    assert (error["param"] or "").partition("[")[0] == param
    assert httpx.get(f"{gateway.url}/health").status_code == 200


def test_long_texts_may_be_cut(gateway: GatewayThread) -> None:
    answer = ask(gateway, "/v1/embeddings", model="minilm", input=["a b " * 40_000, "short"], truncate=True)
    assert len(answer["data"]) == 2


def test_the_time_of_a_request_is_that_of_all_its_texts(encoders: TritonServer) -> None:
    with GatewayThread(GatewayConfig(triton=encoders.grpc_url, port=0, timeout_s=0.3)) as hasty:
        body = {"model": "minilm", "input": ["a long way to the old harbour"] * 4000}
        answer = httpx.post(f"{hasty.url}/v1/embeddings", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.elapsed.total_seconds() < 10
        assert httpx.get(f"{hasty.url}/health").status_code == 200


def test_encoders_are_loaded_on_demand(
    encoder_checkpoints: dict[str, Path], make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("reranker", "sentiment"):
        make_folder(tmp_path / "models", name, huggingface_model=encoder_checkpoints[name], config="max_batch_size: 8")
    with running(str(tmp_path / "models"), "--on-demand", "--max-loaded=1", output=tmp_path / "output") as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        url = f"http://127.0.0.1:{serving.openai_port}"
        own = [(path, {"model": OWN[path], **BODIES[path]}) for path in ("/v1/classify", "/v1/rerank")]
        [body] = re.findall(r"/v1/rerank .*\n +-d '(.*)'", output)
        for path, request in (("/v1/rerank", json.loads(body)), *own):
            answer = httpx.post(f"{url}{path}", json=request, timeout=120)
            assert answer.status_code == 200, answer.text
