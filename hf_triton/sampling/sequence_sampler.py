# SPDX-License-Identifier: Apache-2.0
"""SequenceSampler: the sampling state of one sequence: parameters, token history, constraint and random stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch

from hf_triton.sampling.history import TokenHistory
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, LogitsProcessor

NUM_KEYS: Final = 64
"""Keys drawn at a time: a call takes as long as dozens of keys."""


class SequenceSampler:
    """Sampling state of one sequence. Only `accept` changes it, so a step that fails after sampling is sampled again.

    Args:
        index: Which of the prompt's `num_sequences` sequences this is; each has a random stream of its own.
        constraint: Restricts the sequence's tokens; None: any token is allowed.
        processor: Changes the scores after penalties and bans.
    """

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        prompt_ids: Sequence[int],
        eos_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
        processor: LogitsProcessor | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.processor = processor
        self.history = TokenHistory(params, prompt_ids, eos_ids)
        self.is_plain_greedy = not (params.do_sample or self.edits_logits or params.num_top_logprobs is not None)
        """Whether the next token is the argmax of the logits, without log probabilities."""
        self.prompt_ids = prompt_ids
        self._eos_ids = eos_ids
        self._token_ids = list(prompt_ids) if processor else []
        self._index = index
        self._draw_keys: deque[int] = deque()

    @cached_property
    def _random(self) -> np.random.Generator:
        """Philox's streams differ by key (Salmon 2011)."""
        seed = self.params.seed
        return np.random.Generator(np.random.Philox(key=None if seed is None else seed + (self._index << 64)))

    @property
    def edits_logits(self) -> bool:
        """Whether biases, penalties, bans, a processor or a constraint can change the next token's logits."""
        return self.constraint is not None or self.processor is not None or self.history.edits_logits

    @property
    def needs_host(self) -> bool:
        """Whether the last token must be on the host before the next one is sampled."""
        return self.edits_logits or self.params.num_top_logprobs is not None

    def after(self, token_ids: Sequence[int]) -> SequenceSampler:
        """A sampler of the same prompt behind other tokens, for a hypothesis of beam search; no constraint."""
        sampler = SequenceSampler(self.params, self._index, self.prompt_ids, self._eos_ids, processor=self.processor)
        for token_id in token_ids:
            sampler.accept(token_id)
        return sampler

    def draw_key(self, num_ahead: int = 0) -> int:
        """The 64-bit key of a draw. Each token has one, so the stream keeps step with the sequence."""
        while len(self._draw_keys) <= num_ahead:
            self._draw_keys += self._random.integers(2**64, size=NUM_KEYS, dtype=np.uint64).tolist()
        return self._draw_keys[num_ahead]

    @property
    def is_complete(self) -> bool:
        """Whether its constraint lets nothing but end-of-sequence follow."""
        return self.constraint is not None and self.constraint.is_complete

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply the logits processor to scores `[vocabulary]` float32."""
        return self.processor(list(self._token_ids), scores) if self.processor else scores

    def accept(self, token_id: int) -> None:
        """Advance by one token; call it once for each, end-of-sequence included."""
        if self.constraint:
            self.constraint.accept(token_id)  # may raise; nothing else has changed then
        self.history.append(token_id)
        if self.processor:
            self._token_ids.append(token_id)
        if self.params.do_sample:
            self.draw_key()
            self._draw_keys.popleft()
