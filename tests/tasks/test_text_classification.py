# SPDX-License-Identifier: Apache-2.0
"""Labels and scores equal those of transformers' pipeline; what cannot be asked is refused in a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import RequestError
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.tasks.text_classification import TextClassification
from tests.support.tasks import SOME, TEXTS, Served, reference

TASK = "text-classification"
LABELS = {0: "bad", 1: "neither", 2: "good"}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def serve(serve_task: Callable[..., tuple[Served, Path]]) -> Callable[..., tuple[Served, Path]]:
    def serve(family: str = "bert", **config: Any) -> tuple[Served, Path]:
        return serve_task(TextClassification, family, "sequence", **{"id2label": LABELS, **config})

    return serve


def same(found: Any, expected: Any) -> None:
    """Equal labels, and equal scores to the tolerance."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found["label"] == expected["label"]
        assert found["score"] == pytest.approx(expected["score"], abs=TOLERANCE)


@pytest.mark.parametrize("family", SOME)
def test_labels_and_scores_equal_the_pipeline_s(family: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(family)
    same(served.json(TEXTS), [answer for (answer,) in reference(folder, TASK, TEXTS)])
    same(served.json(TEXTS, top_k=3), reference(folder, TASK, TEXTS, top_k=3))


@pytest.mark.parametrize("config", [{}, {"problem_type": "multi_label_classification"}, {"problem_type": "regression"}])
@pytest.mark.parametrize("function", [None, "softmax", "sigmoid", "none"])
def test_function_is_chosen_as_the_pipeline_chooses(
    config: dict[str, Any], function: str | None, serve: Callable[..., tuple[Served, Path]]
) -> None:
    served, folder = serve(**config)
    options = {} if function is None else {"function_to_apply": function}
    same(served.json(TEXTS, top_k=2, **options), reference(folder, TASK, TEXTS, top_k=2, **options))


def test_one_label_gets_its_own_probability(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(id2label={0: "good"})
    same(served.json(TEXTS), [answer for (answer,) in reference(folder, TASK, TEXTS)])


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_pairs_of_texts_equal_the_pipeline_s(family: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(family)
    pairs = [{"text": TEXTS[0], "text_pair": text} for text in TEXTS]
    inputs = {"args": encode_strings(TEXTS[:1], (1,)), "text_pair": encode_strings(TEXTS, (len(TEXTS),))}
    outputs = served.ask({"text": inputs["args"], "text_pair": inputs["text_pair"]}, top_k=3)
    expected = reference(folder, TASK, pairs, top_k=3)
    assert [[label.decode() for label in row] for row in outputs["label"]] == [
        [entry["label"] for entry in row] for row in expected
    ]
    np.testing.assert_allclose(
        outputs["score"], [[entry["score"] for entry in row] for row in expected], atol=TOLERANCE
    )


def test_outputs_have_a_row_for_each_text(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, _ = serve()
    for shape in ((4,), (4, 1)):
        for top_k, width in ((None, 1), (1, 1), (3, 3)):
            parameters = {} if top_k is None else {"top_k": top_k}
            outputs = served.ask({"text": encode_strings(TEXTS, shape)}, **parameters)
            assert {name: (array.shape, array.dtype) for name, array in outputs.items()} == {
                "label": ((4, width), np.object_),
                "score": ((4, width), np.float32),
            }


@pytest.mark.parametrize("name", ["args", "text_inputs"])
def test_client_of_mlserver_gets_one_output_of_json(name: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    served, _ = serve()
    outputs = served.ask({name: encode_strings(TEXTS, (4, 1))})
    assert {name: array.shape for name, array in outputs.items()} == {"output": (4, 1)}


def test_best_label_may_hold_any_word(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(id2label={0: "très bon", 1: '"', 2: "好"})
    same(served.json(TEXTS, top_k=3), reference(folder, TASK, TEXTS, top_k=3))


ONE: dict[str, Array] = {"text": encode_strings(["a"], (1,))}
REFUSED: dict[str, tuple[dict[str, Array], dict[str, object], str]] = {
    "no text": ({}, {}, "text is missing: text-classification needs text, the texts"),
    "a pair alone": ({"text_pair": encode_strings(["a"], (1,))}, {}, "text is missing"),
    "a number of pairs": (
        {"text": encode_strings(["a", "b"], (2,)), "text_pair": encode_strings(["a", "b", "c"], (3,))},
        {},
        "got 2 of text and 3 of text_pair",
    ),
    "two names": ({**ONE, "args": encode_strings(["a"], (1,))}, {}, "text and args are the same input"),
    "too long": ({"text": encode_strings(["bad " * 200], (1,))}, {}, "the text has 202 tokens, more than the 130 of"),
    "too many labels": (ONE, {"top_k": 4}, "top_k must be an integer >= 1 and <= 3, got 4"),
    "no labels": (ONE, {"top_k": 0}, "top_k must be an integer >= 1, got 0"),
    "a number as text": (ONE, {"top_k": "two"}, "top_k must be an integer >= 1, got 'two'"),
    "an unknown function": (
        ONE,
        {"function_to_apply": "tanh"},
        "function_to_apply must be one of `softmax`, `sigmoid`, `none`, got 'tanh'",
    ),
    "truncate": (ONE, {"truncate": "yes"}, "truncate must be true or false, got 'yes'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_in_a_sentence(case: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    inputs, parameters, sentence = REFUSED[case]
    with pytest.raises(RequestError, match=sentence):
        serve()[0].ask(inputs, **parameters)
