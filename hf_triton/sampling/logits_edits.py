# SPDX-License-Identifier: Apache-2.0
"""Applies biases, penalties, bans, logits processors and constraints to a batch of logits, in transformers' order.

That of `_get_logits_processor` (transformers 5.23): logit bias, repetition penalty, n-grams, bad words, minimum length.
Presence and frequency penalties, which transformers does not have, follow the repetition penalty; a sequence's own
logits processor follows the bans, and its constraint comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.transfer import array_to_device, to_device, to_index
from hf_triton.sampling.sequence_sampler import SequenceSampler

LEAST: Final = -1e30
"""The score of tokens that `generate`'s own processors ban where a constraint allows no others."""


def edit_logits(logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> torch.Tensor:
    """The scores after biases, penalties and bans, `[rows, vocabulary]`.

    Returns:
        float32, or `logits` itself if no sampler edits them. Banned tokens are at minus infinity, never a whole row.
    """
    if not any(sampler.edits_logits for sampler in samplers):
        return logits
    histories = [sampler.history for sampler in samplers]
    size = logits.shape[1]
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = scores.view(-1)
    indices, biases = _flatten([history.biases for history in histories], size, scores.device)
    flat.index_add_(0, indices, biases)
    indices, factors, subtrahends = _flatten([history.penalties() for history in histories], size, scores.device)
    before = flat[indices]
    flat[indices] = torch.where(before < 0, before * factors, before / factors) - subtrahends
    (indices,) = _flatten([(history.banned_ids(),) for history in histories], size, scores.device)
    if len(indices):
        flat.index_fill_(0, indices, -torch.inf)
    processed = [row for row, sampler in enumerate(samplers) if sampler.processor]
    for row in processed:
        scores[row] = samplers[row].process(scores[row])
    _apply_bitmasks(scores, logits, samplers)
    if processed or len(indices):
        _allow_fallback_tokens(scores, logits, samplers)
    return scores


def _flatten(
    parts: Sequence[tuple[npt.NDArray[Any], ...]], size: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Concatenate every row's token ids, as indices into the flattened scores, and the numbers that belong to them.

    Ids from the vocabulary's `size` on are skipped: a prompt may hold tokens for which the model has no logit.
    """
    ids, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    indices = ids + np.repeat(np.arange(len(parts)) * size, [len(part[0]) for part in parts])
    is_in_vocabulary = ids < size
    return tuple(array_to_device(column[is_in_vocabulary], device) for column in (indices, *columns))


def _apply_bitmasks(scores: torch.Tensor, logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> None:
    """Ban what constraints do not allow. A row that has nothing else left gets the logits of what they allow."""
    constraints = {row: sampler.constraint for row, sampler in enumerate(samplers) if sampler.constraint}
    bitmasks = {row: bitmask for row, each in constraints.items() if (bitmask := each.bitmask()) is not None}
    if not bitmasks:
        return
    size = scores.shape[1]
    packed = np.zeros((len(bitmasks), -(-size // 8)), np.uint8)
    for line, bitmask in zip(packed, bitmasks.values(), strict=True):
        line[: len(bitmask)] = bitmask[: packed.shape[1]]
    index = to_index(list(bitmasks), scores.device)
    weights = to_device([1 << bit for bit in range(8)], torch.uint8, scores.device)
    is_banned = ((array_to_device(packed, scores.device).unsqueeze(-1) & weights) == 0).view(len(bitmasks), -1)[
        :, :size
    ]
    masked = scores[index].masked_fill_(is_banned, -torch.inf)
    is_empty = masked.amax(-1, keepdim=True) == -torch.inf
    scores[index] = torch.where(
        is_empty, logits[index].float().clamp(min=LEAST).masked_fill(is_banned, -torch.inf), masked
    )


def _allow_fallback_tokens(scores: torch.Tensor, logits: torch.Tensor, samplers: Sequence[SequenceSampler]) -> None:
    """Allow one token in each row in which all are banned, which none with a constraint is: see `SampledTokens`."""
    fallbacks = [sampler.history.first_eos_id(scores.shape[1]) for sampler in samplers]
    tokens = to_index([-1 if token_id is None else token_id for token_id in fallbacks], scores.device).unsqueeze(1)
    if None in fallbacks:
        tokens = torch.where(tokens < 0, logits.argmax(-1, keepdim=True), tokens)
    is_all_banned = scores.amax(-1, keepdim=True) == -torch.inf
    scores.scatter_(1, tokens, scores.gather(1, tokens).masked_fill(is_all_banned, 0.0))
