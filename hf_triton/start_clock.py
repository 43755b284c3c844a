# SPDX-License-Identifier: Apache-2.0
"""Times the parts of a model's start, from its process's `execve` on, for the log line that tells them."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Final


class StartClock:
    """Adds the time since the last part's end to a part; each process has one, and starts one model."""

    def __init__(self) -> None:
        self._parts_s: Counter[str] = Counter()
        self._ended_s = 0.0

    def end(self, part: str) -> None:
        """End a part, which began with the end of the one before it."""
        now_s = time.process_time()
        self._parts_s[part] += now_s - self._ended_s  # type: ignore[assignment]
        self._ended_s = now_s

    def describe(self) -> str:
        """The seconds since the process started, and the processor seconds of each part."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts_s.items())
        return f"in {_age_s():.1f} s ({time.process_time():.1f} s of processor time): {parts}"


def _age_s() -> float:
    """Seconds since this process was started."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


start_clock: Final = StartClock()
