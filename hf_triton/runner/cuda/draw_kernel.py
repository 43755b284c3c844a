# SPDX-License-Identifier: Apache-2.0
"""A kernel in Triton's language that draws a token of each row of scores: one program a row.

The program reads its row again and again, from the GPU's cache after the first time: for the highest and the lowest
score, for each step of the searches for the lowest score that top_k and top_p keep, and for the draw. A step of a
search halves the range of scores and moves its bounds to scores that the row has. So each step leaves fewer, the search
ends for any row, and a vocabulary of 128,256 random scores takes 5 to 22 steps.

Importing it imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

MAX_BLOCK: Final = 8192
"""Scores that a program holds at a time."""
SCORES_PER_WARP: Final = 512

COLUMNS: Final = ["temperatures", "top_ks", "top_ps", "min_ps", "keys"]
"""Views of one tensor, whose alignment depends on the number of rows; a kernel for each would be compiled when it is
drawn with."""

LEAST = tl.constexpr(-1e30)
"""Replaces NaN, so that it is drawn where all else is banned."""
MOST = tl.constexpr(1e30)
"""Replaces infinity, so that differences are numbers."""
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


def draw(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """`hf_triton.sampling.draw.draw` on a device.

    Args:
        scores: `[rows, vocabulary]`, any float dtype and strides.
        temperature: `[rows]` float64, as top_p and min_p.
        top_k: `[rows]` int64.
        top_p: 1 keeps all tokens.
        min_p: 0 keeps all tokens.
        keys: `[rows]` int64, the bits of the draws' keys.

    Returns:
        `[rows]` int64.
    """
    num_rows, size = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(scores):
        draw_kernel[(num_rows,)](
            scores, scores.stride(0), size, temperature, top_k, top_p, min_p, keys, tokens,
            BLOCK=block, num_warps=max(1, block // SCORES_PER_WARP),
        )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def draw_kernel(
    scores,
    row_stride,
    size,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    tokens,
    BLOCK: tl.constexpr,
):
    """Draw the token of the program's row."""
    program = tl.program_id(0)
    row = scores + program.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + program).to(tl.float32)
    top_k = tl.load(top_ks + program)
    top_p = tl.load(top_ps + program).to(tl.float32)
    min_p = tl.load(min_ps + program).to(tl.float32)
    floor = tl.full([], -INFINITY, tl.float32)
    cuts_by_count = (top_k > 0) & (top_k < size)
    if cuts_by_count | (top_p < 1) | (min_p > 0):
        least, peak = _range(row, size, BLOCK)
        factor = LOG2_E / temperature
        if cuts_by_count:
            floor = _floor(row, size, least, peak, peak, factor, top_k.to(tl.float32), False, BLOCK)
        if top_p < 1:
            mass, _above, _below = _weigh(row, size, floor, peak, factor, True, BLOCK)
            floor = _floor(row, size, tl.maximum(floor, least), peak, peak, factor, top_p * mass, True, BLOCK)
        if min_p > 0:
            floor = tl.maximum(floor, peak + temperature * tl.log(min_p))
    tl.store(tokens + program, _pick(row, size, floor, temperature, tl.load(keys + program), BLOCK))


@triton.jit
def _floor(row, size, low, high, peak, factor, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest score of the row, from `low` to `high`, such that the scores from it on weigh `target` or more."""
    while low < high:
        middle = low + (high - low) * 0.5
        pivot = tl.where(middle > low, middle, high)
        weight, above, below = _weigh(row, size, pivot, peak, factor, BY_MASS, BLOCK)
        is_reached = weight >= target
        low = tl.where(is_reached, above, low)
        high = tl.where(is_reached, high, below)
    return low


@triton.jit
def _weigh(row, size, pivot, peak, factor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The number or mass of the scores from `pivot` on, the lowest of them, and the highest below it."""
    weight = tl.zeros([BLOCK], tl.float32)
    above = tl.full([BLOCK], INFINITY, tl.float32)
    below = tl.full([BLOCK], -INFINITY, tl.float32)
    for start in range(0, size, BLOCK):
        _columns, scores = _load(row, start, size, BLOCK)
        is_above = scores >= pivot
        if BY_MASS:
            weight += tl.where(is_above, tl.exp2((scores - peak) * factor), 0.0)
        else:
            weight += tl.where(is_above, 1.0, 0.0)
        above = tl.minimum(above, tl.where(is_above, scores, INFINITY))
        below = tl.maximum(below, tl.where(is_above, -INFINITY, scores))
    return tl.sum(weight, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _range(row, size, BLOCK: tl.constexpr):
    """The lowest score above minus infinity, and the highest."""
    least = tl.full([BLOCK], INFINITY, tl.float32)
    peak = tl.full([BLOCK], -INFINITY, tl.float32)
    for start in range(0, size, BLOCK):
        _columns, scores = _load(row, start, size, BLOCK)
        least = tl.minimum(least, tl.where(scores > -INFINITY, scores, INFINITY))
        peak = tl.maximum(peak, scores)
    return tl.min(least, 0), tl.max(peak, 0)


@triton.jit
def _pick(row, size, floor, temperature, key, BLOCK: tl.constexpr):
    """The token of the highest sum of score and noise, the first of several; scores below `floor` are out."""
    best = tl.full([BLOCK], -INFINITY, tl.float32)
    tokens = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        columns, scores = _load(row, start, size, BLOCK)
        sums = tl.where(scores >= floor, tl.div_rn(scores, temperature) + _noise(columns, key), -INFINITY)
        tokens = tl.where(sums > best, columns, tokens)
        best = tl.maximum(best, sums)
    return tl.min(tl.where(best == tl.max(best, 0), tokens, size), 0)


@triton.jit
def _load(row, start, size, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    scores = tl.load(row + columns, mask=columns < size, other=-INFINITY).to(tl.float32)
    return columns, tl.minimum(tl.where(scores == scores, scores, LEAST), MOST)


@triton.jit
def _noise(columns, key):
    """`gumbel_noise` of tokens, bit by bit up to the logarithms; Triton has no `log1p`."""
    bits = columns + key.to(tl.int32)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= (key >> 32).to(tl.int32)
    bits ^= bits >> 15
    bits *= 0x846CA68B - 2**32
    bits ^= bits >> 16
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    rest = 1 - uniform
    lost = tl.where(rest < 1, 1 - rest, 1.0)  # its logarithm's error, by which Kahan corrects it (HP-15C, 1982)
    surprise = tl.where(rest < 1, -tl.log(rest) * (uniform / lost), uniform)
    return -tl.log(surprise)
