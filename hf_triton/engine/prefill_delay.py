# SPDX-License-Identifier: Apache-2.0
"""Prompts that are on their way are read together.

Texts that end in one step have clients that send their next prompts at about one moment. Running the first to come at
once means rows that are out of step from then on: a step more at the least. So reading waits for as many as have just
left, no longer than two steps take, and a few steps where most texts are about to reach their length. Where no row
runs, that would be idle time: the first wait for the others as long as they come closely one after the other, then they
are read while the others come, and it is their first step that waits. Knows no rows.
"""

from __future__ import annotations

import time
from typing import Final

WAIT_STEPS: Final = 2
MAX_WAIT_S: Final = 0.02
"""Clients that come back do so in less, however long a step takes."""
MAX_GAP_S: Final = 0.002
"""Between two prompts that come closely one after the other: clients that are told of their texts' ends in turn."""
MEMORY_STEPS: Final = 4
"""Who has not come back after so many steps is not waited for."""
SOON_STEPS: Final = 3
"""Steps that reading waits for texts to end; fewer where they take more than `SOON_S`."""
SOON_S: Final = 0.05


class PrefillDelay:
    """Tells how long to wait for others before prompts are read."""

    def __init__(self) -> None:
        self._num_expected = 0
        self._left_s = 0.0
        self._came_s = 0.0
        self._step_s = 0.0
        self._until_s: float | None = None
        self._num_used = 0  # steps

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
        self._came_s = time.monotonic()

    def on_read(self) -> None:
        """Those who were there are read: the next ones may wait anew."""
        self._until_s, self._num_used = None, 0

    def waits(self, num_waiting: int, nums_left: list[int]) -> bool:
        """Whether those who are there wait for others; else they are to be read. To be asked once a step.

        Args:
            num_waiting: How many are there.
            nums_left: The most tokens that each running row may yet have. Where rows run, a step is what passes
                meanwhile; where none does, see `gap_s`.
        """
        self._forget()
        if self._leave_soon(nums_left) >= max(num_waiting, len(nums_left) // 2 + 1):
            self._num_used += 1
            return self._step_s > 0
        if self._until_s is None:
            self._until_s = time.monotonic() + min(WAIT_STEPS * self._step_s, MAX_WAIT_S)
        return bool(nums_left) and self._step_s <= MAX_WAIT_S and self.rest_s() > 0

    def rest_s(self) -> float:
        """Seconds from now that those who wait for others, or were read without them, have yet to wait."""
        self._forget()
        left_s = (self._until_s or 0.0) - time.monotonic()
        if left_s <= 0:
            self._num_expected = 0
        return left_s if self._num_expected else 0.0

    def gap_s(self) -> float:
        """Seconds from now that those who are there wait for the next one before they are read, where no row runs."""
        return max(0.0, min(self.rest_s(), self._came_s + MAX_GAP_S - time.monotonic()))

    def _leave_soon(self, nums_left: list[int]) -> int:
        """How many rows end while reading may still wait."""
        num_steps = min(SOON_STEPS, int(SOON_S / max(self._step_s, 1e-9))) - self._num_used
        return sum(num_left <= num_steps for num_left in nums_left)

    def _forget(self) -> None:
        if time.monotonic() - self._left_s > MEMORY_STEPS * self._step_s:
            self._num_expected = 0
