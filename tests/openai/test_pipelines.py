# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's own client by a URL: each task against transformers' pipeline, and questions to tokenizers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from transformers import AutoTokenizer

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread
from tests.support.images import IMAGES, LABELS, encoded, save_image_checkpoint
from tests.support.speech import encode, save_whisper, sound
from tests.support.tasks import reference, save_task_checkpoint

pytestmark = pytest.mark.full  # nine models

ENTITIES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
INFERENCE = {0: "contradiction", 1: "neutral", 2: "entailment"}
HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vectors": ("bert", "embeddings", {}),
    "reranker": ("bert", "sequence", {"num_labels": 1}),
    "sentiment": ("distilbert", "sequence", {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}}),
    "entities": ("distilbert", "tokens", {"num_labels": 5, "id2label": ENTITIES}),
    "masks": ("bert", "masks", {}),
    "answers": ("bert", "answers", {}),
    "nli": ("bert", "sequence", {"num_labels": 3, "id2label": INFERENCE}),
}
SETTINGS: dict[str, dict[str, Any]] = {"vectors": {"pooling": "mean"}, "nli": {"task": "zero-shot-classification"}}
TEXT = "Anna lives in Berlin."
PNG, WAV = encoded(IMAGES[0]), encode(sound(1.0))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    saved = {name: save_task_checkpoint(root / name, *head[:2], **head[2]) for name, head in HEADS.items()}
    return {**saved, "vit": save_image_checkpoint(root / "vit", "vit"), "whisper": save_whisper(root / "whisper")}


@pytest.fixture(scope="module")
def gateway(
    checkpoints: dict[str, Path], make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayThread]:
    repository = tmp_path_factory.mktemp("repository")
    for name, checkpoint in checkpoints.items():
        make_folder(repository, name, huggingface_model=checkpoint, **SETTINGS.get(name, {}))
    with (
        TritonServer(repository, ready_timeout_s=280) as server,
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client_of(gateway: GatewayThread) -> Callable[..., InferenceClient]:
    return lambda model="": InferenceClient(gateway.url + (f"/?model={model}" if model else ""))


@pytest.mark.parametrize("model", ["", "vit"])
@pytest.mark.parametrize("image", [PNG, encoded(IMAGES[0], "WEBP")], ids=["PNG", "WebP"])
def test_images_are_classified(
    client_of: Callable[..., InferenceClient], tmp_path: Path, model: str, image: bytes
) -> None:
    found = client_of(model).image_classification(image)
    (tmp_path / "a.png").write_bytes(PNG)
    assert client_of(model).image_classification(tmp_path / "a.png") == client_of(model).image_classification(PNG)
    assert {each.label for each in found} == {*LABELS.values()}
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    assert sum(each.score for each in found) == pytest.approx(1)


def test_images_come_as_base64_beside_parameters(client_of: Callable[..., InferenceClient]) -> None:
    whole = client_of("vit").image_classification(PNG)
    for model in ("vit", ""):
        assert client_of(model).image_classification(PNG, top_k=1) == whole[:1]
    raw = client_of("vit").image_classification(PNG, function_to_apply="none")
    assert [each.label for each in raw] == [each.label for each in whole]
    assert sum(each.score for each in raw) != pytest.approx(1)


@pytest.mark.parametrize(
    "path", ["", "/?model=whisper", "/v1/audio/transcriptions", "/v1/audio/transcriptions?model=tgi"]
)
def test_audio_is_transcribed(gateway: GatewayThread, tmp_path: Path, path: str) -> None:
    form = httpx.post(
        f"{gateway.url}/v1/audio/transcriptions", data={"temperature": "0"}, files={"file": ("a.wav", WAV)}, timeout=60
    )
    (tmp_path / "a.wav").write_bytes(WAV)
    heard = InferenceClient(gateway.url + path).automatic_speech_recognition(tmp_path / "a.wav")
    assert heard.text == form.json()["text"]
    if not path.startswith("/v1"):
        assert InferenceClient(gateway.url + path).automatic_speech_recognition(WAV).text == heard.text


def test_fields_beside_an_audio_are_those_of_a_form(gateway: GatewayThread) -> None:
    url, name = f"{gateway.url}/v1/audio/transcriptions", "timestamp_granularities"
    fields = {"response_format": "verbose_json", f"{name}[]": ["word", "segment"]}
    form = httpx.post(url, data=fields, files={"file": ("a.wav", WAV)}, timeout=60)
    assert "words" in form.json()
    for each in (name, f"{name}[]"):
        query = {"response_format": "verbose_json", each: ["word", "segment"]}
        alone = httpx.post(url, params=query, content=WAV, headers={"content-type": "audio/wav"}, timeout=60)
        assert alone.json() == form.json()
    twice = {"params": {"model": ["a", "whisper"]}, "headers": {"content-type": "audio/wav"}}
    assert httpx.post(url, content=WAV, **twice, timeout=60).json()["error"]["param"] == "model"


def test_parameters_of_audio_reach_the_model(client_of: Callable[..., InferenceClient]) -> None:
    for model in ("whisper", ""):
        heard = client_of(model).automatic_speech_recognition(WAV, extra_body={"return_timestamps": "segment"})
        assert heard.chunks is not None
    with pytest.raises(Exception, match=r"there is no input or parameter 'parameters[.]beams'"):
        client_of("whisper").automatic_speech_recognition(WAV, extra_body={"beams": 2})


def test_texts_are_classified(client_of: Callable[..., InferenceClient], checkpoints: dict[str, Path]) -> None:
    found: Any = client_of("sentiment").text_classification(TEXT)
    [wanted] = reference(checkpoints["sentiment"], "text-classification", [TEXT], top_k=None)
    assert [(each.label, each.score) for each in found] == [
        (each["label"], pytest.approx(each["score"], abs=1e-5)) for each in wanted
    ]
    best: Any = client_of("sentiment").text_classification(TEXT, top_k=1)
    assert best == found[:1]


def test_entities_are_found(client_of: Callable[..., InferenceClient], checkpoints: dict[str, Path]) -> None:
    found = client_of("entities").token_classification(TEXT, aggregation_strategy="simple")
    [wanted] = reference(checkpoints["entities"], "token-classification", [TEXT], aggregation_strategy="simple")
    assert [(each.entity_group, each.start, each.end) for each in found] == [
        (each["entity_group"], each["start"], each["end"]) for each in wanted
    ]


def test_masks_are_filled(client_of: Callable[..., InferenceClient], checkpoints: dict[str, Path]) -> None:
    mask = AutoTokenizer.from_pretrained(checkpoints["masks"]).mask_token
    found = client_of("masks").fill_mask(f"a {mask} c", top_k=3)
    [wanted] = reference(checkpoints["masks"], "fill-mask", [f"a {mask} c"], top_k=3)
    assert [each.token for each in found] == [each["token"] for each in wanted]


def test_questions_are_answered(client_of: Callable[..., InferenceClient]) -> None:
    found: Any = client_of("answers").question_answering("Where does Anna live?", TEXT, max_answer_len=5)
    assert TEXT[found.start : found.end] == found.answer


def test_labels_are_chosen(client_of: Callable[..., InferenceClient]) -> None:
    found = client_of("nli").zero_shot_classification(TEXT, ["a city", "a song"], multi_label=True)
    assert {each.label for each in found} == {"a city", "a song"}
    assert found[0].score >= found[1].score > 0
    [one] = client_of("nli").zero_shot_classification(TEXT, ["a city"], hypothesis_template="It is {}.")
    assert one.label == "a city"


@pytest.mark.parametrize("model", ["", "vectors"])
def test_vectors_are_made_and_compared(client_of: Callable[..., InferenceClient], model: str) -> None:
    client = client_of(model)
    assert client.feature_extraction(TEXT).shape == client.feature_extraction([TEXT]).shape
    same, other = client.sentence_similarity(TEXT, other_sentences=[TEXT, "boats"])
    assert same == pytest.approx(1, abs=1e-5)
    assert other < same


def test_lists_are_answered_by_lists(gateway: GatewayThread) -> None:
    def ask(model: str, **body: Any) -> Any:
        answer = httpx.post(f"{gateway.url}/", json={"model": model, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert len(ask("entities", inputs=[TEXT, "boats"])) == 2
    assert [len(row) for row in ask("sentiment", inputs=[TEXT, "boats"], parameters={"top_k": 2})] == [2, 2]
    assert ask("entities", inputs="a b " * 200, parameters={"truncate": True}) is not None
    assert [rank["index"] for rank in ask("reranker", query="a", texts=["b"])] == [0]


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "several models": ({"params": {"model": "tgi"}, "json": {"inputs": 1}}, 400, "inputs must be "),
    "no JSON": ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "the body is not JSON: "),
    "a number": ({"params": {"model": "sentiment"}, "json": {"inputs": 1}}, 400, "inputs must be a string or a list"),
    "no inputs": ({"params": {"model": "sentiment"}, "json": {}}, 400, "inputs is required"),
    "a file for texts": (
        {"params": {"model": "sentiment"}, "content": PNG},
        415,
        "a model for text-classification reads",
    ),
    "no image": ({"content": b"text", "headers": {"content-type": "image/png"}}, 400, "inputs is "),
    "a part of a question": (
        {"params": {"model": "answers"}, "json": {"inputs": {"question": "a"}}},
        400,
        "inputs must be an object with question and context",
    ),
    "an empty text": ({"params": {"model": "sentiment"}, "json": {"inputs": ""}}, 400, "inputs is empty"),
    "no labels": ({"params": {"model": "nli"}, "json": {"inputs": "a"}}, 400, "parameters.candidate_labels is missing"),
    "top_k of none": (
        {"params": {"model": "sentiment"}, "json": {"inputs": "a", "parameters": {"top_k": 0}}},
        400,
        "parameters.top_k must be an integer >= 1, got 0",
    ),
    "a parameter of no task": (
        {"params": {"model": "masks"}, "json": {"inputs": "a", "parameters": {"cancel": True}}},
        400,
        "there is no field 'parameters.cancel'",
    ),
    "a number of 65 bits": (
        {"params": {"model": "masks"}, "json": {"inputs": "a", "parameters": {"top_k": 2**64}}},
        400,
        "parameters.top_k is no number that is taken",
    ),
    "a model that is no name": ({"json": {"model": {"a": 1}, "inputs": "a"}}, 404, "the model "),
    "a wrong model": (
        {"params": {"model": "nobody"}, "json": {"inputs": "a"}},
        404,
        "the model 'nobody' does not exist",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_requests_are_refused(gateway: GatewayThread, name: str) -> None:
    request, status, sentence = REFUSED[name]
    answer = httpx.post(f"{gateway.url}/", timeout=60, **request)
    assert (answer.status_code, answer.json()["error"][: len(sentence)]) == (status, sentence), answer.text


@pytest.mark.parametrize("model", ["vectors", "reranker", "masks", "whisper"])
@pytest.mark.parametrize("adds", [None, False])
def test_encoders_tokenize(gateway: GatewayThread, checkpoints: dict[str, Path], model: str, adds: bool | None) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoints[model])
    body = {"model": model, "prompt": TEXT, "add_special_tokens": adds, "return_token_strs": True}
    told = httpx.post(f"{gateway.url}/tokenize", json=body, timeout=60).json()
    ids = tokenizer(TEXT, add_special_tokens=adds is not False).input_ids
    assert (told["tokens"], told["count"]) == (ids, len(ids))
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert told["max_model_len"] > 0
    text = httpx.post(f"{gateway.url}/detokenize", json={"model": model, "tokens": ids}, timeout=60).json()
    assert text == {"prompt": tokenizer.decode(ids)}


def test_questions_that_make_no_sense_are_refused(gateway: GatewayThread) -> None:
    def error(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{gateway.url}{path}", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    assert error("/tokenize", prompt="a")["param"] == "model"
    chat = error("/tokenize", model="vectors", messages=[{"role": "user", "content": "a"}])
    assert (chat["param"], chat["message"][:41]) == ("messages", "messages is for models that generate text")
    assert error("/detokenize", model="vectors", tokens=[10**6])["param"] == "tokens"
    assert error("/tokenize", model="vit", prompt="a")["message"] == "this model has no tokenizer to ask"


def test_a_tokenizer_says_what_it_is(gateway: GatewayThread, checkpoints: dict[str, Path]) -> None:
    told = httpx.get(f"{gateway.url}/tokenizer_info", params={"model": "vectors"}, timeout=60).json()
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoints["vectors"])
    assert told["tokenizer_class"] == type(tokenizer).__name__
    assert told["mask_token"] == tokenizer.mask_token
    assert str(checkpoints["vectors"]) not in str(told)
    assert httpx.get(f"{gateway.url}/tokenizer_info").status_code == 400
