# SPDX-License-Identifier: Apache-2.0
"""Biases, penalties, bans and constraints in the scores of all rows, in transformers' order.

That of `_get_logits_processor` (transformers 5.23): logit bias, repetition penalty, n-grams, bad words, shortest
length. Presence and frequency penalties, which transformers does not have, follow the repetition penalty; a row's own
processor follows the bans, and its constraint that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_triton.runner.transfer import array_to_device, to_column, to_device, to_index
from hf_triton.sampling.history import Array

if TYPE_CHECKING:
    from hf_triton.sampling.sampler import SequenceSampler


def edit_scores(logits: torch.Tensor, rows: Sequence[SequenceSampler]) -> torch.Tensor:
    """The scores after biases, penalties and bans, `[rows, vocabulary]`.

    Returns:
        float32, or `logits` itself where no row has any. Banned tokens are at minus infinity, never all of a row.
    """
    if not any(row.edits_scores for row in rows):
        return logits
    histories = [row.history for row in rows]
    size = logits.shape[1]
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = scores.view(-1)
    places, biases = _flattened([history.biases() for history in histories], size, scores.device)
    flat.index_add_(0, places, biases)
    places, factors, subtrahends = _flattened([history.penalties() for history in histories], size, scores.device)
    before = flat[places]
    flat[places] = torch.where(before < 0, before * factors, before / factors) - subtrahends
    (places,) = _flattened([(history.banned_ids(),) for history in histories], size, scores.device)
    if len(places):
        flat.index_fill_(0, places, -torch.inf)
    processed = [index for index, row in enumerate(rows) if row.processor]
    for index in processed:
        scores[index] = rows[index].process(scores[index])
    is_masked = _apply_masks(scores, rows)
    if is_masked or processed or len(places):
        _leave_a_way_out(scores, logits, rows)
    return scores


def _flattened(parts: Sequence[tuple[Array, ...]], size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Every row's ids as places in the flattened scores, and the numbers that belong to them.

    Args:
        parts: Of each row its ids and columns of numbers, all `[ids]`. An id from `size` on is passed over: a prompt
            may hold tokens that the model cannot write.
        size: The vocabulary.
        device: Where to.
    """
    ids, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    places = ids + np.repeat(np.arange(len(parts)) * size, [len(part[0]) for part in parts])
    is_written = ids < size
    return tuple(array_to_device(column[is_written], device) for column in (places, *columns))


def _apply_masks(scores: torch.Tensor, rows: Sequence[SequenceSampler]) -> bool:
    """Leave of each row only what its constraint allows; whether there is any constraint."""
    masks = {index: row.constraint.mask() for index, row in enumerate(rows) if row.constraint}
    if not masks:
        return False
    size = scores.shape[1]
    packed = np.zeros((len(masks), -(-size // 8)), np.uint8)
    for place, mask in enumerate(masks.values()):
        packed[place, : len(mask)] = mask[: packed.shape[1]]
    index = to_index(list(masks), scores.device)
    weights = to_device([1 << bit for bit in range(8)], torch.uint8, scores.device)
    is_banned = (array_to_device(packed, scores.device).unsqueeze(-1) & weights) == 0
    scores[index] = scores[index].masked_fill_(is_banned.view(len(masks), -1)[:, :size], -torch.inf)
    return True


def _leave_a_way_out(scores: torch.Tensor, logits: torch.Tensor, rows: Sequence[SequenceSampler]) -> None:
    """Give a row in which every token is banned its only one: see `SampledTokens`."""
    ends = [row.way_out(scores.shape[1]) for row in rows]
    ways_out = to_column([-1 if end is None else end for end in ends], scores.device, torch.int64)
    if None in ends:
        ways_out = torch.where(ways_out < 0, logits.argmax(-1, keepdim=True), ways_out)
    is_stuck = scores.amax(-1, keepdim=True) == -torch.inf
    scores.scatter_(1, ways_out, scores.gather(1, ways_out).masked_fill(is_stuck, 0.0))
