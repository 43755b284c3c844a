# SPDX-License-Identifier: Apache-2.0
"""After a failed step: sequences are tried again in smaller batches, and only the one at fault is refused."""

from __future__ import annotations

import logging

from hf_triton.engine.kv_memory import KVMemory
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import Sequence
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind

logger = logging.getLogger(__name__)


class Recovery:
    """Decides what a failure means for the sequences.

    Args:
        scheduler: Preempts them.
        memory: Holds their KV.
    """

    def __init__(self, scheduler: Scheduler, memory: KVMemory) -> None:
        self._scheduler = scheduler
        self._memory = memory

    def recover(self, sequences: list[Sequence], error: Exception) -> None:
        """Preempt the sequences of a failed step; refuse one if it must be the cause.

        Args:
            sequences: Those of the step; none if it failed before it was scheduled.
            error: What the step raised.

        Raises:
            Exception: `error`, if the device is lost or no sequence can be the cause.
        """
        if is_fatal(error):
            raise error
        stages = self._scheduler.stages
        in_memory = stages.in_memory()
        sequences = sequences or in_memory or next(iter(stages.ready), [])
        if not sequences:
            raise error
        if self._is_guilty(sequences, in_memory, error):
            sequences[0].group.finish(error_outcome(error))
        else:
            logger.warning("%d sequences failed together (%s); trying them again", len(sequences), kind(error))
        self._memory.prefixes.clear()
        victims = self._select_victims(sequences, error)
        longest = max(sequence.num_tokens for sequence in sequences)
        refusal = self._memory.no_memory_error(longest) if is_memory(error) else None
        self._scheduler.preempt(in_memory if self._memory.is_corrupt else victims, refusal)

    def _is_guilty(self, sequences: list[Sequence], in_memory: list[Sequence], error: Exception) -> bool:
        """Whether nothing else can have been the cause of a failure, or could give memory up."""
        if is_memory(error):
            return len(sequences) == 1 and len(in_memory) <= 1 and not self._memory.prefixes.num_tokens
        running = self._memory.running
        are_running = all(sequence in running for sequence in sequences)
        num_parts = len(sequences) if are_running else len({id(sequence.group) for sequence in sequences})
        return num_parts == 1 and all(sequence in sequences for sequence in running)

    def _select_victims(self, sequences: list[Sequence], error: Exception) -> list[Sequence]:
        """The sequences that leave the memory after a failure.

        Out of memory preempts the contexts that are being prefilled, or the younger half of the running sequences, and
        lowers the number that run at a time. Any other failure makes every sequence a suspect, which runs alone.
        """
        if not is_memory(error):
            for sequence in sequences:
                sequence.is_suspect = True
            return sequences
        running = self._memory.running
        prefilling = [sequence for sequence in self._scheduler.stages.prefilling() if sequence not in running]
        num_staying = len(running) if prefilling else (len(running) + 1) // 2
        self._scheduler.slot_limit = max(1, num_staying or len(prefilling) // 2)
        by_age = sorted(running, key=lambda sequence: sequence.age)
        done = [sequence for sequence in sequences if sequence.is_done]
        return [*done, *(sequence for sequence in prefilling or by_age[num_staying:] if sequence not in done)]
