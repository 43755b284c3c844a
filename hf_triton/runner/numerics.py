# SPDX-License-Identifier: Apache-2.0
"""Agreement of logits up to the rounding of a dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

TOLERANCE: Final = {"float32": 1e-3, "float64": 1e-3}
"""Part of the largest logit, by dtype."""
HALF_TOLERANCE: Final = 5e-2  # bfloat16 keeps 8 bits


def agree(expected: torch.Tensor, actual: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of one shape differ by no more than rounding.

    Args:
        expected: The largest logit is taken from here.
        actual: Of the same shape.
        dtype: In which both were computed.
    """
    tolerance = TOLERANCE.get(str(dtype).removeprefix("torch."), HALF_TOLERANCE)
    return bool((expected - actual).abs().max() <= tolerance * expected.abs().max())
