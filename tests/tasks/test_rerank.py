# SPDX-License-Identifier: Apache-2.0
"""Scores of documents equal those of sentence-transformers' CrossEncoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_triton.errors import CheckpointError, RequestError
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.settings import ModelSettings
from hf_triton.tasks.generative_rerank import HEAD, INSTRUCTION, TAIL, GenerativeRerank
from hf_triton.tasks.registry import folder_task
from hf_triton.tasks.rerank import Rerank
from hf_triton.testing import build_tiny_checkpoint
from tests.support.sentence_checkpoints import quietly
from tests.support.tasks import SOME, TEXTS, Served, save_task_checkpoint

QUERY = "Where does Anna live?"
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"}}


@pytest.fixture(scope="module")
def serve(serve_task: Callable[..., tuple[Served, Path]]) -> Callable[..., tuple[Served, Path]]:
    def serve(family: str = "bert", **config: Any) -> tuple[Served, Path]:
        return serve_task(Rerank, family, "sequence", **{"num_labels": 1, **config})

    return serve


def strings(texts: list[str]) -> Array:
    return encode_strings(texts, (len(texts),))


def cross_encoder(folder: Path, pairs: list[tuple[str, str]]) -> npt.NDArray[Any]:
    from sentence_transformers import CrossEncoder

    with quietly():
        scores: npt.NDArray[Any] = CrossEncoder(str(folder), device="cpu").predict(pairs)
    return scores


@pytest.mark.parametrize("config", [{}, IDENTITY], ids=["sigmoid", "identity"])
@pytest.mark.parametrize("family", SOME)
def test_scores_equal_those_of_a_cross_encoder(
    family: str, config: dict[str, Any], serve: Callable[..., tuple[Served, Path]]
) -> None:
    served, folder = serve(family, **config)
    outputs = served.ask({"query": strings([QUERY]), "documents": strings(TEXTS)})
    assert (outputs["score"].shape, outputs["score"].dtype) == ((4,), np.float32)
    np.testing.assert_allclose(outputs["score"], cross_encoder(folder, [(QUERY, text) for text in TEXTS]), atol=1e-5)


def test_raw_scores_are_logits_in_the_same_order(serve: Callable[..., tuple[Served, Path]]) -> None:
    inputs = {"query": strings([QUERY]), "documents": strings(TEXTS)}
    served, _ = serve()
    plain, raw = served.ask(inputs)["score"], served.ask(inputs, raw_scores=True)["score"]
    np.testing.assert_allclose(plain, 1 / (1 + np.exp(-raw)), atol=1e-6)


def test_each_document_may_have_its_own_query(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve()
    queries = list(reversed(TEXTS))
    outputs = served.ask({"query": strings(queries), "documents": strings(TEXTS)})
    np.testing.assert_allclose(
        outputs["score"], cross_encoder(folder, list(zip(queries, TEXTS, strict=True))), atol=1e-5
    )


def test_long_documents_are_cut_as_a_cross_encoder_cuts(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve()
    long = " ".join(TEXTS * 5)
    outputs = served.ask({"query": strings([QUERY]), "documents": strings([long])}, truncate=True)
    np.testing.assert_allclose(outputs["score"], cross_encoder(folder, [(QUERY, long)]), atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Array], dict[str, object], str]] = {
    "no documents": ({"query": strings([QUERY])}, {}, "documents is missing: rerank needs documents"),
    "no query": ({"documents": strings(TEXTS)}, {}, "query is missing: rerank needs query"),
    "too many": (
        {"query": strings([QUERY]), "documents": strings(["a"] * 101)},
        {},
        "holds 101 texts, more than the 100",
    ),
    "unequal numbers": (
        {"query": strings(["a", "b"]), "documents": strings(["a", "b", "c"])},
        {},
        "got 2 of query and 3 of documents",
    ),
    "too long": (
        {"query": strings([QUERY]), "documents": strings(["bad " * 200])},
        {},
        "tokens, more than the 130 of the model: shorten it, or set truncate to true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_in_a_sentence(case: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    inputs, parameters, sentence = REFUSED[case]
    with pytest.raises(RequestError, match=sentence):
        serve()[0].ask(inputs, **parameters)


def test_models_that_score_otherwise_are_refused(tmp_path: Path) -> None:
    for place, (config, words) in enumerate(
        [
            ({"num_labels": 3}, "has 3 labels, and rerank needs a model with one"),
            (
                {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
                "makes scores by torch.nn.modules.activation.Tanh",
            ),
        ]
    ):
        folder = save_task_checkpoint(tmp_path / str(place), "bert", "sequence", **config)
        with pytest.raises(CheckpointError, match=words):
            Served(folder, Rerank)


@pytest.fixture(scope="module")
def generative(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Path]:
    folder = build_tiny_checkpoint(
        tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=1024, vocab_size=400
    )
    assert folder_task(None, ModelSettings(huggingface_model=str(folder), task="rerank"), folder) is GenerativeRerank
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    return Served(folder, GenerativeRerank), folder


def probability_of_yes(folder: Path, query: str, document: str, instruction: str) -> float:
    """As the card of Qwen3-Reranker computes it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    text = f"{HEAD}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{TAIL}"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1]
    answers = logits[[tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]]
    return float(torch.softmax(answers, 0)[1])


def test_score_is_the_probability_of_yes(generative: tuple[Served, Path]) -> None:
    served, folder = generative
    for instruction in (INSTRUCTION, "Find the opposite"):
        outputs = served.ask({"query": strings([QUERY]), "documents": strings(TEXTS)}, instruction=instruction)
        expected = [probability_of_yes(folder, QUERY, text, instruction) for text in TEXTS]
        np.testing.assert_allclose(outputs["score"], expected, atol=1e-5)
        assert len(set(expected)) == len(TEXTS)


def test_long_documents_are_cut_before_the_models_own_words(generative: tuple[Served, Path]) -> None:
    served, _ = generative
    inputs = {"query": strings([QUERY]), "documents": strings(["bad " * 400])}
    with pytest.raises(RequestError, match="that the model's own words leave"):
        served.ask(inputs)
    assert 0 < served.ask(inputs, truncate=True)["score"][0] < 1


def test_a_model_without_the_answers_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "model", "qwen3")
    with pytest.raises(CheckpointError, match="has no tokens yes and no"):
        Served(folder, GenerativeRerank)
