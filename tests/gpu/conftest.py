# SPDX-License-Identifier: Apache-2.0
"""All of these tests need a CUDA device."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, and say why."""
    if torch.cuda.is_available():
        return
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
