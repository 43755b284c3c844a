# SPDX-License-Identifier: Apache-2.0
"""Samples the next token of every sequence of a batch, each with parameters of its own: edit, warp, draw or argmax.

Sampling changes no state, `SequenceSampler.accept` does: a step that fails after sampling is sampled again, and a
sequence that depends on its logits alone is sampled before its last token is on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_triton.runner.transfer import ToHost, array_to_device, to_index
from hf_triton.sampling.logits_edits import edit_logits
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.sampling.types import TokenLogprobs
from hf_triton.sampling.warp import warp_scores


@dataclass(frozen=True)
class SampledToken:
    """The next token of one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Set if the sampling parameters ask for it (`num_top_logprobs`)."""


class SampledTokens:
    """The next token of every sequence, on the device and on its way to the host.

    A sequence in which every token is banned takes its end-of-sequence token (the lowest id of several), even if that
    is banned too, and the model's likeliest token if it has none. A row of NaN takes some token. A constraint comes
    before bans: if they leave none of the tokens that it allows, the sequence takes the likeliest of these.

    Args:
        logits: `[rows, vocabulary]`, any float dtype and device; must stay unchanged until `read` if a sequence wants
            log probabilities.
        samplers: One for each row of `logits`.
        num_ahead: Tokens of each sequence, or of all, sampled before this one and not yet accepted; 0 if a sampler
            `needs_host`.
    """

    def __init__(
        self, logits: torch.Tensor, samplers: Sequence[SequenceSampler], num_ahead: int | Sequence[int] = 0
    ) -> None:
        if isinstance(num_ahead, int):
            num_ahead = [num_ahead] * len(samplers)
        self._samplers = samplers
        self._logits = logits if any(sampler.params.num_top_logprobs is not None for sampler in samplers) else None
        if all(sampler.is_plain_greedy for sampler in samplers):
            self.tokens = logits.argmax(-1)
        else:
            self.tokens = _choose(edit_logits(logits, samplers), samplers, num_ahead)
        """`[rows]` int64."""
        self._host_copy = ToHost(self.tokens)

    def read(self) -> list[SampledToken]:
        """The tokens; the one place where the host waits for the device."""
        token_ids = self._host_copy.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logits is not None:
            num_top = {
                row: sampler.params.num_top_logprobs
                for row, sampler in enumerate(self._samplers)
                if sampler.params.num_top_logprobs is not None
            }
            logits = self._logits[to_index(list(num_top), self._logits.device)]
            rows = token_logprobs(logits, [token_ids[row] for row in num_top], list(num_top.values()))
            logprobs = dict(zip(num_top, rows, strict=True))
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def sample_tokens(logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> list[SampledToken]:
    """Sample the next token of every sequence and wait until it is on the host; see `SampledTokens`."""
    return SampledTokens(logits, samplers).read()


def _choose(scores: torch.Tensor, samplers: Sequence[SequenceSampler], num_ahead: Sequence[int]) -> torch.Tensor:
    """The token id of each row of edited scores, `[rows]` int64 on their device."""
    drawing = [row for row, sampler in enumerate(samplers) if sampler.params.do_sample]
    if len(drawing) == len(samplers):
        return _draw(scores.float(), samplers, num_ahead)
    tokens = scores.argmax(-1)
    if drawing:
        index = to_index(drawing, scores.device)
        chosen = [samplers[row] for row in drawing]
        tokens[index] = _draw(scores[index].float(), chosen, [num_ahead[row] for row in drawing])
    return tokens


def _draw(scores: torch.Tensor, samplers: Sequence[SequenceSampler], num_ahead: Sequence[int]) -> torch.Tensor:
    """Draw a token id for each row of `scores`, `[rows, vocabulary]` float32, by the Gumbel-max trick (Gumbel 1954).

    The argmax of score plus noise is a draw from the softmax. Each token has noise of its own, so rounding that moves
    scores by 1e-6, as batch shapes do, changes about one draw in a million; along cumulative probabilities it would
    change a hundred times as many. A token at minus infinity is never drawn.
    """
    warped = warp_scores(scores, [sampler.params for sampler in samplers])
    keys = [sampler.draw_key(ahead) for sampler, ahead in zip(samplers, num_ahead, strict=True)]
    noise = gumbel_noise(keys, scores.shape[1], scores.device)
    return (warped + noise).argmax(-1)


def gumbel_noise(keys: Sequence[int], size: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise `[rows, size]`, a function of the row's 64-bit key and the token id alone.

    Token ids are hashed by the rounds of Wellons's lowbias32 (2018), with the key's halves mixed in before and between.
    """
    halves = np.array(keys, np.uint64).view(np.int32).reshape(-1, 2)
    first, second = array_to_device(np.ascontiguousarray(halves.T), device).unsqueeze(-1)
    bits: torch.Tensor = torch.arange(size, dtype=torch.int32, device=device) + first
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= second
    bits ^= bits >> 15
    bits *= 0x846CA68B - 2**32
    bits ^= bits >> 16
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # precise for high values
