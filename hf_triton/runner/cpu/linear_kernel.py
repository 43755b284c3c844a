# SPDX-License-Identifier: Apache-2.0
"""Products of a few vectors with weights that oneDNN has packed, compiled by numba for the processor that it runs on.

For so few, what counts is that weights come from memory without a pause: while some are multiplied, the next ones are
fetched, as many as the processor can take meanwhile. oneDNN waits for each.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu import llvm as machine
from hf_triton.runner.cpu.llvm import FLOAT, LINE, LONG, WORD, compiled, intrinsic

BLOCK: Final = 64
"""Outputs whose weights stand together: those of one word of input, then those of the next."""
WORD_BYTES: Final = 4
"""Of a word: one number in 32 bits, or two in 16 that are multiplied and added up in one step."""
LINES: Final = WORD_BYTES * BLOCK // LINE
"""Of a block, for each word of input; a register holds one."""
AT_A_TIME: Final = 6
"""Vectors that are multiplied together. Their sums with a block, and its weights for a word, fill the registers."""
STEP: Final = 4
"""Words of a turn of the innermost loop."""
CHUNK: Final = 32
"""Words whose weights are fetched ahead, for each time that the ones before are gone through."""
SPREAD: Final = LINES
"""Times that these are gone through while the next are fetched, at most: as many as there are lines."""
NEEDS: Final = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}
"""What a processor must have, by the dtype of vectors and weights."""


class Task(NamedTuple):
    """What to compute: numbers and addresses."""

    progress: int
    """Where an int64 is, at zero."""
    vectors: int
    """Of `[num, words]`."""
    weights: int
    """As oneDNN packs them: `[outputs / 64, words, 64]`."""
    found: int
    """Of float32 `[num, outputs]`, to which the products are added."""
    num: int
    """Of vectors."""
    words: int
    """A multiple of `STEP`."""
    outputs: int
    at_once: int
    """Blocks that a thread takes at once."""


def can_run(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this dtype and processor.

    Processors with tiles have something better for 16 bits, which oneDNN uses.
    """
    has_better = dtype == torch.bfloat16 and machine.has("amx-bf16")
    return dtype in NEEDS and machine.has(NEEDS[dtype]) and not has_better


def run(dtype: torch.dtype, task: Task, num_threads: int) -> None:
    """Compute products, each the same whatever is computed beside it.

    Args:
        dtype: One that `can_run`.
        task: Whose addresses hold what they should.
        num_threads: That share the work, at most.
    """
    machine.run(make(dtype), task, num_threads)


@cache
def make(dtype: torch.dtype) -> Any:
    """The kernel, which takes a second to compile."""
    one, two, three, four, five, six = (_tile(dtype, number) for number in range(1, AT_A_TIME + 1))

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

    @machine.kernel_of(Task)
    def multiply(address: Any) -> None:
        task = carray(address, 1)[0]
        turns = (task.num + AT_A_TIME - 1) // AT_A_TIME
        turns = SPREAD if turns == SPREAD - 1 else turns  # a number of which lines have an equal share
        spread = min(turns, SPREAD)
        block_bytes, vector_bytes, found_bytes = WORD_BYTES * BLOCK, WORD_BYTES * task.words, 4 * task.outputs
        blocks = task.outputs // BLOCK
        item = machine.next_number(task.progress)
        while item * task.at_once < blocks:
            for block in range(item * task.at_once, min(blocks, (item + 1) * task.at_once)):
                for word in range(0, task.words, CHUNK * spread):
                    words = min(CHUNK * spread, task.words - word)
                    weights = task.weights + block_bytes * (block * task.words + word)
                    share, done = block_bytes * words // spread, 0
                    for turn in range(turns):
                        number = (task.num - done + turns - turn - 1) // (turns - turn)
                        vectors = task.vectors + done * vector_bytes + WORD_BYTES * word
                        found = task.found + done * found_bytes + 4 * block * BLOCK
                        ahead = weights + spread * share + turn * share if turn < spread else weights
                        tile = vectors, vector_bytes, weights, words, found, found_bytes, ahead, spread
                        add_products(number, tile)
                        done += number
            item = machine.next_number(task.progress)

    return multiply


# --- what numba has no words for -------------------------------------------------------------------------------------


class _BFloat16(ir.HalfType):  # type: ignore[misc]
    """LLVM's, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    __str__ = _to_string


SUMS: Final = ir.VectorType(FLOAT, LINE // 4)
PAIRS: Final = ir.VectorType(_BFloat16(), LINE // 2)
NOBODY: Final = ir.Constant(SUMS, ir.Undefined)
EVERYWHERE: Final = ir.Constant(ir.VectorType(WORD, LINE // 4), [0] * (LINE // 4))


def _tile(dtype: torch.dtype, number: int) -> Any:
    """What adds the products of `number` vectors and the weights of some words of a block, and fetches others."""

    @intrinsic
    def tile(context: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            taken = [builder.extract_value(arguments[0], place) for place in range(8)]
            vectors, vector_bytes, weights, words, found, found_bytes, ahead, spread = taken
            places = [(row, line) for row in range(number) for line in range(LINES)]

            def behind(address: Any, count: Any, size: Any) -> Any:
                return builder.add(address, builder.mul(count, size))

            def at(kind: Any, address: Any) -> Any:
                return builder.inttoptr(address, kind.as_pointer())

            rows = [behind(vectors, LONG(row), vector_bytes) for row in range(number)]
            targets = [
                at(SUMS, behind(behind(found, LONG(row), found_bytes), LONG(line), LONG(LINE))) for row, line in places
            ]
            part = builder.sdiv(LONG(LINE), spread)  # each line is fetched so often: that costs nothing, branches do
            begun = [builder.load(target, align=4) for target in targets]
            entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            place = builder.phi(LONG)
            place.add_incoming(LONG(0), entry)
            sums = [builder.phi(SUMS) for _ in places]
            added = list(sums)
            for word in (builder.add(place, LONG(step)) for step in range(STEP)):
                first = builder.mul(word, LONG(LINES))
                for line in range(LINES):
                    machine.prefetch(builder, behind(ahead, builder.add(first, LONG(line)), part))
                here = behind(weights, word, LONG(LINES * LINE))
                lines = [builder.load(at(SUMS, builder.add(here, LONG(line * LINE))), align=4) for line in range(LINES)]
                given = [builder.load(at(FLOAT, behind(row, word, LONG(WORD_BYTES))), align=2) for row in rows]
                wide = [builder.insert_element(NOBODY, each, WORD(0)) for each in given]
                wide = [builder.shuffle_vector(each, NOBODY, EVERYWHERE) for each in wide]
                added = [
                    _added(builder, dtype, each, wide[row], lines[line])
                    for each, (row, line) in zip(added, places, strict=True)
                ]
            following = builder.add(place, LONG(STEP))
            place.add_incoming(following, loop)
            for each, first, last in zip(sums, begun, added, strict=True):
                each.add_incoming(first, entry)
                each.add_incoming(last, loop)
            builder.cbranch(builder.icmp_signed("<", following, words), loop, end)
            builder.position_at_end(end)
            for each, target in zip(added, targets, strict=True):
                builder.store(each, target, align=4)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 8)), generate  # type: ignore[no-untyped-call]

    return tile


def _added(builder: Any, dtype: torch.dtype, sums: Any, wide: Any, line: Any) -> Any:
    """Sums to which the products of a register of words and a line of weights are added."""
    if dtype == torch.float32:
        name, arguments = "llvm.fma.v16f32", [wide, line, sums]
    else:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        arguments = [sums, builder.bitcast(wide, PAIRS), builder.bitcast(line, PAIRS)]
    kind = ir.FunctionType(SUMS, [each.type for each in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)
