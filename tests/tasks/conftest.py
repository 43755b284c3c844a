# SPDX-License-Identifier: Apache-2.0
"""Tasks with tiny checkpoints, each made and loaded once for a module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tasks import Served, save_task_checkpoint


@pytest.fixture(scope="module")
def serve_task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Served, Path]]:
    """`serve_task(kind, family, head, **config)`: the task and its checkpoint."""
    started: dict[str, tuple[Served, Path]] = {}

    def serve(kind: Any, family: str, head: str, **config: Any) -> tuple[Served, Path]:
        name = f"{kind.__name__} {family} {head} {config}"
        if name not in started:
            folder = save_task_checkpoint(tmp_path_factory.mktemp("model"), family, head, **config)
            started[name] = Served(folder, kind), folder
        return started[name]

    return serve
