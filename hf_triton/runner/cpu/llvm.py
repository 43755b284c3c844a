# SPDX-License-Identifier: Apache-2.0
"""Building blocks of kernels that numba lacks: memory by address, prefetching, torch's threads.

Kernels run in torch's own thread pool: a second pool would compete for the same cores.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending, njit, types
from numba.core import config

MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
"""What LLVM may assume of sums and products; nan and inf keep their meaning."""
LINE: Final = 64
"""Bytes of a cache line."""
WORD, LONG, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()

compiled = njit(fastmath=MATH, error_model="numpy")
intrinsic: Any = extending.intrinsic  # its types lose the decorated function's arguments


def is_for_host() -> bool:
    """Whether numba compiles for this processor, and is not configured for a lesser one."""
    return config.CPU_NAME is config.CPU_FEATURES is None and bool(config.ENABLE_AVX)  # type: ignore[attr-defined]


def has(feature: str) -> bool:
    """Whether kernels may use a processor feature, by LLVM's name.

    Check it before compiling: LLVM aborts the process if it has no instruction for an operation.
    """
    return is_for_host() and bool(get_host_cpu_features().get(feature, False))


@cache
def openmp_parallel() -> Any:
    """GNU OpenMP's function that runs a function in several threads; None if torch came with another OpenMP."""
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is not None:
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel


@intrinsic
def next_number(context: Any, address: Any) -> Any:
    """Fetch and increment the int64 at an address, atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (address,) = arguments
        return builder.atomic_rmw("add", pointer_to(builder, LONG, address, LONG(0)), LONG(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def fetch(context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address to the second level; an invalid address does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any) -> None:
    """Emit the IR of `fetch`."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    to_read, to_second_level, data = WORD(0), WORD(2), WORD(1)  # the first one waits for few lines at a time
    builder.call(function, [builder.inttoptr(address, pointer), to_read, to_second_level, data])


def pointer_to(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """Emit the IR of a pointer to the element at `index` of an array, given its address."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])
