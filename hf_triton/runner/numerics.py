# SPDX-License-Identifier: Apache-2.0
"""Whether numbers are right: logits of two ways that agree up to the rounding of a model's dtype, and no nan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

TOLERANCE: Final = {"float32": 1e-3, "float64": 1e-3}
"""Of the largest logit, by dtype."""
HALF_TOLERANCE: Final = 5e-2  # bfloat16 keeps 8 bits


def agree(expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of one shape differ by no more than rounding.

    Args:
        expected: What the largest logit is taken of.
        found: Of the same shape.
        dtype: What both were computed in.
    """
    tolerance = TOLERANCE.get(str(dtype).removeprefix("torch."), HALF_TOLERANCE)
    return bool((expected - found).abs().max() <= tolerance * expected.abs().max())


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of the numbers is nan or infinite; the host waits for it."""
    return all(bool(each.isfinite().all()) for each in tensors)
