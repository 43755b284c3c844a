# SPDX-License-Identifier: Apache-2.0
"""A sleeping model's weights: from a GPU to the host's memory and back. On a CPU they stay.

What moves are storages, so that whatever shares one still does: tied weights, parts of a merged product. A tensor that
has moved keeps its identity, but not its address.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hf_triton.runner.budget import HOST_FRACTION, FreeMemory
from hf_triton.runner.cgroups import PROC, read_text
from hf_triton.runner.cpu import give_back_freed_memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class OffloadedWeights:
    """Weights of GPUs that lie in the host's memory."""

    def __init__(self) -> None:
        self._moved: list[tuple[torch.device, torch.UntypedStorage, torch.Tensor]] = []  # and the bytes on the host

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the storages of tensors to pinned memory of the host, as far as it has room; others stay.

        What cannot be pinned is moved too, more slowly.
        """
        import torch

        storages: dict[int, tuple[torch.device, torch.UntypedStorage]] = {}
        for tensor in _plain(tensors):
            storage = tensor.untyped_storage()
            if tensor.device.type == "cuda" and storage.nbytes() and storage.resizable():
                storages[storage.data_ptr()] = tensor.device, storage
        left = int(FreeMemory().of(torch.device("cpu")) * HOST_FRACTION) // _num_processes()
        moved = []
        for device, storage in storages.values():
            needed = 1 << (storage.nbytes() - 1).bit_length()  # torch rounds up what it pins
            if needed <= left and (host := _allocate(storage.nbytes())) is not None:
                left -= needed
                host.untyped_storage().copy_(storage, non_blocking=True)
                moved.append((device, storage, host))
        if len(moved) < len(storages):
            num_stay = len(storages) - len(moved)
            logger.warning("%d of %d tensors stay on the GPU: the host has no room", num_stay, len(storages))
        _wait_for(device for device, _, _ in moved)
        for device, storage, host in moved:
            storage.resize_(0)
            self._moved.append((device, storage, host))

    def restore(self) -> None:
        """Bring all back. After a failure, what is back may be offloaded again, and the rest is there yet."""
        devices = {device for device, _, _ in self._moved}
        while self._moved:
            _, storage, host = self._moved[-1]
            storage.resize_(host.nbytes)
            storage.copy_(host.untyped_storage(), non_blocking=True)
            self._moved.pop()
        _wait_for(devices)


def held_bytes(device: torch.device) -> int:
    """What this process has of the GPUs' memory; of a model elsewhere, of the host's, 0 if that is not known."""
    if device.type == "cuda":
        import torch

        return sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    numbers = read_text(PROC / "self/statm").split()
    return int(numbers[1]) * mmap.PAGESIZE if numbers else 0


def release_freed(device: torch.device) -> None:
    """Give back to the system what is freed, and kept for the next forward."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
    give_back_freed_memory()


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors with a storage of their own: those inside of quantised ones, which are subclasses of torch's."""
    for tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            yield tensor
        else:
            yield from _plain(getattr(tensor, name) for name in flatten()[0])


def _allocate(num_bytes: int) -> torch.Tensor | None:
    """Memory of the host, pinned if that can be had; None: there is none."""
    import torch

    for is_pinned in (True, False):
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        except (MemoryError, RuntimeError) as error:
            logger.debug("%d bytes of the host's memory cannot be had (pinned: %s): %s", num_bytes, is_pinned, error)
    return None


def _num_processes() -> int:
    """How many processes have a part of the model, and move theirs at the same time."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_initialized() else 1


def _wait_for(devices: Iterable[torch.device]) -> None:
    import torch

    for device in set(devices):
        torch.cuda.synchronize(device)
