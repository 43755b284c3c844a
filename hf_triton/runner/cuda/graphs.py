# SPDX-License-Identifier: Apache-2.0
"""Capture of CUDA graphs. Knows no model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

_CAPTURING: Final = threading.Lock()  # torch: one capture at a time in a process


class GraphCapture:
    """Captures work of one device as graphs that share a memory pool.

    They may share it because they never run at the same time, and none needs what another has left there.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Use a new memory pool; the old one is freed with its graphs."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], *, checks_sync: bool) -> torch.cuda.CUDAGraph:
        """Capture what `run` launches, after one run on the same stream, as torch asks for.

        Args:
            run: Reads and writes tensors that keep their addresses.
            checks_sync: Whether to run once more and raise if the host synchronizes with the device: a capture that
                fails for that reason leaves torch's allocator, up to 2.12 at least, as if it still captured.
        """
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with _CAPTURING, torch.cuda.stream(stream):
                run()
                if checks_sync:
                    with _sync_raises():
                        run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                    run()
        finally:
            current.wait_stream(stream)
        return graph


@contextmanager
def _sync_raises() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
