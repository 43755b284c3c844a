# SPDX-License-Identifier: Apache-2.0
"""The tasks by name, and which one a folder has. Importing it loads no task."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import SettingsError
from hf_triton.hub.kind import find_task, generates_text
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
    "tokenization": "Tokenization",
}
"""Each is a class in the module of its own name, with underscores."""


GENERATIVE_TASKS: Final[dict[str, str]] = {"rerank": "GenerativeRerank"}
"""Tasks that models which generate text do otherwise: classes in modules of the name behind `generative_`."""


def encoder_task(name: str, *, generates: bool = False) -> type[EncoderTask[Any]] | None:
    """The class of an encoder's task; None for tasks that generate text.

    Args:
        name: As the setting `task` has it.
        generates: Whether the model is one that generates text.
    """
    if name not in ENCODER_TASKS:
        return None
    if generates and name in GENERATIVE_TASKS:
        own: type[EncoderTask[Any]] = getattr(
            importlib.import_module(f"hf_triton.tasks.generative_{name}"), GENERATIVE_TASKS[name]
        )
        return own
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

    Raises:
        SettingsError: The folder's own class declares nothing.
    """
    if own is not None:
        if not hasattr(own, "declaration"):
            raise SettingsError(
                f"the task class {own.__name__} of 1/model.py has no declaration: give it a TaskDeclaration of its "
                "inputs and outputs"
            )
        return own
    checkpoint = Hub(model_folder, settings, os.environ).find_config_folder()
    name = settings.task or (checkpoint and find_task(checkpoint)) or "text-generation"
    return encoder_task(name, generates=checkpoint is not None and generates_text(checkpoint))
