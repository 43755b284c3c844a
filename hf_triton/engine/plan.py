# SPDX-License-Identifier: Apache-2.0
"""What one step computes: a chunk of a prefill batch, or one token of every running sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_triton.engine.sequence import Sequence

if TYPE_CHECKING:
    from hf_triton.engine.prefix_cache import Prefix
    from hf_triton.runner.device import ChunkSizes
    from hf_triton.sampling.sampler import SampledToken


@dataclass(frozen=True)
class PrefillRequest:
    """One context to prefill, and the sequences that continue it (`num_return_sequences`)."""

    sequences: list[Sequence]
    context: list[int]
    num_cached: int = 0
    """Tokens at its beginning whose KV is copied from `prefix`."""
    prefix: Prefix | None = None
    pause: int | None = None
    """Tokens after which a chunk must end, because the prefix cache stores the recurrent state there; None: no such
    point."""
    is_alone: bool = False
    """Whether it shares a batch with no other context."""

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return len(self.context)

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to score with each prompt token; None: prompt logprobs are not asked for, or known already."""
        group = self.sequences[0].group
        return None if group.prompt_logprobs is not None else group.params.prompt_logprobs


class PrefillBatch:
    """A left-padded batch of contexts, prefilled chunk by chunk.

    Args:
        requests: At least one.
        chunk_sizes: Of the device.
        is_whole: Whether the batch is one chunk, whatever its length.
    """

    def __init__(self, requests: list[PrefillRequest], chunk_sizes: ChunkSizes, *, is_whole: bool = False) -> None:
        self.requests = requests
        self.longest = max(request.length for request in requests)
        """Tokens of the longest context."""
        self.is_long = num_padded(requests) > chunk_sizes.max_tokens
        """Whether it takes several chunks even if no sequence is decoding."""
        self.num_computed = _num_known_columns(requests, self.longest)
        """Columns that have been computed, or need not be."""
        self.state: Any = None
        """The executor's tensors, released with the batch."""
        self._chunk_sizes = chunk_sizes
        self._is_whole = is_whole

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that wait for this batch."""
        return [sequence for request in self.requests for sequence in request.sequences]

    @property
    def is_complete(self) -> bool:
        """Whether all columns have been computed."""
        return self.num_computed == self.longest

    def chunk_end(self, *, is_decoding: bool) -> int:
        """The column at which the next chunk ends.

        A chunk never has a single column if there are two: recurrent layers would take it for a decoding step, which
        no token of a prompt is in `generate`, and would ignore its padding.

        Args:
            is_decoding: Whether sequences are decoding, which a long chunk would stall.
        """
        if self._is_whole:
            return self.longest
        num_tokens = self._chunk_sizes.size(is_decoding=is_decoding, num_cached=self.num_computed)
        pause = self.requests[0].pause or 0
        last = pause if self.num_computed < pause else self.longest
        end = self.num_computed + max(2, num_tokens // len(self.requests))
        return last if end >= last - 1 else end


@dataclass(frozen=True)
class ScheduledStep:
    """One step: at most one of `prefill` and `decode`. An empty step reads the tokens of the one in flight."""

    prefill: PrefillBatch | None = None
    chunk_end: int = 0
    """The column of `prefill` at which its chunk ends."""
    decode: tuple[Sequence, ...] = ()
    """The running sequences, by slot."""
    inflight: Any = None
    """The executor's: a decoding step whose tokens the sequences do not have yet."""
    runs_ahead: bool = False
    """Whether `decode` stays in flight, so that the next step can start before its tokens are read."""
    wait_s: float = 0.0
    """Seconds to wait: a context needs memory that others on the device may free."""

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that a failure of this step may have come from."""
        return self.prefill.sequences if self.prefill else list(self.decode)


@dataclass(frozen=True)
class StepOutput:
    """The result of a step."""

    tokens: dict[Sequence, SampledToken] = field(default_factory=dict)
    """The next token of each sequence: of a complete prefill batch, or of a decoding step."""
    inflight: Any = None
    """The decoding step that is in flight now."""
    prefill: PrefillBatch | None = None
    """The batch of which a chunk was computed."""


def num_padded(requests: list[PrefillRequest]) -> int:
    """Tokens to compute for these contexts in one batch, padding counted."""
    longest = max(request.length for request in requests)
    return len(requests) * (longest - _num_known_columns(requests, longest))


def is_worth_one_batch(requests: list[PrefillRequest], chunk_sizes: ChunkSizes, recompute_length: float) -> bool:
    """Whether to prefill contexts together.

    They must be on one side of `recompute_length` and fit one chunk, and their padding must cost less than reading the
    weights once more for each.
    """
    if len(requests) > 1 and any(request.is_alone for request in requests):
        return False
    if len({request.length >= recompute_length for request in requests}) > 1:
        return False
    num_new = sum(request.length - request.num_cached for request in requests)
    return num_padded(requests) <= min(chunk_sizes.max_tokens, num_new + chunk_sizes.per_weights * (len(requests) - 1))


def _num_known_columns(requests: list[PrefillRequest], longest: int) -> int:
    """The first columns of a left-padded batch that hold nothing but padding and cached tokens."""
    return min(longest - request.length + request.num_cached for request in requests)
