# SPDX-License-Identifier: Apache-2.0
"""Files with the tensors that published checkpoints have: those of another head are passed over, others refused."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_triton.errors import CheckpointError
from hf_triton.folders.tensor_check import check_tensors
from hf_triton.hub.checkpoint import Checkpoint, Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.hub.pretrained import load_config
from hf_triton.settings import ModelSettings
from hf_triton.tasks.registry import task_class
from hf_triton.testing import add_tensor, build_tiny_checkpoint
from tests.support.encoders import build_model
from tests.support.published_tensors import PUBLISHED, publish
from tests.support.tasks import TEXTS, Served, build_tokenizer, reference, save_task_checkpoint

READY: Mapping[str, tuple[Callable[[Path], Path], str | None]] = {
    "sentiment": (lambda folder: save_task_checkpoint(folder, "distilbert", "sequence"), "text-classification"),
    "ner": (lambda folder: save_task_checkpoint(folder, "bert", "tokens"), "token-classification"),
    "qa": (lambda folder: save_task_checkpoint(folder, "roberta", "answers"), "question-answering"),
    "reranker": (lambda folder: save_task_checkpoint(folder, "xlm-roberta", "sequence", num_labels=1), "rerank"),
    "bge": (lambda folder: save_task_checkpoint(folder, "bert", "embeddings"), "feature-extraction"),
    "falcon7b": (lambda folder: build_tiny_checkpoint(folder, "falcon"), None),
    "persimmon8b": (lambda folder: build_tiny_checkpoint(folder, "persimmon"), None),
    "llama7b": (lambda folder: build_tiny_checkpoint(folder, "llama"), None),
}
"""By ready folder: its architecture, and its task."""


def auto_class_of(task: str | None) -> str | None:
    kind = task_class(task) if task else None
    return kind.auto_class if kind else None


def load(folder: Path, task: str | None) -> Checkpoint:
    """Load a checkpoint, and check it as `hf-triton check` does, which must say the same."""
    settings = ModelSettings(huggingface_model=str(folder))
    try:
        loaded = load_checkpoint(Hub(folder, settings, {}), settings, Placement("CPU", 0), auto_class_of(task))
    except CheckpointError as error:
        with pytest.raises(CheckpointError, match=re.escape(error.sentence)):
            check_tensors(folder, load_config(folder, settings), settings, auto_class_of(task))
        raise
    assert check_tensors(folder, load_config(folder, settings), settings, auto_class_of(task))
    return loaded


@pytest.mark.parametrize("name", READY)
def test_a_ready_folder_loads_what_is_published(name: str, tmp_path: Path) -> None:
    build, task = READY[name]
    assert type(load(publish(build(tmp_path / name), name), task).model).__name__
    assert READY.keys() == PUBLISHED.keys()


def test_answers_are_those_of_the_pipeline(tmp_path: Path) -> None:
    folder = publish(save_task_checkpoint(tmp_path / "ner", "bert", "tokens"), "ner")
    kind = task_class("token-classification")
    assert kind is not None
    answers = Served(folder, kind).json(TEXTS[:2])
    expected = reference(folder, "token-classification", TEXTS[:2])
    assert [[each["word"] for each in answer] for answer in answers] == [
        [each["word"] for each in answer] for answer in expected
    ]
    scores = [each["score"] for answer in answers for each in answer]
    assert scores == pytest.approx([float(each["score"]) for answer in expected for each in answer], abs=1e-5)


OTHER_HEADS: Mapping[str, tuple[str, str, str, list[str]]] = {
    "bert-base as it was pretrained": (
        "bert",
        "masks",
        "fill-mask",
        ["bert.pooler.dense.bias", "cls.seq_relationship.weight"],
    ),
    "classifier beside a masked language model": (
        "roberta",
        "sequence",
        "text-classification",
        ["lm_head.dense.weight", "lm_head.bias", "roberta.pooler.dense.weight"],
    ),
    "discriminator beside a classifier": (
        "electra",
        "sequence",
        "text-classification",
        ["discriminator_predictions.dense.weight", "discriminator_predictions.dense_prediction.bias"],
    ),
    "masked language model beside entities": (
        "distilbert",
        "tokens",
        "token-classification",
        ["vocab_transform.weight", "vocab_layer_norm.bias", "vocab_projector.weight"],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", OTHER_HEADS)
def test_another_head_of_the_family_is_passed_over(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family, head, task, names = OTHER_HEADS[case]
    build_model(family, head, vocab_size=320).save_pretrained(tmp_path)
    build_tokenizer("wordpiece").save_pretrained(tmp_path)
    for name in names:
        add_tensor(tmp_path, name)
    with caplog.at_level(logging.INFO, "hf_triton.hub.weights"):
        load(tmp_path, task)
    assert f"{len(names)} tensors of another head of the family are not used ({sorted(names)[0]}" in caplog.text


@pytest.mark.parametrize("name", ["cls.other.weight", "bert.encoder.layer.2.output.dense.weight", "classifier.extra"])
def test_what_no_head_of_the_family_has_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_task_checkpoint(tmp_path / "ner", "bert", "tokens")
    add_tensor(folder, "bert.pooler.dense.bias")
    add_tensor(folder, name)
    with pytest.raises(CheckpointError, match=re.escape(f"1 not in the model ({name})")):
        load(folder, "token-classification")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["encoder.layer.2.output.dense.weight", "encoder.layer.0.output.lora_A.weight", "embeddings.extra.weight"]
)
def test_what_the_body_of_an_embedder_has_not_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_task_checkpoint(tmp_path / "bge", "bert", "embeddings")
    add_tensor(folder, "my_head.weight")
    load(folder, "feature-extraction")
    add_tensor(folder, name)
    with pytest.raises(CheckpointError, match=re.escape(f"1 not in the model ({name})")):
        load(folder, "feature-extraction")


def test_a_decoder_s_other_head_is_passed_over(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "llama", "llama")
    add_tensor(folder, "score.weight")
    load(folder, None)


def test_old_names_of_a_normalization_are_read(tmp_path: Path) -> None:
    """google-bert/bert-base-uncased, converted from TensorFlow in 2018."""
    folder = save_task_checkpoint(tmp_path / "masks", "bert", "masks")
    expected = load(folder, "fill-mask").model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in tensors.items()
    }
    seq: dict[str, Any] = {"cls.seq_relationship.weight": torch.rand(2, 32), "bert.pooler.dense.bias": torch.rand(32)}
    save_file(old | seq, folder / "model.safetensors", {"format": "pt"})
    read = load(folder, "fill-mask").model.state_dict()
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    entities = shutil.copytree(folder, tmp_path / "entities")
    save_task_checkpoint(entities, "bert", "tokens")
    own = load_file(entities / "model.safetensors")
    head = {key: value for key, value in old.items() if key.startswith("cls.")}
    save_file(own | head, entities / "model.safetensors", {"format": "pt"})
    load(entities, "token-classification")
