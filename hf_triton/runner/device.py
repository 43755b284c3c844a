# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of its device: prefill chunk sizes, and CPU cores or a CUDA context for its thread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from hf_triton.runner.cpu import SharedCores

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChunkSizes:
    """Tokens of a prefill chunk on one kind of device."""

    max_tokens: int
    """While no sequence is decoding."""
    max_tokens_decoding: int
    """While sequences are decoding: their next step waits for the chunk."""
    long_context: float = math.inf
    """Cached tokens whose attention takes about as long as the rest of a chunk; longer contexts get shorter chunks."""

    def budget(self, num_decodes: int) -> int:
        """Tokens of chunks in a step beside decoding sequences, whose tokens count; at least a quarter of a chunk."""
        if not num_decodes:
            return self.max_tokens
        size = min(self.max_tokens, self.max_tokens_decoding)
        return max(size - num_decodes, -(-size // 4))

    def share(self, *, is_decoding: bool, num_cached: int) -> float:
        """The part of a step's budget that a chunk behind cached tokens may take; above 0, at most 1."""
        return 1 / (1 + num_cached // self.long_context) if is_decoding else 1.0


CHUNK_SIZES: Final = {
    "cpu": ChunkSizes(512, 256, long_context=2048),
    "cuda": ChunkSizes(1024, 512),  # 512 bounds the stalls: Sarathi-Serve (Agrawal 2024)
}
"""Each of torch's device types has its own; other accelerators take CUDA's."""
MAX_NUM_SEQS: Final = {"cuda": 256}
"""The most sequences that run at a time, by torch's device type."""
DEFAULT_NUM_SEQS: Final = 32
"""All other types run so many."""


class DeviceContext:
    """A model's device, as the thread that computes on it uses it.

    As a context manager it is busy inside and closed afterwards: for loading a model.

    Args:
        device: Of the model's input embedding; None before torch is imported, for the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._cores = SharedCores() if device is None or device.type == "cpu" else None

    @property
    def chunk_sizes(self) -> ChunkSizes:
        """Tokens of a prefill chunk."""
        return CHUNK_SIZES.get("cpu" if self._device is None else self._device.type, CHUNK_SIZES["cuda"])

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at a time, unless the folder says how many."""
        return DEFAULT_NUM_SEQS if self._device is None else MAX_NUM_SEQS.get(self._device.type, DEFAULT_NUM_SEQS)

    def begin(self) -> None:
        """Prepare the calling thread: kernels outside torch (Triton's) run on the thread's current CUDA device."""
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.set_device(self._device)

    def busy(self) -> None:
        """Take a share of the CPU cores; call it before every step, see `SharedCores.take`."""
        if self._cores is not None:
            self._cores.take()

    def idle(self) -> None:
        """Leave the CPU cores to other models."""
        if self._cores is not None:
            self._cores.leave()

    def close(self) -> None:
        """Leave the CPU cores and restore torch's number of threads."""
        if self._cores is not None:
            self._cores.close()

    def __enter__(self) -> Self:
        self.begin()
        self.busy()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
