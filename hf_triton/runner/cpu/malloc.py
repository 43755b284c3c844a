# SPDX-License-Identifier: Apache-2.0
"""Keep freed tensor memory in the C library's heap for the next forward, or give it back to the system."""

from __future__ import annotations

import ctypes
import os
from typing import Final

MMAP_THRESHOLD: Final = (-3, 32 << 20)
"""glibc's `M_MMAP_THRESHOLD`: larger allocations, such as the KV cache, go back to the system when freed."""
TRIM_THRESHOLD: Final = (-1, 256 << 20)
"""glibc's `M_TRIM_THRESHOLD`: freed bytes that the heap keeps."""


def keep_freed_memory() -> None:
    """Let the heap keep memory that a forward frees for the next one.

    By default glibc returns it to the system, which maps and clears thousands of pages at each forward: a fourth of the
    time of a prefill. Does nothing if the environment has a `MALLOC_...` variable, or with another C library.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(*MMAP_THRESHOLD)
        set_option(*TRIM_THRESHOLD)


def trim() -> None:
    """Give the system the memory that the heap keeps; does nothing with another C library than glibc."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
