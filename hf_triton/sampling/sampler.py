# SPDX-License-Identifier: Apache-2.0
"""Samples the next token of every sequence of a batch, each with parameters of its own: edit, warp, draw or argmax.

Sampling changes no state, `SequenceSampler.accept` does: a step that fails after sampling is sampled again, and a
sequence that depends on its logits alone is sampled before its last token is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_triton.runner.transfer import ToHost, to_index
from hf_triton.sampling.draw import draw_tokens
from hf_triton.sampling.logits_edits import edit_logits
from hf_triton.sampling.logprobs import PendingLogprobs
from hf_triton.sampling.row_params import RowParams
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.sampling.types import TokenLogprobs


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Its log probabilities, if the sampling parameters ask for them (`num_top_logprobs`)."""


class SampledTokens:
    """The next token of every sequence, on the device and on its way to the host.

    A sequence in which every token is banned takes its end-of-sequence token (the lowest id of several), even if that
    is banned too, and the model's likeliest token if it has none. A row of NaN takes some token. A constraint comes
    before bans: if they leave none of the tokens that it allows, the sequence takes the likeliest of these.

    Args:
        logits: `[rows, vocabulary]`, any float dtype and device; may change afterwards.
        samplers: One for each row of `logits`; a sequence with a proposal has several rows.
        num_ahead: Tokens of each sequence, or of all, sampled before this one and not yet accepted; 0 if a sampler
            `edits_logits`.
    """

    def __init__(
        self, logits: torch.Tensor, samplers: Sequence[SequenceSampler], num_ahead: int | Sequence[int] = 0
    ) -> None:
        if isinstance(num_ahead, int):
            num_ahead = [num_ahead] * len(samplers)
        num_top: dict[int, int] = {}
        if all(sampler.is_plain_greedy for sampler in samplers):
            self.tokens = logits.argmax(-1)
        else:
            self.tokens = _choose(edit_logits(logits, samplers), samplers, num_ahead)
            num_top = {
                row: sampler.params.num_top_logprobs
                for row, sampler in enumerate(samplers)
                if sampler.params.num_top_logprobs is not None
            }
        """Token ids, `[rows]` int64."""
        self._host_copy = ToHost(self.tokens)
        self._scored_rows = list(num_top)
        if num_top:
            index = to_index(self._scored_rows, logits.device)
            self._logprobs = PendingLogprobs(logits[index], self.tokens[index], list(num_top.values()))

    def read(self) -> list[SampledToken]:
        """The tokens; the one place where the host waits for the device. It launches nothing."""
        logprobs = dict(zip(self._scored_rows, self._logprobs.read(), strict=True)) if self._scored_rows else {}
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(self._host_copy.tolist())]


def sample_tokens(logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> list[SampledToken]:
    """Sample the next token of every sequence and wait until it is on the host; see `SampledTokens`."""
    return SampledTokens(logits, samplers).read()


def _choose(scores: torch.Tensor, samplers: Sequence[SequenceSampler], num_ahead: Sequence[int]) -> torch.Tensor:
    """The token id of each row of edited scores, `[rows]` int64 on their device."""
    drawn = [row for row, sampler in enumerate(samplers) if sampler.params.do_sample]
    if not drawn:
        return scores.argmax(-1)
    keys = [samplers[row].draw_key(num_ahead[row]) for row in drawn]
    params = RowParams.build([samplers[row].params for row in drawn], keys)
    if len(drawn) == len(samplers):
        return draw_tokens(scores, params)
    tokens = scores.argmax(-1)
    index = to_index(drawn, scores.device)
    tokens[index] = draw_tokens(scores[index], params)
    return tokens
