# SPDX-License-Identifier: Apache-2.0
"""Filled masks and entailed labels equal those of transformers' pipelines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_triton.errors import CheckpointError, RequestError
from hf_triton.protocol.tensor_values import encode_strings
from hf_triton.tasks.fill_mask import FillMask
from hf_triton.tasks.zero_shot_classification import ZeroShotClassification
from tests.support.tasks import SOME, TEXTS, Served, reference, save_task_checkpoint

LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
CANDIDATES = ["good", "bad", "a boat"]
MASKED = ["Anna lives in <mask>", "the <mask> was bad", "<mask> two boats"]


@pytest.fixture(scope="module")
def serve(serve_task: Callable[..., tuple[Served, Path]]) -> Callable[..., tuple[Served, Path]]:
    def serve(kind: Any, family: str = "bert", head: str = "masks", **config: Any) -> tuple[Served, Path]:
        return serve_task(kind, family, head, **config)

    return serve


def names(labels: dict[int, str]) -> dict[str, Any]:
    return {"id2label": labels, "label2id": {label: index for index, label in labels.items()}}


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("family", SOME)
def test_filled_masks_equal_the_pipeline_s(family: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(FillMask, family)
    same(served.json(MASKED), reference(folder, "fill-mask", MASKED))
    same(served.json(MASKED, top_k=2), reference(folder, "fill-mask", MASKED, top_k=2))


def test_each_of_several_masks_is_filled(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(FillMask)
    texts = ["<mask> lives in <mask>"]
    same(served.json(texts), reference(folder, "fill-mask", texts))


def test_targets_are_the_choice(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(FillMask)
    targets = ["good", "bad", "Berlin"]
    same(served.json(MASKED, targets=targets), reference(folder, "fill-mask", MASKED, targets=targets))
    assert len(served.json(MASKED[:1], targets=targets, top_k=2)[0]) == 2


@pytest.mark.parametrize(
    ("text", "parameters", "sentence"),
    [
        ("no mask", {}, "the text has no <mask>, the token that is to be filled"),
        ("<mask>", {"top_k": 0}, "top_k must be an integer >= 1 and <= 1000, got 0"),
        ("<mask>", {"targets": ["good", "nowhere"]}, "targets holds 'nowhere', which is no token of the model"),
        ("<mask>", {"targets": []}, "targets must be"),
        ("<mask> " * 200, {}, "tokens, more than the 130 of the model"),
        ("<mask>", {"temperature": 1.0}, "temperature is a parameter of text generation"),
    ],
)
def test_bad_masks_are_refused_in_a_sentence(
    text: str, parameters: dict[str, Any], sentence: str, serve: Callable[..., tuple[Served, Path]]
) -> None:
    with pytest.raises(RequestError, match=sentence):
        serve(FillMask)[0].json([text], **parameters)


def by_label(answers: Any) -> list[dict[str, Any]]:
    """Answers whose labels have no order: the tokenizer is another in each run, and two labels may score alike."""
    for answer in answers:
        assert answer["scores"] == sorted(answer["scores"], reverse=True)
    return [
        {**answer, "labels": None, "scores": dict(zip(answer["labels"], answer["scores"], strict=True))}
        for answer in answers
    ]


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("family", SOME)
def test_entailed_labels_equal_the_pipeline_s(
    family: str, multi_label: bool, serve: Callable[..., tuple[Served, Path]]
) -> None:
    served, folder = serve(ZeroShotClassification, family, "sequence", **names(LABELS))
    options = {"candidate_labels": CANDIDATES, "multi_label": multi_label}
    expected = reference(folder, "zero-shot-classification", TEXTS, **options)
    same(by_label(served.json(TEXTS, **options)), by_label(expected))


def test_template_one_label_and_the_place_of_entailment(serve: Callable[..., tuple[Served, Path]]) -> None:
    labels = {0: "ENTAILMENT", 1: "neutral", 2: "contradiction"}
    served, folder = serve(ZeroShotClassification, "bert", "sequence", **names(labels))
    for candidates in (CANDIDATES, ["bad"]):
        options = {
            "candidate_labels": candidates,
            "hypothesis_template": "It is about {}, not more.",
            "multi_label": True,
        }
        expected = reference(folder, "zero-shot-classification", TEXTS, **options)
        same(by_label(served.json(TEXTS, **options)), by_label(expected))


@pytest.mark.parametrize("labels", ["bad, good,, München ", '["bad, good"]'])
def test_commas_part_labels_as_in_the_pipeline(labels: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(ZeroShotClassification, "bert", "sequence", **names(LABELS))
    candidates = json.loads(labels) if labels.startswith("[") else labels
    expected = reference(folder, "zero-shot-classification", TEXTS, candidate_labels=candidates)
    same(by_label(served.json(TEXTS, candidate_labels=labels)), by_label(expected))


def test_tensors_have_a_label_and_a_score_each(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, _ = serve(ZeroShotClassification, "bert", "sequence", **names(LABELS))
    outputs = served.ask({"text": encode_strings(TEXTS, (4,))}, candidate_labels=CANDIDATES)
    assert {name: array.shape for name, array in outputs.items()} == {"label": (4, 3), "score": (4, 3), "output": (4,)}
    assert sorted(outputs["label"][0]) == sorted(label.encode() for label in CANDIDATES)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, "candidate_labels is missing"),
        ({"candidate_labels": []}, "candidate_labels must be"),
        ({"candidate_labels": ["a", "a"]}, "candidate_labels names a label twice"),
        ({"candidate_labels": ["a", ""]}, "candidate_labels must be"),
        ({"candidate_labels": ["a"] * 101}, "candidate_labels must be"),
        ({"candidate_labels": ["a"], "hypothesis_template": "none"}, "hypothesis_template must have one {} for the"),
        ({"candidate_labels": ["a"], "multi_label": "maybe"}, "multi_label must be true or false"),
        ({"candidate_label": ["a"]}, "did you mean 'candidate_labels'"),
    ],
)
def test_bad_labels_are_refused_in_a_sentence(
    parameters: dict[str, Any], sentence: str, serve: Callable[..., tuple[Served, Path]]
) -> None:
    served, _ = serve(ZeroShotClassification, "bert", "sequence", **names(LABELS))
    with pytest.raises(RequestError, match=sentence):
        served.json(TEXTS, **parameters)


def test_a_model_that_entails_nothing_is_refused(tmp_path: Path) -> None:
    folder = save_task_checkpoint(tmp_path / "model", "bert", "sequence", num_labels=2)
    with pytest.raises(CheckpointError, match=r"has no label that begins with 'entail'.* 'LABEL_0', 'LABEL_1'"):
        Served(folder, ZeroShotClassification)
