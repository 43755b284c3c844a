# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's language without a GPU: run by its interpreter, or compiled ahead.

Triton lies in a folder of its own, `make test-all` puts it there. Only the processes of these fixtures see it: torch
would use it elsewhere. A fixture calls a function there: `interpreted(check, *arguments)`; function and arguments are
pickled, so tensors are made there. Imports of `triton` and of modules with kernels belong inside such functions.

`compiled` compiles what a function launches, and launches nothing.
"""

import importlib.util
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from tests.support.paths import ROOT

FOLDER: Final = ROOT / ".venv" / "triton"

Call = Callable[..., Any]


class CompiledKernel(NamedTuple):
    name: str
    shared_bytes: int
    ptx: str
    hash: str
    """Two compilations may have the same code, but not the same hash."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Call]:
    """Calls a function where kernels run on the CPU: one program after the other, in random order."""
    with _process(_interpret) as call:
        yield call


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Calls a function with tensors of the CPU for a device of some compute capability.

    `compiled(90, launch, *arguments)` gives the kernels that were to be launched.
    """
    with _process(_compile, tmp_path_factory.mktemp("triton")) as call:
        yield lambda capability, function, *arguments: call(_compiled, capability, function, *arguments)


@contextmanager
def _process(prepare: Callable[..., None], *arguments: Any) -> Iterator[Call]:
    if not (FOLDER / ".set-up").exists() and importlib.util.find_spec("triton") is None:
        pytest.skip(f"Triton's language is not in {FOLDER}: make test-all installs it")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=arguments) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _compile(cache: Path) -> None:
    sys.path.append(str(FOLDER))
    os.environ["TRITON_CACHE_DIR"] = str(cache)


def _compiled(capability: int, function: Call, *arguments: Any) -> list[CompiledKernel]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    kernels = []

    def compile_only(self: Any, grid: Any, *given: Any, **named: Any) -> None:
        kernels.append(self.run(*given, grid=grid, warmup=True, **named))

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: capability,  # kernels are kept by device
            get_current_stream=lambda _: 0,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", lambda self, grid: partial(compile_only, self, grid))
        function(*arguments)
    return [CompiledKernel(each.name, each.metadata.shared, each.asm["ptx"], each.hash) for each in kernels]


def _interpret() -> None:
    sys.path.append(str(FOLDER))
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import interpreter_builder as builder

    _shuffle(builder)
    _multiply_bfloat16(builder)


def _shuffle(builder: Any) -> None:
    """Run a grid's programs in random order: in theirs, one could rely on what an earlier one has written."""
    programs: list[tuple[int, ...]] = []
    shuffle, set_size, set_program = random.Random(0).shuffle, builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(*size: int) -> None:
        programs[:] = itertools.product(*map(range, size))
        shuffle(programs)
        set_size(*size)

    builder.set_grid_dim = set_grid_dim
    builder.set_grid_idx = lambda *_: set_program(*programs.pop())


def _multiply_bfloat16(builder: Any) -> None:
    """Triton 3.7's interpreter multiplies the bits of bfloat16 as whole numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    multiply = builder.create_dot

    def exact(matrix: Any) -> Any:
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        return TensorHandle((matrix.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(left: Any, right: Any, *others: Any) -> Any:
        return multiply(exact(left), exact(right), *others)

    builder.create_dot = create_dot
