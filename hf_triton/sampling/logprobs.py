# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens by the model's own logits, before penalties, biases and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hf_triton.runner.transfer import ToHost, to_index
from hf_triton.sampling.types import TokenLogprobs

MAX_SCORES_AT_ONCE: Final = 2**24
"""Logits converted to float32 at a time; those of a long prompt are gigabytes."""


class PendingLogprobs:
    """Log probability of each token by the logits in front of it, on its way to the host.

    The logits may change as soon as it is made.

    Args:
        logits: `[tokens, vocabulary]`, any float dtype and device.
        tokens: `[tokens]` int64, on the same device. A token without a logit is at minus infinity.
        num_top: Number of likeliest tokens to add, of all rows or of each, cut to the vocabulary.
        max_scores: Logits to convert at a time.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_top: int | Sequence[int],
        max_scores: int = MAX_SCORES_AT_ONCE,
    ) -> None:
        self._num_top = [num_top] * len(tokens) if isinstance(num_top, int) else num_top
        size = logits.shape[1]
        self._max_top = min(max(self._num_top, default=0), size)
        num_rows = max(1, max_scores // size)
        parts = zip(torch.split(logits, num_rows), torch.split(tokens.unsqueeze(1), num_rows), strict=True)
        self._table = ToHost(torch.cat([_logprob_table(*part, self._max_top) for part in parts]))

    def read(self) -> list[TokenLogprobs]:
        """The log probabilities; the host waits for them."""
        max_top = self._max_top
        return [
            TokenLogprobs(
                int(token_id), logprob, tuple((int(top[max_top + n]), top[n]) for n in range(min(num, max_top)))
            )
            for num, (token_id, logprob, *top) in zip(self._num_top, self._table.tolist(), strict=True)
        ]


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int | Sequence[int], max_scores: int = MAX_SCORES_AT_ONCE
) -> list[TokenLogprobs]:
    """Log probabilities of token ids that the host knows; see `PendingLogprobs`."""
    return PendingLogprobs(logits, to_index(token_ids, logits.device), num_top, max_scores).read()


def _logprob_table(logits: torch.Tensor, tokens: torch.Tensor, max_top: int) -> torch.Tensor:
    """`[tokens, 2 + 2 * max_top]` float64: the token, its log probability, the highest ones, and their token ids."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    own = logprobs.gather(1, tokens.clamp(max=logits.shape[1] - 1)).masked_fill(tokens >= logits.shape[1], -torch.inf)
    top = logprobs.topk(max_top)
    return torch.cat([column.double() for column in (tokens, own, top.values, top.indices)], dim=-1)
