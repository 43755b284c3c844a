# SPDX-License-Identifier: Apache-2.0
"""Which modules are RMSNorms, and of which kind: found by trying what each computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional


class NormKind(NamedTuple):
    """A norm computes `rms_norm(states, offset + weight, eps)`."""

    eps: float
    offset: int


def random_numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same at every call, whatever own code has made torch's defaults."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return numbers.to(dtype).to(device)


def is_like_norm(module: nn.Module, device_type: str) -> bool:
    """Whether a module has one weight of one dimension on such a device, and nothing else."""
    parameters = [each for each in module._parameters.values() if each is not None]
    others = [*module.children(), *(each for each in module._buffers.values() if each is not None)]
    return not others and [(each.ndim, each.device.type) for each in parameters] == [(1, device_type)]


def find_norm(
    module: nn.Module, scales: Sequence[float], is_same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> tuple[NormKind, torch.Tensor] | None:
    """A module's kind and the states by which it was found, `[scales, size]` in float32; None: it is no norm.

    A random weight tells what the module computes: those of a new model are all 1.

    Args:
        module: It is like a norm, see `is_like_norm`.
        scales: A row of random states is so large.
        is_same: Whether the module's output is that of the norm.
    """
    ((name, weight),) = module.named_parameters()
    trial = random_numbers(len(weight), dtype=torch.float32, device=weight.device)
    states = torch.stack([trial.roll(number + 1) * scale for number, scale in enumerate(scales)])
    expected = functional_call(module, {name: trial}, (states,))
    for eps in {value for value in vars(module).values() if isinstance(value, float)}:
        for offset in (0, 1):
            if is_same(expected, functional.rms_norm(states, trial.shape, offset + trial, eps)):
                return NormKind(eps, offset), states
    return None
