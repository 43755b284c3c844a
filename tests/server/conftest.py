# SPDX-License-Identifier: Apache-2.0
"""The standard server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.standard import StandardServer


@pytest.fixture(scope="package")
def standard(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[StandardServer]:
    """The server of the standard repository: `standard.serve("plain", "typed")`."""
    standard = StandardServer(tmp_path_factory.mktemp("standard"), make_folder)
    with standard.server:
        yield standard
