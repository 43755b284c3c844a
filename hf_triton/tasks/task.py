# SPDX-License-Identifier: Apache-2.0
"""Task: a task whose requests and responses a `TaskDeclaration` describes, as the server knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton.protocol.task_declaration import TaskDeclaration

if TYPE_CHECKING:
    from pathlib import Path

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.hub.resolve import Hub
    from hf_triton.settings import ModelSettings
    from hf_triton.tasks.interface import LoadedTask
    from hf_triton.tasks.serving.meter import Meter


class Task:
    """A task of a model folder.

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

    @classmethod
    def start(
        cls,
        checkpoint: Checkpoint,
        settings: ModelSettings,
        *,
        on_fatal: Callable[[], None],
        meter: Meter,
        hub: Hub | None = None,
    ) -> LoadedTask:
        """Serve a loaded checkpoint, its engine running.

        Args:
            checkpoint: Model and tokenizer.
            settings: The folder's.
            on_fatal: Called after the engine has failed for good.
            meter: Counts.
            hub: Finds the folder's adapters.

        Raises:
            LoadError: The checkpoint does not fit the task.
        """
        raise NotImplementedError
