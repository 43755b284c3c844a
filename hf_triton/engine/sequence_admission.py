# SPDX-License-Identifier: Apache-2.0
"""Decides which groups leave the queue and which waiting sequences run: by slots, blocks and trials. No torch."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.engine_config import EngineConfig, ModelTraits
from hf_triton.engine.prefix_cache import PrefixCache
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.step_draft import StepDraft
from hf_triton.engine.waiting_queue import WaitingQueue


@dataclass(eq=False)
class SequenceAdmission:
    """Counts what running sequences take and have yet to take, gives state slots, and refuses what waits too long."""

    running: list[Sequence]
    """The scheduler's own list."""
    memory: BlockMemory
    prefixes: PrefixCache
    queue: WaitingQueue[SequenceGroup]
    traits: ModelTraits
    max_sequences: int
    """The most sequences that run at a time."""
    start: Callable[[SequenceGroup], None]
    """Creates the sequences of a group that has left the queue, or finishes it with an error."""
    config: EngineConfig
    slot_limit: int = field(init=False)
    """Sequences that may run now; fewer than `max_sequences` after the memory ran out."""
    starting: deque[SequenceGroup] = field(default_factory=deque, init=False)
    """Groups that have left the queue and have no sequences yet."""

    def __post_init__(self) -> None:
        self.reset_limit()
        self._free_slots = list(range(self.max_sequences)) if self.traits.has_states else []

    # --- groups ------------------------------------------------------------------------------------------------------

    def start_groups(self, num_sequences: int) -> Iterator[SequenceGroup]:
        """Take queued groups in order while there are slots beside so many sequences; those that have started.

        Behind one that `generate` has run whole the others have their step first.
        """
        num_free, takes_any = self.max_sequences - num_sequences, not (num_sequences or self.starting)
        self.starting.extend(self.queue.take(num_free, takes_any=takes_any))
        while self.starting:
            group = self.starting[0]
            self.start(group)
            self.starting.popleft()
            if not group.is_finished:
                yield group
            elif group.images is not None:
                return

    def num_free(self, num_sequences: int) -> int:
        """Slots beside so many sequences and the groups that start."""
        return max(0, self.max_sequences - num_sequences - len(self.starting))

    # --- sequences ---------------------------------------------------------------------------------------------------

    def fitting(self, waiting: Iterable[Sequence], draft: StepDraft) -> Iterator[tuple[Sequence, list[int] | None]]:
        """The waiting sequences, in order, that fit beside those before them and are of the same trial.

        The caller lets each run, with the cached blocks that its context begins with. They are None for one that does
        not fit though nothing runs.
        """
        num_slots, trial = self.num_slots(), self.trial()
        num_promised = sum(self._num_needed(sequence) for sequence in self.running)
        for sequence in waiting:
            num_new = 1 + len(sequence.siblings)
            if draft.num_left <= 0:
                return
            if self.running and (sequence.trial != trial or num_slots + num_new > self.slot_limit):
                return
            if sequence.num_inflight:
                continue  # its last token is not known yet
            cached = self.prefixes.find(sequence)
            if cached is None:
                continue  # another one is computing its prefix
            num_needed = self._num_needed(sequence) - sum(self.memory.pool.is_held(block) for block in cached)
            if not self.memory.has_room(num_promised + num_needed, num_slots + num_new):
                if not self.running:
                    yield sequence, None
                return
            yield sequence, cached
            num_slots, trial = num_slots + num_new, sequence.trial
            num_promised += self._num_needed(sequence)

    def is_short(self, sequence: Sequence) -> bool:
        """Whether what is not cached of a waiting context takes one chunk at most."""
        num_tokens = sequence.num_tokens
        if num_tokens > self.traits.chunk_sizes.max_tokens:
            num_tokens -= len(self.prefixes.find(sequence) or []) * self.memory.block_size
        return num_tokens <= self.traits.chunk_sizes.max_tokens

    def wait_or_refuse(self, sequence: Sequence) -> float:
        """Seconds that a context waits for memory of others on the device; 0: it has waited enough and is refused."""
        group, now_s = sequence.group, time.monotonic()
        group.no_room_since_s = now_s if group.no_room_since_s is None else group.no_room_since_s
        if now_s - group.no_room_since_s < self.config.max_memory_wait_s:
            return self.config.memory_poll_s
        group.finish(self.memory.no_memory_error(sequence.num_tokens))
        return 0.0

    def num_slots(self) -> int:
        """Running sequences, with those that wait for one of them to compute their prompt."""
        return sum([1 + len(sequence.siblings) for sequence in self.running])

    def trial(self) -> int:
        """The trial of the running sequences; 0: all have passed where they failed."""
        return max([sequence.trial for sequence in self.running], default=0)

    def _num_needed(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes yet for its context and next token; to its end, if it cannot be recomputed."""
        if self.traits.recomputes:
            return self.memory.num_blocks(sequence.num_tokens + 1) - len(sequence.blocks)
        return (1 + len(sequence.siblings)) * self.memory.num_blocks(sequence.max_tokens) - len(sequence.blocks)

    # --- slots -------------------------------------------------------------------------------------------------------

    def has_slot(self) -> bool:
        return len(self.running) < max(self.slot_limit, 1)

    def take_slot(self, sequence: Sequence) -> None:
        """Give a sequence a slot for its states, if the model has any."""
        if self.traits.has_states:
            sequence.slot = heapq.heappop(self._free_slots)

    def free_slot(self, sequence: Sequence) -> None:
        """Take a sequence's slot back."""
        if sequence.slot >= 0:
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.slot = -1

    def raise_limit(self) -> None:
        """Allow one more sequence: another one has finished."""
        self.slot_limit = min(self.slot_limit + 1, self.max_sequences)

    def reset_limit(self) -> None:
        """Allow as many sequences as at first."""
        self.slot_limit = self.max_sequences
