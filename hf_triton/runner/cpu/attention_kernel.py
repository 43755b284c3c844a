# SPDX-License-Identifier: Apache-2.0
"""The kernel of decode attention, compiled by numba for this processor.

Keys and values are read once, in the dtype of the KV cache, and multiplied in 32 bits with all queries that share them.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu import llvm
from hf_triton.runner.cpu.llvm import FLOAT, LINE, WORD, compiled, intrinsic

COLUMNS_AHEAD: Final = 12
"""Columns that are prefetched ahead: the processor's own prefetching stops at each page."""

ZERO, HALF, ONE, MIN_EXPONENT, MINUS_INFINITY = map(np.float32, (0, 0.5, 1, -126, -np.inf))
LOG2_E, LN_2 = map(np.float32, (1.4426950408889634, 0.6931471805599453))
E2, E3, E4, E5, E6 = map(np.float32, (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720))  # Taylor series of e ** y

_read, _write, _long, _next, _fetch = llvm.read, llvm.write, llvm.long, llvm.next_number, llvm.fetch


class AttentionTask(NamedTuple):
    """Arguments of the kernel: sizes, strides in elements, and addresses."""

    progress: int
    """Address of two int64, zero at first: tasks taken so far, and threads."""
    lengths: int
    """Address of int64 `[rows]`: how many of its last columns each row sees, at least one."""
    rows: int
    key_heads: int
    heads_per_key: int
    """Adjacent heads that share keys and values."""
    heads_per_task: int
    """How many of those a thread computes together."""
    columns: int
    queries: int
    """Address of float32 `[rows, heads, size]`, scaled."""
    result: int
    """Address of float32 `[rows, heads, value_size]`."""
    scores: int
    """Address of float32 `[threads, heads_per_task, columns]`, working memory."""
    keys: int
    key_row: int
    key_head: int
    key_column: int
    values: int
    value_row: int
    value_head: int
    value_column: int


def run_attention(dtype: torch.dtype, size: int, value_size: int, task: AttentionTask, num_threads: int) -> None:
    """Run the kernel for keys and values of a dtype in `READERS`; the task's addresses must be valid."""
    llvm.run(compile_attention(dtype, size, value_size), task, num_threads)


@cache
def compile_attention(dtype: torch.dtype, size: int, value_size: int) -> Any:
    """Compile the kernel for heads of these sizes (queries and keys, values), in a second or two."""
    read, width = READERS[dtype], dtype.itemsize

    @compiled
    def fetch(address: int, stride: int, columns: int, size: int) -> None:
        for column in range(columns):
            for byte in range(0, size * width, LINE):
                _fetch(address + column * stride + byte)

    multiply, add_up = _score_function(read, fetch, size), _sum_function(read, fetch, value_size)

    @llvm.kernel_of(AttentionTask)
    def attend(address: Any) -> None:
        task = carray(address, 1)[0]
        parts = (task.heads_per_key + task.heads_per_task - 1) // task.heads_per_task
        scores = task.scores + 4 * _next(task.progress + 8) * task.heads_per_task * task.columns
        item = _next(task.progress)
        while item < task.rows * task.key_heads * parts:
            row, head = item // parts // task.key_heads, item // parts % task.key_heads
            first = item % parts * task.heads_per_task
            number, length = min(task.heads_per_task, task.heads_per_key - first), _long(task.lengths, row)
            column, query = task.columns - length, (row * task.key_heads + head) * task.heads_per_key + first
            key = row * task.key_row + head * task.key_head + column * task.key_column
            value = row * task.value_row + head * task.value_head + column * task.value_column
            queries, result = task.queries + 4 * query * size, task.result + 4 * query * value_size
            keys, key_stride = task.keys + width * key, width * task.key_column
            values, value_stride = task.values + width * value, width * task.value_column
            multiply(queries, number, keys, key_stride, length, scores, task.columns)
            fetch(values, value_stride, COLUMNS_AHEAD, value_size)
            for index in range(number):
                _softmax(scores + 4 * index * task.columns, length)
            add_up(scores, task.columns, number, values, value_stride, length, result)
            item = _next(task.progress)

    return attend


def _score_function(read: Any, fetch: Any, size: int) -> Any:
    @compiled
    def multiply(queries: int, group: int, keys: int, stride: int, length: int, scores: int, columns: int) -> None:
        """Scores `[group, columns]`, four columns at a time."""
        fours = length - length % 4
        for column in range(0, fours, 4):
            key = keys + column * stride
            fetch(key + COLUMNS_AHEAD * stride, stride, 4, size)
            for head in range(group):
                query, at = queries + 4 * head * size, head * columns + column
                score_0 = score_1 = score_2 = score_3 = ZERO
                for index in range(size):
                    number = _read(query, index)
                    score_0 += number * read(key, index)
                    score_1 += number * read(key + stride, index)
                    score_2 += number * read(key + 2 * stride, index)
                    score_3 += number * read(key + 3 * stride, index)
                _write(scores, at, score_0)
                _write(scores, at + 1, score_1)
                _write(scores, at + 2, score_2)
                _write(scores, at + 3, score_3)
        for column in range(fours, length):
            for head in range(group):
                score = ZERO
                for index in range(size):
                    score += _read(queries, head * size + index) * read(keys + column * stride, index)
                _write(scores, head * columns + column, score)

    return multiply


def _sum_function(read: Any, fetch: Any, value_size: int) -> Any:
    @compiled
    def add_up(weights: int, columns: int, group: int, values: int, stride: int, length: int, result: int) -> None:
        """Weighted sums `[group, value_size]` of the values, four columns at a time."""
        for index in range(group * value_size):
            _write(result, index, ZERO)
        fours = length - length % 4
        for column in range(0, fours, 4):
            value = values + column * stride
            fetch(value + COLUMNS_AHEAD * stride, stride, 4, value_size)
            for head in range(group):
                weight, total = weights + 4 * (head * columns + column), result + 4 * head * value_size
                weight_0, weight_1 = _read(weight, 0), _read(weight, 1)
                weight_2, weight_3 = _read(weight, 2), _read(weight, 3)
                for index in range(value_size):
                    first = weight_0 * read(value, index) + weight_1 * read(value + stride, index)
                    last = weight_2 * read(value + 2 * stride, index) + weight_3 * read(value + 3 * stride, index)
                    _write(total, index, _read(total, index) + (first + last))
        for column in range(fours, length):
            for head in range(group):
                weight, total = _read(weights, head * columns + column), result + 4 * head * value_size
                for index in range(value_size):
                    _write(total, index, _read(total, index) + weight * read(values + column * stride, index))

    return add_up


# --- other dtypes -----------------------------------------------------------------------------------------------------


def _of_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, WORD), WORD(16)), FLOAT)


READERS: Final = {torch.float32: _read, torch.bfloat16: llvm.reader(ir.IntType(16), 2, types.float32, _of_bfloat16)}
"""Read a number of keys or values, by dtype."""
if llvm.has("f16c") or (llvm.is_for_host() and not platform.machine().startswith("x86")):
    READERS[torch.float16] = llvm.reader(
        ir.HalfType(), 2, types.float32, lambda builder, number: builder.fpext(number, FLOAT)
    )


# --- softmax ---------------------------------------------------------------------------------------------------------


@intrinsic
def _power_of_two(context: Any, exponent: Any) -> Any:
    """`2 ** exponent` for a whole number from -126 on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        biased = builder.add(builder.fptosi(arguments[0], WORD), WORD(127))
        return builder.bitcast(builder.shl(biased, WORD(23)), FLOAT)

    return types.float32(types.float32), generate


@compiled
def _softmax(scores: int, num: int) -> None:
    """Softmax in index. nan or inf make all scores nan; if all are -inf, all become zero, as in torch.

    `e ** x = 2 ** n * e ** y` with a whole n and `|y| <= ln(2) / 2`, for which seven terms of the series are exact in
    32 bits.
    """
    most = _read(scores, 0)
    for index in range(1, num):
        most = _read(scores, index) if _read(scores, index) > most else most
    if most == MINUS_INFINITY:
        for index in range(num):
            _write(scores, index, ZERO)
        return
    total = ZERO
    for index in range(num):
        exponent = (_read(scores, index) - most) * LOG2_E
        exponent = MIN_EXPONENT if exponent < MIN_EXPONENT else exponent
        whole = np.floor(exponent + HALF)
        y = (exponent - whole) * LN_2
        power = ((((((E6 * y + E5) * y + E4) * y + E3) * y + E2) * y + ONE) * y + ONE) * _power_of_two(whole)
        _write(scores, index, power)
        total += power
    share = ONE / total
    for index in range(num):
        _write(scores, index, _read(scores, index) * share)
