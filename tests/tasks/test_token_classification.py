# SPDX-License-Identifier: Apache-2.0
"""Entities equal those of transformers' pipeline, long texts in windows included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import RequestError
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.tasks.token_classification import TokenClassification
from tests.support.tasks import SOME, TEXTS, Served, reference

TASK = "token-classification"
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
STRATEGIES = ["none", "simple", "first", "average", "max"]
LONG = " ".join(TEXTS * 6)


@pytest.fixture(scope="module")
def serve(serve_task: Callable[..., tuple[Served, Path]]) -> Callable[[str], tuple[Served, Path]]:
    return lambda family: serve_task(TokenClassification, family, "tokens", id2label=LABELS)


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [{**each, "score": None} for each in found] == [{**each, "score": None} for each in expected]
    np.testing.assert_allclose(
        [each["score"] for each in found], [float(each["score"]) for each in expected], atol=1e-5
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", SOME)
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_equal_the_pipeline_s(family: str, strategy: str, serve: Callable[[str], tuple[Served, Path]]) -> None:
    served, folder = serve(family)
    found = served.json(TEXTS, aggregation_strategy=strategy)
    for entities, expected in zip(found, reference(folder, TASK, TEXTS, aggregation_strategy=strategy), strict=True):
        same(entities, expected)
    assert any(found)


def test_ignored_labels_are_chosen(serve: Callable[[str], tuple[Served, Path]]) -> None:
    served, folder = serve("bert")
    for ignored in ([], ["O", "B-PER"]):
        expected = reference(folder, TASK, TEXTS[:1], ignore_labels=ignored)
        same(served.json(TEXTS[:1], ignore_labels=ignored)[0], expected[0])


@pytest.mark.parametrize("stride", [0, 20, 50])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_long_text_is_computed_in_windows(
    family: str, stride: int, serve: Callable[[str], tuple[Served, Path]]
) -> None:
    served, folder = serve(family)
    options = {"aggregation_strategy": "simple", "stride": stride}
    [expected] = reference(folder, TASK, [LONG], **options)
    assert len(expected) > 100
    same(served.json([LONG], **options)[0], expected)


ONE: dict[str, Array] = {"text": encode_strings(["a"], (1,))}
REFUSED: dict[str, tuple[dict[str, Array], dict[str, object], str]] = {
    "no text": ({}, {}, "text is missing: token-classification needs text"),
    "an unknown strategy": (ONE, {"aggregation_strategy": "mean"}, "aggregation_strategy must be one of `none`"),
    "stride without a strategy": (ONE, {"stride": 4}, "stride needs an aggregation_strategy other than none"),
    "stride of a window": (
        ONE,
        {"stride": 128, "aggregation_strategy": "simple"},
        "stride must be an integer >= 0 and <= 127, got 128",
    ),
    "too long": ({"text": encode_strings([LONG], (1,))}, {}, "tokens, more than the 130 of the model"),
    "labels that are no strings": (ONE, {"ignore_labels": [1]}, "ignore_labels must be a string or a JSON array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_in_a_sentence(case: str, serve: Callable[[str], tuple[Served, Path]]) -> None:
    inputs, parameters, sentence = REFUSED[case]
    with pytest.raises(RequestError, match=sentence):
        serve("bert")[0].ask(inputs, **parameters)
