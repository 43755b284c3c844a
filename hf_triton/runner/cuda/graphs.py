# SPDX-License-Identifier: Apache-2.0
"""Captured forwards: a step of few tokens takes the GPU less time than Python needs to launch its kernels.

A graph depends on the numbers of tokens and of rows of outputs alone. What else a step is (lengths, blocks, slots,
which tokens are whose) its kernels read from the device, so a step of decodes and one with chunks replay the same
graphs; of a model with states, decodes alone are replayed. A step that has fewer tokens than its graph is padded. All
graphs share their memory, as one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.device_step import DeviceStep, StepSize
from hf_triton.runner.numerics import agree
from hf_triton.runner.transfer import copy_to_device


@dataclass(frozen=True)
class StepGraph:
    """The captured forward of one size."""

    size: StepSize
    step: DeviceStep
    """What it reads."""
    graph: torch.cuda.CUDAGraph


class StepGraphs:
    """The captured forwards of a model.

    Args:
        forward: Computes outputs `[rows, width]` of a step from numbers on the device.
        device: Of all tensors.
        sizes: Of the graphs, ascending.
        num_tables: Blocks of all tables of a step, for which there is room; steps with more have no graph.
        beside: Other graphs, whose memory these use too; those of both run one at a time.
    """

    def __init__(
        self,
        forward: Callable[[DeviceStep], torch.Tensor],
        device: torch.device,
        *,
        sizes: Sequence[StepSize],
        num_tables: int,
        beside: StepGraphs | None = None,
    ) -> None:
        self._forward = forward
        self._num_tables = num_tables
        self._numbers = torch.zeros(sizes[-1].num_fixed + num_tables, dtype=torch.int64, device=device)
        self._graphs: list[StepGraph] = []
        self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for size in reversed(sizes):  # the largest first: the others find its memory
            step = size.split(self._numbers)
            self.load(size.fill((), np.empty(0, np.int64), ()))
            with _waiting_refused():
                outputs = forward(step)  # compiles what is not compiled yet
            if not self._graphs:
                self.outputs = outputs.new_empty(max(each.num_rows for each in sizes), outputs.shape[1])
                """`[rows, width]`, those of the last replay, until the next one."""
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),  # a capture that fails leaves its own behind
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self.outputs[: size.num_rows].copy_(forward(step))
            self._graphs.append(StepGraph(size, step, graph))
        self._graphs.reverse()

    def find(self, num_tokens: int, num_sequences: int, num_rows: int, num_tables: int) -> StepGraph | None:
        """The smallest graph that has room for a step; None: there is none."""
        if num_tables > self._num_tables:
            return None
        for graph in self._graphs:
            size = graph.size
            if num_tokens <= size.num_tokens and num_sequences <= size.num_sequences and num_rows <= size.num_rows:
                return graph
        return None

    def replays_right(self, graph: StepGraph, before: Callable[[], object] = lambda: None) -> bool:
        """Whether replays on the loaded numbers give what `forward` gives eagerly, where the same kernels run.

        Args:
            graph: Replayed twice: the second replay reads the states that the first has left.
            before: Brings states to where replays and forwards begin.
        """
        before()
        for _ in range(2):
            graph.graph.replay()
        found = self.outputs[: graph.size.num_rows].cpu()
        before()
        self._forward(graph.step)
        return agree(self._forward(graph.step).cpu(), found)

    def load(self, numbers: npt.NDArray[np.int64]) -> None:
        """Bring a step's numbers to where its graph reads them."""
        copy_to_device(numbers, self._numbers[: len(numbers)])


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Raise where the host would wait for the device: a capture that failed of it would harm torch's allocator.

    See pytorch#180395. The mode is the process's, in which no other engine runs at load.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
