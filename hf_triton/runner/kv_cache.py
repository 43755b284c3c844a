# SPDX-License-Identifier: Apache-2.0
"""The rows of key/value memory: every running text is a row, and all rows end at the same column, the clock.

That is left padding, the contract that every decoder-only transformers model keeps for batched `generate`: masks,
rotary positions, alibi and sliding windows come out right with the model's own forward. Knows no texts, no sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from transformers.cache_utils import Cache

from hf_triton.runner.kv_layer import KVCacheLayer
from hf_triton.runner.states import (
    AnyLayer,
    StatesLayer,
    TextStates,
    kept_layers,
    layer_of_rows,
    states_of,
    text_states,
)

COLUMN_STEP: Final = 128
"""The buffers have a multiple of so many columns, and so many that no row needs any more are dropped together."""
CUDA_SHAPE: Final = (8, 512)
"""Rows and columns that buffers on a CUDA device begin with: those that grow throw captured graphs away."""


class KVCache:
    """Buffers `[rows, heads, columns, head_dim]` for keys and for values of every layer.

    Rows `[:num_rows]` and columns `[first:clock]` are in use; row i has its tokens in the columns `[starts[i]:clock]`.
    A row is all zero before its text comes in: one that came to nan leaves none behind for the next in its place.

    Args:
        device: Where the buffers live.
        slot_tokens: How many tokens weigh as much as what a row has of one size, see `states`.
    """

    def __init__(self, device: torch.device, slot_tokens: int = 0) -> None:
        self._slot_tokens = slot_tokens
        self.num_rows = 0
        self.first = 0
        self.clock = 0
        self.max_tokens: int | None = None
        """As `num_tokens`: what growing ahead of need respects; None: no limit."""
        self.cache = Cache(layers=[])
        """What the model's forward is given; it appends to the rows in use, at the clock."""
        self.is_corrupt = False
        """A move of the rows broke off in the middle: what they hold is lost."""
        self.bucket: tuple[int, int] | None = None
        """Rows and columns that the forward sees, see `padded_to`."""
        self.clock_index = torch.zeros(1, dtype=torch.int64, device=device)
        """`clock`, on the device."""
        self._starts: list[int] = []
        self._clear()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns that the buffers have."""
        return self._mask.shape[0], self._mask.shape[1]

    @property
    def num_tokens(self) -> int:
        """Rows x columns that the buffers have, states counted."""
        return self._tokens(self.shape)

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.clock - self.first

    @property
    def num_seen(self) -> int:
        """Rows that the forward sees."""
        return self.num_rows if self.bucket is None else self.bucket[0]

    def attention_mask(self) -> torch.Tensor:
        """`[rows, columns]` int64, 1 where a row has a token, the one of the column just made included."""
        if self.bucket is None:
            return self._mask[: self.num_rows, self.first : self.clock + 1]
        return self._mask[: self.bucket[0], : self.bucket[1]]

    def position_ids(self) -> torch.Tensor:
        """`[rows, 1]` int64, tokens that each row has before its next one."""
        return self._positions[: self.num_seen]

    @contextmanager
    def padded_to(self, rows: int, columns: int) -> Iterator[None]:
        """Let the forward see the buffers' first `rows` and `columns` whatever is in use: the same shapes at each step.

        Rows beyond those in use have position 0 and see the newest column at least; what they compute is of no use.
        """
        self.bucket = rows, columns
        try:
            yield
        finally:
            self.bucket = None

    @contextmanager
    def states_kept(self) -> Iterator[None]:
        """Let the forward run and no row's state be another afterwards, so that the same column can be run again."""
        buffers = [buffer for layer in self._layers() for buffer in states_of(layer)]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, states in zip(buffers, before, strict=True):
                buffer.copy_(states)

    def add(self, prefilled: Cache, row: int, length: int) -> None:
        """Lay a row of a left-padded prefill, its last `length` columns, into a new row that ends at the clock."""
        if not self.cache.layers:
            self.cache.layers = [layer_of_rows(self, layer) for layer in prefilled.layers]
        if not self.num_rows:
            self._set_clock(length, length)
        self._make_room(self.num_rows + 1, length)
        start = self.clock - length
        for layer, read in zip(self._layers(), kept_layers(prefilled), strict=True):
            layer.put(self.num_rows, slice(start, self.clock), read, row)
        self.is_corrupt = True
        self._starts.append(start)
        self.num_rows += 1
        self.first = min(self._starts)
        self._mark(self.num_rows - 1)
        self.is_corrupt = False

    def remove(self, row: int) -> None:
        """Free a row; the last one takes its place."""
        last = self.num_rows - 1
        if row != last:
            self.is_corrupt = True
            for layer in self._layers():
                layer.replace(row, last)
            self._starts[row] = self._starts[last]
            self._mark(row)
            self.is_corrupt = False
        self._starts.pop()
        self.num_rows = last
        self._mask[last] = 0
        self._positions[last] = 0
        self.first = min(self._starts, default=self.clock)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return self.clock - self._starts[row]

    def read(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[heads, length, head_dim]` of a row's first tokens, layer by layer; views of the buffers."""
        columns = slice(self._starts[row], self._starts[row] + length)
        layers = [layer for layer in self._layers() if isinstance(layer, KVCacheLayer)]
        return [(layer.key_rows[row, :, columns], layer.value_rows[row, :, columns]) for layer in layers]

    def states(self, row: int) -> list[TextStates]:
        """What the layers that keep states have of a row; views."""
        return text_states(self.cache, row)

    def make_column(self) -> None:
        """Have a free column at the clock, and drop those that no row needs any more."""
        if self._is_worth_moving():
            self._lay_out(self.shape, -self.first)
        self._make_room(self.num_rows, 0)
        self._mask[:, self.clock] = 1
        self.is_corrupt = self._has_states()  # until the column is whole: no other forward can run it again

    def advance(self) -> None:
        """The column made has a token of every row now."""
        self.clock += 1
        self.clock_index += 1
        self._positions[: self.num_rows] += 1
        self.is_corrupt = False

    def widen(self, columns: int) -> None:
        """Have so many columns at least."""
        self._lay_out((self.shape[0], max(columns, self.shape[1])), 0)

    def trim(self) -> None:
        """Give back what nobody uses."""
        if self.num_rows:
            self._lay_out(self._least(self.num_rows, self.width + 1), -self.first)
        else:
            self.release()

    def release(self) -> None:
        """Give all memory back; there must be no row in use."""
        self.cache = Cache(layers=[])
        self._clear()

    # --- the buffers -------------------------------------------------------------------------------------------------

    def _layers(self) -> list[AnyLayer]:
        return kept_layers(self.cache)

    def _has_states(self) -> bool:
        return any(isinstance(layer, StatesLayer) for layer in self.cache.layers)

    def _tokens(self, shape: tuple[int, int]) -> int:
        return shape[0] * (shape[1] + self._slot_tokens)

    def _clear(self) -> None:
        self._mask = self.clock_index.new_zeros(0, 0)  # [rows, columns], zero beyond the clock
        self._positions = self.clock_index.new_zeros(0, 1)
        self.allocation = object()
        """Another object after each change of the buffers' addresses."""

    def _set_clock(self, first: int, clock: int) -> None:
        self.first, self.clock = first, clock
        self.clock_index.fill_(clock)

    def _least(self, rows: int, columns: int) -> tuple[int, int]:
        return max(rows, self.num_rows), _rounded(max(columns, self.width))

    def _is_worth_moving(self) -> bool:
        """Whether to move the rows to the left end: for a few columns only where the buffers would grow otherwise."""
        return self.first >= (COLUMN_STEP if self.clock < self.shape[1] else COLUMN_STEP // 4)

    def _make_room(self, rows: int, length: int) -> None:
        """Have so many rows, columns for a new one of `length` (0: none joins), and a free column."""
        least, in_place = max(self.width, length) + 1, max(self.clock, length) + 1
        needed = least if length else in_place  # where a text is copied, all may be moved
        has_room = rows <= self.shape[0] and needed <= self.shape[1]
        shape = self.shape if has_room else self._larger(rows, least, needed)
        clock = (in_place if in_place <= shape[1] else least) - 1
        if shape != self.shape or clock != self.clock:
            self._lay_out(shape, clock - self.clock)

    def _larger(self, rows: int, least: int, needed: int) -> tuple[int, int]:
        """The shape to take: with room for more, with none, or without what nobody uses, as `max_tokens` has it.

        Args:
            rows: That are needed.
            least: Columns that are needed.
            needed: The same, with those that are not worth dropping.
        """
        held = self.shape
        kept = max(rows, held[0]), max(self._least(rows, needed)[1], held[1])
        if self._mask.is_cuda:
            ahead = [max(kept[each], 2 * held[each], CUDA_SHAPE[each]) for each in (0, 1)]
        else:
            ahead = [max(kept[0], min(2 * held[0], held[0] + 16)), kept[1]]
        grown = tuple(ahead[each] if kept[each] > held[each] else held[each] for each in (0, 1))
        for shape in (grown, kept):
            if self.max_tokens is None or self._tokens((shape[0], shape[1])) <= self.max_tokens:
                return shape[0], shape[1]
        return self._least(rows, least)

    def _lay_out(self, shape: tuple[int, int], by: int) -> None:
        """Give the buffers a shape, and move what is in use `by` columns to the right."""
        mask, positions = self._mask, self._positions
        if shape != self.shape:
            mask, positions = mask.new_zeros(shape), positions.new_zeros(shape[0], 1)
            self.allocation = object()
        # Where it breaks off, layers with larger buffers and the same contents in place go with those not reached.
        is_larger = shape[0] >= self.shape[0] and shape[1] >= self.shape[1]
        self.is_corrupt = bool(by) or not is_larger
        used = slice(self.first, self.clock)
        for layer in self._layers():
            layer.move(shape, used, by)
        self.is_corrupt = True
        self._mask, self._positions = mask, positions
        self._starts = [start + by for start in self._starts]
        self._set_clock(self.first + by, self.clock + by)
        for row in range(self.num_rows):
            self._mark(row)
        self.is_corrupt = False

    def _mark(self, row: int) -> None:
        start = self._starts[row]
        self._mask[row] = 0
        self._mask[row, start : self.clock] = 1
        self._positions[row] = self.clock - start


def buffer_tokens(rows: int, columns: int, slot_tokens: int = 0) -> int:
    """Rows x columns of the smallest buffers with so many in use, states counted."""
    return rows * (_rounded(columns) + slot_tokens)


def _rounded(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP
