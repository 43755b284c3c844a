# SPDX-License-Identifier: Apache-2.0
"""The kernel of decode attention over blocks, compiled by numba for this processor.

A task is one row and some of the heads that share a key head. It goes through the row's blocks once and keeps the
softmax's maximum and total as it goes (https://arxiv.org/abs/1805.02867), so its working memory is one block's scores.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu.llvm import MATH, compiled, next_number

ZERO, HALF, ONE, TWO, MIN_EXPONENT, MINUS_INFINITY = map(np.float32, (0, 0.5, 1, 2, -126, -np.inf))
LOG2_E, LN_2, LARGE = map(np.float32, (1.4426950408889634, 0.6931471805599453, 15))
E2, E3, E4, E5, E6 = map(np.float32, (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720))  # Taylor series of e ** y
BIAS, MANTISSA_BITS, HALF_BITS = np.int32(127), np.int32(23), np.uint32(16)


class PagedTask(NamedTuple):
    """Arguments of the kernel: addresses, sizes, and strides in elements. `dtype` is that of the KV cache."""

    task: int
    """Address of these integers themselves."""
    factors: int
    """Address of float64 `[2]`: scale, and softcap; 0: none."""
    query: int
    """Address of dtype `[rows, heads, size]`, with strides."""
    keys: int
    """Address of dtype `[rows, key_heads, size]`, with strides: each row's newest token, which the kernel writes."""
    values: int
    key_blocks: int
    """Address of dtype `[blocks, key_heads, block_size, size]`."""
    value_blocks: int
    tables: int
    """Address of int32 `[rows, width]`: the blocks of each row."""
    lengths: int
    """Address of int64 `[rows]`: tokens of each row, at least one."""
    sinks: int
    """Address of float32 `[heads]`."""
    result: int
    """Address of float32 `[rows, heads, value_size]`."""
    queries: int
    """Address of float32 `[threads, heads_per_task, size]`, working memory."""
    scores: int
    """Address of float32 `[threads, heads_per_task, block_size]`, working memory."""
    states: int
    """Address of float32 `[threads, heads_per_task, 2]`, working memory: the maximum and the total of the softmax."""
    next_task: int
    """Zero at first: tasks taken so far."""
    next_thread: int
    rows: int
    key_heads: int
    heads_per_key: int
    """Adjacent heads that share keys and values."""
    heads_per_task: int
    """How many of those a thread computes together."""
    num_threads: int
    width: int
    window: int
    """How many of its last tokens a row attends to; 0: all."""
    has_tokens: int
    """Whether there are `keys` and `values` to write."""
    has_sinks: int
    query_row: int
    query_head: int
    query_number: int
    key_row: int
    key_head: int
    key_number: int
    value_row: int
    value_head: int
    value_number: int


TASK, FACTORS, QUERY, KEYS, VALUES, KEY_BLOCKS, VALUE_BLOCKS, TABLES, LENGTHS, SINKS, RESULT = range(11)
QUERIES, SCORES, STATES = range(11, 14)
NEXT_TASK, NEXT_THREAD = (8 * PagedTask._fields.index(name) for name in ("next_task", "next_thread"))
RECORD: Final = np.dtype([(name, np.int64) for name in PagedTask._fields])


@cache
def compile_attention(dtype: torch.dtype, size: int, value_size: int, block_size: int) -> Any:
    """Compile the kernel for heads of these sizes (queries and keys, values), in a second or two."""
    number, widened = WIDENED[dtype]
    multiply, add_up = _score_function(widened, size), _sum_function(widened, value_size)

    @cfunc(types.void(types.CPointer(types.voidptr)), fastmath=MATH, error_model="numpy")  # type: ignore[no-untyped-call]
    def attend(addresses: Any) -> None:
        task = carray(addresses[TASK], 1, RECORD)[0]
        heads, parts = task.key_heads * task.heads_per_key, -(-task.heads_per_key // task.heads_per_task)
        factors = carray(addresses[FACTORS], 2, np.float64)
        query = carray(addresses[QUERY], 1, number)
        keys, values = carray(addresses[KEYS], 1, number), carray(addresses[VALUES], 1, number)
        key_blocks = carray(addresses[KEY_BLOCKS], (1, task.key_heads, block_size, size), number)
        value_blocks = carray(addresses[VALUE_BLOCKS], (1, task.key_heads, block_size, value_size), number)
        tables = carray(addresses[TABLES], (task.rows, task.width), np.int32)
        lengths = carray(addresses[LENGTHS], task.rows, np.int64)
        sinks = carray(addresses[SINKS], heads, np.float32)
        result = carray(addresses[RESULT], (task.rows, heads, value_size), np.float32)
        shape = task.num_threads, task.heads_per_task
        thread = next_number(task.task + NEXT_THREAD)
        queries = carray(addresses[QUERIES], (*shape, size), np.float32)[thread]
        scores = carray(addresses[SCORES], (*shape, block_size), np.float32)[thread]
        states = carray(addresses[STATES], (*shape, 2), np.float32)[thread]
        scale, softcap = np.float32(factors[0]), np.float32(factors[1])
        item = next_number(task.task + NEXT_TASK)
        while item < task.rows * task.key_heads * parts:
            row, head = item // parts // task.key_heads, item // parts % task.key_heads
            skipped = item % parts * task.heads_per_task
            group, first = min(task.heads_per_task, task.heads_per_key - skipped), head * task.heads_per_key + skipped
            length = lengths[row]
            if task.has_tokens:
                block, offset = tables[row, (length - 1) // block_size], (length - 1) % block_size
                start = row * task.key_row + head * task.key_head
                for index in range(size):
                    key_blocks[block, head, offset, index] = keys[start + index * task.key_number]
                start = row * task.value_row + head * task.value_head
                for index in range(value_size):
                    value_blocks[block, head, offset, index] = values[start + index * task.value_number]
            for member in range(group):
                start = row * task.query_row + (first + member) * task.query_head
                for index in range(size):
                    queries[member, index] = widened(query[start + index * task.query_number]) * scale
                states[member, 0] = sinks[first + member] if task.has_sinks else MINUS_INFINITY
                states[member, 1] = ONE if task.has_sinks else ZERO
            sums = result[row, first : first + group]
            sums[:] = ZERO
            oldest = max(0, length - task.window) if task.window else 0
            for place in range(oldest // block_size, (length + block_size - 1) // block_size):
                block, begin = tables[row, place], max(0, oldest - place * block_size)
                end = min(block_size, length - place * block_size)
                multiply(queries[:group], key_blocks[block, head, begin:end], scores)
                for member in range(group):
                    if softcap:
                        _cap(scores[member], end - begin, softcap)
                    _soften(scores[member], end - begin, states[member], sums[member])
                add_up(scores, value_blocks[block, head, begin:end], sums)
            for member in range(group):
                _divide(sums[member], states[member])
            item = next_number(task.task + NEXT_TASK)

    return attend


def _score_function(widened: Any, size: int) -> Any:
    @compiled
    def multiply(queries: Any, keys: Any, scores: Any) -> None:
        """Scores `[heads, columns]` of queries `[heads, size]` and keys `[columns, size]`, four columns at a time."""
        length = len(keys)
        fours = length - length % 4
        for column in range(0, fours, 4):
            for head in range(len(queries)):
                score_0 = score_1 = score_2 = score_3 = ZERO
                for index in range(size):
                    number = queries[head, index]
                    score_0 += number * widened(keys[column, index])
                    score_1 += number * widened(keys[column + 1, index])
                    score_2 += number * widened(keys[column + 2, index])
                    score_3 += number * widened(keys[column + 3, index])
                scores[head, column], scores[head, column + 1] = score_0, score_1
                scores[head, column + 2], scores[head, column + 3] = score_2, score_3
        for column in range(fours, length):
            for head in range(len(queries)):
                score = ZERO
                for index in range(size):
                    score += queries[head, index] * widened(keys[column, index])
                scores[head, column] = score

    return multiply


def _sum_function(widened: Any, value_size: int) -> Any:
    @compiled
    def add_up(weights: Any, values: Any, sums: Any) -> None:
        """Add values `[columns, value_size]`, weighted, to sums `[heads, value_size]`, four columns at a time."""
        length = len(values)
        fours = length - length % 4
        for column in range(0, fours, 4):
            for head in range(len(sums)):
                weight_0, weight_1 = weights[head, column], weights[head, column + 1]
                weight_2, weight_3 = weights[head, column + 2], weights[head, column + 3]
                for index in range(value_size):
                    first = weight_0 * widened(values[column, index]) + weight_1 * widened(values[column + 1, index])
                    last = weight_2 * widened(values[column + 2, index]) + weight_3 * widened(values[column + 3, index])
                    sums[head, index] += first + last
        for column in range(fours, length):
            for head in range(len(sums)):
                weight = weights[head, column]
                for index in range(value_size):
                    sums[head, index] += weight * widened(values[column, index])

    return add_up


# --- other dtypes -----------------------------------------------------------------------------------------------------


@compiled
def _of_float32(number: Any) -> Any:
    return number


@compiled
def _of_bfloat16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << HALF_BITS).view(np.float32)


@compiled
def _of_float16(bits: Any) -> Any:
    """Exponent and mantissa move to where float32 has them; the product mends the exponent, subnormal numbers too."""
    word = np.uint32(bits)
    size = np.uint32((word & MAGNITUDE) << SHIFT).view(np.float32) * REBIAS
    size = INFINITY if (word & MAGNITUDE) == INFINITE else size
    size = NAN if (word & MAGNITUDE) > INFINITE else size
    return -size if word & SIGN else size


MAGNITUDE, INFINITE, SIGN, SHIFT = map(np.uint32, (0x7FFF, 0x7C00, 0x8000, 13))
REBIAS, INFINITY, NAN = map(np.float32, (2.0**112, np.inf, np.nan))
WIDENED: Final[dict[torch.dtype, tuple[Any, Any]]] = {
    torch.float32: (np.float32, _of_float32),
    torch.bfloat16: (np.uint16, _of_bfloat16),
    torch.float16: (np.uint16, _of_float16),
}
"""How the kernel reads a dtype's numbers, and widens them to float32."""


# --- softmax ---------------------------------------------------------------------------------------------------------


@compiled
def _power(x: Any) -> Any:
    """`e ** x` in 32 bits for x from -87 to 87, a little above zero for less.

    `e ** x = 2 ** n * e ** y` with a whole n and `|y| <= ln(2) / 2`, for which seven terms of the series are exact.
    """
    exponent = x * LOG2_E
    exponent = MIN_EXPONENT if exponent < MIN_EXPONENT else exponent
    whole = np.floor(exponent + HALF)
    y = (exponent - whole) * LN_2
    factor = np.int32((np.int32(whole) + BIAS) << MANTISSA_BITS).view(np.float32)
    return ((((((E6 * y + E5) * y + E4) * y + E3) * y + E2) * y + ONE) * y + ONE) * factor


@compiled
def _soften(scores: Any, num: int, state: Any, sums: Any) -> None:
    """Replace scores by `e ** (score - maximum)`; total and sums so far move to the new maximum.

    nan or inf make the total nan.
    """
    most = state[0]
    for index in range(num):
        most = scores[index] if scores[index] > most else most
    if most == MINUS_INFINITY:
        for index in range(num):  # zero, as in torch, but nan stays
            scores[index] = ZERO if scores[index] == MINUS_INFINITY else scores[index]
            state[1] += scores[index]
        return
    if most != state[0]:
        factor = _power(state[0] - most)
        state[0] = most
        state[1] *= factor
        for index in range(len(sums)):
            sums[index] *= factor
    total = ZERO
    for index in range(num):
        power = _power(scores[index] - most)
        scores[index] = power
        total += power
    state[1] += total


@compiled
def _divide(sums: Any, state: Any) -> None:
    """Divide by the softmax's total, which is zero where all scores are -inf; the sums are zero then, too."""
    share = ONE / state[1] if state[1] != ZERO else ZERO
    for index in range(len(sums)):
        sums[index] *= share


@compiled
def _cap(scores: Any, num: int, softcap: Any) -> None:
    """`softcap * tanh(score / softcap)`."""
    for index in range(num):
        x = scores[index] / softcap
        x = LARGE if x > LARGE else x
        scores[index] = softcap * (ONE - TWO / (_power(TWO * x) + ONE))
