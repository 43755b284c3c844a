# SPDX-License-Identifier: Apache-2.0
"""The groups that wait for an encoder: first come, first served, in turns of bounded size. Knows no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hf_triton.encoder.types import EncoderGroup, EncoderInput
from hf_triton.errors import CancelledError, DeadlineExceededError, HfTritonError, panics_as_errors, where

logger = logging.getLogger(__name__)

TURN_TOKENS: Final = 512
"""A group with more waits for the other groups after so many tokens, so that a short text passes by hundreds."""
SWEEP_INTERVAL_S: Final = 0.1
"""How often the whole queue is looked through for cancelled and expired groups."""


class PendingGroup:
    """A group and its outputs so far. It is answered exactly once; in the engine's thread, or before it is queued."""

    def __init__(self, group: EncoderGroup) -> None:
        self.inputs = group.inputs
        self.num_taken = 0
        self.is_answered = False
        self._has_begun = False
        self._group = group
        self._outputs: dict[int, npt.NDArray[np.float32]] = {}

    @property
    def num_left(self) -> int:
        """Inputs that were not taken."""
        return len(self.inputs) - self.num_taken

    def begin(self) -> None:
        """Note that a forward with some of its inputs begins."""
        if not self._has_begun:
            self._has_begun = True
            self._group.on_begin()

    def give(self, index: int, output: npt.NDArray[np.float32]) -> None:
        """Take an input's output; the last one answers the group."""
        if not self.is_answered:
            self._outputs[index] = output
        if len(self._outputs) == len(self.inputs):
            self._answer([self._outputs[each] for each in range(len(self.inputs))])

    def fail(self, error: HfTritonError) -> None:
        """Answer with an error."""
        self._answer(error)

    def answer_empty(self) -> None:
        """Answer a group without inputs."""
        self._answer([])

    def drop_if_ended(self) -> bool:
        """Whether the group is answered; one that was cancelled or has passed its deadline is answered now."""
        if not self.is_answered:
            if self._group.is_cancelled():
                self.fail(CancelledError())
            elif self._group.deadline_s is not None and time.monotonic() >= self._group.deadline_s:
                self.fail(DeadlineExceededError())
        return self.is_answered

    def _answer(self, answer: list[npt.NDArray[np.float32]] | HfTritonError) -> None:
        if self.is_answered:
            return
        self.is_answered = True
        self._outputs = {}
        try:
            with panics_as_errors():
                self._group.on_done(answer)
        except Exception as error:  # one request's answer must not end the loop that serves the others
            logger.error("a request could not be answered (%s): %s", type(error).__name__, where(error))


@dataclass(frozen=True)
class Job:
    """One input of a group."""

    pending: PendingGroup
    index: int

    @property
    def input(self) -> EncoderInput:
        """What the model computes."""
        return self.pending.inputs[self.index]


class WaitingGroups:
    """A thread-safe queue of groups whose inputs are taken in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Its lock, notified when a group is added."""
        self.num_inputs = 0
        """Inputs that wait."""
        self._groups: deque[PendingGroup] = deque()
        self._next_sweep_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, pending: PendingGroup) -> None:
        """Queue a group, behind all others."""
        with self.changed:
            self._groups.append(pending)
            self.num_inputs += len(pending.inputs)
            self.changed.notify()

    def take(self, max_tokens: int) -> list[Job]:
        """Remove inputs of up to `max_tokens` together, from the first group on; a longer one alone."""
        jobs: list[Job] = []
        with self.changed:
            while self._groups:
                pending = self._groups[0]
                taken = [] if pending.is_answered else _turn(pending, max_tokens, takes_any=not jobs)
                if not taken and not pending.is_answered:
                    break
                jobs += taken
                max_tokens -= sum(len(job.input.ids) for job in taken)
                self._groups.popleft()
                self.num_inputs -= pending.num_left if pending.is_answered else len(taken)
                if pending.num_left and not pending.is_answered:
                    self._groups.append(pending)
        return jobs

    def sweep(self) -> None:
        """Answer and remove groups that were cancelled or have passed their deadline; at most once an interval."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + SWEEP_INTERVAL_S
        with self.changed:
            groups = list(self._groups)
        num_ended = sum(pending.drop_if_ended() for pending in groups)
        if not num_ended:
            return
        with self.changed:
            self._groups = deque(pending for pending in self._groups if not pending.is_answered)
            self.num_inputs = sum(pending.num_left for pending in self._groups)

    def clear(self) -> list[PendingGroup]:
        """Remove and return all groups."""
        with self.changed:
            groups, self._groups, self.num_inputs = list(self._groups), deque(), 0
        return groups


def _turn(pending: PendingGroup, max_tokens: int, *, takes_any: bool) -> list[Job]:
    """Take the next inputs of a group: a turn's worth, or one that is longer.

    Args:
        pending: The group.
        max_tokens: The most tokens that they may have together.
        takes_any: Whether to take the first input even if it has more.
    """
    jobs: list[Job] = []
    num_tokens = 0
    while pending.num_left:
        num_tokens += len(pending.inputs[pending.num_taken].ids)
        is_first = not jobs
        fits = num_tokens <= max_tokens and (is_first or num_tokens <= TURN_TOKENS)
        if not fits and not (is_first and takes_any):
            break
        jobs.append(Job(pending, pending.num_taken))
        pending.num_taken += 1
    return jobs
