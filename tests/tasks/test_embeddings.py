# SPDX-License-Identifier: Apache-2.0
"""Embeddings equal those of sentence-transformers, whatever modules.json says; what is not served is refused."""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.encoder.forward import EncoderForward
from hf_triton.errors import HfTritonError, LoadError, RequestError
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.task_requests import encode_results
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.settings import ModelSettings
from hf_triton.tasks.embeddings import Embeddings
from hf_triton.tasks.encoder_service import build_task_engine
from hf_triton.tasks.feature_extraction import FeatureExtraction
from tests.support.marks import full
from tests.support.sentence_checkpoints import (
    TEXTS,
    quietly,
    real_checkpoint,
    reference_embeddings,
    save_plain,
    save_sentence_model,
)

LIMITS = Limits(100, 10_000)
TOLERANCE = 1e-5


class Served:
    """A task with its model, run as the service runs it; all texts of a request in one forward."""

    def __init__(self, folder: Path, kind: type[Any] = Embeddings, **settings: Any) -> None:
        chosen = ModelSettings(huggingface_model=str(folder), **settings)
        checkpoint = load_checkpoint(Hub(folder, chosen, {}), chosen, Placement("CPU", 0), kind.auto_class)
        self.task = kind(checkpoint, chosen)
        self.forward = EncoderForward(
            checkpoint.model, self.task.model_outputs, per_token=True, reduce=self.task.reduce, way="packed"
        )

    def ask(self, inputs: Mapping[str, Array], **parameters: Any) -> dict[str, Array]:
        request = self.task.read(inputs, parameters, LIMITS)
        rows = [self.task.encode_row(row, request.options) for row in request.rows]
        outputs = self.forward([each for row in rows for each in row.inputs])
        results = [
            self.task.decode(row, request.options, [output.numpy()]) for row, output in zip(rows, outputs, strict=True)
        ]
        nums_tokens = [len(row.inputs[0].ids) for row in rows]
        declared = self.task.declaration
        default = [name for name, output in declared.all_outputs.items() if output.by_default]
        names = default if request.default_outputs is None else request.default_outputs
        return encode_results(results, nums_tokens, declared, request.shape, names)

    def embed(self, texts: list[str], **parameters: Any) -> Any:
        (vectors,) = self.ask({"text": encode_strings(texts, (len(texts),))}, **parameters).values()
        assert vectors.dtype == np.float32
        return vectors


@pytest.fixture
def serve() -> Callable[..., Served]:
    return lambda folder, kind=Embeddings, **settings: Served(folder, kind, **settings)


# --- modules.json ----------------------------------------------------------------------------------------------------

MODULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls, not normalised": {"pooling": "cls", "normalizes": False},
    "max": {"pooling": "max"},
    "mean_sqrt_len": {"pooling": "mean_sqrt_len_tokens", "normalizes": False},
    "weightedmean": {"pooling": "weightedmean", "normalizes": False},
    "lasttoken": {"pooling": "lasttoken"},
    "several, joined": {"pooling": ["cls", "max", "mean"], "normalizes": False},
    "dense layers": {"dense": [24, 16], "normalizes": False},
    "dense and normalised": {"pooling": ["mean", "max"], "dense": [40]},
    "lower case": {"lowercases": True},
    "default prompt": {"prompts": {"query": "query: ", "document": "text: "}, "default_prompt": "document"},
    "prompt not pooled": {"prompts": {"query": "Find: "}, "default_prompt": "query", "includes_prompt": False},
    "roberta": {"family": "roberta"},
    "modernbert": {"family": "modernbert", "pooling": "cls"},
    "decoder": {"family": "qwen3", "pooling": "lasttoken"},
}


@pytest.mark.parametrize("case", [*list(MODULES)[::3], *full(*list(MODULES)[1::3], *list(MODULES)[2::3])])
def test_modules_give_the_vectors_of_sentence_transformers(
    case: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    folder = save_sentence_model(tmp_path / "model", **MODULES[case])
    vectors = serve(folder).embed(TEXTS)
    expected = reference_embeddings(folder, TEXTS)
    assert vectors.shape == expected.shape
    np.testing.assert_allclose(vectors, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("prompt", ["query", "document"])
def test_prompt_is_chosen_by_its_name(prompt: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    prompts = {"query": "Find: ", "document": "Text: "}
    folder = save_sentence_model(tmp_path / "model", prompts=prompts, default_prompt="query")
    served = serve(folder)
    expected = reference_embeddings(folder, TEXTS, prompt_name=prompt)
    np.testing.assert_allclose(served.embed(TEXTS, prompt_name=prompt), expected, atol=TOLERANCE)
    without = reference_embeddings(folder, TEXTS, prompt="")
    np.testing.assert_allclose(served.embed(TEXTS, prompt_name=""), without, atol=TOLERANCE)
    with pytest.raises(RequestError, match="prompt_name must be a prompt of the model, got 'qery', did you mean"):
        served.embed(TEXTS, prompt_name="qery")


def test_dimensions_cut_and_then_normalise(tmp_path: Path, serve: Callable[..., Served]) -> None:
    folder = save_sentence_model(tmp_path / "model")
    served = serve(folder)
    expected = reference_embeddings(folder, TEXTS, truncate_dim=8, normalize_embeddings=True)
    vectors = served.embed(TEXTS, dimensions=8)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    for wrong in (0, 33):
        with pytest.raises(RequestError, match="dimensions must be an integer >= 1"):
            served.embed(TEXTS, dimensions=wrong)


def test_normalize_can_be_turned_off_and_on(tmp_path: Path, serve: Callable[..., Served]) -> None:
    folder = save_sentence_model(tmp_path / "model")
    served = serve(folder, normalize=False)
    raw = served.embed(TEXTS)
    assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
    unit = served.embed(TEXTS, normalize=True)
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=1e-6)


def test_long_texts_are_refused_or_cut_as_sentence_transformers_cuts(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    folder = save_sentence_model(tmp_path / "model", max_length=20)
    served = serve(folder)
    with pytest.raises(RequestError, match="the text has 52 tokens, more than the 20 of the model"):
        served.embed(["a" * 50])
    expected = reference_embeddings(folder, TEXTS)
    np.testing.assert_allclose(served.embed(TEXTS, truncate=True), expected, atol=TOLERANCE)


def test_longest_text_of_roberta_and_of_the_setting(tmp_path: Path, serve: Callable[..., Served]) -> None:
    folder = save_plain(tmp_path / "plain", "roberta")
    served = serve(folder, pooling="mean")
    assert served.task.max_length == served.task.config.max_position_embeddings - served.task.config.pad_token_id - 1
    assert serve(folder, pooling="mean", max_context_length=20).task.max_length == 20


# --- without modules.json --------------------------------------------------------------------------------------------


def test_plain_encoder_needs_the_setting_pooling(tmp_path: Path, serve: Callable[..., Served]) -> None:
    folder = save_plain(tmp_path / "plain")
    with pytest.raises(LoadError, match=r"has no modules\.json.*set pooling"):
        serve(folder)
    pooled = save_sentence_model(tmp_path / "model", pooling="cls")
    vectors = serve(folder, pooling="cls").embed(TEXTS)
    np.testing.assert_allclose(vectors, reference_embeddings(pooled, TEXTS), atol=TOLERANCE)


def test_head_that_is_not_needed_is_left_out(tmp_path: Path, serve: Callable[..., Served]) -> None:
    masked, plain = save_plain(tmp_path / "masked", head="masks"), save_plain(tmp_path / "plain")
    vectors = serve(masked, pooling="mean").embed(TEXTS)
    assert vectors.shape == serve(plain, pooling="mean").embed(TEXTS).shape


# --- what cannot be served -------------------------------------------------------------------------------------------


def edit(file: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


BROKEN: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "unknown module": (
        "modules.json",
        lambda modules: modules[1].update(type="sentence_transformers.models.LSTM"),
        "has the module 'LSTM' .*not served",
    ),
    "foreign module": (
        "modules.json",
        lambda modules: modules[1].update(type="custom_st.Pooling"),
        "custom_st.Pooling",
    ),
    "no pooling": ("modules.json", lambda modules: modules.pop(1), "one Transformer, then one Pooling"),
    "folder outside": ("modules.json", lambda modules: modules[1].update(path="../1_Pooling"), "outside"),
    "unknown pooling": ("1_Pooling/config.json", lambda config: config.update(pooling_mode="median"), "median"),
    "foreign activation": (
        "2_Dense/config.json",
        lambda config: config.update(activation_function="os.system"),
        "activation 'os.system'",
    ),
    "wrong size": ("2_Dense/config.json", lambda config: config.update(in_features=31), "takes 31 values.*gives 32"),
    "wrong weights": ("2_Dense/config.json", lambda config: config.update(out_features=8), "other names or shapes"),
    "huge": ("2_Dense/config.json", lambda config: config.update(out_features=1_000_000), "other names or shapes"),
    "unknown default prompt": (
        "config_sentence_transformers.json",
        lambda config: config.update(default_prompt_name="none"),
        "names no prompt",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_model(tmp_path_factory.mktemp("sound") / "model", dense=[16])


@pytest.mark.parametrize("case", BROKEN)
def test_broken_modules_are_refused_in_a_sentence(
    case: str, sound: Path, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    file, change, sentence = BROKEN[case]
    folder = shutil.copytree(sound, tmp_path / "model")
    edit(folder / file, change)
    with pytest.raises(LoadError, match=sentence):
        serve(folder)


@pytest.mark.parametrize("file", ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"])
def test_missing_files_of_modules_are_named(
    file: str, sound: Path, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    (folder / file).unlink()
    with pytest.raises(LoadError, match=file):
        serve(folder)


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(sound: Path) -> Served:
    return Served(sound)


@pytest.mark.parametrize("name", ["args", "text_input", "text_inputs", "input", "inputs", "input_text"])
def test_texts_come_under_the_names_of_other_servers(name: str, served: Served) -> None:
    vectors = served.ask({name: encode_strings(TEXTS, (len(TEXTS), 1))})["embedding"]
    assert np.array_equal(vectors, served.embed(TEXTS))


def test_token_ids_stand_for_texts(served: Served) -> None:
    ids = [json.dumps(served.task.tokenizer(text)["input_ids"]) for text in TEXTS]
    vectors = served.ask({"token_ids": encode_strings(ids, (len(ids),))})["embedding"]
    assert np.array_equal(vectors, served.embed(TEXTS))


def vllm_request(given: object, **others: object) -> dict[str, Array]:
    """As Triton's OpenAI frontend writes it."""
    request = json.dumps({"input": given, "pooling_params": {}, **others})
    return {
        "embedding_request": encode_strings([request], (1,)),
        "return_num_input_tokens": np.array([True]),
        "return_num_output_tokens": np.array([True]),
    }


@pytest.mark.parametrize("kind", ["one text", "texts", "token ids", "several token ids"])
def test_embedding_request_of_the_vllm_backend(kind: str, served: Served) -> None:
    ids = served.task.tokenizer(TEXTS[:2])["input_ids"]
    given = {"one text": TEXTS[0], "texts": TEXTS[:2], "token ids": ids[0], "several token ids": ids}[kind]
    num_rows = 1 if kind in ("one text", "token ids") else 2
    outputs = served.ask(vllm_request(given))
    assert sorted(outputs) == ["num_input_tokens", "num_output_tokens", "text_output"]
    vectors = np.array([json.loads(text) for text in outputs["text_output"]])
    np.testing.assert_allclose(vectors, served.embed(TEXTS[:num_rows]), atol=1e-7)
    assert outputs["num_input_tokens"].tolist() == [len(row) for row in ids[:num_rows]]
    assert outputs["num_output_tokens"].tolist() == [0] * num_rows


def test_embedding_request_takes_dimensions_in_both_forms(served: Served) -> None:
    for others in (
        {"pooling_params": {"dimensions": [4]}},
        {"dimensions": 4, "model": "x", "encoding_format": "float"},
    ):
        (text,) = served.ask(vllm_request(TEXTS[0], **others))["text_output"]
        np.testing.assert_allclose(json.loads(text), served.embed(TEXTS[:1], dimensions=4)[0], atol=1e-7)


REFUSED: dict[str, tuple[dict[str, Array], dict[str, object], str]] = {
    "no text": ({}, {}, "there is no text: embeddings needs one of text"),
    "two texts": (
        {"text": encode_strings(["a"], (1,)), "token_ids": encode_strings(["[4]"], (1,))},
        {},
        "text and token_ids are given",
    ),
    "an empty list": ({"text": encode_strings([], (0,))}, {}, "text holds no text"),
    "not text": ({"text": np.array([1])}, {}, r"must be strings \(BYTES\)"),
    "ids that are none": ({"token_ids": encode_strings(["[4, -1]"], (1,))}, {}, r"token_ids\[1\] must be an integer"),
    "ids that are no array": ({"token_ids": encode_strings(["four"], (1,))}, {}, "token_ids must be a JSON array"),
    "too many ids": ({"token_ids": encode_strings([json.dumps([4] * 131)], (1,))}, {}, "131 tokens, more than the 130"),
    "a generation parameter": ({"text": encode_strings(["a"], (1,))}, {"temperature": 1.0}, "of text generation"),
    "an unknown parameter": ({"text": encode_strings(["a"], (1,))}, {"dimension": 4}, "did you mean 'dimensions'"),
    "a flag alone": (
        {"text": encode_strings(["a"], (1,)), "return_num_input_tokens": np.array([True])},
        {},
        "goes with",
    ),
    "no JSON": ({"embedding_request": encode_strings(["{"], (1,))}, {}, "embedding_request is not JSON"),
    "no object": ({"embedding_request": encode_strings(["[]"], (1,))}, {}, "must be a JSON object"),
    "no input": (
        {"embedding_request": encode_strings(["{}"], (1,))},
        {},
        "input of embedding_request must be a string",
    ),
    "mixed input": (vllm_request(["a", 4]), {}, "input of embedding_request must be a string"),
    "an empty input": (vllm_request([]), {}, "input of embedding_request must be a string"),
    "an unknown name": (vllm_request("a", dimension=4), {}, "unknown name 'dimension'"),
    "dimensions that are none": (vllm_request("a", pooling_params={"dimensions": ["x"]}), {}, "dimensions must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_in_a_sentence(case: str, served: Served) -> None:
    inputs, parameters, sentence = REFUSED[case]
    with pytest.raises(HfTritonError, match=sentence):
        served.ask(inputs, **parameters)


# --- a real checkpoint -----------------------------------------------------------------------------------------------


def test_real_checkpoint_equals_sentence_transformers(serve: Callable[..., Served]) -> None:
    vectors = serve(real_checkpoint()).embed(TEXTS)
    np.testing.assert_allclose(vectors, reference_embeddings(real_checkpoint(), TEXTS), atol=TOLERANCE)


# --- feature extraction ----------------------------------------------------------------------------------------------


def test_features_are_nested_as_the_pipeline_nests_them(tmp_path: Path, serve: Callable[..., Served]) -> None:
    from transformers import pipeline

    folder = save_plain(tmp_path / "plain")
    outputs = serve(folder, FeatureExtraction).ask({"args": encode_strings(TEXTS, (len(TEXTS),))})
    with quietly():
        extract: Any = pipeline("feature-extraction", model=str(folder), device="cpu")
        expected = extract(TEXTS)
    for text, wanted in zip(outputs["output"], expected, strict=True):
        np.testing.assert_allclose(np.array(json.loads(text)), np.array(wanted), atol=TOLERANCE)


@pytest.mark.full
def test_requests_that_cut_and_that_do_not_leave_each_other_alone(tmp_path: Path, serve: Callable[..., Served]) -> None:
    task = serve(save_sentence_model(tmp_path / "model")).task
    long = "harbour " * 500
    started = threading.Barrier(4)

    def count(truncate: bool) -> set[object]:
        started.wait()
        return {_num_tokens(task, long, truncate) for _ in range(200)}

    with ThreadPoolExecutor(4) as pool:
        cut, refused, *_ = pool.map(count, [True, False, True, False])
    assert cut == {task.max_length}
    assert refused == {"context_exceeded"}


def _num_tokens(task: Embeddings, text: str, truncate: bool) -> object:
    try:
        return len(task.tokenize(text, truncate=truncate).ids)
    except RequestError as error:
        return error.code


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "expected"), [("auto", torch.float32), ("float16", torch.float16)])
def test_16_bits_that_are_slow_become_float32_unless_they_are_asked_for(
    setting: str, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_triton.runner.dtypes.has_instructions", lambda dtype: False)
    folder = save_sentence_model(tmp_path / "model")
    settings = ModelSettings(huggingface_model=str(folder), dtype=setting)
    checkpoint = load_checkpoint(Hub(folder, settings, {}), settings, Placement("CPU", 0), Embeddings.auto_class)
    checkpoint.model.to(torch.float16)
    build_task_engine(Embeddings(checkpoint, settings), checkpoint, settings).close()
    assert checkpoint.model.dtype == expected
