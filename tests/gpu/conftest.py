# SPDX-License-Identifier: Apache-2.0
"""These tests run on CUDA devices, or on two simulated ones."""

import contextlib
from collections.abc import Iterator

import pytest

from hf_triton.runner.cuda.graphs import StepGraph, StepGraphs
from hf_triton.runner.device_step import StepSize
from tests.support.simulated_gpu import HAS_GPU, Device, simulated_gpus

with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401  # peft imports it, and it looks at the GPU, which is simulated later


class Replays:
    """The graphs that steps have replayed, and how many steps had none."""

    def __init__(self) -> None:
        self.sizes: list[StepSize] = []
        self.num_eager = 0


@pytest.fixture(autouse=True)
def simulated() -> Iterator[Device | None]:
    """State of the simulated devices; None: there are real ones."""
    if HAS_GPU:
        yield None
        return
    with simulated_gpus(2) as device:
        yield device


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    noted = Replays()
    find = StepGraphs.find

    def note(captured: StepGraphs, *sizes: int) -> StepGraph | None:
        graph = find(captured, *sizes)
        if graph is None:
            noted.num_eager += 1
        else:
            noted.sizes.append(graph.size)
        return graph

    monkeypatch.setattr(StepGraphs, "find", note)
    return noted
