# SPDX-License-Identifier: Apache-2.0
"""The kernel of linear layers: a few rows times weights that oneDNN has packed, compiled by numba for this processor.

For few rows, memory bandwidth is the limit: while some weights are multiplied, the next ones are prefetched. oneDNN
waits for each.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from llvmlite import ir
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu import llvm
from hf_triton.runner.cpu.llvm import FLOAT, LINE, LONG, MATH, WORD, compiled, intrinsic, next_number

BLOCK: Final = 64
"""Outputs whose weights are adjacent in memory: all weights of one input word, then those of the next."""
WORD_BYTES: Final = 4
"""A word is one number of 32 bits, or two of 16 that one instruction multiplies and adds."""
LINES: Final = WORD_BYTES * BLOCK // LINE
"""Cache lines of a block for each input word; a register holds one."""
ROWS_PER_TILE: Final = 6 if llvm.has("avx512f") else 1
"""Rows multiplied together: their sums with a block, and its weights for a word, fill the 32 registers of AVX-512, or
the 16 half as wide of AVX2."""
STEP: Final = 4
"""Words of an iteration of the innermost loop."""
CHUNK: Final = 32
"""Words whose weights are prefetched in each pass over the words before them."""
MAX_PASSES: Final = LINES
"""Passes over a chunk while the next one is prefetched, at most: one for each line."""
FEATURES: Final = {torch.float32: ("avx512f", "fma"), torch.bfloat16: ("avx512bf16",)}
"""Processor features for each dtype of rows and weights; one of them is needed."""


TASK: Final = (
    "counter",  # address of `next_task`
    "rows",  # address of `[num_rows, words]`
    "weights",  # address of packed weights, `[outputs / 64, words, 64]`
    "result",  # address of float32 `[num_rows, outputs]`, to which the products are added
    "num_rows",
    "words",  # a multiple of `STEP`
    "outputs",
    "blocks_per_task",
    "next_task",  # zero at first: tasks taken so far
)
"""Arguments of the kernel, int64: sizes and addresses."""


def can_run(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this dtype and processor; in bfloat16, oneDNN's AMX tiles are faster."""
    if dtype == torch.bfloat16 and llvm.has("amx-bf16"):
        return False
    return any(map(llvm.has, FEATURES.get(dtype, ())))


@cache
def compile_linear(dtype: torch.dtype) -> Any:
    """Compile the kernel, in about a second."""
    one, two, three, four, five, six = (_tile(dtype, min(number, ROWS_PER_TILE)) for number in range(1, 7))

    @compiled
    def add_products(number: int, tile: Any) -> None:
        if number == 1:
            one(tile)
        elif number == 2:
            two(tile)
        elif number == 3:
            three(tile)
        elif number == 4:
            four(tile)
        elif number == 5:
            five(tile)
        else:
            six(tile)

    record = types.Record.make_c_struct([(name, types.int64) for name in TASK])
    pointer = types.CPointer(record)  # type: ignore[no-untyped-call]

    @cfunc(types.void(pointer), fastmath=MATH, error_model="numpy")
    def multiply(address: Any) -> None:
        task = carray(address, 1)[0]
        passes = (task.num_rows + ROWS_PER_TILE - 1) // ROWS_PER_TILE
        if passes == MAX_PASSES - 1 and task.num_rows >= MAX_PASSES:
            passes = MAX_PASSES  # so that the lines divide evenly
        prefetching = min(passes, MAX_PASSES)
        block_bytes, row_bytes, result_bytes = WORD_BYTES * BLOCK, WORD_BYTES * task.words, 4 * task.outputs
        blocks = task.outputs // BLOCK
        item = next_number(task.counter)
        while item * task.blocks_per_task < blocks:
            for block in range(item * task.blocks_per_task, min(blocks, (item + 1) * task.blocks_per_task)):
                for word in range(0, task.words, CHUNK * prefetching):
                    words = min(CHUNK * prefetching, task.words - word)
                    weights = task.weights + block_bytes * (block * task.words + word)
                    share, done = block_bytes * words // prefetching, 0
                    for index in range(passes):
                        number = (task.num_rows - done + passes - index - 1) // (passes - index)
                        first_row = task.rows + done * row_bytes + WORD_BYTES * word
                        result = task.result + done * result_bytes + 4 * block * BLOCK
                        ahead = weights + prefetching * share + index * share if index < prefetching else weights
                        tile = first_row, row_bytes, weights, words, result, result_bytes, ahead, prefetching
                        add_products(number, tile)
                        done += number
            item = next_number(task.counter)

    return multiply


# --- LLVM IR ---------------------------------------------------------------------------------------------------------


class _BFloat16(ir.HalfType):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    __str__ = _to_string


SUMS: Final = ir.VectorType(FLOAT, LINE // 4)
PAIRS: Final = ir.VectorType(_BFloat16(), LINE // 2)
UNDEFINED: Final = ir.Constant(SUMS, ir.Undefined)
BROADCAST: Final = ir.Constant(ir.VectorType(WORD, LINE // 4), [0] * (LINE // 4))


def _tile(dtype: torch.dtype, number: int) -> Any:
    """Adds the products of `number` rows with the weights of some words of a block, and prefetches others."""

    @intrinsic
    def tile(context: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            taken = [builder.extract_value(arguments[0], index) for index in range(8)]
            first_row, row_bytes, weights, words, result, result_bytes, ahead, prefetching = taken
            positions = [(row, line) for row in range(number) for line in range(LINES)]

            def behind(address: Any, count: Any, size: Any) -> Any:
                return builder.add(address, builder.mul(count, size))

            def at(kind: Any, address: Any) -> Any:
                return builder.inttoptr(address, kind.as_pointer())

            rows = [behind(first_row, LONG(row), row_bytes) for row in range(number)]
            targets = [
                at(SUMS, behind(behind(result, LONG(row), result_bytes), LONG(line), LONG(LINE)))
                for row, line in positions
            ]
            part = builder.sdiv(LONG(LINE), prefetching)  # lines are prefetched repeatedly: cheaper than a branch
            begun = [builder.load(target, align=4) for target in targets]
            entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(LONG)
            index.add_incoming(LONG(0), entry)
            sums = [builder.phi(SUMS) for _ in positions]
            added = list(sums)
            for word in (builder.add(index, LONG(step)) for step in range(STEP)):
                first = builder.mul(word, LONG(LINES))
                for line in range(LINES):
                    llvm.prefetch(builder, behind(ahead, builder.add(first, LONG(line)), part))
                start = behind(weights, word, LONG(LINES * LINE))
                offsets = [LONG(line * LINE) for line in range(LINES)]
                lines = [builder.load(at(SUMS, builder.add(start, offset)), align=4) for offset in offsets]
                inputs = [builder.load(at(FLOAT, behind(row, word, LONG(WORD_BYTES))), align=2) for row in rows]
                wide = [builder.insert_element(UNDEFINED, item, WORD(0)) for item in inputs]
                wide = [builder.shuffle_vector(item, UNDEFINED, BROADCAST) for item in wide]
                added = [
                    _added(builder, dtype, item, wide[row], lines[line])
                    for item, (row, line) in zip(added, positions, strict=True)
                ]
            following = builder.add(index, LONG(STEP))
            index.add_incoming(following, loop)
            for item, first, last in zip(sums, begun, added, strict=True):
                item.add_incoming(first, entry)
                item.add_incoming(last, loop)
            builder.cbranch(builder.icmp_signed("<", following, words), loop, end)
            builder.position_at_end(end)
            for item, target in zip(added, targets, strict=True):
                builder.store(item, target, align=4)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 8)), generate  # type: ignore[no-untyped-call]

    return tile


def _added(builder: Any, dtype: torch.dtype, sums: Any, wide: Any, line: Any) -> Any:
    """Fused multiply-add of a register of words and a line of weights to sums."""
    if dtype == torch.float32:
        name, arguments = "llvm.fma.v16f32", [wide, line, sums]
    else:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        arguments = [sums, builder.bitcast(wide, PAIRS), builder.bitcast(line, PAIRS)]
    kind = ir.FunctionType(SUMS, [item.type for item in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)
