# SPDX-License-Identifier: Apache-2.0
"""Room for a response in the shared memory that a model's process and its server pass tensors through.

Each process has a pool in it, which grows by whole MiB while `/dev/shm` has any, and never shrinks. A final response
that finds no room is lost, and its client waits for ever: so it is known before whether it fits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hf_triton.model_process import free_shared_memory

OWN_BYTES: Final = 16 << 10
"""What a response takes beside the elements of its tensors, an error's sentence included."""
GROWTH_BYTES: Final = 2 << 20
"""What `/dev/shm` must have beyond a response for a pool to grow by it: a MiB of rounding, and one for other models."""
AMPLE_BYTES: Final = 32 << 20
"""If as much is free beyond a response, those of several threads fit side by side."""
PATIENCE_S: Final = 1.0
"""How long an error waits for its own room: requests leave the pool when they have been read."""
POLL_S: Final = 0.01

_sending = threading.RLock()  # taken again by a request whose destructor answers within a send


@contextmanager
def room_for(num_bytes: int) -> Iterator[bool]:
    """Reserve room for a response while the block sends it, or for an error in its place.

    Yields:
        Whether the response fits. An error is sent if it does not.
    """
    if free_shared_memory() >= num_bytes + AMPLE_BYTES:
        yield True
        return
    with _sending:
        fits = _fits(num_bytes)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (fits or _fits(0)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        yield fits


def _fits(num_bytes: int) -> bool:
    needed = num_bytes + OWN_BYTES
    return free_shared_memory() >= needed + GROWTH_BYTES or _free_in_pool() >= 2 * needed  # which is in pieces


def _free_in_pool() -> int:
    """Free bytes of this process's pool; 0 if the server does not tell."""
    try:
        from c_python_backend_utils import shared_memory
    except ImportError:
        return 0
    return shared_memory.free_memory()
