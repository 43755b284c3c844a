# SPDX-License-Identifier: Apache-2.0
"""Applies temperature, top_k, top_p, min_p and typical_p to a batch of scores, in transformers' order.

Every limit is a score of the row's own, and ties with it are kept: no row's draw depends on another row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.transfer import array_to_device
from hf_triton.sampling.row_params import RowParams


def warp_scores(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The scores `[rows, vocabulary]` to draw from, float32, with minus infinity for tokens that are cut off."""
    device = scores.device
    if (params.temperature != 1.0).any():
        scores = scores / _column(params.temperature, device)
    if params.top_k.any() or (params.top_p < 1.0).any() or params.min_p.any():
        scores = scores.masked_fill(scores < _floors(scores, params), -torch.inf)
    typical = np.flatnonzero(params.typical_p < 1.0)
    if len(typical):
        index, mass = array_to_device(typical, device), _column(params.typical_p[typical], device)
        scores = scores.index_copy(0, index, _keep_typical(scores[index], mass))
    return scores


def _column(numbers: npt.NDArray[Any], device: torch.device, dtype: npt.DTypeLike = np.float32) -> torch.Tensor:
    """A number for each row, `[rows, 1]`."""
    return array_to_device(numbers.astype(dtype), device).unsqueeze(1)


def _floors(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The lowest score that top_k, top_p and min_p leave each row, `[rows, 1]`."""
    floors = torch.full_like(scores[:, :1], -torch.inf)
    is_by_top_k = (params.top_k > 0) & (params.top_k < scores.shape[1])
    is_by_top_p = ~is_by_top_k & (params.top_p < 1.0)
    for is_cut, find_floors in ((is_by_top_k, _top_k_floors), (is_by_top_p, _top_p_floors)):
        rows = np.flatnonzero(is_cut)
        if len(rows) == len(scores):
            floors = find_floors(scores, params)
        elif len(rows):
            index = array_to_device(rows, scores.device)
            floors[index] = find_floors(scores[index], params.select(rows))
    if params.min_p.any():
        floors = floors.maximum(scores.amax(-1, keepdim=True) + _column(params.min_p, scores.device).log())
    return floors


def _top_k_floors(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The lowest score of top_k, and of top_p among what that leaves."""
    ordered = scores.topk(int(params.top_k.max())).values
    floors = ordered.gather(1, _column(params.top_k - 1, scores.device, np.int64))
    if (params.top_p == 1.0).all():
        return floors
    normalisers = scores.masked_fill(scores < floors, -torch.inf).logsumexp(-1, keepdim=True)
    top_p = _column(np.where(params.top_p < 1.0, params.top_p, np.inf), scores.device, np.float64)
    return floors.maximum(_nucleus_floors(ordered, normalisers, top_p))


def _top_p_floors(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The lowest score of top_p among all tokens."""
    normalisers = scores.logsumexp(-1, keepdim=True)
    top_p = _column(params.top_p, scores.device, np.float64)
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
