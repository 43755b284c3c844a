# SPDX-License-Identifier: Apache-2.0
"""Proposal: tokens that may follow in a sequence, against what is sampled at each of their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_triton.sampling.sampler import SampledToken, sample_tokens
from hf_triton.sampling.sequence_sampler import SequenceSampler


@dataclass(frozen=True)
class Proposal:
    """The proposed tokens of one sequence in a step."""

    token_ids: Sequence[int]
    sampler: SequenceSampler
    first: int
    """The step's sampled tokens have from here on those behind each proposed one, unless there are `logits`."""
    logits: torch.Tensor | None
    """`[proposed, vocabulary]`: those behind each, if the sampler edits them by the tokens before."""

    def further(self, token: SampledToken, sampled: Sequence[SampledToken]) -> Iterator[SampledToken]:
        """The tokens behind the sequence's next one, while what is sampled is what was proposed.

        Each is asked for when the sampler has accepted those before it, so it is drawn as in a step of its own.
        """
        for at, proposed in enumerate(self.token_ids):
            if token.token_id != proposed:
                return
            if self.logits is None:
                token = sampled[self.first + at]
            else:
                with torch.inference_mode():
                    (token,) = sample_tokens(self.logits[at : at + 1], [self.sampler])
            yield token
