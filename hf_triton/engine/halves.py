# SPDX-License-Identifier: Apache-2.0
"""What shares a computation shares its failure; it is computed again in halves until the one at fault is alone."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hf_triton.errors import HfTritonError
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


@dataclass
class BatchSize:
    """How much is computed together: half as much once the memory has no room, a little more after every success."""

    most: int
    least: int = 1
    """What is tried however often the memory has no room, if it is no more than `most`."""
    step: int = 1
    """What a success adds."""

    def __post_init__(self) -> None:
        self.now = self.most

    def shrink(self, failed: int) -> None:
        """Take half of what had no room."""
        self.now = max(min(self.now, failed) // 2, min(self.least, self.most))

    def grow(self) -> None:
        self.now = min(self.most, self.now + self.step)


def run_in_halves(
    items: list[Item],
    compute: Callable[[list[Item]], None],
    *,
    wanted: Callable[[list[Item]], list[Item]],
    on_alone: Callable[[Item, HfTritonError], None],
    size: BatchSize,
    cost: Callable[[list[Item]], int] = len,
) -> None:
    """Compute items together; if that fails, in halves, so that only the one at fault is refused.

    Args:
        items: What the queue has given at once.
        compute: Computes some items and delivers what comes out.
        wanted: Those of some items that somebody waits for.
        on_alone: Takes the error of an item that fails alone.
        size: Shrinks if the memory has no room.
        cost: Of some items, in the unit of `size`.

    Raises:
        Exception: The device is lost.
    """
    parts = [items]
    while parts:
        part = wanted(parts.pop())
        if not part:
            continue
        try:
            compute(part)
        except Exception as error:
            if is_fatal(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the model's tensors
            if len(part) == 1:
                on_alone(part[0], error_outcome(error))
                continue
            logger.warning("%d sequences failed together (%s); trying halves", len(part), kind(error))
            if is_memory(error):
                size.shrink(cost(part))
            half = (len(part) + 1) // 2
            parts += [part[half:], part[:half]]
        else:
            size.grow()
