# SPDX-License-Identifier: Apache-2.0
"""A model gives for the token ids of `tokenization`, or of transformers, what it gives for the texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_triton.engine.protocols import Nap
from hf_triton.errors import LoadError, RequestError
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.task_requests import encode_results
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.protocol.token_rows import TOKEN_INPUTS
from hf_triton.settings import ModelSettings
from hf_triton.tasks.embeddings import Embeddings
from hf_triton.tasks.encoder_service import NoEngine
from hf_triton.tasks.rerank import Rerank
from hf_triton.tasks.text_classification import TextClassification
from hf_triton.tasks.tokenization import Tokenization
from tests.support.sentence_checkpoints import TEXTS, save_sentence_model
from tests.support.tasks import LIMITS, Served

TOLERANCE = 1e-6
LONG = "word " * 200


def strings(*texts: str) -> Array:
    return encode_strings(texts, (len(texts),))


def tokenize(folder: Path, inputs: dict[str, Array], **parameters: Any) -> dict[str, Array]:
    settings = ModelSettings(huggingface_model=str(folder), task="tokenization")
    checkpoint = load_checkpoint(Hub(folder, settings, {}), settings, Placement("CPU", 0), Tokenization.auto_class)
    assert checkpoint.model.device.type == "meta"
    task = Tokenization(checkpoint, settings)
    request = task.read(inputs, parameters, LIMITS)
    results = [task.decode(task.encode_row(row, request.options), request.options, []) for row in request.rows]
    return encode_results(results, [], task.declaration, request.shape, TOKEN_INPUTS)


MODULES: dict[str, dict[str, Any]] = {
    "bert": {},
    "lower case": {"lowercases": True},
    "default prompt": {"prompts": {"document": "text: "}, "default_prompt": "document"},
    "short": {"max_length": 12},
    "roberta": {"family": "roberta"},
}


@pytest.mark.parametrize("case", MODULES)
def test_tokens_give_the_vectors_of_the_texts(case: str, tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path / "model", **MODULES[case])
    served = Served(folder, Embeddings)
    texts = strings(*TEXTS, LONG)
    tokens = tokenize(folder, {"text": texts}, truncate=True, dimensions=8)  # dimensions is for the model
    assert {tensor.dtype for tensor in tokens.values()} == {np.dtype(np.int64)}
    wanted = served.ask({"text": texts}, truncate=True)["embedding"]
    np.testing.assert_allclose(served.ask(tokens)["embedding"], wanted, atol=TOLERANCE)


def test_prompt_that_is_not_pooled_is_refused(tmp_path: Path) -> None:
    prompt = {"prompts": {"query": "Find: "}, "default_prompt": "query", "includes_prompt": False}
    folder = save_sentence_model(tmp_path / "model", **prompt)
    with pytest.raises(LoadError, match="leaves the tokens of its prompt out"):
        tokenize(folder, {"text": strings("a")})


@pytest.mark.parametrize("kind", [TextClassification, Rerank])
def test_pairs_give_the_scores_of_the_texts(kind: Any, serve_task: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve_task(kind, "bert", "sequence", num_labels=1)
    names = [text.name for text in kind.declaration.texts if text.name != "token_ids"]
    pair = (strings(TEXTS[0]), strings(*TEXTS))
    texts = dict(zip(names, pair, strict=True))
    tokens = tokenize(folder, dict(zip(("text", "text_pair"), pair, strict=True)))
    assert tokens["token_type_ids"].max() == 1
    np.testing.assert_allclose(served.ask(tokens)["score"], served.ask(texts)["score"], atol=TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_tokenizer_pads_as_it_likes(side: str, serve_task: Callable[..., tuple[Served, Path]]) -> None:
    served, _ = serve_task(TextClassification, "bert", "sequence")
    tokens = served.task.tokenizer(TEXTS, padding=True, padding_side=side, return_tensors="np")
    wanted = served.ask({"text": strings(*TEXTS)})
    found = served.ask(dict(tokens))
    assert found["label"].tolist() == wanted["label"].tolist()
    np.testing.assert_allclose(found["score"], wanted["score"], atol=TOLERANCE)


ONES = np.ones((2, 3), np.int64)
HOLE = np.array([[1, 1, 1], [1, 0, 1]])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"input_ids": ONES}, "attention_mask is missing: input_ids and attention_mask go together"),
    "no ids": ({"attention_mask": ONES}, "input_ids is missing"),
    "texts too": (
        {"input_ids": ONES, "attention_mask": ONES, "text": strings("a")},
        "input_ids stands in place of text: give one of them",
    ),
    "a vector": ({"input_ids": ONES[0], "attention_mask": ONES[0]}, "must have the shape [rows, tokens], got [3]"),
    "another shape": ({"input_ids": ONES, "attention_mask": ONES[:1]}, "attention_mask has the shape [1, 3]"),
    "a hole": ({"input_ids": ONES, "attention_mask": HOLE}, "attention_mask row 1 must be 1 for the tokens and 0"),
    "weights": ({"input_ids": ONES, "attention_mask": ONES * 2}, "attention_mask row 0 must be 1 for the tokens"),
    "too many rows": (
        {"input_ids": np.ones((101, 1), np.int64), "attention_mask": np.ones((101, 1), np.int64)},
        "input_ids holds 101 rows, and 1 to 100 are accepted (setting max_prompts)",
    ),
    "too long": (
        {"input_ids": np.ones((1, 2000), np.int64), "attention_mask": np.ones((1, 2000), np.int64)},
        "a row of input_ids has 16000 bytes, more than the 10000",
    ),
    "too many tokens": (
        {"input_ids": np.ones((1, 200), np.int64), "attention_mask": np.ones((1, 200), np.int64)},
        "the row has 200 tokens, more than the 130 of the model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_that_cannot_be_used_are_refused(case: str, serve_task: Callable[..., tuple[Served, Path]]) -> None:
    served, _ = serve_task(TextClassification, "bert", "sequence")
    inputs, sentence = REFUSED[case]
    with pytest.raises(RequestError) as refusal:
        served.ask(inputs)
    assert sentence in str(refusal.value)


def test_a_folder_without_weights_sleeps_until_its_next_request() -> None:
    engine = NoEngine()
    assert engine.set_sleeping(True).result() == Nap(is_sleeping=True)
    assert engine.is_sleeping
    engine.submit([])
    assert not engine.is_sleeping
