# SPDX-License-Identifier: Apache-2.0
"""After a failed step: sequences are computed again, fewer at a time, and only the one at fault is refused."""

from __future__ import annotations

import logging

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import Sequence
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind
from hf_triton.runner.step import Step

logger = logging.getLogger(__name__)


class Recovery:
    """Decides what a failure means for the sequences.

    A failed step may have written some of its tokens and advanced some states, so its sequences are recomputed.

    Args:
        scheduler: Preempts them.
        memory: Whose prefix cache is cleared.
    """

    def __init__(self, scheduler: Scheduler, memory: BlockMemory) -> None:
        self._scheduler = scheduler
        self._memory = memory

    def recover(self, step: Step, error: Exception) -> None:
        """Preempt the sequences of a failed step; refuse one if it must be the cause.

        Args:
            step: Without ranges if it failed before it was scheduled.
            error: What the step raised.

        Raises:
            Exception: `error`, if the device is lost or no sequence can be the cause.
        """
        if is_fatal(error):
            raise error
        scheduler = self._scheduler
        suspects = scheduler.lose_inflight(step)
        if not suspects:
            raise error
        groups = {id(sequence.group) for sequence in suspects}
        is_alone = len(groups) == 1 and len(suspects) == len(scheduler.running)
        if is_alone and not (is_memory(error) and (len(suspects) > 1 or self._memory.pool.num_kept)):
            suspects[0].group.finish(error_outcome(error))
        else:
            logger.warning("%d sequences failed together (%s); trying them again", len(suspects), kind(error))
        self._memory.pool.clear()
        if is_memory(error):
            self._make_room(suspects)
        else:
            for sequence in suspects:
                sequence.is_suspect = True
            scheduler.preempt(suspects)

    def _make_room(self, sequences: list[Sequence]) -> None:
        """Preempt all sequences of the step, and let half as many run."""
        scheduler = self._scheduler
        self._memory.rest()
        scheduler.slot_limit = max(1, len(scheduler.running) // 2)
        longest = max(sequence.num_tokens for sequence in sequences)
        scheduler.preempt(sequences, self._memory.no_memory_error(longest))
