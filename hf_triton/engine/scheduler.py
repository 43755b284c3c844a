# SPDX-License-Identifier: Apache-2.0
"""Decides what the next step computes: which tokens of which sequences, in which blocks. Imports no torch."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.block_pool import next_digest
from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.types import EngineLoad, Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import GenerationError, HfTritonError
from hf_triton.runner.step import AdmittedSequence, Step, TokenRange
from hf_triton.sampling.types import TokenLogprobs

if TYPE_CHECKING:
    from hf_triton.sampling.sampler import SampledToken


@dataclass(frozen=True)
class StepOutput:
    """What a step has computed."""

    step: Step = field(default_factory=Step)
    """Which; of one that stayed in flight, the output comes with the next."""
    tokens: dict[int, SampledToken] = field(default_factory=dict)
    """The next token of each sequence that samples, by its id."""
    prompt_scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Of scored prompt tokens, by the sequence's id."""


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
        queue: WaitingQueue,
        traits: ModelTraits,
        *,
        max_sequences: int,
        start: Callable[[SequenceGroup], None],
        observer: Observer,
        config: EngineConfig,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        """Admitted or preempted sequences without blocks."""
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
        self._computing: dict[bytes, int] = {}  # digests of blocks that a running sequence is going to publish
        self._free_slots = list(range(max_sequences)) if traits.has_states else []
        self._cuts_context = False  # whether the last step cut a context
        self._begin_step()
        self._begin_notes()

    def _begin_step(self) -> None:
        self._ranges: dict[int, TokenRange] = {}  # of the step that is being scheduled, by sequence
        self._num_left = 0  # tokens of chunks that it may yet compute
        self._wait_s = 0.0

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
           which are admitted if their whole context fits. After a step that cut a context, short ones pass.
        3. A context whose last token is in the step samples the token that follows. Sequences of one prompt wait for
           the first of them, and share its blocks then.
        """
        self._begin_step()
        self._drop_ended()
        self._admit_groups()
        self._memory.refresh(self._num_slots())
        for sequence in list(self.running):
            if sequence.is_decoding and self._reserve(sequence, 1):
                self._compute(sequence, 1)
        is_decoding = bool(self._ranges)
        self._num_left = self._traits.chunk_sizes.size(is_decoding=is_decoding)
        short_first, self._cuts_context = self._cuts_context, False
        for sequence in self._contexts(short_first=short_first):
            num_tokens = self._chunk_size(sequence, is_decoding=is_decoding)
            if num_tokens and self._reserve(sequence, num_tokens):
                self._compute(sequence, num_tokens)
        return self._step()

    def _contexts(self, *, short_first: bool) -> Iterator[Sequence]:
        """Running sequences whose context is not computed yet, and waiting ones as they are admitted."""
        begun = [sequence for sequence in self.running if sequence.num_missing and not sequence.is_decoding]
        waiting = list(self.waiting)
        if short_first:
            limit = self._traits.chunk_sizes.max_tokens
            yield from self._admit([sequence for sequence in waiting if sequence.num_tokens <= limit])
            waiting = [sequence for sequence in waiting if sequence.num_tokens > limit]
        yield from (sequence for sequence in begun if sequence in self.running)
        yield from self._admit(waiting)

    def _chunk_size(self, sequence: Sequence, *, is_decoding: bool) -> int:
        """Tokens of a context's next chunk; 0: its turn comes later."""
        traits, missing = self._traits, sequence.num_missing
        if traits.prefills_whole:
            has_chunk = len(self._ranges) > sum(part.is_decode for part in self._ranges.values())
            return 0 if has_chunk and missing > self._num_left else missing
        share = traits.chunk_sizes.share(is_decoding=is_decoding, num_cached=sequence.num_computed)
        size = min(missing, int(self._num_left * share))
        if traits.has_states and size < missing:  # a chunk of one token would be taken for a decoding step
            size -= missing - size == 1
            size = size if size > 1 else 0
        return size

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for its next tokens, at the cost of the youngest; whether it has them."""
        if sequence not in self.running:
            return False
        needed = self._memory.num_blocks(sequence.num_computed + num_tokens) - len(sequence.blocks)
        while needed > self._pool.num_free:
            youngest = max(self.running, key=lambda other: other.age)
            error = self._memory.no_memory_error(youngest.num_tokens + 1)
            if youngest is sequence and len(self.running) == 1:
                sequence.group.finish(error)
            self.preempt([youngest], error)
            if youngest is sequence:
                return False
        sequence.blocks += [self._pool.allocate() for _ in range(needed)]
        return True

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a sequence's next tokens to the step."""
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        group = sequence.group
        is_last = num_tokens == sequence.num_missing
        num_top = group.params.prompt_logprobs if group.prompt_logprobs is None else None
        num_scored = 0 if num_top is None else max(0, min(end, len(group.prompt_ids) - 1) - start)
        sampling = [sequence, *sequence.siblings] if is_last else []
        self._ranges[sequence.id] = TokenRange(
            sequence.id,
            start,
            end,
            sequence.tokens(start, end),
            list(sequence.blocks),
            sequence.num_tokens,
            tuple(each.id for each in sampling),
            num_top if num_scored else None,
            num_scored,
            sequence.slot,
        )
        sequence.num_computed = end
        for each in sampling:
            each.num_inflight += 1
        if not self._ranges[sequence.id].is_decode:
            self._num_left = max(0, self._num_left - num_tokens)
            self._cuts_context = self._cuts_context or not is_last

    def _step(self) -> Step:
        """The step of the ranges, with what has happened since the last one."""
        ranges = sorted(self._ranges.values(), key=lambda part: (not part.is_decode, part.slot))
        stays = bool(ranges) and self._traits.can_run_ahead() and self._can_run_ahead(ranges)
        step = Step(
            tuple(ranges),
            tuple(self._admitted),
            tuple(self._finished),
            tuple(self._block_copies),
            tuple(self._slot_copies),
            stays,
            self._wait_s,
        )
        self._ranges = {}
        self._begin_notes()
        return step

    def _can_run_ahead(self, ranges: list[TokenRange]) -> bool:
        """Whether the host need not see this step's tokens before the next step, and there is a next one."""
        if any(len(part.samples) > 1 or part.num_scored for part in ranges):
            return False
        sampling = [self._sequences[number] for part in ranges for number in part.samples]
        if any(sequence.sampler.needs_host for sequence in sampling):
            return False
        return any(sequence.num_left > sequence.num_inflight for sequence in sampling)

    # --- admit -------------------------------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Drop sequences that were cancelled, have passed their deadline, or whose group has ended otherwise."""
        sequences = list(self._sequences.values())
        for group in {id(sequence.group): sequence.group for sequence in sequences}.values():
            group.drop_if_ended()
        for sequence in sequences:
            if sequence.is_done:
                self._end(sequence)

    def _admit_groups(self) -> None:
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
        """Admit waiting sequences in order while they fit; a suspect one runs alone."""
        for sequence in waiting:
            if self._num_left <= 0 or any(other.is_suspect for other in self.running):
                return
            if self.running and (sequence.is_suspect or not self._has_slots(sequence)):
                return
            cached = self._cached_blocks(sequence)
            if cached is None or sequence.num_inflight:
                continue  # another one is computing its prefix
            if not self._fits(sequence, cached):
                if not self.running:
                    self._wait_for_memory(sequence)
                return
            self._take_blocks(sequence, cached)
            yield sequence

    def _has_slots(self, sequence: Sequence) -> bool:
        return self._num_slots() + 1 + len(sequence.siblings) <= self.slot_limit

    def _num_slots(self) -> int:
        """Running sequences, with those that wait for one of them to compute their prompt."""
        return sum(1 + len(sequence.siblings) for sequence in self.running)

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether the context fits; to its end, with all others, if the model cannot recompute a sequence."""
        num_slots = 1 + len(sequence.siblings) if self._traits.has_states else 0
        num_shared = sum(self._pool.is_held(block) for block in cached)
        if self._traits.recomputes:
            needed = self._memory.num_blocks(sequence.num_tokens + 1) - num_shared
        else:
            all_sequences = [each for other in (*self.running, sequence) for each in (other, *other.siblings)]
            needed = sum(self._memory.num_blocks(each.max_tokens) - len(each.blocks) for each in all_sequences)
        return self._memory.has_room(needed, num_slots)

    def _take_blocks(self, sequence: Sequence, cached: list[int]) -> None:
        """Let a waiting sequence run, with a cached prefix."""
        self.waiting.remove(sequence)
        for block in cached:
            self._pool.share(block)
        sequence.blocks = list(cached)
        sequence.num_computed = len(cached) * self._memory.block_size
        sequence.group.no_room_since_s = None
        for digest in sequence.digests[len(cached) :]:
            self._computing.setdefault(digest, sequence.id)
        self._note_running(sequence)
        self._admitted += [AdmittedSequence(sibling.id, _adapter_key(sibling)) for sibling in sequence.siblings]
        self._observer.on_prefix_hit(sequence.num_computed)

    def _note_running(self, sequence: Sequence) -> None:
        if self._traits.has_states:
            sequence.slot = heapq.heappop(self._free_slots)
        self.running.append(sequence)
        self._admitted.append(AdmittedSequence(sequence.id, _adapter_key(sequence)))

    def _wait_for_memory(self, sequence: Sequence) -> None:
        """Nothing runs and the next context does not fit: wait for others on the device to free memory, or refuse."""
        group, now_s = sequence.group, time.monotonic()
        group.no_room_since_s = now_s if group.no_room_since_s is None else group.no_room_since_s
        if now_s - group.no_room_since_s < self._config.max_memory_wait_s:
            self._wait_s = self._config.memory_poll_s
        else:
            group.finish(self._memory.no_memory_error(sequence.num_tokens))

    # --- the prefix cache --------------------------------------------------------------------------------------------

    def _cached_blocks(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks that a context begins with; None: a running sequence is computing the next one."""
        if not self._traits.caches_prefixes:
            return []
        size = self._memory.block_size
        self._add_digests(sequence, sequence.num_tokens)
        if sequence.group.params.prompt_logprobs is not None and sequence.group.prompt_logprobs is None:
            return []  # every token's logits are wanted
        cached: list[int] = []
        for digest in sequence.digests[: (sequence.num_tokens - 1) // size]:  # one token is left to compute
            block = self._pool.find(digest)
            if block is None:
                return None if self._computing.get(digest, sequence.id) != sequence.id else cached
            cached.append(block)
        return cached

    def _add_digests(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute the digests of a context's full blocks within its first tokens."""
        size = self._memory.block_size
        is_long = sequence.num_tokens >= self._traits.recompute_length
        for start in range(len(sequence.digests) * size, num_tokens - size + 1, size):
            parent = sequence.digests[-1] if sequence.digests else f"{_adapter_key(sequence)} {is_long}".encode()
            sequence.digests.append(next_digest(parent, sequence.tokens(start, start + size)))

    def _publish(self, sequence: Sequence, part: TokenRange) -> None:
        """Make the blocks known that a range has filled with tokens that are certain."""
        if not self._traits.caches_prefixes:
            return
        size = self._memory.block_size
        end = part.end // size
        if end > part.start // size:
            self._add_digests(sequence, part.end)
            for block, digest in list(zip(sequence.blocks, sequence.digests, strict=False))[part.start // size : end]:
                self._pool.publish(block, digest)
                self._computing.pop(digest, None)

    # --- update ------------------------------------------------------------------------------------------------------

    def update(self, output: StepOutput) -> None:
        """Take the output of a step: publish blocks, append tokens; finished sequences leave."""
        for part in output.step.ranges:
            sequence = self._sequences.get(part.sequence_id)
            if sequence is None:
                continue
            if sequence.blocks[: len(part.block_table)] == part.block_table:  # it has not been preempted since
                self._publish(sequence, part)
                self._add_scores(sequence, part, output)
                if len(part.samples) > 1:
                    self._share_blocks(sequence)
        for number, token in output.tokens.items():
            self._append(number, token)
        if output.tokens:
            self._observer.on_step(len(output.tokens))

    def _append(self, number: int, token: SampledToken) -> None:
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        is_done = sequence.append(token)
        sequence.num_inflight = max(0, sequence.num_inflight - 1)
        if is_done:
            self._end(sequence)
            self.slot_limit = min(self.slot_limit + 1, self._max_sequences)
        elif sequence.num_tokens == self._traits.recompute_length:
            self.preempt([sequence])
            sequence.digests = []

    def _add_scores(self, sequence: Sequence, part: TokenRange, output: StepOutput) -> None:
        """Note the log probabilities of prompt tokens; the group has them when all are known."""
        group = sequence.group
        if group.params.prompt_logprobs is not None and group.prompt_logprobs is None:
            sequence.prompt_scores += output.prompt_scores.get(sequence.id, [])
            if part.end >= len(group.prompt_ids):
                group.prompt_logprobs = sequence.prompt_scores

    def _share_blocks(self, first: Sequence) -> None:
        """Let the sequences that waited for a prompt run on its blocks; the last, partial one is copied for each."""
        siblings, first.siblings = first.siblings, []
        num_full, has_part = divmod(first.num_computed, self._memory.block_size)
        for sibling in reversed(siblings):
            if len(self.running) >= max(self.slot_limit, 1) or self._pool.num_free < bool(has_part):
                self.waiting.appendleft(sibling)
                continue
            for block in first.blocks[:num_full]:
                self._pool.share(block)
            sibling.blocks = first.blocks[:num_full]
            if has_part:
                sibling.blocks.append(self._pool.allocate())
                self._block_copies.append((first.blocks[num_full], sibling.blocks[num_full]))
            sibling.num_computed, sibling.digests = first.num_computed, list(first.digests)
            self._note_running(sibling)
            if self._traits.has_states:
                self._slot_copies.append((first.slot, sibling.slot))

    def _end(self, sequence: Sequence) -> None:
        """Forget a sequence that is done."""
        self._sequences.pop(sequence.id, None)
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and slot."""
        self.running.remove(sequence)
        self._ranges.pop(sequence.id, None)
        self._pool.release(sequence.blocks)
        for digest in [digest for digest in sequence.digests if self._computing.get(digest) == sequence.id]:
            del self._computing[digest]
        if sequence.slot >= 0:
            heapq.heappush(self._free_slots, sequence.slot)
        sequence.blocks, sequence.num_computed, sequence.slot, sequence.prompt_scores = [], 0, -1, []
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
            if scheduled is not None:  # what this step was to sample is not in flight
                for number in scheduled.samples:
                    self._sequences[number].num_inflight -= 1
            self._leave(sequence)
            if sequence.is_done:
                self._sequences.pop(sequence.id, None)
            else:
                self.waiting.appendleft(sequence)

    def lose_inflight(self) -> None:
        """Forget the step in flight: its tokens are sampled again."""
        for sequence in self._sequences.values():
            sequence.num_inflight = 0

    # --- what others ask ---------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there are admitted sequences."""
        return bool(self._sequences or self._starting)

    def running_of(self, numbers: set[int]) -> list[Sequence]:
        """The running sequences among these ids."""
        return [sequence for sequence in self.running if sequence.id in numbers]

    def unfinished(self) -> list[SequenceGroup]:
        """Admitted groups without an outcome."""
        groups = {id(sequence.group): sequence.group for sequence in list(self._sequences.values())}
        return [*(group for group in groups.values() if not group.is_finished), *self._starting]

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread."""
        num_running = sum(1 + len(sequence.siblings) for sequence in list(self.running))
        num_ready = len(self._starting) + len(self.waiting)
        return EngineLoad(
            len(self._queue) + num_ready,
            num_running,
            self._memory.num_used_tokens,
            self._memory.max_used_tokens,
            max(0, self._max_sequences - num_running - num_ready),
        )

    def reset_limits(self) -> None:
        """Allow as many sequences as at first."""
        self.slot_limit = self._max_sequences


def _adapter_key(sequence: Sequence) -> str | None:
    adapter = sequence.group.adapter
    return adapter.key if adapter else None
