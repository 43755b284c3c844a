# SPDX-License-Identifier: Apache-2.0
"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h: the signal a child gets when its parent dies


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the thread that started this process ends. To be called in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
