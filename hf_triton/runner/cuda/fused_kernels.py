# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's language for what a model computes between its linear layers; see `fused_operations.py`.

Importing it loads Triton. All compute in 32 bits and round once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_triton.runner.cuda.attention_kernel import PLACES, find_place

GATE_BLOCK = 1024
"""Numbers of a row that one program gates."""


@triton.jit
def rotate_head(source, target, cos, sin, half, block: tl.constexpr):
    """Rotate one head of one token; all pointers are at its first number."""
    columns = tl.arange(0, block)
    inside = columns < half
    first = tl.load(source + columns, inside).to(tl.float32)
    second = tl.load(source + half + columns, inside).to(tl.float32)
    cos_first, sin_first = tl.load(cos + columns, inside), tl.load(sin + columns, inside)
    cos_second, sin_second = tl.load(cos + half + columns, inside), tl.load(sin + half + columns, inside)
    tl.store(target + columns, first * cos_first - second * sin_first, inside)
    tl.store(target + half + columns, second * cos_second + first * sin_second, inside)


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=PLACES)
def rotary_kernel(
    query, key, cos, sin, value, query_out, key_out, key_blocks, value_blocks, sequences, bounds, lengths, starts,
    tables, num_positions, num_heads, num_keys, half, query_batch, query_head, query_position,
    key_batch, key_head, key_position, cos_batch, cos_position, sin_batch, sin_position,
    value_strides, value_size: tl.constexpr, block_size: tl.constexpr, block: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    """A program for each token and head: first those of the query, then those of the key. The rest are strides.

    With a value, the key's programs write both to their blocks, which are contiguous.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, position = token // num_positions, token % num_positions
    cos += batch * cos_batch + position * cos_position
    sin += batch * sin_batch + position * sin_position
    if head < num_heads:
        source = query + batch * query_batch + head * query_head + position * query_position
        rotate_head(source, query_out + (token * num_heads + head) * 2 * half, cos, sin, half, block)
    else:
        head -= num_heads
        source = key + batch * key_batch + head * key_head + position * key_position
        rotate_head(source, key_out + (token * num_keys + head) * 2 * half, cos, sin, half, block)
        if value is not None:
            sequence = tl.load(sequences + token)
            if sequence >= 0:
                place = find_place(token, head, num_keys, sequence, bounds, lengths, starts, tables, block_size)
                rotate_head(source, key_blocks + place * 2 * half, cos, sin, half, block)
                column = tl.arange(0, value_block)
                value += batch * value_strides[0] + head * value_strides[1] + position * value_strides[2]
                numbers = tl.load(value + column * value_strides[3], column < value_size)
                tl.store(value_blocks + place * value_size + column, numbers, column < value_size)


@triton.jit
def gate_kernel(gate, up, output, gate_row, up_row, size, is_gelu: tl.constexpr, block: tl.constexpr):
    """A program for a part of each row. SiLU is x sigmoid(x), and GELU by tanh the same of another argument."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    numbers = tl.load(gate + row * gate_row + columns, inside).to(tl.float32)
    factors = tl.load(up + row * up_row + columns, inside).to(tl.float32)
    argument = numbers
    if is_gelu:
        argument = 1.5957691216057308 * (numbers + 0.044715 * numbers * numbers * numbers)  # 2 sqrt(2 / pi)
    tl.store(output + row * size + columns, numbers * tl.sigmoid(argument) * factors, inside)


@triton.jit
def norm_kernel(states, residual, total, weight, output, size, eps, block: tl.constexpr):
    """A program for each row; with a residual, of the sum, which goes to `total`."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, block)
    inside = columns < size
    numbers = tl.load(states + row + columns, inside, other=0.0).to(tl.float32)
    if residual is not None:
        numbers += tl.load(residual + row + columns, inside, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, inside)
        numbers = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    tl.store(output + row + columns, numbers * factor * tl.load(weight + columns, inside), inside)


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    value: torch.Tensor | None = None,
    key_blocks: torch.Tensor | None = None,
    value_blocks: torch.Tensor | None = None,
    *places: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fused_operations.rotary`."""
    query, key, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, cos, sin))
    num_rows, num_heads, num_positions, size = query.shape
    cos, sin = cos.expand(num_rows, -1, -1), sin.expand(num_rows, -1, -1)
    outputs = [each.new_empty(num_rows, num_positions, each.shape[1], size) for each in (query, key)]
    value_size, block_size = (1, 1) if value_blocks is None else (value_blocks.shape[3], value_blocks.shape[2])
    rotary_kernel[num_rows * num_positions, num_heads + key.shape[1]](
        query, key, cos, sin, value, *outputs, key_blocks, value_blocks, *(places or [None] * len(PLACES)),
        num_positions, num_heads, key.shape[1], size // 2,
        *query.stride()[:3], *key.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
        None if value is None else value.stride(), value_size, block_size,
        block=triton.next_power_of_2(size // 2), value_block=triton.next_power_of_2(value_size), num_warps=1,
    )  # fmt: skip
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


def gated(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """See `fused_operations.silu_mul` and `gelu_mul`."""
    output = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = gate.shape[-1]
    gate, up = (each.reshape(-1, size) for each in (gate, up))
    gate, up = (each if each.stride(1) == 1 else each.contiguous() for each in (gate, up))
    gate_kernel[len(gate), triton.cdiv(size, GATE_BLOCK)](
        gate, up, output, gate.stride(0), up.stride(0), size, is_gelu=is_gelu, block=GATE_BLOCK
    )
    return output


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `fused_operations.rms_norm`."""
    return _norm(states.contiguous(), None, None, weight, eps)


def add_rms_norm(
    residual: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fused_operations.add_rms_norm`."""
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return total, _norm(states.contiguous(), residual.contiguous(), total, weight, eps)


def _norm(
    states: torch.Tensor, residual: torch.Tensor | None, total: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    output, size = torch.empty_like(states), len(weight)
    block = triton.next_power_of_2(size)
    norm_kernel[(states.numel() // size,)](
        states, residual, total, weight, output, size, eps, block=block, num_warps=min(max(block // 512, 1), 16)
    )
    return output
