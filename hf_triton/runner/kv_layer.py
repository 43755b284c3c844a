# SPDX-License-Identifier: Apache-2.0
"""One layer's keys and values of all slots, in the form that transformers' attention calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class KVWindow:
    """The part of a KV cache that a forward sees: slots `[:num_rows]`, columns `[first:clock]`, or a bucket.

    Args:
        device: Of `clock_index`.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_rows = 0
        self.first = 0
        self.clock = 0
        self.clock_index = torch.zeros(1, dtype=torch.int64, device=device)
        """`clock`, on the device."""
        self.bucket: tuple[int, int] | None = None
        """Slots and columns that the forward sees, see `padded_to`."""

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.clock - self.first

    @property
    def num_seen(self) -> int:
        """Slots that the forward sees."""
        return self.num_rows if self.bucket is None else self.bucket[0]

    @contextmanager
    def padded_to(self, rows: int, columns: int) -> Iterator[None]:
        """Let the forward see the first `rows` and `columns` of the buffers, so that its shapes are static.

        Slots beyond those in use have position 0 and see at least the newest column; their results are ignored.
        """
        self.bucket = rows, columns
        try:
            yield
        finally:
            self.bucket = None


class KVCacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Buffers `[slots, heads, columns, head_dim]` of one layer, at first without slots and columns.

    Args:
        window: The slots and columns in use.
        prefilled: The layer of a prefill's cache, for heads, size, dtype and device.
    """

    def __init__(self, window: KVWindow, prefilled: DynamicLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window
        keys, values = prefilled.keys, prefilled.values
        assert keys is not None
        assert values is not None
        self.key_rows = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])
        self.value_rows = values.new_zeros(0, values.shape[1], 0, values.shape[3])
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def put(self, slot: int, columns: slice, prefilled: DynamicLayer, row: int) -> None:
        """Copy the last columns of a row of a prefill batch to those of a slot."""
        length = columns.stop - columns.start
        for buffer, new in ((self.key_rows, prefilled.keys), (self.value_rows, prefilled.values)):
            buffer[slot] = 0  # NaNs of a previous sequence must not leak
            buffer[slot, :, columns] = new[row, :, -length:]  # type: ignore[index]

    def replace(self, slot: int, by: int) -> None:
        """Copy one slot to another."""
        for buffer in (self.key_rows, self.value_rows):
            buffer[slot, :, : self._window.clock] = buffer[by, :, : self._window.clock]

    def move(self, shape: tuple[int, int], used: slice, by: int) -> None:
        """Resize the buffers to slots and columns, and move the columns in use `by` to the right."""
        self.key_rows = _moved(self.key_rows, shape, self._window.num_rows, used, by)
        self.value_rows = _moved(self.value_rows, shape, self._window.num_rows, used, by)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether transformers must not read the mask's values: that waits for the device."""
        return self._window.bucket is not None or self.key_rows.is_cuda

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[slots, heads, 1, head_dim]` at the clock; returns all columns that the forward sees."""
        window = self._window
        if window.bucket is not None:
            count, end = window.bucket
            keys, values = self.key_rows[:count, :, :end], self.value_rows[:count, :, :end]
            keys.index_copy_(2, window.clock_index, key_states)
            values.index_copy_(2, window.clock_index, value_states)
            return keys, values
        count, end = window.num_rows, window.clock + key_states.shape[2]
        self.key_rows[:count, :, window.clock : end] = key_states
        self.value_rows[:count, :, window.clock : end] = value_states
        return self.key_rows[:count, :, window.first : end], self.value_rows[:count, :, window.first : end]

    def get_seq_length(self) -> int:
        """Columns before the new one; in a bucket a tensor on the device, so that no graph contains its value."""
        return self._window.width if self._window.bucket is None else self._window.clock_index[0]  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, and its first one."""
        return self._window.width + query_length if self._window.bucket is None else self._window.bucket[1], 0


def _moved(buffer: torch.Tensor, shape: tuple[int, int], num_rows: int, columns: slice, by: int) -> torch.Tensor:
    """The buffer in this shape, or a new one, with the columns of its first `num_rows` slots `by` to the right."""
    used = buffer[:num_rows, :, columns]
    if (buffer.shape[0], buffer.shape[2]) == shape:
        used, target = used.clone(), buffer
        target[:num_rows] = 0
    else:
        target = buffer.new_zeros(shape[0], buffer.shape[1], shape[1], buffer.shape[3])
    target[:num_rows, :, columns.start + by : columns.stop + by] = used
    return target
