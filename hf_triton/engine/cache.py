# SPDX-License-Identifier: Apache-2.0
"""The rows of key/value memory: every running text is a row, and all rows end at the same column, the clock.

That is left padding, the contract that every decoder-only transformers model keeps for batched `generate`: masks,
rotary positions, alibi and sliding windows come out right with the model's own forward. Knows no texts, no sampling.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

COLUMN_STEP: Final = 128
"""Columns that the buffers grow by."""


class KeyValueRows:
    """Buffers `[rows, heads, columns, head_dim]` for keys and for values of every layer.

    Rows `[:num_rows]` and columns `[first:clock]` are in use; row i has its tokens in the columns `[starts[i]:clock]`.

    Args:
        device: Where the buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_rows = 0
        self.first = 0
        self.clock = 0
        self._starts: list[int] = []
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [rows, columns], 1 from a row's start on
        self.cache = Cache(layers=[])
        """What the model's forward is given; it appends to the rows in use, at the clock."""
        self.is_torn = False
        """A move of the rows broke off in the middle: what they hold is lost."""

    def attention_mask(self, num_new: int) -> torch.Tensor:
        """`[num_rows, columns in use + num_new]` int64, 1 where a row has a token."""
        return self._mask[: self.num_rows, self.first : self.clock + num_new]

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [self.clock - start for start in self._starts]

    def add(self, prefilled: DynamicCache, row: int, length: int) -> None:
        """Lay a row of a left-padded prefill, its last `length` columns, into a new row that ends at the clock."""
        self._make_columns_before(length)
        self._reserve(prefilled, self.num_rows + 1, self.clock)
        start = self.clock - length
        for layer, (keys, values) in zip(self._layers(), _contents(prefilled), strict=True):
            layer.key_rows[self.num_rows, :, start : self.clock] = keys[row, :, -length:]
            layer.value_rows[self.num_rows, :, start : self.clock] = values[row, :, -length:]
        self._starts.append(start)
        self.num_rows += 1
        self.first = min(self._starts)
        self._mark(self.num_rows - 1)

    def remove(self, row: int) -> None:
        """Free a row; the last one takes its place."""
        last = self.num_rows - 1
        used = slice(self.first, self.clock)
        if row != last:
            for layer in self._layers():
                layer.key_rows[row, :, used] = layer.key_rows[last, :, used]
                layer.value_rows[row, :, used] = layer.value_rows[last, :, used]
            self._starts[row] = self._starts[last]
            self._mark(row)
        self._starts.pop()
        self.num_rows = last
        self.first = min(self._starts, default=0)
        if not self.num_rows:
            self.clock = 0

    def make_column(self) -> None:
        """Have a free column at the clock: by dropping those that no row needs any more, or by growing."""
        if self.clock < self._num_columns():
            return
        if self.first >= COLUMN_STEP:
            self._shift(-self.first)
        else:
            self._resize(self._mask.shape[0], self.clock + COLUMN_STEP)

    def release(self) -> None:
        """Give all memory back; there must be no row in use."""
        self.cache = Cache(layers=[])
        self._mask = self._mask.new_zeros(0, 0)

    # --- the buffers -------------------------------------------------------------------------------------------------

    def _layers(self) -> list[_RowsLayer]:
        return self.cache.layers  # type: ignore[return-value]

    def _num_columns(self) -> int:
        return int(self._mask.shape[1])

    def _make_columns_before(self, length: int) -> None:
        """Move the clock to the right, and all rows with it, until a row of `length` fits before it."""
        if self.clock >= length:
            return
        if self.num_rows == 0:
            self.first = self.clock = length
            return
        if length > self._num_columns():
            self._resize(self._mask.shape[0], length)
        self._shift(length - self.clock)

    def _reserve(self, prefilled: DynamicCache, rows: int, columns: int) -> None:
        if not self.cache.layers:
            self.cache.layers = [_RowsLayer(self, *contents) for contents in _contents(prefilled)]
        if rows > self._mask.shape[0] or columns > self._num_columns():
            doubled = max(rows, min(2 * self._mask.shape[0], rows + 16)) if rows > self._mask.shape[0] else rows
            self._resize(max(doubled, self._mask.shape[0]), max(columns, self._num_columns()))

    def _resize(self, rows: int, columns: int) -> None:
        columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
        for layer in self._layers():
            layer.resize(rows, columns)
        self._mask = self._mask.new_zeros(rows, columns)
        for row in range(self.num_rows):
            self._mark(row)

    def _shift(self, by: int) -> None:
        old, new = slice(self.first, self.clock), slice(self.first + by, self.clock + by)
        self.is_torn = True
        for layer in self._layers():
            layer.key_rows[: self.num_rows, :, new] = layer.key_rows[: self.num_rows, :, old].clone()
            layer.value_rows[: self.num_rows, :, new] = layer.value_rows[: self.num_rows, :, old].clone()
        self.first, self.clock = self.first + by, self.clock + by
        self._starts = [start + by for start in self._starts]
        for row in range(self.num_rows):
            self._mark(row)
        self.is_torn = False

    def _mark(self, row: int) -> None:
        start = self._starts[row]
        self._mask[row, :start] = 0
        self._mask[row, start:] = 1


class _RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's part of the rows, in the form that transformers' attention calls."""

    def __init__(self, rows: KeyValueRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.key_rows = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])
        self.value_rows = values.new_zeros(0, values.shape[1], 0, values.shape[3])
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def resize(self, rows: int, columns: int) -> None:
        """Make the buffers `rows` x `columns`, keeping what is in them."""
        self.key_rows = _resized(self.key_rows, rows, columns)
        self.value_rows = _resized(self.value_rows, rows, columns)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[num_rows, heads, new, head_dim]` at the clock; all columns in use, the new ones included."""
        count, first, clock = self._rows.num_rows, self._rows.first, self._rows.clock
        end = clock + key_states.shape[2]
        self.key_rows[:count, :, clock:end] = key_states
        self.value_rows[:count, :, clock:end] = value_states
        return self.key_rows[:count, :, first:end], self.value_rows[:count, :, first:end]

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self._rows.clock - self._rows.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask has, and where it begins."""
        return self.get_seq_length() + query_length, 0


def _contents(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer.

    Raises:
        AttributeError: A layer keeps something else: the model is not one for these rows.
    """
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[union-attr, misc]


def _resized(buffer: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    larger = buffer.new_zeros(rows, buffer.shape[1], columns, buffer.shape[3])
    larger[: buffer.shape[0], :, : buffer.shape[2]] = buffer
    return larger
