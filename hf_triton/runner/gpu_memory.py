# SPDX-License-Identifier: Apache-2.0
"""How many tokens of KV cache a GPU has room for beside the weights, in the part of it that an instance may take.

Other than a CPU's, this memory is allocated at load: captured graphs hold its addresses. By default it is no more than
the sequences are likely to need, so that other models find room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError
from hf_triton.runner.budget import HOST_FRACTION, FreeMemory, size_words

if TYPE_CHECKING:
    import torch

    from hf_triton.runner.images import ImageMemory

USED_FRACTION: Final = 0.9
"""Weights and KV cache take it of an instance's part, and of what is free at load. The rest is for the driver, a
step's tensors and CUDA graphs."""
SEQUENCE_TOKENS: Final = 4096
"""The KV cache has room by default for so many of each of `max_num_seqs` sequences; fewer if the context is shorter."""
MIN_TOKENS: Final = 256
"""A model with room for fewer is not loaded, unless its context is shorter."""


@dataclass(frozen=True)
class GpuPart:
    """The part of a GPU's memory that an instance may take, weights and KV cache together."""

    fraction: float = 1.0
    """A part of the whole memory, from 0 to 1."""
    is_set: bool = False
    """Whether a setting says so: then the KV cache takes all that the weights leave."""
    reason: str = "the only instance on this GPU"
    """Why it is this part, for messages."""


WHOLE_GPU: Final = GpuPart()


@dataclass(frozen=True)
class DeviceMemory:
    """A model on one of its devices, in bytes."""

    device: torch.device
    per_token: int
    """Keys and values of one token."""
    weights: int
    free: int
    total: int
    reserved: int = 0
    """What the vision tower takes."""

    def max_tokens(self, part: GpuPart, least: int) -> int:
        """The most tokens in what is free, and in what the weights leave of a part, by default at least `least`."""
        if self.device.type != "cuda":
            return int(self.free * HOST_FRACTION) // self.per_token
        room = int(self.total * part.fraction * USED_FRACTION) - self.weights - self.reserved
        if not part.is_set:
            room = max(room, least * self.per_token)
        return max(0, min(room, int(self.free * USED_FRACTION) - self.reserved)) // self.per_token

    def __str__(self) -> str:
        sizes = (size_words(size) for size in (self.weights, self.free, self.total))
        kept = f", {size_words(self.reserved)} kept for images" if self.reserved else ""
        return "{} has {} of weights, and {} of {} free{}".format(self.device, *sizes, kept)


class LoadMemory:
    """The memory of a model's devices, at load.

    Args:
        bytes_per_token: Keys and values of one token in all layers, by device.
        part: What the instance may take of each GPU.
        state_tokens: Tokens that take as much as the states of all sequences.
        read: Returns the free and the total bytes of a device; None: `read_memory`.
        images: What images take, the features of each token that the KV cache has among it; None: there are none.
    """

    def __init__(
        self,
        model: Any,
        bytes_per_token: Mapping[torch.device, int],
        part: GpuPart,
        state_tokens: int = 0,
        read: Callable[[torch.device], tuple[int, int]] | None = None,
        images: ImageMemory | None = None,
    ) -> None:
        weights, read = weight_bytes(model), read or read_memory
        self._part = part
        self._state_tokens = state_tokens
        reserved = images.reserved if images else {}
        per_token = images.per_token if images else 0
        self._devices = [
            DeviceMemory(
                device,
                num_bytes + (per_token if device in reserved else 0),
                weights[device],
                *read(device),
                reserved.get(device, 0),
            )
            for device, num_bytes in bytes_per_token.items()
        ]

    def cache_tokens(self, max_num_seqs: int, context_length: int, *, fills_part: bool = True) -> int:
        """Tokens of keys and values to allocate beside the states.

        They take what the weights leave of the part, and by default no more than `max_num_seqs` sequences of
        `SEQUENCE_TOKENS` or one of the whole context need; those of a part that a setting says take all of it, if
        `fills_part`. A model whose weights outgrow its part by default has room for one sequence of `SEQUENCE_TOKENS`,
        if that is free.

        Raises:
            CheckpointError: A device has no room.
        """
        length = min(context_length, SEQUENCE_TOKENS)
        least = length + self._state_tokens
        num_tokens = min(memory.max_tokens(self._part, least) for memory in self._devices) - self._state_tokens
        if num_tokens < min(MIN_TOKENS, length):
            raise self.error("a KV cache")
        if self._part.is_set and fills_part:
            return num_tokens
        return min(num_tokens, max(max_num_seqs * length, context_length))

    def error(self, wanted: str) -> CheckpointError:
        """The error of a model whose KV cache finds no room."""
        states = f" and states of {self._state_size()} for max_num_seqs sequences" if self._state_tokens else ""
        return CheckpointError(
            "out_of_memory",
            f"there is no room for {wanted}{states}: {self.describe()}: set gpu_memory_fraction, or fewer "
            "max_cache_tokens or max_num_seqs, in the folders on this GPU, or place some elsewhere by instance_group",
        )

    def describe(self) -> str:
        sizes = "; ".join(map(str, self._devices))
        return f"{sizes}; this instance may take {self._part.fraction:.2f} ({self._part.reason})"

    def _state_size(self) -> str:
        return size_words(self._state_tokens * sum(memory.per_token for memory in self._devices))


def weight_bytes(model: Any) -> Counter[torch.device]:
    """Bytes of a model's parameters and buffers by device."""
    weights: Counter[torch.device] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        weights[tensor.device] += own_part(tensor).nbytes
    return weights


def own_part(tensor: Any) -> Any:
    """This process's part of a tensor that is divided among several; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def read_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device; of the host's memory, the free ones twice."""
    free = FreeMemory().of(device)
    if device.type != "cuda":
        return free, free
    import torch

    return free, torch.cuda.mem_get_info(device)[1]
