# SPDX-License-Identifier: Apache-2.0
"""A model's outputs for arrays, such as the pixels of images: those of equal shapes share a forward. Pads nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import torch

from hf_triton.encoder.jobs import ArrayInput
from hf_triton.encoder.probe import Way
from hf_triton.errors import HfTritonError
from hf_triton.runner.cpu import accelerate_encoder
from hf_triton.runner.transfer import array_to_device

Compute = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def build_stacked_forward(
    model: Any, compute: Compute, examples: list[ArrayInput], *, pack_weights: Literal["auto"] | bool = False
) -> StackedForward:
    """A forward whose linear layers are timed by examples; arguments as in `StackedForward` and `build_forward`."""
    forward = StackedForward(model, compute)
    accelerate_encoder(
        model, lambda: torch.cat([each.flatten() for each in forward(examples)]), pack_weights=pack_weights
    )
    return forward


class StackedForward:
    """Computes outputs as `EncoderForward` does. For one thread at a time.

    Args:
        compute: The model's outputs `[batch, ...]` for its arguments, each with a dimension of the batch.
    """

    way: Final[Way] = "padded"
    adapters: Final = None
    slower: Final = ()

    def __init__(self, model: Any, compute: Compute) -> None:
        self.device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._compute = compute
        self.model = model

    @torch.inference_mode()
    def __call__(self, inputs: list[ArrayInput]) -> list[torch.Tensor]:
        """The outputs of each input, float32 on the device."""
        results: dict[int, torch.Tensor] = {}
        for members in _by_shape(inputs):
            arrays = {
                name: self._stack([inputs[index].arrays[name] for index in members])
                for name in inputs[members[0]].arrays
            }
            results |= zip(members, self._compute(arrays).float(), strict=True)
        return [results[index] for index in range(len(inputs))]

    def drop_graphs(self) -> None:
        """There are none."""

    def capture_again(self) -> None:
        """There is nothing to capture."""

    def input_error(self, each: ArrayInput) -> HfTritonError | None:
        """There is none: a task makes arrays that its model takes."""
        return None

    def _stack(self, arrays: list[Any]) -> torch.Tensor:
        tensor = array_to_device(np.stack(arrays), self.device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _by_shape(inputs: list[ArrayInput]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, each in enumerate(inputs):
        groups.setdefault(tuple((name, array.shape) for name, array in each.arrays.items()), []).append(index)
    return list(groups.values())
