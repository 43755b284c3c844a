# SPDX-License-Identifier: Apache-2.0
"""Launches of `attention_kernel`'s kernels: what a program computes, and how many there are."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton

from hf_triton.runner.cuda import attention_kernel as kernel

EVERYTHING: Final = 1 << 30
"""The window of a token that attends to all."""
NUM_PROGRAMS: Final = 2048
"""A device of 132 processors has about 15 for each."""
MAX_SPLITS: Final = 32
MAX_DECODE_TOKENS: Final = 512
"""A larger row has chunks of many tokens, whose tiles are larger."""
MIN_ROWS, MAX_ROWS = 16, 128
"""Of a tile; the least is what a matrix product takes."""


class Tile(NamedTuple):
    """What a program computes with."""

    num_rows: int
    """Tokens times query heads of a key head."""
    num_keys: int
    """Keys at a time."""


def choose_tile(num_tokens: int, group: int, size: int, dtype: torch.dtype) -> Tile:
    """The least rows for decoding sequences, which have one token each; else what the registers hold.

    Args:
        num_tokens: Of the row.
        group: Query heads of a key head, which are in one tile.
        size: Of a head, padded.
        dtype: Of all states; in float32 nothing is a tensor core's.
    """
    if dtype == torch.float32:
        num_rows, num_keys = MAX_ROWS // 4, 32 if size <= 64 else 16
    else:
        num_rows, num_keys = (MAX_ROWS, 64) if size <= 128 else (MAX_ROWS // 2, 32)
    if num_tokens <= MAX_DECODE_TOKENS:
        num_rows = MIN_ROWS
    return Tile(max(num_rows, triton.next_power_of_2(group)), num_keys)


def choose_splits(num_tokens: int, num_key_heads: int) -> int:
    """How many programs share a tile's keys, a power of two: few tokens are few tiles."""
    splits = NUM_PROGRAMS // (num_tokens * num_key_heads)
    return min(MAX_SPLITS, 1 << max(0, splits.bit_length() - 1))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    sequences: torch.Tensor,
    bounds: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    tables: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """`hf_triton.runner.cuda.attention.attend` on a device."""
    places = sequences, bounds, lengths, starts, tables
    if keys is not None and values is not None:
        _write(keys, values, key_blocks, value_blocks, *places)
    return _attend(query, key_blocks, value_blocks, *places, sinks, scale, window, softcap, is_causal=True)


def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: torch.Tensor,
    bounds: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    is_causal: bool,
) -> torch.Tensor:
    """`hf_triton.runner.cuda.attention.attend_packed` on a device."""
    blocks = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    return _attend(
        query, *blocks, sequences, bounds, None, None, None, sinks, scale, window, softcap, is_causal=is_causal
    )


def _attend(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    sequences: torch.Tensor,
    bounds: torch.Tensor,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    tables: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    *,
    is_causal: bool,
) -> torch.Tensor:
    (num_tokens, num_heads, size), (_, num_key_heads, block_size, value_size) = query.shape, value_blocks.shape
    group = num_heads // num_key_heads
    padded_size, padded_value_size = (max(16, triton.next_power_of_2(each)) for each in (size, value_size))
    tile = choose_tile(num_tokens, group, max(padded_size, padded_value_size), query.dtype)
    output = query.new_empty(num_tokens, num_heads, value_size)
    splits, parts, logarithms = 1, None, None
    if tables is not None:
        splits = choose_splits(num_tokens, num_key_heads)
    if splits > 1:
        parts = query.new_empty(num_tokens, num_heads, splits, value_size, dtype=torch.float32)
        logarithms = query.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
    kernel.attend[num_tokens, num_key_heads, splits](
        query,
        key_blocks,
        value_blocks,
        output,
        parts,
        logarithms,
        sequences,
        bounds,
        lengths,
        starts,
        tables,
        sinks,
        query.stride(),
        key_blocks.stride(),
        value_blocks.stride(),
        scale,
        softcap or None,
        window or EVERYTHING,
        is_causal,
        None if tables is None else block_size,
        num_heads,
        group,
        size,
        padded_size,
        value_size,
        padded_value_size,
        *tile,
        num_warps=8 if tile.num_rows == MAX_ROWS else 4,
        num_stages=2,
    )
    if splits > 1:
        found = output, parts, logarithms, sequences, bounds, lengths, window or EVERYTHING, splits
        sizes = num_heads, value_size, padded_value_size, tile.num_rows // group, MAX_SPLITS
        kernel.combine[num_tokens, num_heads](*found, *sizes)
    return output


def _write(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    *places: torch.Tensor,
) -> None:
    (num_key_heads, block_size, size), value_size = key_blocks.shape[1:], value_blocks.shape[3]
    sizes = block_size, size, value_size, triton.next_power_of_2(max(size, value_size))
    strides = keys.stride(), values.stride()
    kernel.write[len(keys), num_key_heads](
        keys, values, key_blocks, value_blocks, *places, *strides, *sizes, num_warps=1
    )
