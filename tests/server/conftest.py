# SPDX-License-Identifier: Apache-2.0
"""The standard server, one for each engine and worker; modules that use it are of the xdist group `standard`."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.standard import StandardServer


@pytest.fixture(scope="session")
def standard(
    tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]
) -> Iterator[Callable[[str], StandardServer]]:
    """Get the standard server of an engine: `standard("continuous").serve("plain", "typed")`."""
    with contextlib.ExitStack() as stack:

        @cache
        def start(engine: str) -> StandardServer:
            standard = StandardServer(tmp_path_factory.mktemp("standard"), make_folder, engine)
            stack.enter_context(standard.server)
            return standard

        yield start
