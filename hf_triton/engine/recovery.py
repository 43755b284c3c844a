# SPDX-License-Identifier: Apache-2.0
"""Recovers from a failed step: fewer sequences run at a time, and only the one at fault is refused."""

from __future__ import annotations

import itertools
import logging

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import Sequence
from hf_triton.errors import where
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind
from hf_triton.runner.step import Step

logger = logging.getLogger(__name__)


class Recovery:
    """Decides what a failure means for the sequences.

    A failed step may have written some of its tokens and advanced some states, so its sequences are recomputed: half of
    them in one trial, until all have passed where they failed, then the other half. A trial that fails is halved again,
    until the sequences of one group fail alone.
    """

    def __init__(self, scheduler: Scheduler, memory: BlockMemory) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._trials = itertools.count(1)

    def recover(self, step: Step, error: Exception) -> None:
        """Preempt the sequences of a failed step; refuse one if it must be the cause.

        A step that failed before it was scheduled has no ranges.

        Raises:
            Exception: `error`, if the device is lost or no sequence can be the cause.
        """
        if is_fatal(error):
            raise error
        scheduler = self._scheduler
        suspects = scheduler.lose_inflight(step)
        if not suspects and step.ranges:  # all have ended meanwhile
            logger.error("an output could not be taken (%s): %s", kind(error), where(error))
            return
        suspects = suspects or list(scheduler.waiting)[:1]
        if not suspects:
            raise error
        if self._is_cause(suspects, step, error):
            suspects[0].group.finish(error_outcome(error))
        else:
            logger.warning("%d sequences failed together (%s); trying them again", len(suspects), kind(error))
        self._memory.pool.clear()
        running = [sequence for sequence in suspects if sequence in scheduler.running]
        if is_memory(error):
            self._make_room(running)
        else:
            self._halve(running)
            scheduler.preempt(running)

    def _is_cause(self, suspects: list[Sequence], step: Step, error: Exception) -> bool:
        """Whether nothing but the group of these sequences can have been the cause, or could give memory up."""
        running = self._scheduler.running
        if len({id(sequence.group) for sequence in (*suspects, *running)}) > 1:
            return False
        if is_memory(error):
            return len(suspects) == 1 and len(running) <= 1 and not self._memory.pool.num_kept
        if any(part.num_drafted for part in step.ranges):  # a trial has no proposals
            return False
        # Scheduling may have failed on a waiting one; but during a trial it looks at those of the trial alone.
        return bool(step.ranges or suspects[0].trial or not running)

    def _halve(self, suspects: list[Sequence]) -> None:
        """Begin two trials."""
        middle = (len(suspects) + 1) // 2
        for half in (suspects[:middle], suspects[middle:]):
            trial = next(self._trials)
            for sequence in half:
                sequence.trial = trial

    def _make_room(self, sequences: list[Sequence]) -> None:
        """Preempt all sequences of the step, and let half as many run."""
        scheduler = self._scheduler
        self._memory.rest()
        self._memory.drop_states()
        scheduler.admission.slot_limit = max(1, len(scheduler.running) // 2)
        longest = max((sequence.num_tokens for sequence in sequences), default=0)
        scheduler.preempt(sequences, self._memory.no_memory_error(longest))
