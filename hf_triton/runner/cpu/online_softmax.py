# SPDX-License-Identifier: Apache-2.0
"""The softmax of kernels that see their scores in parts, in plain numba (https://arxiv.org/abs/1805.02867)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hf_triton.runner.cpu.llvm import MATH

ZERO, HALF, ONE, TWO, MIN_EXPONENT, MINUS_INFINITY = map(np.float32, (0, 0.5, 1, 2, -126, -np.inf))
LOG2_E, LN_2, LARGE = map(np.float32, (1.4426950408889634, 0.6931471805599453, 15))
E2, E3, E4, E5, E6 = map(np.float32, (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720))  # Taylor series of e ** y
BIAS, MANTISSA_BITS = np.int32(127), np.int32(23)

# Inlined, strides become constants: a tenth faster. Kernels alone call these: a quarter less to compile.
inlined: Any = njit(  # type: ignore[call-overload]
    fastmath=MATH, error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@inlined
def soften(scores: Any, softcap: Any, state: Any, sums: Any) -> None:
    """Replace scores by `e ** (score - maximum)`; total and sums so far move to the new maximum.

    nan or inf make the total nan; if all scores are -inf, total and sums stay zero, as in torch.
    """
    if softcap != ZERO:
        for column in range(len(scores)):
            scores[column] = softcap * _tanh(scores[column] / softcap)
    most = state[0]
    for column in range(len(scores)):
        most = scores[column] if scores[column] > most else most
    if most == MINUS_INFINITY:
        for column in range(len(scores)):
            scores[column] = ZERO if scores[column] == MINUS_INFINITY else scores[column]  # nan stays
            state[1] += scores[column]
        return
    if most != state[0]:
        factor = _power(state[0] - most)
        state[0] = most
        state[1] *= factor
        for index in range(len(sums)):
            sums[index] *= factor
    total = ZERO
    for column in range(len(scores)):
        power = _power(scores[column] - most)
        scores[column] = power
        total += power
    state[1] += total


@inlined
def _power(x: Any) -> Any:
    """`e ** x` from -87 to 87, a little above zero for less.

    `e ** x = 2 ** n * e ** y` with a whole n and `|y| <= ln(2) / 2`, for which seven terms of the series are exact in
    32 bits.
    """
    exponent = x * LOG2_E
    exponent = MIN_EXPONENT if exponent < MIN_EXPONENT else exponent
    whole = np.floor(exponent + HALF)
    y = (exponent - whole) * LN_2
    factor = np.int32((np.int32(whole) + BIAS) << MANTISSA_BITS).view(np.float32)
    return ((((((E6 * y + E5) * y + E4) * y + E3) * y + E2) * y + ONE) * y + ONE) * factor


@inlined
def _tanh(x: Any) -> Any:
    """Rounds to 1 from `LARGE` on; nan stays."""
    x = LARGE if x > LARGE else x
    return ONE - TWO / (_power(TWO * x) + ONE)
