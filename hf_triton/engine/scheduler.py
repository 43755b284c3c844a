# SPDX-License-Identifier: Apache-2.0
"""Decides what the next step computes: which tokens of which sequences, in which blocks. Imports no torch."""

from __future__ import annotations

import heapq
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.prefix_cache import PrefixCache
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.types import EngineLoad, Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import GenerationError, HfTritonError
from hf_triton.runner.step import AdmittedSequence, Step, TokenRange
from hf_triton.sampling.types import TokenLogprobs

if TYPE_CHECKING:
    from hf_triton.sampling.sampler import SampledToken

MIN_CHUNK: Final = 3
"""Tokens of a chunk, if as many are missing: with states, neither it nor what it leaves may be one token."""


@dataclass(frozen=True)
class StepOutput:
    """What a step has computed."""

    step: Step = field(default_factory=Step)
    """Which."""
    tokens: dict[int, SampledToken] = field(default_factory=dict)
    """The next token of each sequence that samples, by its id."""
    prompt_scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Of scored prompt tokens, by the sequence's id."""
    finite_blocks: frozenset[int] = frozenset()
    """Those of the step's full blocks that have neither NaN nor infinity."""


class Scheduler:
    """Schedules steps and takes their outputs.

    Args:
        memory: The block pool and its budget.
        queue: Groups that wait for admission.
        traits: Of the model.
        max_sequences: The most sequences that run at a time.
        start: Creates the sequences of an admitted group, or finishes it with an error.
        observer: Observes the engine.
        config: The engine's constants.
    """

    def __init__(
        self,
        memory: BlockMemory,
        queue: WaitingQueue[SequenceGroup],
        traits: ModelTraits,
        *,
        max_sequences: int,
        start: Callable[[SequenceGroup], None],
        observer: Observer,
        config: EngineConfig,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        """Sequences without blocks: of groups that have left the queue, or preempted."""
        self.running: list[Sequence] = []
        """Sequences that have blocks, in the order in which they got them."""
        self.slot_limit = max_sequences
        """Less than `max_sequences` after the memory ran out."""
        self._memory = memory
        self._pool = memory.pool
        self._queue = queue
        self._traits = traits
        self._max_sequences = max_sequences
        self._start = start
        self._observer = observer
        self._config = config
        self._starting: deque[SequenceGroup] = deque()  # left the queue, no sequences yet
        self._sequences: dict[int, Sequence] = {}  # without an end, by id
        self._prefixes = PrefixCache(
            memory.pool,
            memory.block_size,
            is_enabled=traits.caches_prefixes,
            recompute_length=traits.recompute_length,
        )
        self._free_slots = list(range(max_sequences)) if traits.has_states else []
        self._cuts_context = False  # whether the last step cut a context
        self._ranges: dict[int, TokenRange] = {}  # of the step that is being scheduled, by sequence
        self._budget = 0  # tokens of chunks that it may compute
        self._num_left = 0  # of these, how many it may yet
        self._wait_s = 0.0
        self._unread: list[Step] = []  # whose output has not been taken
        self._awaiting: set[int] = set()  # sequences that sit out the next step
        self._begin_notes()

    def _begin_notes(self) -> None:
        self._admitted: list[AdmittedSequence] = []  # since the last step, as what follows
        self._finished: list[int] = []
        self._block_copies: list[tuple[int, int]] = []
        self._slot_copies: list[tuple[int, int]] = []

    # --- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step.

        There is no prefill phase and no decode phase. A sequence has `num_computed` tokens in its blocks, and every
        step lets the sequences catch up with their contexts; one that is behind by a single token decodes.

        1. Each decoding sequence gets its token. If no block is free, the youngest sequence is preempted: it gives its
           blocks back, waits, and is computed again, in part from the prefix cache.
        2. The step's budget of tokens goes to chunks of contexts, first of running sequences, then of waiting ones,
           which are admitted if their whole context fits. Short ones that wait behind a step that cut a context
           pass in a step of their own.
        3. A context whose last token is in the step samples the token that follows. Sequences of one prompt wait for
           the first of them, and share its blocks then.
        4. A step may be scheduled before the tokens of the last one are read. A sequence sits it out if the host must
           see its token first.
        """
        self._ranges, self._wait_s = {}, 0.0
        self._drop_ended()
        self._start_groups()
        self._memory.refresh(self._num_slots() if self._traits.has_states else 0)
        if self.waiting:
            self._make_way_for_trials()
        for sequence in list(self.running):
            if sequence.is_decoding and sequence.id not in self._awaiting and self._reserve(sequence, 1):
                self._compute(sequence, 1)
        num_decodes = len(self._ranges)
        if self.waiting or num_decodes < len(self.running):
            self._schedule_contexts(num_decodes)
        else:
            self._cuts_context = False
        return self._step()

    def _schedule_contexts(self, num_decodes: int) -> None:
        """Add chunks of contexts to a step in which so many sequences decode."""
        self._budget = self._num_left = self._traits.chunk_sizes.budget(num_decodes)
        short = [sequence for sequence in self.waiting if self._is_short(sequence)] if self._cuts_context else []
        self._cuts_context = False
        if not (short and self._compute_chunks(self._admit(short), is_decoding=num_decodes > 0)):
            self._compute_chunks(self._contexts(), is_decoding=num_decodes > 0)
            self._cuts_context = any(not part.samples for part in self._ranges.values())

    def _contexts(self) -> Iterator[Sequence]:
        """Running sequences whose context is not computed yet, and waiting ones as they are admitted."""
        for sequence in list(self.running):
            sits_out = sequence.id in self._ranges or sequence.id in self._awaiting or sequence not in self.running
            if not sits_out and sequence.num_missing:
                yield sequence
        yield from self._admit(list(self.waiting))

    def _compute_chunks(self, contexts: Iterable[Sequence], *, is_decoding: bool) -> bool:
        """Add the next chunks of contexts to the step; whether there are any."""
        num_ranges = len(self._ranges)
        for sequence in contexts:
            num_tokens = self._chunk_size(sequence, is_decoding=is_decoding)
            if num_tokens and self._reserve(sequence, num_tokens):
                self._compute(sequence, num_tokens)
        return len(self._ranges) > num_ranges

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether what is not cached of a waiting context takes one chunk at most."""
        num_tokens = sequence.num_tokens
        if num_tokens > self._traits.chunk_sizes.max_tokens:
            num_tokens -= len(self._prefixes.find(sequence) or []) * self._memory.block_size
        return num_tokens <= self._traits.chunk_sizes.max_tokens

    def _chunk_size(self, sequence: Sequence, *, is_decoding: bool) -> int:
        """Tokens of a context's next chunk; 0: its turn comes later."""
        traits, missing = self._traits, sequence.num_missing
        if traits.prefills_whole:
            return missing if missing <= self._num_left or self._num_left == self._budget else 0
        share = traits.chunk_sizes.share(is_decoding=is_decoding, num_cached=sequence.num_computed)
        size = min(missing, self._num_left, max(MIN_CHUNK, int(self._num_left * share)))
        if traits.has_states and size < missing:  # a chunk of one token would be taken for a decoding step
            size -= missing - size == 1
            size = size if size > 1 else 0
        return size

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its next tokens, at the cost of the youngest; whether it has them."""
        needed = self._memory.num_blocks(sequence.num_computed + num_tokens) - len(sequence.blocks)
        while needed and needed > self._pool.num_free:
            youngest = max(self.running, key=lambda other: other.age)
            self.preempt([youngest], self._memory.no_memory_error(youngest.num_tokens + 1))
            if youngest is sequence:
                return False
        for _ in range(needed):
            sequence.blocks.append(self._pool.allocate())
        return True

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a sequence's next tokens to the step."""
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        is_last = num_tokens == sequence.num_missing
        num_top, num_scored = None, 0
        if sequence.wants_scores:
            num_scored = max(0, min(end, len(sequence.group.prompt_ids) - 1) - start)
            num_top = sequence.group.params.prompt_logprobs if num_scored else None
        sampling = [sequence, *sequence.siblings] if is_last else []
        self._ranges[sequence.id] = TokenRange(
            sequence.id,
            start,
            end,
            sequence.tokens(start, end),
            sequence.blocks[:],
            sequence.num_tokens,
            tuple([each.id for each in sampling]),
            num_top,
            num_scored,
            sequence.slot,
        )
        sequence.num_computed = end
        for each in sampling:
            each.num_inflight += 1
        self._num_left = max(0, self._num_left - num_tokens)

    def _step(self) -> Step:
        """The step of the ranges, with what has happened since the last one."""
        self._awaiting = set()
        if not self._ranges:
            return Step(wait_s=self._wait_s)
        ranges = list(self._ranges.values())
        if len(ranges) > 1:
            ranges.sort(key=lambda part: (not part.is_decode, part.slot))
        stays = self._traits.runs_ahead and self._can_run_ahead(ranges)
        step = Step(
            tuple(ranges),
            tuple(self._admitted),
            tuple(self._finished),
            tuple(self._block_copies),
            tuple(self._prefixes.full_blocks(ranges)),
            tuple(self._slot_copies),
            stays,
        )
        self._ranges = {}
        self._unread.append(step)
        if self._block_copies:
            self._end_copies(self._block_copies)
        self._begin_notes()
        return step

    def _can_run_ahead(self, ranges: list[TokenRange]) -> bool:
        """Whether the next step is scheduled before the tokens of these ranges are read; decides who sits it out.

        That hides the host's work, but a sequence that sits out loses a step: half of those that sample may.
        """
        sequences = [self._sequences[part.sequence_id] for part in ranges]
        if any(each.wants_scores or (each.siblings and each.num_inflight) for each in sequences):
            return False
        going_on = [sequence for sequence in sequences if sequence.num_missing]
        sampling = [sequence for sequence in going_on if sequence.num_inflight]
        awaiting = {sequence.id for sequence in sampling if self._must_be_read(sequence)}
        if not going_on or 2 * len(awaiting) > len(sampling):
            return False
        self._awaiting = awaiting
        return True

    def _must_be_read(self, sequence: Sequence) -> bool:
        """Whether the host must see a sequence's tokens in flight before the next one is computed."""
        num_tokens = sequence.num_tokens + sequence.num_inflight
        return sequence.sampler.needs_host or num_tokens == self._traits.recompute_length

    # --- admit -------------------------------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Drop sequences that were cancelled, have passed their deadline, or whose group has ended otherwise."""
        sequences = list(self._sequences.values())
        for group in dict.fromkeys([sequence.group for sequence in sequences]):
            group.drop_if_ended()
        for sequence in sequences:
            if sequence.is_done:
                self._end(sequence)

    def _start_groups(self) -> None:
        """Take queued groups while there are slots, in the queue's order."""
        num_free = self._max_sequences - len(self._sequences)
        takes_any = not (self._sequences or self._starting)
        self._starting.extend(self._queue.take(num_free, takes_any=takes_any))
        while self._starting:
            group = self._starting[0]
            self._start(group)
            self._starting.popleft()
            if group.is_finished:
                continue
            first, *siblings = group.sequences
            first.siblings = siblings
            self._sequences.update((sequence.id, sequence) for sequence in group.sequences)
            self.waiting.append(first)

    def _admit(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Admit waiting sequences in order while they fit and are of the same trial."""
        num_slots, trial = self._num_slots(), self._trial()
        num_promised = sum(self._num_needed(sequence) for sequence in self.running)
        for sequence in waiting:
            num_new = 1 + len(sequence.siblings)
            if self._num_left <= 0:
                return
            if self.running and (sequence.trial != trial or num_slots + num_new > self.slot_limit):
                return
            if sequence.num_inflight:
                continue  # its last token is not known yet
            cached = self._prefixes.find(sequence)
            if cached is None:
                continue  # another one is computing its prefix
            num_needed = self._num_needed(sequence) - sum(self._pool.is_held(block) for block in cached)
            if not self._memory.has_room(num_promised + num_needed, num_slots + num_new):
                if not self.running:
                    self._wait_for_memory(sequence)
                return
            self._take_blocks(sequence, cached)
            yield sequence
            num_slots, trial = num_slots + num_new, sequence.trial
            num_promised += self._num_needed(sequence)

    def _trial(self) -> int:
        """The trial of the running sequences; 0: all have passed where they failed."""
        return max([sequence.trial for sequence in self.running], default=0)

    def _make_way_for_trials(self) -> None:
        """Once a trial is over, the sequences of the next one take the place of those that have passed."""
        is_over = self.running and not self._trial()
        if is_over and self._traits.recomputes and any(sequence.trial for sequence in self.waiting):
            self.preempt(list(self.running))
            self.waiting = deque(sorted(self.waiting, key=lambda sequence: not sequence.trial))

    def _num_slots(self) -> int:
        """Running sequences, with those that wait for one of them to compute their prompt."""
        return sum([1 + len(sequence.siblings) for sequence in self.running])

    def _num_needed(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes yet for its context and next token; to its end, if it cannot be recomputed."""
        if self._traits.recomputes:
            return self._memory.num_blocks(sequence.num_tokens + 1) - len(sequence.blocks)
        return (1 + len(sequence.siblings)) * self._memory.num_blocks(sequence.max_tokens) - len(sequence.blocks)

    def _take_blocks(self, sequence: Sequence, cached: list[int]) -> None:
        """Let a waiting sequence run, with a cached prefix."""
        self.waiting.remove(sequence)
        for block in cached:
            self._pool.share(block)
        sequence.blocks = array("q", cached)
        sequence.num_computed = len(cached) * self._memory.block_size
        sequence.group.no_room_since_s = None
        if sequence.group.num_cached is None:
            sequence.group.num_cached = sequence.num_computed
        self._prefixes.begin(sequence)
        self._note_running(sequence)
        self._observer.on_prefix_hit(sequence.num_computed)

    def _note_running(self, sequence: Sequence) -> None:
        if self._traits.has_states:
            sequence.slot = heapq.heappop(self._free_slots)
        self.running.append(sequence)
        self._admitted.append(AdmittedSequence(sequence.id, sequence.adapter_key))

    def _wait_for_memory(self, sequence: Sequence) -> None:
        """Nothing runs and the next context does not fit: split its group, wait for memory of others, or refuse it."""
        if sequence.siblings:
            at = self.waiting.index(sequence) + 1
            for sibling in reversed(sequence.siblings):
                self.waiting.insert(at, sibling)
            sequence.siblings = []
            return
        group, now_s = sequence.group, time.monotonic()
        group.no_room_since_s = now_s if group.no_room_since_s is None else group.no_room_since_s
        if now_s - group.no_room_since_s < self._config.max_memory_wait_s:
            self._wait_s = self._config.memory_poll_s
        else:
            group.finish(self._memory.no_memory_error(sequence.num_tokens))

    # --- update ------------------------------------------------------------------------------------------------------

    def update(self, output: StepOutput) -> None:
        """Take the output of a step: publish blocks, append tokens; finished sequences leave."""
        for part in output.step.ranges:
            sequence = self._sequences.get(part.sequence_id)
            if sequence and sequence.blocks[: len(part.block_table)] == part.block_table:  # not preempted since
                if output.step.full_blocks:
                    self._prefixes.publish(sequence, part, output.finite_blocks)
                if sequence.wants_scores:
                    self._add_scores(sequence, part, output)
                if len(part.samples) > 1:
                    self._share_blocks(sequence, part.end)
        num_known = 0
        for number, token in output.tokens.items():
            sequence = self._sequences.get(number)
            if sequence and sequence.num_inflight:
                num_known += 1
                self._append(sequence, token)
        if num_known:
            self._observer.on_step(num_known)
        while self._unread and self._unread.pop(0) is not output.step:
            pass  # an earlier output was lost, as no sequence was left that it is for

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        """Give a sequence the token that was in flight."""
        sequence.num_inflight -= 1
        is_done = sequence.append(token)
        if sequence.trial and sequence.num_tokens > sequence.failed_length:
            sequence.trial = 0
        if is_done:
            self._end(sequence)
            self.slot_limit = min(self.slot_limit + 1, self._max_sequences)
        elif sequence.num_tokens == self._traits.recompute_length:
            self.preempt([sequence])
            sequence.digests = []

    def _add_scores(self, sequence: Sequence, part: TokenRange, output: StepOutput) -> None:
        """Note the log probabilities of prompt tokens; the group has them when all are known."""
        sequence.prompt_scores += output.prompt_scores.get(sequence.id, [])
        if part.end >= len(sequence.group.prompt_ids):
            sequence.group.prompt_logprobs = sequence.prompt_scores

    def _share_blocks(self, first: Sequence, num_tokens: int) -> None:
        """Let the sequences that waited for a prompt run on its blocks; the last, partial one is copied for each.

        One without room waits, and samples its first token again.
        """
        siblings, first.siblings = first.siblings, []
        num_full, has_part = divmod(num_tokens, self._memory.block_size)
        for sibling in reversed(siblings):
            sibling.trial = first.trial
            if len(self.running) >= max(self.slot_limit, 1) or self._pool.num_free < bool(has_part):
                sibling.num_inflight = 0
                self.waiting.appendleft(sibling)
                continue
            for block in first.blocks[:num_full]:
                self._pool.share(block)
            sibling.blocks = first.blocks[:num_full]
            if has_part:
                sibling.blocks.append(self._pool.allocate())
                self._pool.share(first.blocks[num_full])  # until it is copied
                self._block_copies.append((first.blocks[num_full], sibling.blocks[num_full]))
            sibling.num_computed, sibling.digests = num_tokens, list(first.digests)
            self._note_running(sibling)
            if self._traits.has_states:
                self._slot_copies.append((first.slot, sibling.slot))

    def _end_copies(self, pairs: list[tuple[int, int]]) -> None:
        """Release the blocks that a step copies, or that need not be copied any more."""
        self._pool.release([source for source, _ in pairs])
        self._block_copies = [pair for pair in self._block_copies if pair not in pairs]

    def _end(self, sequence: Sequence) -> None:
        """Forget a sequence that is done."""
        self._sequences.pop(sequence.id, None)
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and slot."""
        if sequence in self.running:
            self.running.remove(sequence)
        self._ranges.pop(sequence.id, None)
        self._pool.release(sequence.blocks)
        self._prefixes.end(sequence)
        self._end_copies([pair for pair in self._block_copies if pair[1] in sequence.blocks])
        if sequence.slot >= 0:
            self._slot_copies = [pair for pair in self._slot_copies if pair[1] != sequence.slot]
            heapq.heappush(self._free_slots, sequence.slot)
        sequence.blocks, sequence.num_computed, sequence.slot, sequence.prompt_scores = array("q"), 0, -1, []
        self._admitted = [each for each in self._admitted if each.sequence_id != sequence.id]
        self._finished.append(sequence.id)

    # --- preempt -----------------------------------------------------------------------------------------------------

    def preempt(self, sequences: list[Sequence], error: HfTritonError | None = None) -> None:
        """Take running sequences out of memory; those that are not done wait, to be recomputed with their tokens.

        If the model cannot recompute a sequence, those that have tokens already are refused instead.

        Args:
            sequences: Running.
            error: What to refuse with; None: a failure of the model.
        """
        if not self._traits.recomputes:
            refusal = error or GenerationError(
                "generation_failed",
                "a failure interrupted this sequence, and this model cannot continue an interrupted one: send it again",
            )
            for sequence in sequences:
                if sequence.token_ids and not sequence.is_done:
                    sequence.group.finish(refusal)
        unfinished = [sequence for sequence in sequences if not sequence.is_done]
        self._observer.on_preempt(len(unfinished))
        for sequence in reversed(sequences):
            scheduled = self._ranges.get(sequence.id)
            for number in scheduled.samples if scheduled else ():  # what this step was to sample is not in flight
                self._sequences[number].num_inflight -= 1
            self._leave(sequence)
            if sequence.is_done:
                self._sequences.pop(sequence.id, None)
            else:
                self.waiting.appendleft(sequence)

    def lose_inflight(self, step: Step) -> list[Sequence]:
        """Forget a failed step and the one in flight before it: their tokens are sampled again.

        Returns:
            The running sequences that were in them; all, if the step was not scheduled.
        """
        numbers = {number for lost in (*self._unread, step) for number in lost.sequence_ids}
        lost = [sequence for sequence in self.running if sequence.id in numbers]
        self._ranges, self._unread, self._awaiting = {}, [], set()
        placed = [*self.running, *self.waiting]
        placed += [sibling for first in placed for sibling in first.siblings]
        for sequence in self._sequences.values():
            sequence.failed_length = sequence.num_tokens + max(0, sequence.num_inflight - 1)
            sequence.num_inflight = 0
            if sequence not in placed:  # it was on its way
                self._leave(sequence)
                self.waiting.append(sequence)
        return lost if step.ranges else list(self.running)

    # --- what others ask ---------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there are sequences without an end."""
        return bool(self._sequences or self._starting)

    def unfinished(self) -> list[SequenceGroup]:
        """Groups that have left the queue and have no outcome."""
        groups = dict.fromkeys([sequence.group for sequence in list(self._sequences.values())])
        return [*(group for group in groups if not group.is_finished), *self._starting]

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread."""
        num_running = sum(1 + len(sequence.siblings) for sequence in list(self.running))
        num_ready = len(self._starting) + len(self.waiting)
        return EngineLoad(
            len(self._queue) + num_ready,
            num_running,
            self._memory.num_used_tokens,
            self._memory.max_used_tokens,
            max(0, self._max_sequences - len(self._sequences) - len(self._starting)),
        )

    def reset_limits(self) -> None:
        """Allow as many sequences as at first."""
        self.slot_limit = self._max_sequences
