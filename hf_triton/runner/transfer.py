# SPDX-License-Identifier: Apache-2.0
"""Small numbers between host and device, without either waiting for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers; the host does not wait for what the device has in hand."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def to_column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One number a row, `[rows, 1]`."""
    return to_device(values, dtype, device).unsqueeze(1)


def to_index(places: Sequence[int], device: torch.device) -> torch.Tensor:
    """Places to index with, `[places]` int64."""
    return to_device(places, torch.int64, device)


def array_to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The numbers of an array; as above, the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ToHost:
    """A copy of a tensor on its way to the host, behind what the device has in hand now.

    Args:
        tensor: Of any shape; on a CPU it is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor
        self._is_there: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> Any:
        """The numbers, nested as the tensor's shape has it; waits until they are there."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._copy.tolist()
