# SPDX-License-Identifier: Apache-2.0
"""Agreement of a single operation's results up to the rounding of its dtype; whole models: `model_comparison.py`."""

from __future__ import annotations

from typing import Final

import torch

NUM_EPS: Final = 4
"""Units of rounding."""
MIN_TOLERANCE: Final = 1e-5
"""Sums in float32 differ so much by their order."""


def agree(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether results `[..., numbers]` of one dtype differ only by rounding: a few eps of the largest of their row."""
    tolerance = max(NUM_EPS * torch.finfo(expected.dtype).eps, MIN_TOLERANCE)
    difference, largest = (each.float().abs().amax(-1) for each in (expected - actual, expected))
    return expected.dtype == actual.dtype and bool((difference <= tolerance * largest).all())
