# SPDX-License-Identifier: Apache-2.0
"""How many sequences fit into memory, in the bytes that the engine allocates. Knows neither files nor options."""

from __future__ import annotations

from dataclasses import dataclass

from hf_triton.runner.gpu_memory import DeviceMemory, GpuPart
from hf_triton.runner.model_runner import CPU_BLOCK_SIZE, GPU_BLOCK_SIZE
from hf_triton.runner.outline import Outline


@dataclass(frozen=True)
class Room:
    """A model with so many bytes of weights in the memory of a device; of the host, `total` is what is free."""

    outline: Outline
    weights: int
    device: str
    total: int
    fraction: float = 1.0
    max_cache_tokens: int | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache."""
        return CPU_BLOCK_SIZE if self.device == "cpu" else GPU_BLOCK_SIZE

    @property
    def num_tokens(self) -> int:
        """Tokens of keys and values, states included, for which there is room."""
        import torch

        free = self.total - self.weights if self.device == "cpu" else self.total
        memory = DeviceMemory(
            torch.device(self.device), self.outline.bytes_per_token, self.weights, max(0, free), self.total
        )
        return max(0, memory.max_tokens(GpuPart(self.fraction, is_set=True), 0))

    def sequence_tokens(self, context: int) -> int:
        return -(-context // self.block_size) * self.block_size

    def sequence_bytes(self, context: int) -> int:
        """Bytes of a sequence's blocks and states."""
        return (self.sequence_tokens(context) + self.outline.slot_tokens) * self.outline.bytes_per_token

    def num_sequences(self, context: int) -> int:
        """How many sequences of so many tokens fit."""
        each = self.sequence_tokens(context)
        number = self.num_tokens // (each + self.outline.slot_tokens)
        return number if self.max_cache_tokens is None else min(number, self.max_cache_tokens // each)
