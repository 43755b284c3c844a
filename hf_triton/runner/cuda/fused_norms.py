# SPDX-License-Identifier: Apache-2.0
"""RMSNorms in one kernel: what a norm computes is found by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from hf_triton.runner.cuda.fused_operations import is_usable, rms_norm
from hf_triton.runner.norms import find_norm
from hf_triton.runner.numerics import agree

Forward = Callable[[torch.Tensor], torch.Tensor]

SCALES: Final = 1.0, 30.0, 1e-3
"""A norm's random rows are so large; the mean square of the last is about as large as its eps."""


def forward_of(module: Any) -> Any:
    """A module's forward, inside accelerate's hooks."""
    return getattr(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward", None)


@dataclass
class FusedNorm:
    original: Forward
    """Computes states of another dtype than the model's."""
    weight: torch.Tensor
    """`[size]`: in the model's dtype, or in float32 as a sum that the dtype does not hold."""
    eps: float
    dtype: torch.dtype
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """States, and those normalised, which the kernel that made them has computed with them."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        kept, self.kept = self.kept, None
        if kept is not None and kept[0] is states:
            return kept[1]
        if not self.takes(states):
            return self.original(states)
        if self.weight.dtype == self.dtype:
            return functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        return rms_norm(states, self.weight, self.eps)

    def takes(self, states: torch.Tensor) -> bool:
        return states.dtype == self.dtype

    def keep(self, states: torch.Tensor, normed: torch.Tensor) -> None:
        """Give `normed` if the next call is of `states`, the same object."""
        self.kept = states, normed


def build_norm(module: nn.Module, dtype: torch.dtype, original: Forward) -> tuple[FusedNorm, torch.Tensor] | None:
    """The replacement and states to compare it with."""
    (weight,) = module.parameters()
    if (found := find_norm(module, SCALES, agree)) is None:
        return None
    (eps, offset), states = found
    total = weight if offset == 0 else offset + weight.float()
    is_right = total.dtype == dtype or is_usable(weight.device, dtype)
    return (FusedNorm(original, total, eps, dtype), states.to(dtype)) if is_right else None
