# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's language without a GPU: run by its interpreter, or compiled ahead.

Triton lies in a folder of its own, `make test-all` puts it there. Only the processes of these fixtures see it: torch
would use it elsewhere. A fixture calls a function there: `interpreted(check, *arguments)`; function and arguments are
pickled, so tensors are made there. Imports of `triton` and of modules with kernels belong inside such functions.
"""

import importlib.util
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.paths import ROOT

FOLDER: Final = ROOT / ".venv" / "triton"

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Call]:
    """Calls a function where kernels run on the CPU: one program after the other, in random order."""
    with _process(_interpret) as call:
        yield call


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Calls a function where kernels can be compiled, for any device."""
    with _process(_compile, tmp_path_factory.mktemp("triton")) as call:
        yield call


@contextmanager
def _process(prepare: Callable[..., None], *arguments: Any) -> Iterator[Call]:
    if not FOLDER.is_dir() and importlib.util.find_spec("triton") is None:
        pytest.skip(f"Triton's language is not in {FOLDER}: make test-all installs it")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=arguments) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _compile(cache: Path) -> None:
    sys.path.append(str(FOLDER))
    os.environ["TRITON_CACHE_DIR"] = str(cache)


def _interpret() -> None:
    """Shuffle a grid's programs: in order, a program could rely on what an earlier one has written."""
    sys.path.append(str(FOLDER))
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import interpreter_builder as builder

    programs: list[tuple[int, ...]] = []
    shuffle, set_size, set_program = random.Random(0).shuffle, builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(*size: int) -> None:
        programs[:] = itertools.product(*map(range, size))
        shuffle(programs)
        set_size(*size)

    builder.set_grid_dim = set_grid_dim
    builder.set_grid_idx = lambda *_: set_program(*programs.pop())
