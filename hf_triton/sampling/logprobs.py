# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens by the model's own logits, before penalties, biases and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hf_triton.runner.transfer import to_column
from hf_triton.sampling.types import TokenLogprobs

MAX_SCORES_AT_ONCE: Final = 2**24
"""Logits converted to float32 at a time; those of a long prompt are gigabytes."""


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int | Sequence[int], max_scores: int = MAX_SCORES_AT_ONCE
) -> list[TokenLogprobs]:
    """Log probability of each token by the logits in front of it.

    Args:
        logits: `[tokens, vocabulary]`, any float dtype and device.
        token_ids: One for each row of `logits`. A token without a logit is at minus infinity.
        num_top: Number of likeliest tokens to add, of all rows or of each, cut to the vocabulary.
        max_scores: Logits to convert at a time.
    """
    num_top = [num_top] * len(token_ids) if isinstance(num_top, int) else num_top
    size = logits.shape[1]
    max_top = min(max(num_top, default=0), size)
    tokens = to_column(token_ids, logits.device, torch.int64)
    num_rows = max(1, max_scores // size)
    parts = zip(torch.split(logits, num_rows), torch.split(tokens, num_rows), strict=True)
    table = torch.cat([_logprob_table(*part, max_top) for part in parts]).tolist()
    return [
        TokenLogprobs(
            token_id, row[0], tuple((int(row[1 + max_top + n]), row[1 + n]) for n in range(min(num, max_top)))
        )
        for token_id, num, row in zip(token_ids, num_top, table, strict=True)
    ]


def _logprob_table(logits: torch.Tensor, tokens: torch.Tensor, max_top: int) -> torch.Tensor:
    """`[tokens, 1 + 2 * max_top]` float64: the token's log probability, the highest ones, and their token ids."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    own = logprobs.gather(1, tokens.clamp(max=logits.shape[1] - 1)).masked_fill(tokens >= logits.shape[1], -torch.inf)
    top = logprobs.topk(max_top)
    return torch.cat([own.double(), top.values.double(), top.indices.double()], dim=-1)
