# SPDX-License-Identifier: Apache-2.0
"""Draws a token of each row of scores by the Gumbel-max trick (Gumbel 1954).

The argmax of score plus noise is a draw from the softmax. Each token has noise of its own, so rounding that moves
scores by 1e-6, as batch shapes do, changes about one draw in a million; along cumulative probabilities it would change
a hundred times as many. A token at minus infinity is never drawn.

torch computes it by some dozens of operations. On a CUDA device one kernel does, the operation `hf_triton::draw`, whose
tokens are the same up to rounding.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Final

import numpy as np
import torch

from hf_triton.runner import cuda
from hf_triton.runner.transfer import array_to_device
from hf_triton.sampling.row_params import Ids, RowParams
from hf_triton.sampling.warp import warp_scores

logger = logging.getLogger(__name__)

LIBRARY: Final = torch.library.Library("hf_triton", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "draw(Tensor scores, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor keys) -> Tensor"
)


def draw_tokens(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Draw a token id, int64, for each row of scores `[rows, vocabulary]` after `edit_logits`."""
    if scores.device.type != "cuda" or not is_usable(scores.device, scores.dtype, scores.shape[1]):
        return draw_by_torch(scores, params)
    tokens = draw(scores, params)
    typical = np.flatnonzero(params.typical_p < 1.0)  # not in the kernel
    if len(typical):
        index = array_to_device(typical, scores.device)
        tokens[index] = draw_by_torch(scores[index], params.select(typical))
    return tokens


def prepare_draws(logits: torch.Tensor) -> None:
    """Try the operation on such logits and on such scores, which are float32: a kernel is compiled at its first use."""
    if logits.device.type == "cuda":
        for dtype in {logits.dtype, torch.float32}:
            is_usable(logits.device, dtype, logits.shape[1])


def draw(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The operation: draw a token id for each row, without typical_p; arguments as for `draw_tokens`."""
    temperature, top_k, top_p, min_p, keys = array_to_device(params.pack(), scores.device)
    shares = (bits.view(torch.float64) for bits in (top_p, min_p))
    tokens: torch.Tensor = torch.ops.hf_triton.draw(scores, temperature.view(torch.float64), top_k, *shares, keys)
    return tokens


def draw_by_torch(scores: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The same as `draw_tokens` by torch's operations."""
    noise = gumbel_noise(params.keys, scores.shape[1], scores.device)
    return (warp_scores(scores.float(), params) + noise).argmax(-1)


def gumbel_noise(keys: Ids, size: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise `[rows, size]`, a function of the row's 64-bit key and the token id alone.

    Token ids are hashed by the rounds of Wellons's lowbias32 (2018), with the key's halves mixed in before and between.
    """
    halves = keys.view(np.int32).reshape(-1, 2)
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


def _draw_on_cpu(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    columns = temperature, top_k, top_p, min_p, torch.ones_like(min_p), keys
    return draw_by_torch(scores, RowParams._make(column.numpy() for column in columns))


LIBRARY.impl("draw", _draw_on_cpu, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("draw", cuda.draw, "CUDA")  # type: ignore[no-untyped-call]


@cache
def is_usable(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the operation is right for a device's scores, which is tried once; if not, the log says why."""
    reason = cuda.why_no_kernel(partial(_is_right, device, dtype, size))
    if reason is None:
        return True
    logger.warning("no sampling kernel for %s on %s (%s): torch draws tokens, slower", dtype, device, reason)
    return False


def _is_right(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    scores = (3 * torch.randn(4, size, generator=torch.Generator().manual_seed(0))).to(dtype)
    columns = [0.7, 1.0, 1.3, 1.0], [0, 50, 0, 20], [1.0, 1.0, 0.8, 0.9], [0.0, 0.0, 0.0, 0.1], [1.0] * 4
    params = RowParams._make(map(np.array, (*columns, np.arange(4) << 40)))
    return torch.equal(draw(scores.to(device), params).cpu(), draw(scores, params))
