# SPDX-License-Identifier: Apache-2.0
"""Whether two ways to compute the same logits agree, up to the rounding of a model's dtype."""

from __future__ import annotations

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
