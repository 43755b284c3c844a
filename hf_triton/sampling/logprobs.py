# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens by the model's own logits, before penalties, biases and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hf_triton.runner.transfer import to_column
from hf_triton.sampling.types import TokenLogprobs

MAX_LOGPROB_SCORES: Final = 2**24  # a long prompt's log probabilities at once would be gigabytes


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """How likely each token is by the logits before it.

    Args:
        logits: `[tokens, vocabulary]`, any float dtype and device.
        token_ids: One for each row of `logits`. A token that the model has no logit for is at minus infinity.
        num_top: Likeliest tokens to give beside it, cut to the vocabulary.
    """
    return table_of_logprobs(logits, token_ids, [num_top] * len(token_ids))


def table_of_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The same, each token with a number of its own."""
    size = logits.shape[1]
    most = min(max(num_top, default=0), size)
    tokens = to_column(token_ids, logits.device, torch.int64)
    rows_at_once = max(1, MAX_LOGPROB_SCORES // size)
    parts = zip(torch.split(logits, rows_at_once), torch.split(tokens, rows_at_once), strict=True)
    table = torch.cat([_logprob_table(*part, most) for part in parts]).tolist()
    return [
        TokenLogprobs(token_id, row[0], tuple((int(row[1 + most + n]), row[1 + n]) for n in range(min(num, most))))
        for token_id, num, row in zip(token_ids, num_top, table, strict=True)
    ]


def _logprob_table(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """In float64, which holds token ids too, `[tokens, 1 + 2 * most]`: the token's, the highest, and whose they are."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    own = logprobs.gather(1, tokens.clamp(max=logits.shape[1] - 1)).masked_fill(tokens >= logits.shape[1], -torch.inf)
    top = logprobs.topk(most)
    return torch.cat([own.double(), top.values.double(), top.indices.double()], dim=-1)
