# SPDX-License-Identifier: Apache-2.0
"""Decides which groups leave the queue and which waiting sequences run: by slots, blocks and trials. No torch."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.prefix_cache import PrefixCache
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.step_draft import StepDraft
from hf_triton.engine.waiting_queue import WaitingQueue


class SequenceAdmission:
    """Counts what running sequences take and have yet to take, and changes neither them nor those that wait.

    Args:
        running: The scheduler's list of running sequences.
        memory: The block pool and its budget.
        prefixes: Finds the blocks that a context begins with.
        queue: Groups that wait for admission.
        traits: Properties of the model.
        max_sequences: The most sequences that run at a time.
        start: Creates the sequences of an admitted group, or finishes it with an error.
        config: The engine's constants.
    """

    def __init__(
        self,
        running: list[Sequence],
        memory: BlockMemory,
        prefixes: PrefixCache,
        queue: WaitingQueue[SequenceGroup],
        traits: ModelTraits,
        *,
        max_sequences: int,
        start: Callable[[SequenceGroup], None],
        config: EngineConfig,
    ) -> None:
        self.slot_limit = max_sequences
        """Sequences that may run now; fewer than `max_sequences` after the memory ran out."""
        self.starting: deque[SequenceGroup] = deque()
        """Groups that have left the queue and have no sequences yet."""
        self._running = running
        self._memory = memory
        self._prefixes = prefixes
        self._queue = queue
        self._traits = traits
        self._max_sequences = max_sequences
        self._start = start
        self._config = config
        self._free_slots = list(range(max_sequences)) if traits.has_states else []

    # --- groups ------------------------------------------------------------------------------------------------------

    def start_groups(self, num_sequences: int) -> Iterator[SequenceGroup]:
        """Take queued groups in order while there are slots beside so many sequences; those that have started."""
        num_free, takes_any = self._max_sequences - num_sequences, not (num_sequences or self.starting)
        self.starting.extend(self._queue.take(num_free, takes_any=takes_any))
        while self.starting:
            group = self.starting[0]
            self._start(group)
            self.starting.popleft()
            if not group.is_finished:
                yield group

    def num_free(self, num_sequences: int) -> int:
        """Slots beside so many sequences and the groups that start."""
        return max(0, self._max_sequences - num_sequences - len(self.starting))

    # --- sequences ---------------------------------------------------------------------------------------------------

    def fitting(self, waiting: Iterable[Sequence], draft: StepDraft) -> Iterator[tuple[Sequence, list[int] | None]]:
        """The waiting sequences, in order, that fit beside those before them and are of the same trial.

        The caller lets each run, with the cached blocks that its context begins with. They are None for one that does
        not fit though nothing runs.
        """
        num_slots, trial = self.num_slots(), self.trial()
        num_promised = sum(self._num_needed(sequence) for sequence in self._running)
        for sequence in waiting:
            num_new = 1 + len(sequence.siblings)
            if draft.num_left <= 0:
                return
            if self._running and (sequence.trial != trial or num_slots + num_new > self.slot_limit):
                return
            if sequence.num_inflight:
                continue  # its last token is not known yet
            cached = self._prefixes.find(sequence)
            if cached is None:
                continue  # another one is computing its prefix
            num_needed = self._num_needed(sequence) - sum(self._memory.pool.is_held(block) for block in cached)
            if not self._memory.has_room(num_promised + num_needed, num_slots + num_new):
                if not self._running:
                    yield sequence, None
                return
            yield sequence, cached
            num_slots, trial = num_slots + num_new, sequence.trial
            num_promised += self._num_needed(sequence)

    def is_short(self, sequence: Sequence) -> bool:
        """Whether what is not cached of a waiting context takes one chunk at most."""
        num_tokens = sequence.num_tokens
        if num_tokens > self._traits.chunk_sizes.max_tokens:
            num_tokens -= len(self._prefixes.find(sequence) or []) * self._memory.block_size
        return num_tokens <= self._traits.chunk_sizes.max_tokens

    def wait_or_refuse(self, sequence: Sequence) -> float:
        """Seconds that a context waits for memory of others on the device; 0: it has waited enough and is refused."""
        group, now_s = sequence.group, time.monotonic()
        group.no_room_since_s = now_s if group.no_room_since_s is None else group.no_room_since_s
        if now_s - group.no_room_since_s < self._config.max_memory_wait_s:
            return self._config.memory_poll_s
        group.finish(self._memory.no_memory_error(sequence.num_tokens))
        return 0.0

    def num_slots(self) -> int:
        """Running sequences, with those that wait for one of them to compute their prompt."""
        return sum([1 + len(sequence.siblings) for sequence in self._running])

    def trial(self) -> int:
        """The trial of the running sequences; 0: all have passed where they failed."""
        return max([sequence.trial for sequence in self._running], default=0)

    def _num_needed(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes yet for its context and next token; to its end, if it cannot be recomputed."""
        if self._traits.recomputes:
            return self._memory.num_blocks(sequence.num_tokens + 1) - len(sequence.blocks)
        return (1 + len(sequence.siblings)) * self._memory.num_blocks(sequence.max_tokens) - len(sequence.blocks)

    # --- slots -------------------------------------------------------------------------------------------------------

    def has_slot(self) -> bool:
        """Whether one more sequence may run."""
        return len(self._running) < max(self.slot_limit, 1)

    def take_slot(self, sequence: Sequence) -> None:
        """Give a sequence a slot for its states, if the model has any."""
        if self._traits.has_states:
            sequence.slot = heapq.heappop(self._free_slots)

    def free_slot(self, sequence: Sequence) -> None:
        """Take a sequence's slot back."""
        if sequence.slot >= 0:
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.slot = -1

    def raise_limit(self) -> None:
        """Allow one more sequence: another one has finished."""
        self.slot_limit = min(self.slot_limit + 1, self._max_sequences)

    def reset_limit(self) -> None:
        """Allow as many sequences as at first."""
        self.slot_limit = self._max_sequences
