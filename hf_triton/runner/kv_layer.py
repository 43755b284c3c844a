# SPDX-License-Identifier: Apache-2.0
"""One layer's keys and values of all rows, in the form that transformers' attention calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from hf_triton.runner.kv_cache import KVCache


class KVCacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Buffers `[rows, heads, columns, head_dim]` of one layer, which begin without any rows and columns.

    Args:
        rows: What tells the rows and columns in use.
        read: What the model's layer has written, of which heads, size, dtype and device are taken.
    """

    def __init__(self, rows: KVCache, read: DynamicLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        keys, values = read.keys, read.values
        assert keys is not None
        assert values is not None
        self.key_rows = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])
        self.value_rows = values.new_zeros(0, values.shape[1], 0, values.shape[3])
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def put(self, row: int, columns: slice, read: DynamicLayer, place: int) -> None:
        """Lay the last columns of one place of a batch that has been read into those of a row."""
        length = columns.stop - columns.start
        for buffer, new in ((self.key_rows, read.keys), (self.value_rows, read.values)):
            buffer[row] = 0
            buffer[row, :, columns] = new[place, :, -length:]  # type: ignore[index]

    def replace(self, row: int, by: int) -> None:
        """Lay one row into another."""
        for buffer in (self.key_rows, self.value_rows):
            buffer[row, :, : self._rows.clock] = buffer[by, :, : self._rows.clock]

    def move(self, shape: tuple[int, int], used: slice, by: int) -> None:
        """Give the buffers a shape, rows and columns, and move the columns in use `by` to the right."""
        self.key_rows = _moved(self.key_rows, shape, self._rows.num_rows, used, by)
        self.value_rows = _moved(self.value_rows, shape, self._rows.num_rows, used, by)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether transformers must not look at the mask's values: that waits for the device."""
        return self._rows.bucket is not None or self.key_rows.is_cuda

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[rows, heads, 1, head_dim]` at the clock; all columns that the forward sees."""
        rows = self._rows
        if rows.bucket is not None:
            count, end = rows.bucket
            keys, values = self.key_rows[:count, :, :end], self.value_rows[:count, :, :end]
            keys.index_copy_(2, rows.clock_index, key_states)
            values.index_copy_(2, rows.clock_index, value_states)
            return keys, values
        count, end = rows.num_rows, rows.clock + key_states.shape[2]
        self.key_rows[:count, :, rows.clock : end] = key_states
        self.value_rows[:count, :, rows.clock : end] = value_states
        return self.key_rows[:count, :, rows.first : end], self.value_rows[:count, :, rows.first : end]

    def get_seq_length(self) -> int:
        """Columns before the new one; in a bucket a tensor on the device, so that its value is no part of a graph."""
        return self._rows.width if self._rows.bucket is None else self._rows.clock_index[0]  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask has, and where it begins."""
        return self._rows.width + query_length if self._rows.bucket is None else self._rows.bucket[1], 0


def _moved(buffer: torch.Tensor, shape: tuple[int, int], num_rows: int, columns: slice, by: int) -> torch.Tensor:
    """The buffer in this shape, or a new one, with the columns of its first `num_rows` rows `by` to the right."""
    used = buffer[:num_rows, :, columns]
    if (buffer.shape[0], buffer.shape[2]) == shape:
        used, target = used.clone(), buffer
        target[:num_rows] = 0
    else:
        target = buffer.new_zeros(shape[0], buffer.shape[1], shape[1], buffer.shape[3])
    target[:num_rows, :, columns.start + by : columns.stop + by] = used
    return target
