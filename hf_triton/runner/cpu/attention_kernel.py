# SPDX-License-Identifier: Apache-2.0
"""Attention of one token, compiled by numba for the processor that it runs on.

Keys and values are read once, in the dtype they are kept in, and multiplied in 32 bits with all the queries that share
them.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu import llvm as machine
from hf_triton.runner.cpu.llvm import FLOAT, LINE, WORD, compiled, intrinsic

AHEAD: Final = 12
"""Columns ahead of what is computed that are brought into the processor's cache: by itself it stops at each page."""

ZERO, HALF, ONE, LEAST, NOTHING = map(np.float32, (0, 0.5, 1, -126, -np.inf))
LOG2_E, LN_2 = map(np.float32, (1.4426950408889634, 0.6931471805599453))
E2, E3, E4, E5, E6 = map(np.float32, (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720))  # of the series of e ** y

_read, _write, _long, _next, _fetch = machine.read, machine.write, machine.long, machine.next_number, machine.fetch


class Task(NamedTuple):
    """What to compute: numbers, strides in numbers of the dtype, and addresses."""

    progress: int
    """Where two int64 are, at zero: of what is done, and of threads."""
    lengths: int
    """Of int64 `[rows]`: how many of its last columns each row sees, one at least."""
    rows: int
    key_heads: int
    sharing: int
    """Heads that have the keys of one, neighbours of each other."""
    at_a_time: int
    """How many of them a thread computes together."""
    columns: int
    queries: int
    """Of float32 `[rows, heads, size]`, scaled."""
    found: int
    """Of float32 `[rows, heads, value_size]`, where the result goes."""
    room: int
    """Of float32 `[threads, at_a_time, columns]`, for scores."""
    keys: int
    key_row: int
    key_head: int
    key_column: int
    values: int
    value_row: int
    value_head: int
    value_column: int


def run(dtype: torch.dtype, size: int, value_size: int, task: Task, num_threads: int) -> None:
    """Compute attention of one token.

    Args:
        dtype: Of keys and values: one of those in `READERS`.
        size: Of a head's queries and keys.
        value_size: Of its values.
        task: Whose addresses hold what they should.
        num_threads: That share the work, at most.
    """
    machine.run(make(dtype, size, value_size), task, num_threads)


@cache
def make(dtype: torch.dtype, size: int, value_size: int) -> Any:
    """The kernel for such heads, which takes a second or two to compile."""
    read, width = READERS[dtype], dtype.itemsize

    @compiled
    def fetch(address: int, stride: int, columns: int, size: int) -> None:
        for column in range(columns):
            for byte in range(0, size * width, LINE):
                _fetch(address + column * stride + byte)

    @compiled
    def multiply(queries: int, group: int, keys: int, stride: int, length: int, scores: int, columns: int) -> None:
        """Scores `[group, columns]`, four columns at a time."""
        fours = length - length % 4
        for column in range(0, fours, 4):
            key = keys + column * stride
            fetch(key + AHEAD * stride, stride, 4, size)
            for head in range(group):
                query, at = queries + 4 * head * size, head * columns + column
                score_0 = score_1 = score_2 = score_3 = ZERO
                for place in range(size):
                    number = _read(query, place)
                    score_0 += number * read(key, place)
                    score_1 += number * read(key + stride, place)
                    score_2 += number * read(key + 2 * stride, place)
                    score_3 += number * read(key + 3 * stride, place)
                _write(scores, at, score_0)
                _write(scores, at + 1, score_1)
                _write(scores, at + 2, score_2)
                _write(scores, at + 3, score_3)
        for column in range(fours, length):
            for head in range(group):
                score = ZERO
                for place in range(size):
                    score += _read(queries, head * size + place) * read(keys + column * stride, place)
                _write(scores, head * columns + column, score)

    @compiled
    def add_up(weights: int, columns: int, group: int, values: int, stride: int, length: int, found: int) -> None:
        """Weighted sums `[group, value_size]` of the values, four columns at a time."""
        for place in range(group * value_size):
            _write(found, place, ZERO)
        fours = length - length % 4
        for column in range(0, fours, 4):
            value = values + column * stride
            fetch(value + AHEAD * stride, stride, 4, value_size)
            for head in range(group):
                weight, total = weights + 4 * (head * columns + column), found + 4 * head * value_size
                weight_0, weight_1 = _read(weight, 0), _read(weight, 1)
                weight_2, weight_3 = _read(weight, 2), _read(weight, 3)
                for place in range(value_size):
                    first = weight_0 * read(value, place) + weight_1 * read(value + stride, place)
                    last = weight_2 * read(value + 2 * stride, place) + weight_3 * read(value + 3 * stride, place)
                    _write(total, place, _read(total, place) + (first + last))
        for column in range(fours, length):
            for head in range(group):
                weight, total = _read(weights, head * columns + column), found + 4 * head * value_size
                for place in range(value_size):
                    _write(total, place, _read(total, place) + weight * read(values + column * stride, place))

    @machine.kernel_of(Task)
    def attend(address: Any) -> None:
        task = carray(address, 1)[0]
        parts = (task.sharing + task.at_a_time - 1) // task.at_a_time
        scores = task.room + 4 * _next(task.progress + 8) * task.at_a_time * task.columns
        item = _next(task.progress)
        while item < task.rows * task.key_heads * parts:
            row, head = item // parts // task.key_heads, item // parts % task.key_heads
            first = item % parts * task.at_a_time
            number, length = min(task.at_a_time, task.sharing - first), _long(task.lengths, row)
            column, query = task.columns - length, (row * task.key_heads + head) * task.sharing + first
            key = row * task.key_row + head * task.key_head + column * task.key_column
            value = row * task.value_row + head * task.value_head + column * task.value_column
            queries, found = task.queries + 4 * query * size, task.found + 4 * query * value_size
            keys, key_stride = task.keys + width * key, width * task.key_column
            values, value_stride = task.values + width * value, width * task.value_column
            multiply(queries, number, keys, key_stride, length, scores, task.columns)
            fetch(values, value_stride, AHEAD, value_size)
            for place in range(number):
                _softmax(scores + 4 * place * task.columns, length)
            add_up(scores, task.columns, number, values, value_stride, length, found)
            item = _next(task.progress)

    return attend


# --- numbers in other dtypes ------------------------------------------------------------------------------------------


def _of_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, WORD), WORD(16)), FLOAT)


def _of_float16(builder: Any, number: Any) -> Any:
    return builder.fpext(number, FLOAT)


READERS: Final = {torch.float32: _read, torch.bfloat16: machine.reader(ir.IntType(16), 2, types.float32, _of_bfloat16)}
"""Of keys and values, by their dtype."""
if machine.has("f16c") or (machine.is_for_host() and not platform.machine().startswith("x86")):
    READERS[torch.float16] = machine.reader(ir.HalfType(), 2, types.float32, _of_float16)


# --- softmax ---------------------------------------------------------------------------------------------------------


@intrinsic
def _power_of_two(context: Any, exponent: Any) -> Any:
    """`2 ** exponent` of a whole number, -126 or more."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        biased = builder.add(builder.fptosi(arguments[0], WORD), WORD(127))
        return builder.bitcast(builder.shl(biased, WORD(23)), FLOAT)

    return types.float32(types.float32), generate


@compiled
def _softmax(scores: int, num: int) -> None:
    """In place. nan and inf make all nan, and where each is -inf all are zero, as in torch.

    `e ** x = 2 ** n * e ** y` with a whole n and `|y| <= ln(2) / 2`, where seven terms of the series are right to
    32 bits.
    """
    most = _read(scores, 0)
    for place in range(1, num):
        most = _read(scores, place) if _read(scores, place) > most else most
    if most == NOTHING:
        for place in range(num):
            _write(scores, place, ZERO)
        return
    total = ZERO
    for place in range(num):
        exponent = (_read(scores, place) - most) * LOG2_E
        exponent = LEAST if exponent < LEAST else exponent
        whole = np.floor(exponent + HALF)
        y = (exponent - whole) * LN_2
        power = ((((((E6 * y + E5) * y + E4) * y + E3) * y + E2) * y + ONE) * y + ONE) * _power_of_two(whole)
        _write(scores, place, power)
        total += power
    share = ONE / total
    for place in range(num):
        _write(scores, place, _read(scores, place) * share)
