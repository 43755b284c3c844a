# SPDX-License-Identifier: Apache-2.0
"""The tasks by name, and which one a folder has. Importing it loads no task."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_triton.errors import SettingsError, clip
from hf_triton.hub.kind import find_task, find_way
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings

if TYPE_CHECKING:
    from hf_triton.tasks.task import Task

ENCODER_TASKS: Final[dict[str, str]] = {
    "embeddings": "Embeddings",
    "rerank": "Rerank",
    "text-classification": "TextClassification",
    "token-classification": "TokenClassification",
    "question-answering": "QuestionAnswering",
    "fill-mask": "FillMask",
    "zero-shot-classification": "ZeroShotClassification",
    "feature-extraction": "FeatureExtraction",
    "sparse-embeddings": "SparseEmbeddings",
    "tokenization": "Tokenization",
    "image-classification": "ImageClassification",
}
DECLARED_TASKS: Final[dict[str, str]] = {**ENCODER_TASKS, "automatic-speech-recognition": "SpeechRecognition"}
"""Tasks that generate no text, or none from a prompt. Each is a class in the module of its own name, with
underscores."""
SERVED: Final = {"EncoderTask", "SpeechRecognition"}
"""Classes of which a task is a subclass, as each has a service."""


VARIANTS: Final[dict[tuple[str, str], str]] = {
    ("embeddings", "image"): "ImageEmbeddings",
    ("rerank", "generative"): "GenerativeRerank",
    ("rerank", "pooled"): "PooledRerank",
    ("sparse-embeddings", "lexical"): "LexicalSparseEmbeddings",
}
"""Tasks that some checkpoints do in a way of their own: classes in the module `WAY_TASK`."""


def task_class(name: str, way: str | None = None) -> type[Task] | None:
    """The class of a task; None for tasks that generate text."""
    if name not in DECLARED_TASKS:
        return None
    variant = VARIANTS.get((name, way or ""))
    module = (name if variant is None else f"{way}_{name}").replace("-", "_")
    task: type[Task] = getattr(importlib.import_module(f"hf_triton.tasks.{module}"), variant or DECLARED_TASKS[name])
    return task


def folder_task(own: type[Task] | None, settings: ModelSettings, model_folder: Path) -> type[Task] | None:
    """The class of a folder's task; None if it generates text.

    The setting `task` comes before what the checkpoint says; one that is not on disk yet generates text.

    Raises:
        SettingsError: The folder's own class declares nothing.
    """
    if own is not None:
        _check_own(own)
        return own
    checkpoint = Hub(model_folder, settings, os.environ).find_config_folder()
    found = checkpoint and not settings.gguf_file and find_task(checkpoint)
    name = settings.task or found or "text-generation"
    return task_class(name, None if checkpoint is None else find_way(checkpoint))


def _check_own(own: object) -> None:
    """Refuse what is no task; the SettingsError says what a task class is."""
    from hf_triton.protocol.task_declaration import TaskDeclaration
    from hf_triton.tasks.task import Task

    if not (isinstance(own, type) and issubclass(own, Task) and SERVED & {base.__name__ for base in own.mro()}):
        raise SettingsError(
            f"task_class of 1/model.py must be a subclass of hf_triton.tasks.encoder_task.EncoderTask, got {clip(own)}"
        )
    if not isinstance(getattr(own, "declaration", None), TaskDeclaration):
        raise SettingsError(
            f"the task class {own.__name__} of 1/model.py has no declaration: give it a TaskDeclaration of its inputs "
            "and outputs"
        )
