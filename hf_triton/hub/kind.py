# SPDX-License-Identifier: Apache-2.0
"""What a folder or repository is that is no checkpoint of transformers, by the names of its files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from hf_triton.errors import clip


def describe_other_kind(folder: Path, names: Collection[str]) -> str | None:
    """What a folder or repository is, and what to do instead, as the end of a sentence; None if it is nothing known.

    Args:
        folder: Holds its small files.
        names: All of its files, here or on the Hub.
    """
    if "adapter_config.json" in names:
        base = _base_model(folder / "adapter_config.json")
        of = f" of {clip(base)}" if base else ""
        return (
            f"is an adapter{of}, not a whole model: set huggingface_model to its base model, and load the adapter in "
            "the hook load (checkpoint.model.load_adapter), or merge it into the base model and save that"
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


def _base_model(file: Path) -> str | None:
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return base if isinstance(base, str) else None


def is_embedding_model(folder: Path, architectures: Collection[str]) -> bool:
    """Whether a checkpoint is one of sentence-transformers without a head that generates text."""
    generates = any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in architectures)
    return (folder / "modules.json").exists() and not generates
