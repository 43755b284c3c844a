# SPDX-License-Identifier: Apache-2.0
"""What an engine takes from its queue: work with a turn, a deadline, and exactly one outcome. Knows no model."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hf_triton.errors import CancelledError, DeadlineExceededError, HfTritonError, panics_as_errors, where

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Listener(Generic[Result]):
    """Follows the groups of one request, in the engine's thread: must be quick. This one ignores everything."""

    def is_cancelled(self) -> bool:
        """Whether to drop the request's groups. Called at every step."""
        return False

    def on_begin(self) -> None:
        """The first forward of an encoder, or of a model of speech, with one of the groups begins. Must not raise."""

    def on_finish(self, row: int, outcome: Result | HfTritonError) -> None:
        """Take the outcome of a group: called exactly once, here or in `submit`; an exception is logged and ignored."""


@dataclass(eq=False, kw_only=True)
class Group(Generic[Result]):
    """What of a request has one outcome, a result or an error: a prompt's sequences, an encoder's inputs, one audio."""

    listener: Listener[Result] = field(default_factory=Listener)
    row: int = 0
    """The listener knows the group by it."""
    deadline_s: float | None = None
    """A group that is still queued by then is refused; by `time.monotonic()`."""
    priority: int = 0
    """Lower values leave the queue first; requests of equal priority take turns."""

    turn: int = field(default=0, init=False)
    """The turn that it waits for in its `WaitingQueue`."""
    num_waiting: int = field(default=1, init=False)
    """Prompts or inputs of it that have not left the queue."""
    is_finished: bool = field(default=False, init=False)

    def take_turn(self, budget: int, *, takes_any: bool) -> int:
        """Take what leaves the queue in one turn, and subtract it from `num_waiting`; the rest takes the next turn.

        Args:
            budget: What it may cost at most, in the engine's own unit.
            takes_any: Whether what is first in the group may cost more.

        Returns:
            What it costs; 0: nothing was taken, as it would cost more.
        """
        raise NotImplementedError

    def finish(self, outcome: Result | HfTritonError) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        try:
            with panics_as_errors():
                self.listener.on_finish(self.row, outcome)
        except Exception as error:  # one listener's mistake must not end the loop that serves the others
            logger.error("delivering an outcome failed: %s", where(error))

    def queue_error(self) -> HfTritonError | None:
        """The error to refuse a queued group with: it has passed its deadline or was cancelled; None: neither."""
        return DeadlineExceededError() if self.is_late() else self.cancellation()

    def refuse_if_ended(self) -> bool:
        """Refuse a group that was cancelled or has passed its deadline; whether it is finished."""
        if not self.is_finished and (error := self.queue_error()) is not None:
            self.finish(error)
        return self.is_finished

    def is_late(self) -> bool:
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def cancellation(self) -> HfTritonError | None:
        """The error of a group that was cancelled, or whose request cannot be asked; None: it goes on."""
        try:
            with panics_as_errors():
                return CancelledError() if self.listener.is_cancelled() else None
        except Exception as error:  # one request's mistake must not end the loop
            logger.error("asking whether a request was cancelled failed: %s", where(error))
            return HfTritonError("internal", "the request could not be followed; the server's log says why")
