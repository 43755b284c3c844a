# SPDX-License-Identifier: Apache-2.0
"""What a folder or repository is that is no checkpoint of transformers, by the names of its files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import clip

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
    if (folder / "modules.json").exists() and not any(name.endswith("ForSequenceClassification") for name in names):
        return "embeddings"
    if _generate(names):
        return "text-generation"
    for name in names:
        for head, task in TASKS_BY_HEAD.items():
            if name.endswith(head):
                return "rerank" if task == "text-classification" and _num_labels(config) == 1 else task
    return "embeddings" if any(name.endswith("Model") for name in names) else None


def generates_text(folder: Path) -> bool:
    """Whether a checkpoint's architecture is one that generates text."""
    return _generate(_architectures(_read_object(folder / "config.json")))


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
