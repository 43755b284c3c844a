# SPDX-License-Identifier: Apache-2.0
"""What kernels are made of that numba has no words for: memory by its address, prefetching, threads that torch has.

Threads are those of torch's own pool: a second one would wait for the same cores.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import cfunc, extending, njit, types
from numba.core import config

MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
"""What LLVM may do with sums and products; nan and inf stay what they are."""
LINE: Final = 64
"""Bytes that come into the cache together."""
WORD, LONG, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()

compiled = njit(fastmath=MATH, error_model="numpy")
intrinsic: Any = extending.intrinsic  # its own types have the arguments of what it makes one off


def is_for_host() -> bool:
    """Whether numba compiles for the processor at hand; it may be told to do so for less."""
    return config.CPU_NAME is config.CPU_FEATURES is None and bool(config.ENABLE_AVX)  # type: ignore[attr-defined]


def has(feature: str) -> bool:
    """Whether it does, and that one has this, by LLVM's name.

    To be asked before: LLVM ends the process where there is no instruction for what it is told.
    """
    return is_for_host() and bool(get_host_cpu_features().get(feature, False))


def kernel_of(task: Any) -> Any:
    """Makes a function of one argument a kernel: what it is given are the numbers of a task.

    Args:
        task: A named tuple of whole numbers.
    """
    record = types.Record.make_c_struct([(name, types.int64) for name in task._fields])
    pointer = types.CPointer(record)  # type: ignore[no-untyped-call]
    return cfunc(types.void(pointer), fastmath=MATH, error_model="numpy")


def run(kernel: Any, task: tuple[int, ...], num_threads: int) -> None:
    """Have a kernel do a task.

    Args:
        kernel: Made by `kernel_of`.
        task: Whose addresses hold what they should.
        num_threads: That share the work, at most.
    """
    share_out = _share_out()
    numbers = array("q", task)
    address, _ = numbers.buffer_info()
    if num_threads == 1 or share_out is None:
        kernel.ctypes(address)
    else:
        share_out(kernel.address, address, num_threads, 0)


@cache
def _share_out() -> Any:
    """What has a function run by several threads: GNU OpenMP's, which torch has brought in; None where it has not."""
    share_out = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if share_out is not None:
        share_out.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return share_out


def reader(kind: Any, num_bytes: int, result: Any, widened: Callable[[Any, Any], Any] | None = None) -> Any:
    """What reads the number that stands `index` places behind an address."""

    @intrinsic
    def read(context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = builder.load(pointer_to(builder, kind, *arguments), align=num_bytes)
            return widened(builder, number) if widened else number

        return result(types.int64, types.int64), generate

    return read


@intrinsic
def write(context: Any, address: Any, index: Any, number: Any) -> Any:
    """Put 32 bits `index` places behind an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *target, number = arguments
        builder.store(number, pointer_to(builder, FLOAT, *target), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def next_number(context: Any, address: Any) -> Any:
    """The int64 at an address, which is one more for the thread that comes next."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (address,) = arguments
        return builder.atomic_rmw("add", pointer_to(builder, LONG, address, LONG(0)), LONG(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def fetch(context: Any, address: Any) -> Any:
    """Have the processor bring what stands at an address into its cache; one that is nobody's does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any) -> None:
    """The IR of `fetch`."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    to_read, for_long, data = WORD(0), WORD(3), WORD(1)
    builder.call(function, [builder.inttoptr(address, pointer), to_read, for_long, data])


def pointer_to(builder: Any, kind: Any, address: Any, index: Any) -> Any:
    """The IR of a pointer to what stands `index` places behind an address."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


long = reader(LONG, 8, types.int64)
read = reader(FLOAT, 4, types.float32)
