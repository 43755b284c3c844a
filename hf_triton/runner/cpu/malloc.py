# SPDX-License-Identifier: Apache-2.0
"""Keep freed tensor memory in the C library's heap for the next forward."""

from __future__ import annotations

import ctypes
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
