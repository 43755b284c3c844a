# SPDX-License-Identifier: Apache-2.0
"""Contexts that are read before their rows run: a left-padded batch, a piece at a time. Knows no queue, no budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import DynamicLayer

from hf_triton.engine.prefix_cache import LayerContents, Prefix
from hf_triton.engine.sequence import Sequence
from hf_triton.runner.device import chunk_sizes_for
from hf_triton.runner.forward import Forward
from hf_triton.runner.padding import pad
from hf_triton.runner.states import TextStates, go_on_from, text_states
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.types import TokenLogprobs


@dataclass(frozen=True)
class PrefillRequest:
    """One context to read, the rows that go on from it (`num_return_sequences`), and the part of it that is known."""

    rows: list[Sequence]
    context: list[int]
    num_cached: int = 0
    """Its first tokens, whose keys and values are those of `prefix`."""
    prefix: Prefix | None = None
    pause: int | None = None
    """A column at which a piece ends, for what has been read to be kept; None: nowhere."""

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return len(self.context)

    @property
    def is_alone(self) -> bool:
        """Whether it is read by itself: with a state of its own to go on from, or to stop at."""
        return self.pause is not None or bool(self.prefix and self.prefix.states)

    @property
    def num_top_logprobs(self) -> int | None:
        """Log probabilities of prompt tokens that are still to be found; None: none."""
        job = self.rows[0].job
        return None if job.prompt_logprobs is not None else job.sequence.plan.prompt_logprobs


def num_padded(prefill_requests: list[PrefillRequest]) -> int:
    """Tokens to compute for these contexts in one batch, padding counted."""
    longest = max(reading.length for reading in prefill_requests)
    return len(prefill_requests) * (longest - _num_known_columns(prefill_requests, longest))


def are_worth_one_batch(
    prefill_requests: list[PrefillRequest], device: torch.device, switch_length: float = math.inf
) -> bool:
    """Whether to read contexts together.

    They must be on one side of `switch_length` and fit one piece, and their padding cost less than a read for each.
    """
    if len(prefill_requests) > 1 and any(reading.is_alone for reading in prefill_requests):
        return False
    if len({reading.length > switch_length for reading in prefill_requests}) > 1:
        return False
    num_new = sum(reading.length - reading.num_cached for reading in prefill_requests)
    pieces = chunk_sizes_for(device)
    return num_padded(prefill_requests) <= min(pieces.alone, num_new + pieces.per_weights * (len(prefill_requests) - 1))


def _num_known_columns(prefill_requests: list[PrefillRequest], longest: int) -> int:
    """The first columns of a left-padded batch that hold nothing but padding and shared tokens."""
    return min(longest - reading.length + reading.num_cached for reading in prefill_requests)


class Prefill:
    """A batch of contexts being read.

    Args:
        prefill_requests: At least one.
        forward: The model's.
        is_whole: Whether they are read in one piece, however long they are.
    """

    def __init__(self, prefill_requests: list[PrefillRequest], forward: Forward, *, is_whole: bool) -> None:
        self.prefill_requests = prefill_requests
        self._is_whole = is_whole
        self.cache = forward.new_cache()
        self._forward = forward
        self.longest = max(reading.length for reading in prefill_requests)
        """Tokens of the longest context."""
        self.is_long = num_padded(prefill_requests) > chunk_sizes_for(forward.device).alone
        """Whether it takes several pieces even where nobody waits for them."""
        self.num_read = 0
        """Columns that have been read."""
        self._input_ids: torch.Tensor | None = None  # [contexts, longest], from the first piece on
        self._attention_mask: torch.Tensor
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in prefill_requests]

    @property
    def rows(self) -> list[Sequence]:
        """All rows that wait for this."""
        return [row for reading in self.prefill_requests for row in reading.rows]

    def advance(self, *, has_company: bool) -> torch.Tensor | None:
        """Read one more piece; the logits that follow the contexts, `[contexts, vocabulary]`, after the last.

        Args:
            has_company: Whether rows are running, which a long piece would hold up.
        """
        input_ids = self._begin() if self._input_ids is None else self._input_ids
        piece = chunk_sizes_for(self._forward.device).size(has_company=has_company, num_columns=self.num_read)
        start = self.num_read
        end = self.longest if self._is_whole else self._end_of_chunk(piece // len(self.prefill_requests))
        is_scored = any(reading.num_top_logprobs is not None for reading in self.prefill_requests)
        num_logits = end - start if is_scored else 1
        mask = self._attention_mask[:, :end]
        logits = self._forward(
            input_ids[:, start:end], mask, self.cache, num_logits=num_logits, num_context=self.longest
        )
        if is_scored:
            self._score(input_ids, logits)
        self.num_read = end
        if end < self.longest:
            return None
        for reading, found in zip(self.prefill_requests, self._prompt_logprobs, strict=True):
            if reading.num_top_logprobs is not None:
                reading.rows[0].job.prompt_logprobs = found
        return logits[:, -1]

    def _end_of_chunk(self, num_columns: int) -> int:
        """Where the next piece of so many columns ends.

        None has a single one as long as there are two: layers with states take that for a step, which none of a
        prompt is in `generate`, and look for no padding in it.
        """
        pause = self.prefill_requests[0].pause or 0
        last = pause if self.num_read < pause else self.longest
        end = self.num_read + max(2, num_columns)
        return last if end >= last - 1 else end

    def read(self, index: int, length: int) -> LayerContents:
        """The keys and values of a context's first `length` tokens, `[heads, length, head_dim]` of every layer."""
        first = self.longest - self.prefill_requests[index].length
        columns = slice(first, first + length)
        layers = [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer)]
        return [(layer.keys[index, :, columns], layer.values[index, :, columns]) for layer in layers]  # type: ignore[index]

    def states(self, index: int) -> list[TextStates]:
        """What the layers that keep states have of a context, as far as it has been read."""
        return text_states(self.cache, index)

    def _begin(self) -> torch.Tensor:
        """The input ids, once; shared prefixes are laid into the columns that need not be computed."""
        contexts = [reading.context for reading in self.prefill_requests]
        input_ids, self._attention_mask = pad(contexts, 0, self._forward.device, at_left=True)
        self.num_read = _num_known_columns(self.prefill_requests, self.longest)
        filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, reading in enumerate(self.prefill_requests):
            gap = self.longest - reading.length
            if reading.prefix is None or gap >= self.num_read:
                continue
            for number, (keys, values) in enumerate(reading.prefix.read(self.num_read - gap)):
                if number == len(filled):
                    filled.append((self._columns(keys), self._columns(values)))
                filled[number][0][index, :, gap:] = keys
                filled[number][1][index, :, gap:] = values
        first = self.prefill_requests[0].prefix
        go_on_from(self.cache, filled, first.states if first else ())
        self.prefill_requests = [
            replace(reading, prefix=None) for reading in self.prefill_requests
        ]  # its memory may go
        self._input_ids = input_ids
        return input_ids

    def _columns(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros `[contexts, heads, known columns, head_dim]` for contents `[heads, tokens, head_dim]`."""
        return like.new_zeros(len(self.prefill_requests), like.shape[0], self.num_read, like.shape[2])

    def _score(self, input_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Note how likely this piece's prompt tokens are, by the logits `[contexts, new, vocabulary]` before each."""
        for index, reading in enumerate(self.prefill_requests):
            if reading.num_top_logprobs is None:
                continue
            start = max(self.num_read, self.longest - reading.length)
            end = min(self.num_read + logits.shape[1], self.longest - 1)
            if start < end:
                scores = logits[index, start - self.num_read : end - self.num_read]
                tokens = input_ids[index, start + 1 : end + 1].tolist()
                self._prompt_logprobs[index] += token_logprobs(scores, tokens, reading.num_top_logprobs)
