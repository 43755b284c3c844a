# SPDX-License-Identifier: Apache-2.0
"""The kernel of linear layers whose weights have 4 or 8 bits and a scale for each group of inputs; compiled by numba.

Rows are rounded to 16 bits, with a scale for each of the same groups, so that an instruction multiplies pairs of whole
numbers and adds the products; within a group the sum is exact. Groups are added in one order, whatever the number of
rows: a row has the same bits in any company.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from hf_triton.runner.cpu import llvm
from hf_triton.runner.cpu.llvm import FLOAT, LINE, LONG, MATH, WORD, compiled, intrinsic, next_number

IS_WIDE: Final = llvm.has("avx512bw")
LANES: Final = 16 if IS_WIDE else 8
"""Outputs in a register: each has a word of codes."""
REGISTERS: Final = 2
"""Registers of outputs whose codes are adjacent in memory, for one word of inputs after the other."""
BLOCK: Final = REGISTERS * LANES
ROWS_PER_TILE: Final = 4
"""Rows that are multiplied with codes together once they are unpacked."""
BYTES_AHEAD: Final = 8192
"""How far codes are prefetched: the processor's own prefetching stops at each page."""
LARGEST: Final = 32767
SMALLEST: Final = 2.0**-100
"""A group of smaller inputs counts as zeros."""
NOT_FINITE: Final = 0x7F800000
"""The bits of float32 from which on a number is infinite or none."""

TASK: Final = (
    "task",  # address of these integers themselves
    "rows",  # address of float32 `[num_rows, inputs]`
    "numbers",  # address of int16 `[num_rows, inputs]`: the rounded rows, working memory
    "factors",  # address of int32 or float32 `[num_rows, groups, 3]`: what an empty sum is, scale, scaled sum of inputs
    "codes",  # address of words `[blocks, inputs / codes of a word, BLOCK]`
    "scales",  # address of float16 `[blocks, groups, BLOCK]`
    "minimums",  # the same, if weights have them
    "result",  # address of float32 `[num_rows, blocks * BLOCK]`
    *("num_rows", "inputs", "groups", "blocks", "blocks_per_task"),
    "zero",  # the code of a weight that is zero, if weights have no minimums
    "next_task",  # zero at first: tasks taken so far
)
"""Arguments of the kernel, int64: addresses and sizes."""
NEXT_TASK: Final = 8 * TASK.index("next_task")
RECORD: Final = np.dtype([(name, np.int64) for name in TASK])
FACTOR_BYTES: Final = 12


def can_run() -> bool:
    """Whether this processor has what the kernel needs."""
    return all(map(llvm.has, ("avx2", "fma", "f16c")))


@cache
def compile_rounding(group: int) -> Any:
    """Compile what rounds rows to 16 bits in groups of so many inputs."""
    round_group = _rounding(group)

    @cfunc(types.void(types.CPointer(types.voidptr)), fastmath=MATH, error_model="numpy")  # type: ignore[no-untyped-call]
    def round_rows(addresses: Any) -> None:
        task = carray(addresses[0], 1, RECORD)[0]
        for index in range(task.num_rows * task.groups):
            place = task.rows + 4 * group * index, task.numbers + 2 * group * index, task.factors + FACTOR_BYTES * index
            round_group((*place, task.zero))

    return round_rows


@cache
def compile_product(bits: int, group: int, has_minimums: bool) -> Any:
    """Compile the kernel for codes of so many bits, in one or two seconds."""
    one, two, three, four = (_tile(bits, group, has_minimums, number) for number in range(1, ROWS_PER_TILE + 1))

    @compiled
    def compute_tile(number: int, tile: Any) -> None:
        if number == 1:
            one(tile)
        elif number == 2:
            two(tile)
        elif number == 3:
            three(tile)
        else:
            four(tile)

    @cfunc(types.void(types.CPointer(types.voidptr)), fastmath=MATH, error_model="numpy")  # type: ignore[no-untyped-call]
    def multiply(addresses: Any) -> None:
        task = carray(addresses[0], 1, RECORD)[0]
        code_bytes, scale_bytes = task.inputs * bits // 8 * BLOCK, 2 * task.groups * BLOCK
        row_bytes, factor_bytes, result_bytes = 2 * task.inputs, FACTOR_BYTES * task.groups, 4 * task.blocks * BLOCK
        item = next_number(task.task + NEXT_TASK)
        while item * task.blocks_per_task < task.blocks:
            for block in range(item * task.blocks_per_task, min(task.blocks, (item + 1) * task.blocks_per_task)):
                for row in range(0, task.num_rows, ROWS_PER_TILE):
                    tile = (
                        task.numbers + row * row_bytes,
                        row_bytes,
                        task.factors + row * factor_bytes,
                        factor_bytes,
                        task.codes + block * code_bytes,
                        task.scales + block * scale_bytes,
                        task.minimums + block * scale_bytes,
                        task.groups,
                        task.result + row * result_bytes + 4 * block * BLOCK,
                        result_bytes,
                    )
                    compute_tile(min(ROWS_PER_TILE, task.num_rows - row), tile)
            item = next_number(task.task + NEXT_TASK)

    return multiply


# --- LLVM IR ---------------------------------------------------------------------------------------------------------

WORDS: Final = ir.VectorType(WORD, LANES)
PAIRS: Final = ir.VectorType(ir.IntType(16), 2 * LANES)
FLOATS: Final = ir.VectorType(FLOAT, LANES)
HALVES: Final = ir.VectorType(ir.HalfType(), LANES)
MULTIPLY_PAIRS: Final = "llvm.x86.avx512.pmaddw.d.512" if IS_WIDE else "llvm.x86.avx2.pmadd.wd"
FUSED: Final = f"llvm.fma.v{LANES}f32"


def _constant(number: int) -> Any:
    return ir.Constant(WORDS, [number] * LANES)


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), arguments)


def _kept_here(builder: Any, number: Any) -> Any:
    """A number that LLVM computes before what follows: it would form one sum after the other, and spill all codes."""
    kind = ir.FunctionType(number.type, [number.type])
    return builder.asm(kind, "", "=v,0", [number], True)


def _load(builder: Any, kind: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _broadcast(builder: Any, kind: Any, address: Any) -> Any:
    """All lanes of a register with the number at an address."""
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, _load(builder, kind.element, address), WORD(0))
    return builder.shuffle_vector(single, undefined, _constant(0))


def _rounding(group: int) -> Any:
    """Rounds a group of inputs, and gives its factors: scale NaN if an input is infinite or none."""

    @intrinsic  # type: ignore[untyped-decorator]
    def round_group(context: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, target, factors, zero = (builder.extract_value(arguments[0], index) for index in range(4))

            def store(value: Any, address: Any, offset: int) -> None:
                place = builder.inttoptr(builder.add(address, LONG(offset)), value.type.as_pointer())
                builder.store(value, place, align=2)

            def all_lanes(number: Any) -> Any:
                single = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, WORD(0))
                return builder.shuffle_vector(single, single, _constant(0))

            parts = [_load(builder, FLOATS, builder.add(row, LONG(4 * at))) for at in range(0, group, LANES)]
            bits = [builder.and_(builder.bitcast(part, WORDS), _constant(0x7FFFFFFF)) for part in parts]
            most = bits[0]
            for each in bits[1:]:
                most = builder.select(builder.icmp_signed(">", each, most), each, most)
            most = _call(builder, f"llvm.vector.reduce.smax.v{LANES}i32", WORD, most)
            is_finite = builder.icmp_signed("<", most, WORD(NOT_FINITE))
            largest = builder.bitcast(most, FLOAT)
            is_large = builder.fcmp_ordered(">", largest, FLOAT(SMALLEST))
            inverse = builder.select(is_large, builder.fdiv(FLOAT(LARGEST), largest), FLOAT(0))
            wide, half = all_lanes(inverse), ir.Constant(FLOATS, [0.5] * LANES)
            total = _constant(0)
            for place, part in enumerate(parts):
                shifted = _call(builder, FUSED, FLOATS, part, wide, half)
                whole = _call(builder, f"llvm.floor.v{LANES}f32", FLOATS, shifted)
                number = builder.fptosi(builder.select(is_finite, whole, ir.Constant(FLOATS, [0.0] * LANES)), WORDS)
                store(builder.trunc(number, ir.VectorType(ir.IntType(16), LANES)), target, 2 * LANES * place)
                total = builder.add(total, number)
            total = _call(builder, f"llvm.vector.reduce.add.v{LANES}i32", WORD, total)
            scale = builder.select(is_finite, builder.fdiv(largest, FLOAT(LARGEST)), FLOAT(math.nan))
            store(builder.neg(builder.mul(builder.trunc(zero, WORD), total)), factors, 0)
            store(scale, factors, 4)
            store(builder.fmul(scale, builder.sitofp(total, FLOAT)), factors, 8)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 4)), generate  # type: ignore[no-untyped-call]

    return round_group


def _tile(bits: int, group: int, has_minimums: bool, number: int) -> Any:
    """The products of `number` rows with the weights of a block: their sum over all groups, stored as the result."""
    per_word = 32 // bits
    mask = _constant((1 << bits) - 1 | ((1 << bits) - 1) << 16)
    positions = [(row, register) for row in range(number) for register in range(REGISTERS)]

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(context: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            taken = [builder.extract_value(arguments[0], index) for index in range(10)]
            rows, row_bytes, factors, factor_bytes, codes, scales, minimums, groups, result, result_bytes = taken

            def behind(address: Any, count: Any, size: Any) -> Any:
                count, size = (LONG(each) if isinstance(each, int) else each for each in (count, size))
                return builder.add(address, builder.mul(count, size))

            entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(LONG)
            index.add_incoming(LONG(0), entry)
            sums = [builder.phi(FLOATS) for _ in positions]
            own_factors = [behind(behind(factors, row, factor_bytes), index, FACTOR_BYTES) for row in range(number)]
            own_rows = [behind(behind(rows, row, row_bytes), index, 2 * group) for row in range(number)]
            own_codes = behind(codes, index, group // per_word * 4 * BLOCK)
            empty = [_broadcast(builder, WORDS, address) for address in own_factors]
            whole = [empty[row] for row, _ in positions]
            for word in range(group // per_word):
                for line in range(-(-4 * BLOCK // LINE)):
                    llvm.prefetch(builder, behind(own_codes, 1, 4 * BLOCK * word + LINE * line + BYTES_AHEAD))
                packed = [
                    _load(builder, WORDS, behind(own_codes, 1, 4 * (BLOCK * word + LANES * register)))
                    for register in range(REGISTERS)
                ]
                for pair in range(per_word // 2):
                    shift = _constant(bits * pair)
                    pairs = [
                        builder.bitcast(builder.and_(builder.lshr(each, shift) if pair else each, mask), PAIRS)
                        for each in packed
                    ]
                    offset = 4 * (word * per_word // 2 + pair)
                    inputs = [
                        builder.bitcast(_broadcast(builder, WORDS, behind(address, 1, offset)), PAIRS)
                        for address in own_rows
                    ]
                    whole = [
                        _kept_here(
                            builder,
                            builder.add(total, _call(builder, MULTIPLY_PAIRS, WORDS, inputs[row], pairs[register])),
                        )
                        for total, (row, register) in zip(whole, positions, strict=True)
                    ]
            added = []
            for address, kind in ((scales, 1), (minimums, 2))[: 1 + has_minimums]:
                halves = [
                    _load(builder, HALVES, behind(behind(address, index, 2 * BLOCK), 2 * LANES, register))
                    for register in range(REGISTERS)
                ]
                wide = [builder.fpext(each, FLOATS) for each in halves]
                of_rows = [_broadcast(builder, FLOATS, behind(each, 4, kind)) for each in own_factors]
                added.append([(wide[register], of_rows[row]) for row, register in positions])
            following = [
                _call(
                    builder,
                    FUSED,
                    FLOATS,
                    builder.sitofp(total, FLOATS),
                    builder.fmul(*added[0][position]),
                    before,
                )
                for position, (total, before) in enumerate(zip(whole, sums, strict=True))
            ]
            if has_minimums:
                following = [
                    _call(builder, FUSED, FLOATS, *added[1][position], before)
                    for position, before in enumerate(following)
                ]
            for phi, value in zip(sums, following, strict=True):
                phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
                phi.add_incoming(value, loop)
            after = builder.add(index, LONG(1))
            index.add_incoming(after, loop)
            builder.cbranch(builder.icmp_signed("<", after, groups), loop, end)
            builder.position_at_end(end)
            for (row, register), value in zip(positions, following, strict=True):
                address = behind(behind(result, row, result_bytes), 4 * LANES, register)
                builder.store(value, builder.inttoptr(address, FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 10)), generate  # type: ignore[no-untyped-call]

    return tile
