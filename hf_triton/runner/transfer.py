# SPDX-License-Identifier: Apache-2.0
"""Copies of small tensors between host and device that neither waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers; the host does not wait for the device."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def to_index(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor to index with, `[indices]` int64."""
    return to_device(indices, torch.int64, device)


def array_to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of an array; the host does not wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def copy_to_device(array: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Overwrite a tensor with an array of its shape; the host does not wait for the device."""
    source = torch.from_numpy(array)
    is_cuda = target.device.type == "cuda"
    target.copy_(source.pin_memory() if is_cuda else source, non_blocking=is_cuda)


class ToHost:
    """A copy of a tensor to the host, queued after the device's present work; a CPU tensor is not copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor
        self._arrival: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> Any:
        """The numbers, nested as in `torch.Tensor.tolist`; waits until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.tolist()
