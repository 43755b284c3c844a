# SPDX-License-Identifier: Apache-2.0
"""Prompts that are on their way are read together.

Texts that end in one step have clients that send their next prompts at about one moment. Reading the first to come at
once means reading the others apart, and rows that are out of step from then on: a step more at the least. So reading
waits for as many as have just left, but no longer than a step takes. Knows no rows.
"""

from __future__ import annotations

import time
from typing import Final

MAX_WAIT_S: Final = 0.02
"""Clients that come back do so in less, however long a step takes."""
MEMORY_STEPS: Final = 4
"""Who has not come back after so many steps is not waited for."""


class Gathering:
    """Tells how long to wait for others before prompts are read."""

    def __init__(self) -> None:
        self._num_expected = 0
        self._left_s = 0.0
        self._step_s = 0.0
        self._until_s: float | None = None

    def on_step(self, step_s: float) -> None:
        """A step has taken so many seconds, the delivery of its texts not counted."""
        self._step_s = step_s

    def on_leave(self, num_sequences: int) -> None:
        """So many sequences have ended in one step."""
        if num_sequences:
            self._forget()
            self._num_expected += num_sequences
            self._left_s = time.monotonic()

    def on_come(self) -> None:
        """A sequence is there."""
        self._num_expected = max(0, self._num_expected - 1)

    def wait_s(self, *, has_company: bool) -> float:
        """Seconds from now that those who are there wait for others; 0: they are to be read.

        Args:
            has_company: Whether rows are running, so that a step is what passes meanwhile.
        """
        now = time.monotonic()
        self._forget()
        if self._until_s is None:
            self._until_s = now + min(self._step_s, MAX_WAIT_S)
        if now < self._until_s and self._num_expected and not (has_company and self._step_s > MAX_WAIT_S):
            return self._until_s - now
        self._num_expected, self._until_s = 0, None
        return 0.0

    def _forget(self) -> None:
        if time.monotonic() - self._left_s > MEMORY_STEPS * self._step_s:
            self._num_expected = 0
