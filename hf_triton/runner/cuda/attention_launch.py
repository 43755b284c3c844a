# SPDX-License-Identifier: Apache-2.0
"""Launches of `attention_kernel`'s kernels: what a program computes, and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton

from hf_triton.runner.cuda import attention_kernel as kernel

if TYPE_CHECKING:
    from hf_triton.runner.device_step import Places
    from hf_triton.runner.mask_rules import Window
    from hf_triton.runner.torch_attention import Scoring

PROGRAMS_A_PROCESSOR: Final = 4
"""So many are resident; more splits of the keys would only be combined."""
MAX_SPLITS: Final = 32
FEW_TOKENS: Final = 64
"""A row of no more has small tiles alone."""
MANY_TOKENS: Final = 1024
"""A row of more is a prompt's: it has large tiles alone. One between may have decoding sequences and chunks."""
FEW_NEW: Final = 8
"""New tokens of a sequence that has small tiles in a row with both."""
ANY_NUMBER: Final = 1 << 30
STAGES: Final = 5, 3, 2
"""Turns of a loop under way at a time. Of loads behind a block table, 5 are the first that overlap with products."""


class Tile(NamedTuple):
    num_rows: int
    """Query heads of a key head, of several tokens."""
    num_keys: int
    """Keys at a time."""
    num_warps: int


class Kind(NamedTuple):
    """The tiles of the sequences with so many new tokens."""

    min_new: int
    max_new: int
    tiles: Sequence[Tile]
    """The best first."""


def small_tiles(group: int, size: int, dtype: torch.dtype) -> Sequence[Tile]:
    """Tiles of decoding sequences, of one token each, hold all heads of a key head, so its keys are read once.

    A `group` is the query heads of a key head, `size` the numbers of a head, padded.
    """
    num_rows = min(max(16, triton.next_power_of_2(group)), 128 if size <= 128 else 32)
    keys = (16,) if dtype == torch.float32 and size > 64 else (32, 16)
    return [Tile(num_rows, num_keys, 8 if num_rows == 128 else 4) for num_keys in keys]


def large_tiles(size: int, dtype: torch.dtype) -> Sequence[Tile]:
    """Tiles of prompts have the rows that registers hold, two programs a processor; arguments as in `small_tiles`."""
    if dtype == torch.float32:
        return [Tile(32, 32 if size <= 64 else 16, 4), Tile(16, 16, 4)]
    tiles = [Tile(64, 64, 4), Tile(64, 32, 4), Tile(32, 32, 4), Tile(16, 32, 4)]
    return tiles[0 if size <= 64 else 1 if size <= 128 else 2 :]


def kinds_of(num_tokens: int, group: int, size: int, dtype: torch.dtype, *, is_packed: bool) -> Sequence[Kind]:
    """The launches for a row: each sequence has tiles of one kind; a packed row has no decoding sequences."""
    small, large = small_tiles(group, size, dtype), large_tiles(size, dtype)
    if num_tokens <= FEW_TOKENS:
        return [Kind(0, ANY_NUMBER, small)]
    if is_packed or num_tokens > MANY_TOKENS:
        return [Kind(0, ANY_NUMBER, large)]
    return [Kind(0, FEW_NEW, small), Kind(FEW_NEW + 1, ANY_NUMBER, large)]


def choose_splits(num_programs: int, num_places: int) -> int:
    """How many programs share a tile's keys, a power of two, so that they fill a device's places."""
    splits = num_places // num_programs
    return min(MAX_SPLITS, 1 << max(0, splits.bit_length() - 1))


@cache
def num_places(device: torch.device) -> int:
    """Programs that are resident on a device at a time."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return PROGRAMS_A_PROCESSOR * processors


def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: int,
) -> torch.Tensor:
    """`hf_triton.runner.cuda.attention.attend` on a device."""
    if keys is not None and values is not None:
        _write(keys, values, key_blocks, value_blocks, places)
    return _attend(query, key_blocks, value_blocks, places, scoring, window, is_causal=True)


def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: Window,
) -> torch.Tensor:
    """`hf_triton.runner.cuda.attention.attend_packed` on a device."""
    blocks = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    return _attend(query, *blocks, places, scoring, window.size, is_causal=window.is_causal)


def _attend(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: int,
    *,
    is_causal: bool,
) -> torch.Tensor:
    (num_tokens, num_heads, size), (_, num_key_heads, block_size, value_size) = query.shape, value_blocks.shape
    group, num_sequences, is_packed = num_heads // num_key_heads, len(places.bounds) - 1, places.tables is None
    padded_size, padded_value_size = (max(16, triton.next_power_of_2(each)) for each in (size, value_size))
    output = query.new_empty(num_tokens, num_heads, value_size)
    sizes = size, padded_size, value_size, padded_value_size
    form = bool(window), is_causal, None if is_packed else block_size, num_heads, group, *sizes

    def launch(kind: Kind, tile: Tile, num_stages: int) -> Any:
        num_rows = tile.num_rows
        num_tiles = num_tokens * group // num_rows + num_sequences + 1  # one more for padding
        splits, parts, logarithms = 1, None, None
        if not is_packed:
            num_working = min(num_tokens * -(-group // num_rows), num_tiles) * num_key_heads
            splits = choose_splits(num_working, num_places(query.device))
        if splits > 1:
            parts = query.new_empty(num_tokens, num_heads, splits, value_size, dtype=torch.float32)
            logarithms = query.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
        launched = kernel.attend[num_tiles, num_key_heads, splits](
            query,
            key_blocks,
            value_blocks,
            output,
            parts,
            logarithms,
            *places[1:],
            scoring.sinks,
            query.stride(),
            key_blocks.stride(),
            value_blocks.stride(),
            scoring.scale,
            scoring.softcap or None,
            window,
            num_tokens,
            num_sequences,
            kind.min_new,
            kind.max_new,
            *form,
            *tile[:2],
            num_warps=tile.num_warps,
            num_stages=num_stages,
        )
        if splits > 1:
            found = output, parts, logarithms, *places[:3], window, splits, kind.min_new, kind.max_new, bool(window)
            kernel.combine[num_tokens, num_heads](
                *found, num_heads, group, value_size, padded_value_size, num_rows, MAX_SPLITS
            )
        return launched

    for kind in kinds_of(num_tokens, group, max(padded_size, padded_value_size), query.dtype, is_packed=is_packed):
        known = query.device, query.dtype, *form, scoring.softcap is None, scoring.sinks is None, *kind.tiles
        _launch_best(known, kind, launch)
    return output


_BEST: Final[dict[Hashable, tuple[Tile, int]]] = {}
"""The tile and the stages of each form of the kernel."""


def _launch_best(known: Hashable, kind: Kind, launch: Callable[[Kind, Tile, int], Any]) -> None:
    """Launch with the first tile that the device has the shared memory for, and that needs no memory for registers.

    It is found at the first launch of a form of the kernel, which is compiled then.

    Raises:
        triton.OutOfResources: The device has not enough for the least.
    """
    if known in _BEST:
        launch(kind, *_BEST[known])
        return
    spills, refusal = {}, None
    for num_stages in STAGES:
        for tile in kind.tiles:
            try:
                launched = launch(kind, tile, num_stages)
            except triton.OutOfResources as error:
                refusal = error
                continue
            spills[tile, num_stages] = getattr(launched, "n_spills", 0)
            if not spills[tile, num_stages]:
                _BEST[known] = tile, num_stages
                return
    if refusal is not None and not spills:
        raise refusal
    _BEST[known] = min(spills, key=lambda choice: spills[choice])


def _write(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    places: Places,
) -> None:
    (num_key_heads, block_size, size), value_size = key_blocks.shape[1:], value_blocks.shape[3]
    sizes = block_size, size, value_size, triton.next_power_of_2(max(size, value_size))
    strides = keys.stride(), values.stride()
    kernel.write[len(keys), num_key_heads](
        keys, values, key_blocks, value_blocks, *places, *strides, *sizes, num_warps=1
    )
