# SPDX-License-Identifier: Apache-2.0
"""The memory of one layer's blocks. On a CPU it is touched as blocks are written, and given back block by block."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Sequence

import torch

from hf_triton.runner.step_tensors import StepTensors
from hf_triton.runner.transfer import to_index

PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_NORESERVE", 0x4000)


class KVBlocks:
    """Keys `[blocks, key heads, block size, size]` and values likewise, of one layer.

    Args:
        keys: `[..., key heads, tokens, size]`: a layer's first keys, for their shape, dtype and device.
    """

    def __init__(self, num_blocks: int, block_size: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.block_size = block_size
        self.device = keys.device
        self._maps: list[mmap.mmap | None] = []
        self.keys = self._new(num_blocks, keys)
        self.values = self._new(num_blocks, values)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values take so much."""
        return (self.keys[0].nbytes + self.values[0].nbytes) // self.block_size

    def gather(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens of a step's sequences, `[1, key heads, tokens, size]`."""
        tables = step.on(self.device, "tables")
        parts = [self.read(tables[row], end) for row, end in enumerate(step.ends)]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, 1).unsqueeze(0), torch.cat(values, 1).unsqueeze(0)

    def read(self, table: torch.Tensor, length: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a sequence's keys and values `[first:length]`, `[heads, tokens, size]`; `first` begins a block."""
        blocks = table[first // self.block_size : -(-length // self.block_size)]
        keys, values = self.keys[blocks].transpose(0, 1), self.values[blocks].transpose(0, 1)
        return keys.flatten(1, 2)[:, : length - first], values.flatten(1, 2)[:, : length - first]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each from one to another; all are read before any is written."""
        sources, targets = (to_index(numbers, self.device) for numbers in zip(*pairs, strict=True))
        self.keys[targets] = self.keys[sources]
        self.values[targets] = self.values[sources]

    def are_finite(self, blocks: Sequence[int]) -> torch.Tensor:
        """Whether the keys and values of each block are neither NaN nor infinite, `[blocks]` bool."""
        index = to_index(blocks, self.device)
        keys, values = (tensor[index].isfinite().flatten(1).all(1) for tensor in (self.keys, self.values))
        return keys & values

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free the memory of blocks whose contents are not needed; only on a CPU, in whole pages."""
        runs = list(_runs(sorted(blocks)))
        for tensor, buffer in zip((self.keys, self.values), self._maps, strict=True):
            if buffer is None:
                continue
            size = tensor[0].nbytes
            for first, last in runs:
                start = -(-first * size // mmap.PAGESIZE) * mmap.PAGESIZE
                length = (last + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE - start
                if length > 0:
                    buffer.madvise(mmap.MADV_DONTNEED, start, length)

    def _new(self, num_blocks: int, states: torch.Tensor) -> torch.Tensor:
        heads, size = states.shape[-3], states.shape[-1]
        shape = num_blocks, heads, self.block_size, size
        buffer = None
        if states.device.type == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
            num_bytes = num_blocks * heads * self.block_size * size * states.element_size()
            try:
                buffer = mmap.mmap(-1, max(1, num_bytes), flags=PRIVATE)
            except OSError as error:  # the process may not have so many addresses
                raise MemoryError(f"no room for a KV cache of {num_bytes:,} bytes in a layer") from error
            tensor = torch.frombuffer(buffer, dtype=states.dtype, count=num_bytes // states.element_size()).view(shape)
        else:
            tensor = states.new_empty(shape)
        self._maps.append(buffer)
        return tensor


def _runs(blocks: list[int]) -> Iterable[tuple[int, int]]:
    """The first and last of consecutive numbers."""
    for _, group in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        yield numbers[0], numbers[-1]
