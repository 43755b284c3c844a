# SPDX-License-Identifier: Apache-2.0
"""What a folder or repository is that is no checkpoint of transformers, by the names of its files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Literal

from hf_triton.errors import CheckpointError, clip
from hf_triton.hub.sentence_files import CROSS_ENCODER, GENERAL, MODULES, load_module_list, refusal

TASKS_BY_HEAD: Final[dict[str, str]] = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
}
"""By the end of an architecture's name."""
GENERATING: Final = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def describe_other_kind(folder: Path, names: Collection[str]) -> str | None:
    """What a folder or repository is, and what to do instead, as the end of a sentence; None if it is nothing known.

    Args:
        folder: Holds its small files.
        names: All of its files, here or on the Hub.
    """
    if MODULES in names and (reason := refusal(folder)):
        return reason
    if "adapter_config.json" in names:
        base = _read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {clip(base)}" if base and isinstance(base, str) else ""
        return (
            f"is an adapter{of}, not a whole model: set huggingface_model to its base model, and name the adapter in "
            "the setting adapters"
        )
    if any(name.endswith(".gguf") for name in names):
        return "has GGUF files, which llama.cpp reads: name the repository with the original safetensors"
    if "model_index.json" in names:
        return "is a pipeline of diffusers, which makes images: choose a model that generates text"
    if any(name.endswith(".onnx") for name in names):
        return "has ONNX files, which are not served: name the repository with the original safetensors"
    if any(name.endswith((".h5", ".msgpack")) for name in names):
        return "has TensorFlow's or Flax's weights alone: name a repository with safetensors"
    return None


def find_task(folder: Path) -> str | None:
    """What a checkpoint's files say that it does; None if they say nothing of it.

    A cross-encoder has one label, and a checkpoint without a head (`BertModel`) makes embeddings.
    """
    config = _read_object(folder / "config.json")
    names = _architectures(config)
    if (folder / MODULES).exists() and not any(name.endswith("ForSequenceClassification") for name in names):
        is_cross_encoder = _read_object(folder / GENERAL).get("model_type") == CROSS_ENCODER
        return "rerank" if is_cross_encoder else "embeddings"
    if _generate(names):
        return "text-generation"
    for name in names:
        for head, task in TASKS_BY_HEAD.items():
            if name.endswith(head):
                return "rerank" if task == "text-classification" and _num_labels(config) == 1 else task
    return "embeddings" if any(name.endswith("Model") for name in names) else None


def find_way(folder: Path) -> Literal["generative", "pooled"] | None:
    """How a checkpoint does its task: by a model that generates, by a cross-encoder's pooled vector, or by its head."""
    if _generate(_architectures(_read_object(folder / "config.json"))):
        return "generative"
    kind = _read_object(folder / GENERAL).get("model_type")
    is_pooled = kind == CROSS_ENCODER and "Pooling" in _module_kinds(folder)
    return "pooled" if is_pooled else None


def _module_kinds(folder: Path) -> list[str]:
    """The kinds of the modules of modules.json; empty if it cannot be read, which loading reports."""
    try:
        return [kind for kind, _ in load_module_list(folder)]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _generate(architectures: list[str]) -> bool:
    return any(name.endswith(GENERATING) for name in architectures)


def _architectures(config: dict[str, Any]) -> list[str]:
    return [name for name in config.get("architectures") or () if isinstance(name, str)]


def _num_labels(config: dict[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(config.get("num_labels", 2))


def _read_object(file: Path) -> dict[str, Any]:
    """A file's JSON object; empty if it has none, which loading reports."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
