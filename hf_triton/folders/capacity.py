# SPDX-License-Identifier: Apache-2.0
"""How many sequences fit into memory, and how long a card computes on a request. Knows neither files nor options.

Bytes and tokens are those that the engine allocates. Times are estimates: a step reads the weights and what is cached
of each sequence, and computes; the slower of both decides, at a part of what the card's data sheet states.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_triton.folders.cards import Card
from hf_triton.runner.device import CHUNK_SIZES
from hf_triton.runner.gpu_memory import DeviceMemory, GpuPart
from hf_triton.runner.model_runner import CPU_BLOCK_SIZE, GPU_BLOCK_SIZE
from hf_triton.runner.outline import Outline

GIGA, TERA = 10**9, 10**12


@dataclass(frozen=True)
class Room:
    """A model in the memory of a device.

    Args:
        outline: Of the model.
        weights: In bytes.
        device: `cuda` or `cpu`.
        total: Bytes of the device; of the host, those that are free.
        fraction: The part of a GPU that an instance takes.
        max_cache_tokens: The setting.
    """

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
        """Of keys and values, states included, for which there is room."""
        import torch

        free = self.total - self.weights if self.device == "cpu" else self.total
        memory = DeviceMemory(
            torch.device(self.device), self.outline.bytes_per_token, self.weights, max(0, free), self.total
        )
        return max(0, memory.max_tokens(GpuPart(self.fraction, is_set=True), 0))

    def sequence_tokens(self, context: int) -> int:
        """Of the blocks of a sequence."""
        return -(-context // self.block_size) * self.block_size

    def sequence_bytes(self, context: int) -> int:
        """Of a sequence's blocks and states."""
        return (self.sequence_tokens(context) + self.outline.slot_tokens) * self.outline.bytes_per_token

    def num_sequences(self, context: int) -> int:
        """How many sequences of so many tokens fit."""
        each = self.sequence_tokens(context)
        number = self.num_tokens // (each + self.outline.slot_tokens)
        return number if self.max_cache_tokens is None else min(number, self.max_cache_tokens // each)


@dataclass(frozen=True)
class Speed:
    """The most that a model reaches on a card: all of its bandwidth and arithmetic.

    Args:
        room: The model in its memory.
        num_parameters: Of the model.
        card: By its data sheet.
    """

    room: Room
    num_parameters: int
    card: Card

    def prefill_s(self, num_tokens: int) -> float:
        """Of a prompt alone."""
        flop = self.room.outline.prompt_flop(num_tokens, CHUNK_SIZES["cuda"].max_tokens)
        return self._seconds(self._read(num_tokens), flop)

    def step_s(self, num_sequences: int, context: float) -> float:
        """Of one token of each sequence, with so many tokens before it on average."""
        outline = self.room.outline
        cached = (context + outline.slot_tokens) * outline.bytes_per_token
        num_bytes = self._read(num_sequences) + num_sequences * cached
        return self._seconds(num_bytes, num_sequences * outline.decoding_flop(context))

    def requests_per_s(self, num_sequences: int, prompt: int, output: int) -> float:
        """Of so many at a time, prompts computed one after the other."""
        step = self.step_s(num_sequences, prompt + output / 2)
        return 1 / (self.prefill_s(prompt) + output * step / num_sequences)

    def _read(self, num_tokens: int) -> float:
        """Bytes of the weights that so many tokens need: of a mixture of experts, at most what each computes with."""
        outline = self.room.outline
        active = (outline.token_flop + outline.logits_flop) / 2 / self.num_parameters
        return self.room.weights * min(1.0, num_tokens * active)

    def _seconds(self, num_bytes: float, flop: float) -> float:
        return max(num_bytes / (self.card.bandwidth_gb_s * GIGA), flop / (self.card.tflops * TERA))
