# SPDX-License-Identifier: Apache-2.0
"""What a folder or repository is that is no checkpoint of transformers, by the names of its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from hf_triton.errors import CheckpointError, clip
from hf_triton.files import read_json
from hf_triton.hub.gguf import SUFFIX, list_files
from hf_triton.hub.model_tables import tables_of_class, tables_of_family
from hf_triton.hub.sentence_names import CROSS_ENCODER, GENERAL, MODULES, SPARSE_ENCODER, sparse_linear_file

IMAGES_AND_TEXTS: Final = "ZERO_SHOT_IMAGE_CLASSIFICATION"
"""The table of CLIP and its like."""
TASKS_BY_TABLE: Final[Mapping[str, str]] = {
    "SEQ_TO_SEQ_CAUSAL_LM": "text-generation",
    "MASKED_LM": "fill-mask",
    "CAUSAL_LM": "text-generation",
    "MULTIMODAL_LM": "text-generation",
    "SEQUENCE_CLASSIFICATION": "text-classification",
    "TOKEN_CLASSIFICATION": "token-classification",
    "QUESTION_ANSWERING": "question-answering",
    "SPEECH_SEQ_2_SEQ": "automatic-speech-recognition",
    "CTC": "automatic-speech-recognition",
    "IMAGE_CLASSIFICATION": "image-classification",
    IMAGES_AND_TEXTS: "embeddings",
}
"""The task of a table of transformers' models; the first that has a class decides."""
TASKS_BY_KIND: Final[Mapping[str, str]] = {CROSS_ENCODER: "rerank", SPARSE_ENCODER: "sparse-embeddings"}
"""The task of a `model_type` of sentence-transformers."""
UNSPECIFIC: Final = {"BASE", "PRETRAINING", "TEXT_ENCODING"}
"""Tables of models without a head for a task."""
TASKS_BY_ENDING: Final[Mapping[str, str]] = {
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "text-generation",
    "LMHeadModel": "text-generation",
    "DoubleHeadsModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "Model": "embeddings",
}
"""The task by the end of a class's name that transformers does not have: a repository's own, or an old one."""


ORIGINAL: Final = r"^consolidated[-.\w]*\.(safetensors|pth)$"
"""Files of Mistral's and of Meta's own code."""
GENERATING_CLASSES: Final = {"AutoModelForCausalLM", "AutoModelForSeq2SeqLM"}


def describe_other_kind(folder: Path, names: Collection[str]) -> str | None:
    """What a folder or repository is, and what to do instead, as the end of a sentence; None if it is nothing known."""
    if MODULES in names:
        from hf_triton.hub.sentence_files import refusal

        if reason := refusal(folder):
            return reason
    if "adapter_config.json" in names:
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {clip(base)}" if base and isinstance(base, str) else ""
        return (
            f"is an adapter{of}, not a whole model: set huggingface_model to its base model, and name the adapter in "
            "the setting adapters"
        )
    if files := [name for name in names if name.endswith(SUFFIX)]:
        return (
            f"has GGUF files ({list_files(files)}): name one by its quantisation or path, `hf-triton serve "
            "NAME:Q4_K_M`, or by the setting gguf_file"
        )
    if "model_index.json" in names:
        return "is a pipeline of diffusers, which makes images: choose a model that generates text"
    if any(name.endswith(".onnx") for name in names):
        return "has ONNX files, which are not served: name the repository with the original safetensors"
    if not any(name.startswith("model") for name in names) and (own := re.search(ORIGINAL, "\n".join(names), re.M)):
        return (
            f"has weights in the form of its authors' own code ({own[0]}) alone: name the repository with those in the "
            "form of transformers (model.safetensors), often the same name with -hf"
        )
    if any(name.endswith((".h5", ".msgpack")) for name in names):
        return "has TensorFlow's or Flax's weights alone: name a repository with safetensors"
    return None


def find_task(folder: Path) -> str | None:
    """What a checkpoint's files say that it does; None if they say nothing of it.

    A cross-encoder has one label, and a checkpoint without a head (`BertModel`) makes embeddings. What is not served
    has another name (`object-detection`).
    """
    return next(iter(find_tasks(folder)), None)


def find_tasks(folder: Path) -> list[str]:
    """All that a checkpoint's files say that it does; the first one is served unless a folder says otherwise."""
    config = read_object(folder / "config.json")
    tasks = _tasks_of_architectures(config)
    if (folder / MODULES).exists() and "text-classification" not in tasks:
        kind = str(read_object(folder / GENERAL).get("model_type"))
        kind = SPARSE_ENCODER if "SpladePooling" in _module_kinds(folder) else kind
        tasks = [TASKS_BY_KIND.get(kind, "embeddings"), *tasks]
    if "text-classification" in tasks and _num_labels(config) == 1:
        tasks = ["rerank" if task == "text-classification" else task for task in tasks]
    return list(dict.fromkeys(tasks))


def find_way(folder: Path) -> Literal["generative", "pooled", "lexical", "image"] | None:
    """How a checkpoint does its task: by a model that generates, a pooled vector, its text's tokens, or its head.

    `image` stands for vectors of texts and images in one space.
    """
    config = read_object(folder / "config.json")
    if any(IMAGES_AND_TEXTS in tables_of_class(name) for name in _architectures(config)):
        return "image"
    if _tasks_of_architectures(config)[:1] == ["text-generation"]:
        return "generative"
    kind = read_object(folder / GENERAL).get("model_type")
    is_pooled = kind == CROSS_ENCODER and "Pooling" in _module_kinds(folder)
    return "pooled" if is_pooled else "lexical" if sparse_linear_file(folder) else None


def _module_kinds(folder: Path) -> list[str]:
    """The kinds of the modules of modules.json; empty if it cannot be read, which loading reports."""
    from hf_triton.hub.sentence_files import load_module_list

    try:
        return [kind for kind, _ in load_module_list(folder)]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _tasks_of_architectures(config: dict[str, Any]) -> list[str]:
    """What the classes do that a config names; if one generates text, that first."""
    by_class = sorted(map(_tasks_of_class, _architectures(config)), key=lambda tasks: tasks[:1] != ["text-generation"])
    tasks = [task for tasks in by_class for task in tasks]
    auto_map = config.get("auto_map")  # the repository's own classes, which names such as ChatGLMModel do not tell
    generates = isinstance(auto_map, dict) and not GENERATING_CLASSES.isdisjoint(auto_map)
    return ["text-generation", *tasks] if generates and tasks == ["embeddings"] else tasks


def _tasks_of_class(name: str) -> list[str]:
    """What a class does, by transformers' tables if they have it, else by the end of its name."""
    tables = tables_of_class(name)
    if not tables:
        return [task for ending, task in TASKS_BY_ENDING.items() if name.endswith(ending)][:1]
    if tasks := [task for table, task in TASKS_BY_TABLE.items() if table in tables]:
        return tasks
    family = tables_of_family(name) - UNSPECIFIC
    if others := tables - UNSPECIFIC:
        return _not_served(others)
    if tables == {"PRETRAINING"}:  # a model as it was pretrained, which has the head for masks in most families
        return ["fill-mask"] if "MASKED_LM" in family else _not_served(tables)
    if "SEQ_TO_SEQ_CAUSAL_LM" in family and "TEXT_ENCODING" not in tables:
        return ["text-generation"]
    if family and family.isdisjoint(TASKS_BY_TABLE):  # a family that reads images or sound
        return _not_served(family)
    return ["embeddings", *(["text-generation"] if family & {"CAUSAL_LM", "MULTIMODAL_LM"} else [])]


def _not_served(tables: Collection[str]) -> list[str]:
    return [table.lower().replace("_", "-") for table in sorted(tables)]


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _num_labels(config: dict[str, Any]) -> int:
    labels = config.get("id2label")
    number = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    return number if isinstance(number, int) else 0


def read_object(file: Path) -> dict[str, Any]:
    """A file's JSON object; empty if it has none, which loading reports."""
    try:
        value = read_json(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
