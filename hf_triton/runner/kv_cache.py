# SPDX-License-Identifier: Apache-2.0
"""KVCache: keys and values of the running sequences. Each has a slot, and all slots end at one column, the clock.

That is left padding, which every decoder-only transformers model supports in batched `generate`: masks, rotary
positions, alibi and sliding windows come out right with the model's own forward. Knows no requests and no sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from transformers.cache_utils import Cache

from hf_triton.runner.contents import CacheContents
from hf_triton.runner.kv_layer import KVCacheLayer, KVWindow
from hf_triton.runner.states import AnyLayer, StatesLayer, kept_layers, layer_of_slots, sequence_states, states_of

COLUMN_STEP: Final = 128
"""Buffers have a multiple of this many columns, and this many unused ones are dropped together."""
CUDA_SHAPE: Final = (8, 512)
"""First slots and columns of buffers on a CUDA device: growing them invalidates captured graphs."""


class KVCache(KVWindow):
    """Buffers `[slots, heads, columns, head_dim]` for keys and for values of every layer.

    Slot i has its tokens in the columns `[starts[i]:clock]`. Slots are zeroed before reuse, so that NaNs of a previous
    sequence cannot leak.

    Args:
        device: Of the buffers.
        slot_tokens: Tokens that take as much memory as the states of a slot, see `states`.
    """

    def __init__(self, device: torch.device, slot_tokens: int = 0) -> None:
        super().__init__(device)
        self._slot_tokens = slot_tokens
        self.max_tokens: int | None = None
        """Limit of growth ahead of need, as `num_tokens`; None: no limit."""
        self.is_corrupt = False
        """Whether a failure broke off a change of the slots: their contents are lost."""
        self._starts: list[int] = []
        self.release()

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and columns of the buffers."""
        return self._mask.shape[0], self._mask.shape[1]

    @property
    def num_tokens(self) -> int:
        """Slots x columns of the buffers, states counted."""
        return self._tokens(self.shape)

    def attention_mask(self) -> torch.Tensor:
        """`[slots, columns]` int64, 1 if a slot has a token, that of the new column included."""
        if self.bucket is None:
            return self._mask[: self.num_rows, self.first : self.clock + 1]
        return self._mask[: self.bucket[0], : self.bucket[1]]

    def position_ids(self) -> torch.Tensor:
        """`[slots, 1]` int64, tokens before the next one of each slot."""
        return self._positions[: self.num_seen]

    @contextmanager
    def states_kept(self) -> Iterator[None]:
        """Restore all states afterwards, so that a step can run again."""
        buffers = [buffer for layer in self.layers() for buffer in states_of(layer)]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, states in zip(buffers, before, strict=True):
                buffer.copy_(states)

    def add(self, prefilled: Cache, row: int, length: int) -> None:
        """Copy the last `length` columns of a row of a left-padded prefill batch to a new slot."""
        if not self.cache.layers:
            self.cache.layers = [layer_of_slots(self, layer) for layer in prefilled.layers]
        if not self.num_rows:
            self._set_clock(length, length)
        self._make_room(self.num_rows + 1, length)
        start = self.clock - length
        for layer, source in zip(self.layers(), kept_layers(prefilled), strict=True):
            layer.put(self.num_rows, slice(start, self.clock), source, row)
        self.is_corrupt = True
        self._starts.append(start)
        self.num_rows += 1
        self.first = min(self._starts)
        self._mark(self.num_rows - 1)
        self.is_corrupt = False

    def remove(self, slot: int) -> None:
        """Free a slot; the last sequence moves there."""
        last = self.num_rows - 1
        if slot != last:
            self.is_corrupt = True
            for layer in self.layers():
                layer.replace(slot, last)
            self._starts[slot] = self._starts[last]
            self._mark(slot)
            self.is_corrupt = False
        self._starts.pop()
        self.num_rows = last
        self._mask[last] = 0
        self._positions[last] = 0
        self.first = min(self._starts, default=self.clock)

    def length(self, slot: int) -> int:
        """Tokens of a slot."""
        return self.clock - self._starts[slot]

    def read(self, slot: int, length: int) -> CacheContents:
        """Views of the KV of a slot's first tokens, and of the states behind its last token."""
        columns = slice(self._starts[slot], self._starts[slot] + length)
        layers = [layer for layer in self.layers() if isinstance(layer, KVCacheLayer)]
        pairs = [(layer.key_rows[slot, :, columns], layer.value_rows[slot, :, columns]) for layer in layers]
        return CacheContents(pairs, sequence_states(self.cache, slot))

    def make_column(self) -> None:
        """Provide a free column at the clock, and drop unused columns."""
        # Moving the slots for a few columns pays only if the buffers would grow otherwise.
        if self.first >= (COLUMN_STEP if self.clock < self.shape[1] else COLUMN_STEP // 4):
            self._lay_out(self.shape, -self.first)
        self._make_room(self.num_rows, 0)
        self._mask[:, self.clock] = 1
        # A forward that fails may have changed states: the column cannot be computed again.
        self.is_corrupt = any(isinstance(layer, StatesLayer) for layer in self.cache.layers)

    def advance(self) -> None:
        """Count the new column, which now has a token of every slot."""
        self.clock += 1
        self.clock_index += 1
        self._positions[: self.num_rows] += 1
        self.is_corrupt = False

    def widen(self, columns: int) -> None:
        """Grow to at least this many columns."""
        self._lay_out((self.shape[0], max(columns, self.shape[1])), 0)

    def trim(self) -> None:
        """Free unused memory."""
        if self.num_rows:
            self._lay_out(self._least(self.num_rows, self.width + 1), -self.first)
        else:
            self.release()

    def release(self) -> None:
        """Free all memory; no slot may be in use."""
        self.cache = Cache(layers=[])
        """The model's cache: it appends to the slots in use, at the clock."""
        self._mask = self.clock_index.new_zeros(0, 0)  # [slots, columns], zero beyond the clock
        self._positions = self.clock_index.new_zeros(0, 1)
        self.allocation = object()
        """Another object after each change of the buffers' addresses."""

    # --- the buffers -------------------------------------------------------------------------------------------------

    def layers(self) -> list[AnyLayer]:
        """The layers that keep KV or states."""
        return kept_layers(self.cache)

    def _tokens(self, shape: tuple[int, int]) -> int:
        return shape[0] * (shape[1] + self._slot_tokens)

    def _set_clock(self, first: int, clock: int) -> None:
        self.first, self.clock = first, clock
        self.clock_index.fill_(clock)

    def _least(self, rows: int, columns: int) -> tuple[int, int]:
        return max(rows, self.num_rows), _rounded(max(columns, self.width))

    def _make_room(self, rows: int, length: int) -> None:
        """Provide this many slots, columns for a new sequence of `length` (0: none), and a free column."""
        least, in_place = max(self.width, length) + 1, max(self.clock, length) + 1
        needed = least if length else in_place  # a new sequence is copied anyway, so all may move
        has_room = rows <= self.shape[0] and needed <= self.shape[1]
        shape = self.shape if has_room else self._larger(rows, least, needed)
        clock = (in_place if in_place <= shape[1] else least) - 1
        if shape != self.shape or clock != self.clock:
            self._lay_out(shape, clock - self.clock)

    def _larger(self, rows: int, least: int, needed: int) -> tuple[int, int]:
        """The next shape: grown ahead of need if `max_tokens` allows, else as needed, else without unused columns.

        Args:
            rows: Slots needed.
            least: Columns needed.
            needed: Columns needed, unused ones that are not worth dropping included.
        """
        held = self.shape
        kept = max(rows, held[0]), max(self._least(rows, needed)[1], held[1])
        if self._mask.is_cuda:
            ahead = [max(kept[axis], 2 * held[axis], CUDA_SHAPE[axis]) for axis in (0, 1)]
        else:
            ahead = [max(kept[0], min(2 * held[0], held[0] + 16)), kept[1]]
        grown = tuple(ahead[axis] if kept[axis] > held[axis] else held[axis] for axis in (0, 1))
        for shape in ((grown[0], grown[1]), kept):
            if self.max_tokens is None or self._tokens(shape) <= self.max_tokens:
                return shape
        return self._least(rows, least)

    def _lay_out(self, shape: tuple[int, int], by: int) -> None:
        """Resize the buffers, and move the columns in use `by` to the right."""
        mask, positions = self._mask, self._positions
        if shape != self.shape:
            mask, positions = mask.new_zeros(shape), positions.new_zeros(shape[0], 1)
            self.allocation = object()
        # If it fails midway, larger buffers with the same contents in place fit the layers that were not reached.
        is_larger = shape[0] >= self.shape[0] and shape[1] >= self.shape[1]
        self.is_corrupt = bool(by) or not is_larger
        used = slice(self.first, self.clock)
        for layer in self.layers():
            layer.move(shape, used, by)
        self.is_corrupt = True
        self._mask, self._positions = mask, positions
        self._starts = [start + by for start in self._starts]
        self._set_clock(self.first + by, self.clock + by)
        for slot in range(self.num_rows):
            self._mark(slot)
        self.is_corrupt = False

    def _mark(self, slot: int) -> None:
        start = self._starts[slot]
        self._mask[slot] = 0
        self._mask[slot, start : self.clock] = 1
        self._positions[slot] = self.clock - start


def buffer_tokens(slots: int, columns: int, slot_tokens: int = 0) -> int:
    """Slots x columns of the smallest buffers that hold these, states counted."""
    return slots * (_rounded(columns) + slot_tokens)


def _rounded(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP
