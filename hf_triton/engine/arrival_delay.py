# SPDX-License-Identifier: Apache-2.0
"""How long prefill waits for further prompts. Knows no sequences.

Clients whose completions end in one step send their next prompts at about one moment. Prefilling the first of them
alone puts it out of step with the others: from then on, each prefill interrupts the decoding of all others. So after n
sequences finished, prefill waits until n prompts have arrived, for at most two decoding steps.
"""

from __future__ import annotations

import time
from typing import Final

MAX_STEPS: Final = 2


class ArrivalDelay:
    """Delays the prefill of the first prompts to arrive after sequences finished.

    Args:
        max_delay_s: The longest delay, however long a step takes.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._limit_s = 0.0
        self._num_expected = 0
        self._finished_s = 0.0
        self._since_s: float | None = None  # since when prompts wait

    def on_step(self, step_s: float, num_finished: int) -> None:
        """A decoding step took `step_s` seconds, and so many sequences finished with it."""
        self._limit_s = min(MAX_STEPS * step_s, self._max_delay_s)
        if num_finished:
            self._num_expected += num_finished
            self._finished_s = time.monotonic()

    def on_arrival(self, num_sequences: int) -> None:
        """So many sequences were admitted."""
        self._num_expected = max(0, self._num_expected - num_sequences)

    def on_prefill(self) -> None:
        """The prompts that waited are prefilled."""
        self._since_s = None

    def rest_s(self) -> float:
        """Seconds that the prompts which wait have yet to wait for others; asked when there are some."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        rest_s = min(self._since_s, self._finished_s) + self._limit_s - now_s
        if rest_s <= 0:
            self._num_expected = 0
        return rest_s if self._num_expected else 0.0
