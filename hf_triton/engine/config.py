# SPDX-License-Identifier: Apache-2.0
"""The constants of an engine in one place; tests pass others. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_triton.runner.device import ChunkSizes


@dataclass(frozen=True)
class EngineConfig:
    """What no setting changes."""

    chunk_sizes: ChunkSizes | None = None
    """Tokens of a prefill chunk; None: the device's."""
    max_memory_wait_s: float = 5.0
    """How long a context waits for other users of the device to free memory, before it is refused."""
    memory_poll_s: float = 0.02
    """How often it looks for memory meanwhile."""
    idle_release_s: float = 10.0
    """How long an engine is idle before it frees its memory."""
    queue_sweep_s: float = 0.1
    """How often the queue is looked through for cancelled and expired groups."""
    prefix_cache_fraction: float = 0.25
    """Of the KV cache memory: the most that the prefix cache takes."""
    padding_fraction: float = 0.25
    """Of the weights' memory: a sequence whose padding would take more gets a lane of its own. Attention takes about
    twice as long as the layers for a byte, and several such sequences may come."""
