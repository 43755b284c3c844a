# SPDX-License-Identifier: Apache-2.0
"""The size of the KV cache on a GPU, from the weights, the memory and the instance's part of it."""

from typing import Any

import pytest
import torch

from hf_triton.errors import CheckpointError
from hf_triton.runner.gpu_memory import WHOLE_GPU, GpuPart, LoadMemory, weight_bytes

GPUS = [torch.device("cuda", index) for index in range(2)]
HALF = GpuPart(0.5, reason="instances on this GPU: one 1, two 1")


class Weights:
    """A model of so many bytes on each device."""

    def __init__(self, *sizes: int) -> None:
        self._tensors = [FakeTensor(device, size) for device, size in zip(GPUS, sizes, strict=False)]

    def parameters(self) -> list[Any]:
        return self._tensors

    def buffers(self) -> list[Any]:
        return []


class FakeTensor:
    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes


def memory_of(
    part: GpuPart = WHOLE_GPU, *, weights: int = 200_000, free: int = 800_000, state_tokens: int = 0
) -> LoadMemory:
    """A GPU of a million bytes, of which a token takes ten."""
    return LoadMemory(Weights(weights), {GPUS[0]: 10}, part, state_tokens, lambda _: (free, 1_000_000))


@pytest.mark.parametrize(
    ("memory", "tokens"),
    [
        (memory_of(), 70_000),
        (memory_of(free=500_000), 45_000),
        (memory_of(HALF), 25_000),
        (memory_of(HALF, state_tokens=20_000), 5_000),
        (memory_of(HALF, weights=600_000), 4096),  # outgrow the part: room for one sequence
        (memory_of(HALF, weights=600_000, state_tokens=1000), 4096),
        (memory_of(HALF, weights=600_000, free=20_000), 1800),
        (memory_of(GpuPart(0.25, is_set=True)), 2500),
        (memory_of(GpuPart(0.0)), 4096),  # others have set all of it
    ],
)
def test_the_cache_has_what_the_weights_leave_of_the_part(memory: LoadMemory, tokens: int) -> None:
    assert memory.cache_tokens(4096, 32_768) == tokens


def test_by_default_it_is_what_the_sequences_need() -> None:
    assert memory_of().cache_tokens(2, 32_768) == 32_768, "one sequence of the whole context"
    assert memory_of().cache_tokens(12, 32_768) == 12 * 4096
    assert memory_of().cache_tokens(12, 1000) == 12_000
    part = GpuPart(1.0, is_set=True)
    assert memory_of(part).cache_tokens(2, 1000) == 70_000, "a setting says otherwise"
    assert memory_of(part).cache_tokens(2, 1000, fills_part=False) == 2000, "a model without keys"


def test_the_device_that_fills_first_decides() -> None:
    free = {GPUS[0]: 900_000, GPUS[1]: 100_000}
    model = Weights(100_000, 50_000)
    memory = LoadMemory(model, dict.fromkeys(GPUS, 10), WHOLE_GPU, 0, lambda device: (free[device], 1_000_000))
    assert memory.cache_tokens(4096, 4096) == 9000


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (memory_of(HALF, free=2000), ("195.3 KiB of weights", "2.0 KiB of 976.6 KiB free", "0.50", HALF.reason)),
        (memory_of(GpuPart(0.2, is_set=True, reason="gpu_memory_fraction 0.2")), ("gpu_memory_fraction 0.2",)),
        (memory_of(state_tokens=80_000), ("states of 781.2 KiB for max_num_seqs sequences",)),
    ],
)
def test_the_error_says_what_is_there_and_what_to_set(memory: LoadMemory, words: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as raised:
        memory.cache_tokens(32, 4096)
    assert raised.value.code == "out_of_memory"
    for word in (*words, "cuda:0", "set gpu_memory_fraction", "max_cache_tokens", "instance_group"):
        assert word in raised.value.sentence


def test_weights_count_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert weight_bytes(model) == {torch.device("cpu"): 64}
