# SPDX-License-Identifier: Apache-2.0
"""The constants of an engine, and the properties of its model that decide scheduling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_triton.engine.prompt_lookup import ProposalCosts
    from hf_triton.runner.device import ChunkSizes


@dataclass(frozen=True)
class EngineConfig:
    """Constants that no setting changes."""

    chunk_sizes: ChunkSizes | None = None
    """Tokens of a prefill chunk; None: the device's."""
    block_size: int | None = None
    """Tokens of a block of the KV cache; None: the device's."""
    min_kept_bytes: int = 64 << 20
    """A prefix cache of this size, or of the weights' if they are more, takes no fresh memory on a CPU before released
    blocks; never more than `prefix_cache_fraction`."""
    max_memory_wait_s: float = 5.0
    """How long a context waits for other users of the device to free memory, before it is refused."""
    memory_poll_s: float = 0.02
    """How often it looks for memory meanwhile."""
    idle_release_s: float = 10.0
    """How long an engine is idle before it frees its memory."""
    prefix_cache_fraction: float = 0.25
    """The most of the KV cache that the prefix cache keeps on a CPU before released blocks are used again."""
    kept_state_tokens: int = 4096
    """The prefix cache keeps a model's states every so many tokens of a context, and where it ends."""
    spare_image_tokens: int = 4096
    """Images of as many tokens keep their features when no request needs them any more, until the engine is idle."""
    proposal_cost: float | None = None
    """The part of a decoding step that a proposed token costs, see `ProposalCosts`; None: it is timed at load."""
    runs_ahead: bool | None = None
    """Whether a step may start before the tokens of the last one are read; None: on a GPU."""


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model and its executor that decide how sequences are scheduled."""

    chunk_sizes: ChunkSizes
    recompute_length: float = float("inf")
    """Tokens of context at which a model with long RoPE changes its rotary frequencies, see `LongRope`. A sequence that
    reaches this length is preempted and its KV recomputed with the new ones. Infinite for other models."""
    recomputes: bool = True
    """Whether recomputing a preempted sequence gives its former state. If not, a sequence is admitted only if the
    memory has room for all tokens that it may generate."""
    prefills_whole: bool = False
    """Whether chunked prefill is off: the whole context is one chunk."""
    has_states: bool = False
    """Whether some layers keep states, which take a slot for each sequence."""
    caches_prefixes: bool = False
    """Whether full blocks are published."""
    joins_images: bool = False
    """Whether the tokens of an image attend to each other, so that an image is never cut."""
    proposals: ProposalCosts | None = None
    """What proposed tokens cost; None: none are proposed."""
    runs_ahead: bool = False
    """Whether a decoding step may start before the tokens of the last one are read."""

    @property
    def keeps_states(self) -> bool:
        """Whether the prefix cache keeps states beside blocks."""
        return self.has_states and self.caches_prefixes
