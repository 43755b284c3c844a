# SPDX-License-Identifier: Apache-2.0
"""Task: what a model does with requests, which a `TaskDeclaration` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton.protocol.task_declaration import TaskDeclaration

if TYPE_CHECKING:
    from pathlib import Path

    from hf_triton.settings import ModelSettings


class Task:
    """A task of a model folder: declares requests; subclasses encode and decode what they hold.

    Attributes:
        declaration: Its requests and responses.
        auto_class: The class of transformers that loads the model: `AutoModelForSequenceClassification`, ...
    """

    declaration: ClassVar[TaskDeclaration]
    auto_class: ClassVar[str] = "AutoModel"

    @classmethod
    def check_config(cls, config: Any, settings: ModelSettings) -> None:
        """Check what config.json alone says; `hf-triton check` does so without loading the model.

        Raises:
            CheckpointError: The checkpoint does not fit the task.
        """

    @classmethod
    def check_files(cls, folder: Path, settings: ModelSettings) -> None:
        """Check what the checkpoint's other small files say, as `check_config`.

        Raises:
            LoadError: The checkpoint does not fit the task.
        """
