# SPDX-License-Identifier: Apache-2.0
"""Decides what the next step computes: which tokens of which sequences, in which blocks. Imports no torch."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.engine_config import EngineConfig, ModelTraits
from hf_triton.engine.image_features import ImageFeatures
from hf_triton.engine.prefix_cache import PrefixCache
from hf_triton.engine.protocols import EngineLoad, Observer
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.sequence_admission import SequenceAdmission
from hf_triton.engine.state_pool import NOT_KEPT
from hf_triton.engine.step_draft import StepDraft, StepNotes
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import GenerationError, HfTritonError
from hf_triton.runner.step import AdmittedSequence, Step
from hf_triton.sampling.types import TokenLogprobs

if TYPE_CHECKING:
    from hf_triton.sampling.sampler import SampledToken


@dataclass(frozen=True)
class StepOutput:
    step: Step = field(default_factory=Step)
    tokens: dict[int, SampledToken] = field(default_factory=dict)
    """The next token of each sequence that samples, by its id."""
    prompt_scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log probabilities of the scored prompt tokens, by the sequence's id."""
    finite_blocks: frozenset[int] = frozenset()
    """The step's full blocks that have neither NaN nor infinity."""
    further: Mapping[int, Iterable[SampledToken]] = field(default_factory=dict)
    """The tokens behind the next one of each sequence with a proposal; each is drawn when it is asked for."""


class Scheduler:
    """Schedules steps and takes their outputs."""

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
        self.features = ImageFeatures(config.spare_image_tokens)
        self._memory = memory
        self._pool = memory.pool
        self._queue = queue
        self._traits = traits
        self._observer = observer
        self._sequences: dict[int, Sequence] = {}  # without an end, by id
        self._prefixes = PrefixCache(
            memory.pool,
            memory.block_size,
            traits,
            config.kept_state_tokens,
        )
        self.admission = SequenceAdmission(
            self.running, memory, self._prefixes, queue, traits, max_sequences, start, config
        )
        self._notes = StepNotes(memory.pool)
        self._cuts_context = False  # whether the last step cut a context, or ran a tower
        self._unread: list[Step] = []  # whose output has not been taken
        self._awaiting: set[int] = set()  # sequences that sit out the next step

    # --- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide the next step.

        There is no prefill phase and no decode phase. A sequence has `num_computed` tokens in its blocks, and every
        step lets the sequences catch up with their contexts; one that is behind by a single token decodes.

        1. Each decoding sequence gets its token. If no block is free, the youngest sequence is preempted: it gives its
           blocks back, waits, and is computed again, in part from the prefix cache.
        2. The step's budget of tokens goes to chunks of contexts, first of running sequences, then of waiting ones,
           which are admitted if their whole context fits. Short ones that wait behind a step that cut a context or
           ran a vision tower pass in a step of their own, text before images.
        3. The features of an image are computed in a step before the one that has its tokens, an image a step.
        4. A context whose last token is in the step samples the token that follows. Sequences of one prompt wait for
           the first of them, and share its blocks then.
        5. A decoding sequence computes what it proposes, too, where that pays and blocks are free.
        6. A step may be scheduled before the tokens of the last one are read. A sequence sits it out if the host must
           see its token first.
        """
        draft, keeps_states = StepDraft(self._traits, self.features), self._traits.keeps_states
        self._drop_ended()
        for group in self.admission.start_groups(len(self._sequences)):
            self._add(group)
        num_slots = self.admission.num_slots() if self._traits.has_states else 0
        self._memory.refresh(num_slots, reads_states=bool(self._notes.slot_copies))
        if self.waiting:
            self._make_way_for_trials()
        for sequence in list(self.running):
            if sequence.is_decoding and sequence.id not in self._awaiting and self._reserve(sequence, 1, draft):
                kept_slot = self._prefixes.reserve(sequence, 1, len(self.running)) if keeps_states else NOT_KEPT
                draft.add(sequence, 1, kept_slot)
        if self.waiting or len(draft.ranges) < len(self.running):
            self._schedule_contexts(draft)
        else:
            self._cuts_context = False
        draft.add_proposals(self._memory, self.running)
        step = draft.build(self._notes, self._prefixes)
        self._awaiting = draft.awaiting
        if step.ranges:
            self._unread.append(step)
            if step.block_copies:
                self._pool.release([source for source, _ in step.block_copies])
            self._notes = StepNotes(self._pool)
        return step

    def _schedule_contexts(self, draft: StepDraft) -> None:
        """Add chunks of contexts to a step that has its decoding sequences."""
        draft.begin_chunks()
        short = self._short_contexts(draft) if self._cuts_context else ()
        self._cuts_context = False
        if not self._add_chunks(short, draft):
            self._add_chunks(self._contexts(draft), draft)
            self._cuts_context = draft.cuts_context

    def _short_contexts(self, draft: StepDraft) -> Iterator[Sequence]:
        """Those that take one chunk at most: the towers of many images, an image a step, do not stop short texts."""
        waiting = list(filter(self.admission.is_short, self.waiting))
        yield from self._admit([sequence for sequence in waiting if sequence.group.images is None], draft)
        yield from filter(self._is_short, self._behind(draft))
        yield from self._admit([sequence for sequence in waiting if sequence.group.images is not None], draft)

    def _contexts(self, draft: StepDraft) -> Iterator[Sequence]:
        """Running sequences whose context is not computed yet, and waiting ones as they are admitted."""
        yield from self._behind(draft)
        yield from self._admit(list(self.waiting), draft)

    def _behind(self, draft: StepDraft) -> Iterator[Sequence]:
        """Running sequences whose context is not computed yet."""
        for sequence in list(self.running):
            sits_out = sequence in draft.ranges or sequence.id in self._awaiting or sequence not in self.running
            if not sits_out and sequence.num_missing:
                yield sequence

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether a running context takes one chunk at most, which has waited for an image's features."""
        return sequence.group.images is not None and sequence.num_missing <= self._traits.chunk_sizes.max_tokens

    def _add_chunks(self, contexts: Iterable[Sequence], draft: StepDraft) -> bool:
        """Add the next chunks of contexts; whether there are any."""
        num_ranges, keeps_states = len(draft.ranges), self._traits.keeps_states
        for sequence in contexts:
            num_tokens = draft.chunk_size(sequence)
            if num_tokens and self._reserve(sequence, num_tokens, draft):
                num_running = len(self.running)
                kept_slot = self._prefixes.reserve(sequence, num_tokens, num_running) if keeps_states else NOT_KEPT
                draft.add(sequence, num_tokens, kept_slot)
        return len(draft.ranges) > num_ranges

    def _reserve(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Give a sequence blocks for its next tokens, at the cost of the youngest; whether it has them."""
        needed = self._memory.num_blocks(sequence.num_computed + num_tokens) - len(sequence.blocks)
        while needed and needed > self._pool.num_free:
            youngest = max(self.running, key=lambda other: other.age)
            if (removed := draft.remove(youngest)) is not None:
                self._prefixes.lose([removed])
            self.preempt([youngest], self._memory.no_memory_error(youngest.num_tokens + 1))
            if youngest is sequence:
                return False
        for _ in range(needed):
            sequence.blocks.append(self._pool.allocate())
        return True

    # --- admit -------------------------------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Drop sequences that were cancelled, have passed their deadline, or whose group has ended otherwise."""
        sequences = list(self._sequences.values())
        for group in dict.fromkeys([sequence.group for sequence in sequences]):
            group.drop_if_ended()
        for sequence in sequences:
            if sequence.is_done:
                self._end(sequence)

    def _add(self, group: SequenceGroup) -> None:
        """Let the first sequence of a group wait; its siblings follow it."""
        first, *siblings = group.sequences
        first.siblings = siblings
        self._sequences.update((sequence.id, sequence) for sequence in group.sequences)
        self.waiting.append(first)

    def _make_way_for_trials(self) -> None:
        """Once a trial is over, the sequences of the next one take the place of those that have passed."""
        is_over = self.running and not self.admission.trial()
        if is_over and self._traits.recomputes and any(sequence.trial for sequence in self.waiting):
            self.preempt(list(self.running))
            self.waiting = deque(sorted(self.waiting, key=lambda sequence: not sequence.trial))

    def _admit(self, waiting: list[Sequence], draft: StepDraft) -> Iterator[Sequence]:
        """Let waiting sequences run while they fit; where nothing runs, a group that does not is split, or waits."""
        for sequence, cached in self.admission.fitting(waiting, draft):
            if cached is not None:
                self._take_blocks(sequence, cached)
                yield sequence
            elif sequence.siblings:
                at = self.waiting.index(sequence) + 1
                for sibling in reversed(sequence.siblings):
                    self.waiting.insert(at, sibling)
                sequence.siblings = []
            else:
                draft.wait_s = self.admission.wait_or_refuse(sequence)

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
        self._run(sequence)
        if cached and self._traits.has_states:
            kept_slot = self._pool.states.use(sequence.digests[len(cached) - 1])
            self._notes.slot_copies.append((kept_slot, sequence.slot))
        self._observer.on_prefix_hit(sequence.num_computed)

    def _run(self, sequence: Sequence) -> None:
        self.admission.take_slot(sequence)
        self.running.append(sequence)
        self._notes.admitted.append(AdmittedSequence(sequence.id, sequence.adapter_key))

    # --- update ------------------------------------------------------------------------------------------------------

    def update(self, output: StepOutput) -> None:
        """Take the output of a step: publish blocks, append tokens; finished sequences leave."""
        for tokens in output.step.ranges:
            sequence = self._sequences.get(tokens.sequence_id)
            if sequence and sequence.blocks[: len(tokens.block_table)] == tokens.block_table:  # not preempted since
                if output.step.full_blocks and not tokens.num_drafted:
                    self._prefixes.publish(sequence, tokens, output.finite_blocks)
                if sequence.wants_scores:
                    sequence.add_scores(output.prompt_scores.get(sequence.id, []), tokens.end)
                if len(tokens.samples) > 1:
                    self._share_blocks(sequence, tokens.end)
            else:
                self._prefixes.lose([tokens])
        num_known = 0
        for sequence_id, token in output.tokens.items():
            sequence = self._sequences.get(sequence_id)
            if sequence and sequence.num_inflight:
                num_known += 1
                if sequence_id in output.further:
                    self._append_accepted(sequence, token, output)
                else:
                    self._append(sequence, token)
        if num_known:
            self._observer.on_step(num_known)
        while self._unread and (step := self._unread.pop(0)) is not output.step:
            self._prefixes.lose(step.ranges)  # its output was lost, as no sequence was left that it is for
        self.features.forget_ended()  # no step may follow

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        sequence.num_inflight -= 1
        self._after_append(sequence, is_done=sequence.append(token))

    def _append_accepted(self, sequence: Sequence, token: SampledToken, output: StepOutput) -> None:
        """Append the tokens of a sequence with a proposal, and take back the blocks of what is rejected."""
        part = next(part for part in output.step.ranges if part.sequence_id == sequence.id)
        has_blocks = sequence.blocks == part.block_table  # not preempted since
        sequence.num_inflight -= 1
        num_drawn, is_done = 1, sequence.append(token)
        further = iter(output.further[sequence.id])
        while not is_done and (behind := next(further, None)) is not None:
            num_drawn, is_done = num_drawn + 1, sequence.append(behind)
        if has_blocks:
            sequence.num_computed = part.start + num_drawn
            if output.step.full_blocks:
                self._prefixes.publish(sequence, part._replace(end=sequence.num_computed), output.finite_blocks)
            num_kept = self._memory.num_blocks(sequence.num_computed)
            self._pool.release(sequence.blocks[num_kept:])
            del sequence.blocks[num_kept:]
        self._observer.on_proposal(part.num_drafted, num_drawn - 1)
        self._after_append(sequence, is_done=is_done)

    def _after_append(self, sequence: Sequence, *, is_done: bool) -> None:
        if sequence.trial and sequence.num_tokens > sequence.failed_length:
            sequence.trial = 0
        if is_done:
            self._end(sequence)
            self.admission.raise_limit()
        elif sequence.num_tokens == self._traits.recompute_length:
            if sequence in self.running:  # it may have been preempted while its token was in flight
                self.preempt([sequence])
            sequence.digests = []

    def _share_blocks(self, first: Sequence, num_tokens: int) -> None:
        """Let the sequences that waited for a prompt run on its blocks; the last, partial one is copied for each.

        One without room waits, and samples its first token again.
        """
        siblings, first.siblings = first.siblings, []
        num_full, has_part = divmod(num_tokens, self._memory.block_size)
        for sibling in reversed(siblings):
            sibling.trial = first.trial
            if not self.admission.has_slot() or self._pool.num_free < bool(has_part):
                sibling.num_inflight = 0
                self.waiting.appendleft(sibling)
                continue
            for block in first.blocks[:num_full]:
                self._pool.share(block)
            sibling.blocks = first.blocks[:num_full]
            if has_part:
                sibling.blocks.append(self._pool.allocate())
                self._notes.copy_block(first.blocks[num_full], sibling.blocks[num_full])
            sibling.num_computed, sibling.digests = num_tokens, list(first.digests)
            self._run(sibling)
            if self._traits.has_states:
                self._notes.slot_copies.append((first.slot, sibling.slot))

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
        self._pool.release(sequence.blocks)
        self._prefixes.end(sequence)
        self._notes.leave(sequence)
        self.admission.free_slot(sequence)
        sequence.blocks, sequence.num_computed, sequence.prompt_scores = array("q"), 0, []

    # --- preempt -----------------------------------------------------------------------------------------------------

    def preempt(self, sequences: list[Sequence], error: HfTritonError | None = None) -> None:
        """Take running sequences out of memory; those that are not done wait, to be recomputed with their tokens.

        If the model cannot recompute a sequence, those that have tokens already are refused instead, with `error`.
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
        all_lost = [*self._unread, step]
        for lost in all_lost:
            self._prefixes.lose(lost.ranges)
        lost_ids = {sequence_id for lost in all_lost for sequence_id in lost.sequence_ids}
        lost_slots = {slot for lost in all_lost for _, slot in lost.slot_copies}  # of some that had no turn yet
        suspects = [sequence for sequence in self.running if sequence.id in lost_ids or sequence.slot in lost_slots]
        self._unread, self._awaiting = [], set()
        self.features.lose()
        placed = [*self.running, *self.waiting]
        placed += [sibling for first in placed for sibling in first.siblings]
        for sequence in self._sequences.values():
            sequence.failed_length = sequence.num_tokens + max(0, sequence.num_inflight - 1)
            sequence.num_inflight = 0
            if sequence not in placed:  # it was on its way
                self._leave(sequence)
                self.waiting.append(sequence)
        return suspects if step.ranges else list(self.running)

    # --- what others ask ---------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there are sequences without an end."""
        return bool(self._sequences or self.admission.starting)

    def unfinished(self) -> list[SequenceGroup]:
        """Groups that have left the queue and have no outcome."""
        groups = dict.fromkeys([sequence.group for sequence in list(self._sequences.values())])
        return [*(group for group in groups if not group.is_finished), *self.admission.starting]

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread."""
        num_ready = len(self.admission.starting) + len(self.waiting)
        return EngineLoad(
            len(self._queue) + num_ready,
            self.admission.num_slots(),
            self._memory.num_used_tokens,
            self._memory.max_used_tokens,
            self.admission.num_free(len(self._sequences)),
        )
