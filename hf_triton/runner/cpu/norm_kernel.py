# SPDX-License-Identifier: Apache-2.0
"""The kernel of RMSNorm, of float32 rows one after the other; compiled by numba."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu.llvm import MATH

NUMBERS = types.CPointer(types.float32)  # type: ignore[no-untyped-call]


@cache
def compile_norm() -> Any:
    """Compile it; its arguments are states, weight and result, then how many rows, their size, and epsilon."""
    arguments = NUMBERS, NUMBERS, NUMBERS, types.int64, types.int64, types.float32

    @cfunc(types.void(*arguments), fastmath=MATH, error_model="numpy")
    def normalise(states: Any, weight: Any, result: Any, num_rows: int, size: int, eps: Any) -> None:
        rows, results = carray(states, (num_rows, size)), carray(result, (num_rows, size))
        weights = carray(weight, (size,))
        for row in range(num_rows):
            total = np.float32(0)
            for index in range(size):
                total += rows[row, index] * rows[row, index]
            factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + eps))
            for index in range(size):
                results[row, index] = rows[row, index] * factor * weights[index]

    return normalise
