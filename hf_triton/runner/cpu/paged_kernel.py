# SPDX-License-Identifier: Apache-2.0
"""The kernel of decode attention over blocks, compiled by numba for this processor.

A task is one row and some of its heads. It goes through the row's blocks once: a block's keys of all its heads, which
lie side by side, then their values. Maximum and total of the softmax move on from block to block
(https://arxiv.org/abs/1805.02867), so a block's scores are all the working memory.

Plain numba, but for three instructions that it lacks: an atomic counter, prefetching and the conversion of float16.
Without prefetching the kernel takes 1.1 to 1.5 times as long, least in float32 (16 rows of 256 to 2,048 tokens, one
thread: the processor's own prefetching stops at each page); with float16 converted by integers, 1.8 times.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu import llvm
from hf_triton.runner.cpu.llvm import FLOAT, LINE, MATH, fetch, intrinsic, next_number
from hf_triton.runner.cpu.online_softmax import MINUS_INFINITY, ONE, ZERO, inlined, soften
from hf_triton.runner.cpu.paged_attention import COLUMNS

COLUMNS_AHEAD: Final = 48
"""Tokens that are prefetched ahead, from the next run of memory where one ends."""

HALF_BITS: Final = np.uint32(16)


TASK_FIELDS: Final = (
    "task",  # address of these integers themselves
    "query",  # address of KV `[rows, heads, size]`, with strides
    "keys",  # address of KV `[rows, key_heads, size]`, with strides: each row's newest token, which the kernel writes
    "values",
    "key_blocks",  # address of KV `[blocks, key_heads, block_size, size]`
    "value_blocks",
    "tables",  # address of int32 `[rows, width]`: the blocks of each row
    "lengths",  # address of int64 `[rows]`: tokens of each row, at least one
    "sinks",  # address of float32 `[heads]`
    "result",  # address of float32 `[rows, heads, value_size]`
    "queries",  # address of float32 `[threads, heads_per_task, size]`, working memory
    "scores",  # address of float32 `[threads, heads_per_task, block_size]`, working memory
    "sums",  # address of float32 `[threads, heads_per_task + 1, value_size]`, working memory; the last row is not read
    "states",  # address of float32 `[threads, heads_per_task, 2]`, working memory: maximum and total of the softmax
    "next_task",  # zero at first: tasks taken so far
    "next_thread",  # zero at first
    *("num_threads", "rows", "key_heads"),
    "heads_per_key",  # adjacent heads that share keys and values
    *("heads_per_task", "block_size", "width"),
    "window",  # how many of its last tokens a row attends to; 0: all
    "has_tokens",  # whether there are `keys` and `values` to write
    "has_sinks",
    *("query_row", "query_head", "query_number"),
    *("key_row", "key_head", "key_number"),
    *("value_row", "value_head", "value_number"),
)
"""Arguments of the kernel, int64: addresses, sizes, and strides in elements; "KV" is the dtype of the KV cache.

Two float64 follow: the scale of scores, and their softcap; 0: none.
"""
TASK, QUERY, KEYS, VALUES, KEY_BLOCKS, VALUE_BLOCKS, TABLES, LENGTHS, SINKS, RESULT = range(10)
QUERIES, SCORES, SUMS, STATES = range(10, 14)
NEXT_TASK, NEXT_THREAD = (8 * TASK_FIELDS.index(name) for name in ("next_task", "next_thread"))
RECORD: Final = np.dtype(
    [*((name, np.int64) for name in TASK_FIELDS), *((name, np.float64) for name in ("scale", "softcap"))]
)


@cache
def compile_attention(dtype: torch.dtype, size: int, value_size: int, heads_together: int) -> Any:
    """Compile the kernel for heads of these sizes (queries and keys, values), in two to four seconds.

    The dtype is in `WIDENED`; two heads are computed together where heads share keys, else one.
    """
    number, widened = WIDENED[dtype]
    key_bytes, value_bytes = size * dtype.itemsize, value_size * dtype.itemsize
    multiply = _score_function(widened, size, key_bytes, heads_together)
    add_up = _sum_function(widened, value_size, value_bytes, heads_together)

    @cfunc(types.void(types.CPointer(types.voidptr)), fastmath=MATH, error_model="numpy")  # type: ignore[no-untyped-call]
    def attend(addresses: Any) -> None:
        task = carray(addresses[TASK], 1, RECORD)[0]
        rows, key_heads, heads_per_key, block_size = task.rows, task.key_heads, task.heads_per_key, task.block_size
        heads, per_task = key_heads * heads_per_key, task.heads_per_task
        query = carray(addresses[QUERY], 1, number)
        keys, values = carray(addresses[KEYS], 1, number), carray(addresses[VALUES], 1, number)
        key_blocks = carray(addresses[KEY_BLOCKS], (1, key_heads, block_size, size), number)
        value_blocks = carray(addresses[VALUE_BLOCKS], (1, key_heads, block_size, value_size), number)
        tables = carray(addresses[TABLES], (rows, task.width), np.int32)
        lengths = carray(addresses[LENGTHS], rows, np.int64)
        sinks = carray(addresses[SINKS], heads, np.float32)
        result = carray(addresses[RESULT], (rows, heads, value_size), np.float32)
        thread = next_number(task.task + NEXT_THREAD)
        queries = carray(addresses[QUERIES], (task.num_threads, per_task, size), np.float32)[thread]
        scores = carray(addresses[SCORES], (task.num_threads, per_task, block_size), np.float32)[thread]
        sums = carray(addresses[SUMS], (task.num_threads, per_task + 1, value_size), np.float32)[thread]
        states = carray(addresses[STATES], (task.num_threads, per_task, 2), np.float32)[thread]
        scale, softcap = np.float32(task.scale), np.float32(task.softcap)
        key_run, value_run = block_size * key_bytes, block_size * value_bytes
        parts = (heads + per_task - 1) // per_task
        item = next_number(task.task + NEXT_TASK)
        while item < rows * parts:
            row, first = item // parts, item % parts * per_task
            last = min(heads, first + per_task)
            first_key, last_key = first // heads_per_key, (last - 1) // heads_per_key
            newest, oldest = lengths[row] - 1, max(0, lengths[row] - task.window) if task.window else 0
            if task.has_tokens:
                block, column = tables[row, newest // block_size], newest % block_size
                for head in range(first_key, last_key + 1):
                    key = row * task.key_row + head * task.key_head
                    value = row * task.value_row + head * task.value_head
                    _write(keys, key, task.key_number, key_blocks[block, head, column])
                    _write(values, value, task.value_number, value_blocks[block, head, column])
            for head in range(first, last):
                start = row * task.query_row + head * task.query_head
                for index in range(size):
                    queries[head - first, index] = widened(query[start + index * task.query_number]) * scale
                sums[head - first] = ZERO
                states[head - first, 0] = sinks[head] if task.has_sinks else MINUS_INFINITY
                states[head - first, 1] = ONE if task.has_sinks else ZERO
            for place in range(oldest // block_size, newest // block_size + 1):
                block, following = tables[row, place], tables[row, min(place + 1, newest // block_size)]
                begin, end = max(0, oldest - place * block_size), min(block_size, newest + 1 - place * block_size)
                key = task.key_blocks + (block * key_heads + first_key) * key_run
                value = task.value_blocks + (block * key_heads + first_key) * value_run
                following_key = task.key_blocks + (following * key_heads + first_key) * key_run
                for head in range(first_key, last_key + 1):
                    low = max(0, head * heads_per_key - first)
                    high = min(last, (head + 1) * heads_per_key) - first
                    further = key + key_run if head < last_key else value
                    multiply(queries[low:high], key_blocks[block, head, :end], scores[low:high], key, further)
                    for member in range(low, high):
                        soften(scores[member, begin:end], softcap, states[member], sums[member])
                    key = further
                for head in range(first_key, last_key + 1):
                    low = max(0, head * heads_per_key - first)
                    high = min(last, (head + 1) * heads_per_key) - first
                    further = value + value_run if head < last_key else following_key
                    weights, shown = scores[low:high, begin:end], value_blocks[block, head, begin:end]
                    add_up(weights, shown, sums[low:], value, further)
                    value = further
            for head in range(first, last):
                total = states[head - first, 1]  # zero where all scores are -inf; so are the sums then
                share = ONE / total if total != ZERO else ZERO
                for index in range(value_size):
                    result[row, head, index] = sums[head - first, index] * share
            item = next_number(task.task + NEXT_TASK)

    return attend


def _score_function(widened: Any, size: int, num_bytes: int, heads_together: int) -> Any:
    @inlined
    def multiply(queries: Any, keys: Any, scores: Any, here: int, further: int) -> None:
        """Scores `[heads, columns]` of queries `[heads, size]` and keys `[columns, size]`, `COLUMNS` at a time.

        The last ones may lie behind the keys, but in their block; those scores are not read. If the number of heads is
        odd, the last one is its own `other`.
        """
        for column in range(0, len(keys), COLUMNS):
            _fetch_ahead(here, further, column, len(keys), num_bytes)
            key_0, key_1, key_2, key_3 = keys[column], keys[column + 1], keys[column + 2], keys[column + 3]
            for head in range(0, len(queries), heads_together):
                other = head + 1 if heads_together > 1 and head + 1 < len(queries) else head
                query, query_of_other = queries[head], queries[other]
                a_0 = a_1 = a_2 = a_3 = b_0 = b_1 = b_2 = b_3 = ZERO
                for index in range(size):
                    a, b = query[index], query_of_other[index]
                    number_0, number_1 = widened(key_0[index]), widened(key_1[index])
                    number_2, number_3 = widened(key_2[index]), widened(key_3[index])
                    a_0 += a * number_0
                    a_1 += a * number_1
                    a_2 += a * number_2
                    a_3 += a * number_3
                    b_0 += b * number_0
                    b_1 += b * number_1
                    b_2 += b * number_2
                    b_3 += b * number_3
                scores[head, column], scores[head, column + 1] = a_0, a_1
                scores[head, column + 2], scores[head, column + 3] = a_2, a_3
                scores[other, column], scores[other, column + 1] = b_0, b_1
                scores[other, column + 2], scores[other, column + 3] = b_2, b_3

    return multiply


def _sum_function(widened: Any, value_size: int, num_bytes: int, heads_together: int) -> Any:
    @inlined
    def add_up(weights: Any, values: Any, sums: Any, here: int, further: int) -> None:
        """Add values `[columns, value_size]`, weighted, to sums `[heads, value_size]`, `COLUMNS` at a time.

        The last of all sums takes what the last head's own `other` adds if the number of heads is odd.
        """
        heads, columns = weights.shape
        whole = columns - columns % COLUMNS
        for column in range(0, whole, COLUMNS):
            _fetch_ahead(here, further, column, columns, num_bytes)
            value_0, value_1 = values[column], values[column + 1]
            value_2, value_3 = values[column + 2], values[column + 3]
            for head in range(0, heads, heads_together):
                other = head + 1 if heads_together > 1 and head + 1 < heads else head
                sums_of_head, sums_of_other = sums[head], sums[other if other > head else len(sums) - 1]
                a_0, a_1 = weights[head, column], weights[head, column + 1]
                a_2, a_3 = weights[head, column + 2], weights[head, column + 3]
                b_0, b_1 = weights[other, column], weights[other, column + 1]
                b_2, b_3 = weights[other, column + 2], weights[other, column + 3]
                for index in range(value_size):
                    number_0, number_1 = widened(value_0[index]), widened(value_1[index])
                    number_2, number_3 = widened(value_2[index]), widened(value_3[index])
                    sums_of_head[index] += (a_0 * number_0 + a_1 * number_1) + (a_2 * number_2 + a_3 * number_3)
                    if heads_together > 1:
                        sums_of_other[index] += (b_0 * number_0 + b_1 * number_1) + (b_2 * number_2 + b_3 * number_3)
        for column in range(whole, columns):
            for head in range(heads):
                for index in range(value_size):
                    sums[head, index] += weights[head, column] * widened(values[column, index])

    return add_up


@inlined
def _write(numbers: Any, start: int, stride: int, target: Any) -> None:
    for index in range(len(target)):
        target[index] = numbers[start + index * stride]


@inlined
def _fetch_ahead(here: int, further: int, column: int, columns: int, num_bytes: int) -> None:
    """Prefetch the tokens that lie `COLUMNS_AHEAD` ahead, or in the run of memory that follows."""
    ahead = column + COLUMNS_AHEAD
    start = here + ahead * num_bytes if ahead < columns else further + (ahead - columns) * num_bytes
    for byte in range(0, COLUMNS * num_bytes, LINE):
        fetch(start + byte)


# --- dtypes ----------------------------------------------------------------------------------------------------------


@inlined
def _of_float32(number: Any) -> Any:
    return number


@inlined
def _of_bfloat16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << HALF_BITS).view(np.float32)


@intrinsic
def _of_float16(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), FLOAT)

    return types.float32(types.uint16), generate


WIDENED: Final[dict[torch.dtype, tuple[Any, Any]]] = {
    torch.float32: (np.float32, _of_float32),
    torch.bfloat16: (np.uint16, _of_bfloat16),
}
"""How the kernel reads a dtype's numbers, and widens them to float32."""
if llvm.has("f16c") or (llvm.is_for_host() and not platform.machine().startswith("x86")):
    WIDENED[torch.float16] = np.uint16, _of_float16
