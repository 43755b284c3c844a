# SPDX-License-Identifier: Apache-2.0
"""Applies temperature, top_k, top_p, min_p and typical_p to a batch of scores, in transformers' order.

Every limit is a score of the row's own, and ties with it are kept: no row's draw depends on another row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_triton.runner.transfer import to_column, to_index
from hf_triton.sampling.params import SamplingParams


def warp_scores(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The scores to draw from, with minus infinity for tokens that are cut off.

    Args:
        scores: `[rows, vocabulary]`, float32, after `edit_logits`.
        params: One for each row; `do_sample` is ignored.
    """
    if any(one.temperature != 1.0 for one in params):
        scores = scores / to_column([one.temperature for one in params], scores.device)
    if any(one.top_k or one.top_p < 1.0 or one.min_p for one in params):
        scores = scores.masked_fill(scores < _floors(scores, params), -torch.inf)
    typical = [row for row, one in enumerate(params) if one.typical_p < 1.0]
    if typical:
        index = to_index(typical, scores.device)
        mass = to_column([params[row].typical_p for row in typical], scores.device)
        scores = scores.index_copy(0, index, _keep_typical(scores[index], mass))
    return scores


def _floors(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The lowest score that top_k, top_p and min_p leave each row, `[rows, 1]`."""
    size = scores.shape[1]
    floors = torch.full_like(scores[:, :1], -torch.inf)
    by_top_k = [row for row, one in enumerate(params) if 0 < one.top_k < size]
    by_top_p = [row for row, one in enumerate(params) if not 0 < one.top_k < size and one.top_p < 1.0]
    for indices, find_floors in ((by_top_k, _top_k_floors), (by_top_p, _top_p_floors)):
        if indices:
            index = to_index(indices, scores.device)
            floors[index] = find_floors(scores[index], [params[row] for row in indices])
    if any(one.min_p for one in params):
        min_p = to_column([one.min_p for one in params], scores.device)
        floors = floors.maximum(scores.amax(-1, keepdim=True) + min_p.log())
    return floors


def _top_k_floors(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The lowest score of top_k, and of top_p among what that leaves."""
    sizes = to_column([one.top_k for one in params], scores.device, torch.int64)
    ordered = scores.topk(max(one.top_k for one in params)).values
    floors = ordered.gather(1, sizes - 1)
    if all(one.top_p == 1.0 for one in params):
        return floors
    normalisers = scores.masked_fill(scores < floors, -torch.inf).logsumexp(-1, keepdim=True)
    top_p = to_column([one.top_p if one.top_p < 1.0 else torch.inf for one in params], scores.device, torch.float64)
    return floors.maximum(_nucleus_floors(ordered, normalisers, top_p))


def _top_p_floors(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The lowest score of top_p among all tokens."""
    normalisers = scores.logsumexp(-1, keepdim=True)
    top_p = to_column([one.top_p for one in params], scores.device, torch.float64)
    return _nucleus_floors(_likeliest(scores, normalisers, top_p), normalisers, top_p)


def _nucleus_floors(ordered: torch.Tensor, normalisers: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest score among the likeliest tokens whose probabilities add up to `top_p` (Holtzman et al. 2020).

    Args:
        ordered: `[rows, candidates]`, descending.
        normalisers: `[rows, 1]`, a token's log probability is its score less this.
        top_p: `[rows, 1]`, float64.
    """
    probabilities = (ordered - normalisers).double().exp()
    is_kept = probabilities.cumsum(-1) - probabilities < top_p
    return ordered.gather(1, is_kept.sum(-1, keepdim=True).clamp(min=1) - 1)  # none only for NaN


def _likeliest(scores: torch.Tensor, normalisers: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The highest scores in descending order, enough to hold every row's nucleus.

    A GPU sorts the vocabulary faster than the host could inspect a part of it.
    """
    count = 128  # a nucleus is rarely larger, and sorting a vocabulary on a CPU is slow
    while scores.device.type == "cpu" and count < scores.shape[1]:
        ordered = scores.topk(count).values
        mass = (ordered - normalisers).double().exp().sum(-1, keepdim=True)
        if bool((mass > top_p + 1e-5).all()):  # float32 normalisers err by less
            return ordered
        count *= 8
    return scores.sort(descending=True).values


def _keep_typical(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose surprise is closest to the entropy, up to a probability of `mass` (Meister et al. 2022)."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(logprobs * probabilities).nansum(-1, keepdim=True)
    distance = (logprobs + entropy).abs()
    ordered, order = distance.sort(-1)
    cumulative = probabilities.gather(1, order).cumsum(-1, dtype=torch.float64)
    last = (cumulative < mass).sum(-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    return scores.masked_fill(distance > ordered.gather(1, last), -torch.inf)
