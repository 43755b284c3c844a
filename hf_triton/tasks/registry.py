# SPDX-License-Identifier: Apache-2.0
"""The tasks by name, and which one a folder has. Importing it loads no task."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_triton.hub.kind import find_task
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings

if TYPE_CHECKING:
    from hf_triton.tasks.encoder_task import EncoderTask

ENCODER_TASKS: Final[dict[str, str]] = {
    "embeddings": "Embeddings",
    "rerank": "Rerank",
    "text-classification": "TextClassification",
    "token-classification": "TokenClassification",
    "question-answering": "QuestionAnswering",
    "fill-mask": "FillMask",
    "zero-shot-classification": "ZeroShotClassification",
    "feature-extraction": "FeatureExtraction",
}
"""Each is a class in the module of its own name, with underscores."""


def encoder_task(name: str) -> type[EncoderTask[Any]] | None:
    """The class of an encoder's task; None for tasks that generate text."""
    if name not in ENCODER_TASKS:
        return None
    module = importlib.import_module(f"hf_triton.tasks.{name.replace('-', '_')}")
    task: type[EncoderTask[Any]] = getattr(module, ENCODER_TASKS[name])
    return task


def folder_task(
    own: type[EncoderTask[Any]] | None, settings: ModelSettings, model_folder: Path
) -> type[EncoderTask[Any]] | None:
    """The class of a folder's task; None if it generates text.

    Args:
        own: The task class of the folder's 1/model.py.
        settings: The folder's; its `task` comes before what the checkpoint says.
        model_folder: The folder. A checkpoint that is not on disk yet is taken for one that generates text.
    """
    if own is not None:
        return own
    if settings.task is not None:
        return encoder_task(settings.task)
    checkpoint = Hub(model_folder, settings, os.environ).find_config_folder()
    return encoder_task((checkpoint and find_task(checkpoint)) or "text-generation")
