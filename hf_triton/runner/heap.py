# SPDX-License-Identifier: Apache-2.0
"""Memory that is used again and again: the C library's heap, for tensors on a CPU, and Python's objects."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Final

MMAP_THRESHOLD: Final = (-3, 32 << 20)
"""glibc's `M_MMAP_THRESHOLD`: what is larger, such as key/value memory, goes back to the system when freed."""
TRIM_THRESHOLD: Final = (-1, 256 << 20)
"""glibc's `M_TRIM_THRESHOLD`: bytes that the heap keeps for what comes next."""


def keep_freed_memory() -> None:
    """Let the heap keep what a forward gives back for the next one.

    glibc by itself returns it, and has thousands of pages mapped and cleared again at each forward: a fourth of the
    time of reading a prompt. Does nothing where the environment says `MALLOC_...`, or with another C library.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(*MMAP_THRESHOLD)
        set_option(*TRIM_THRESHOLD)


def keep_objects() -> None:
    """Have the garbage collector pass by the objects that there are now, when all is loaded.

    Torch, transformers and a model are half a million. It would go through them every ten seconds or so of load, for
    0.3 s in which no other thread runs; and as Python ends, of which Triton 24.10's stub dies (segmentation fault).
    """
    gc.collect()
    gc.freeze()
