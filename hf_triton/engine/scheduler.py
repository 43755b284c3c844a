# SPDX-License-Identifier: Apache-2.0
"""Decides what the next step computes: admission, prefill batches and chunks, preemption. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hf_triton.engine.config import EngineConfig
from hf_triton.engine.plan import (
    PrefillBatch,
    PrefillRequest,
    ScheduledStep,
    StepOutput,
    is_worth_one_batch,
    num_padded,
)
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.types import EngineLoad, Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import GenerationError, HfTritonError

if TYPE_CHECKING:
    from hf_triton.runner.device import ChunkSizes


class Memory(Protocol):
    """The KV cache and the prefix cache, as the scheduler uses them."""

    running: list[Sequence]
    """Sequences that have a slot, by slot."""
    prefills: list[PrefillBatch]
    """Batches that are being prefilled, the current one last; the scheduler adds and removes them."""

    @property
    def is_corrupt(self) -> bool:
        """Whether all sequences must be recomputed."""

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A failure inside leaves the memory corrupt."""

    def reserve(self, contexts: list[list[Sequence]]) -> bool:
        """Make room for another token of every sequence and for prefilling these contexts; whether there is enough."""

    def insert(self, sequence: Sequence, batch: PrefillBatch, at: int) -> None:
        """Give a sequence a slot, with the KV of context `at` of a complete batch."""

    def free(self, slot: int) -> None:
        """Free a slot; another sequence may take it."""

    def reset(self) -> None:
        """Begin with new, empty slots."""

    def prefill_request(self, sequences: list[Sequence]) -> PrefillRequest:
        """The request to prefill the context of these sequences, with its cached prefix."""

    def store_prompt(self, batch: PrefillBatch, at: int, num_tokens: int) -> None:
        """Store the first tokens of context `at` in the prefix cache."""

    def no_memory_error(self, num_tokens: int) -> HfTritonError:
        """The error of a sequence of `num_tokens` tokens that does not fit."""


@dataclass(frozen=True)
class ModelTraits:
    """What the scheduler needs to know of a model and its executor."""

    chunk_sizes: ChunkSizes
    recompute_length: float = float("inf")
    """A context that grows to this many tokens is recomputed: its KV is that of shorter ones. See `Forward`."""
    recomputes: bool = True
    """Whether a sequence can be preempted and recomputed from its tokens; else it is admitted if it fits to its end."""
    prefills_whole: bool = False
    """Whether a context is one chunk, whatever its length."""
    stores_prompts: bool = False
    """Whether every prompt goes to the prefix cache; else only those of sequences that finish at their first token."""
    can_run_ahead: Callable[[], bool] = lambda: False
    """Whether a decoding step may start before the tokens of the last one are read."""


@dataclass
class _Round:
    """The prefill chunks between two decoding steps."""

    is_decoding: bool
    """Whether sequences are decoding, which wait meanwhile."""
    num_tokens: int = 0
    is_over: bool = False


class Scheduler:
    """Schedules steps, each a prefill chunk or a decoding step, and takes their results.

    Sequences are in one of four stages: queued, ready (admitted or preempted), prefilling, running.

    Args:
        memory: The KV cache.
        queue: Where groups wait for admission.
        traits: Of the model.
        max_sequences: The most sequences that are admitted at a time.
        start: Creates the sequences of an admitted group, or finishes it with an error.
        observer: Observes the engine.
        config: The engine's constants.
    """

    def __init__(
        self,
        memory: Memory,
        queue: WaitingQueue,
        traits: ModelTraits,
        *,
        max_sequences: int,
        start: Callable[[SequenceGroup], None],
        observer: Observer,
        config: EngineConfig,
    ) -> None:
        self._memory = memory
        self._queue = queue
        self._traits = traits
        self._max_sequences = max_sequences
        self._start = start
        self._observer = observer
        self._config = config
        self.slot_limit = max_sequences
        """Less than `max_sequences` after the memory ran out."""
        self._admitting: deque[SequenceGroup] = deque()  # taken from the queue, and not started yet
        self._ready: deque[list[Sequence]] = deque()  # the sequences of one context together
        self._inflight: object = None  # the executor's decoding step whose tokens have not been taken
        self._round: _Round | None = None
        self._wait_s = 0.0
        self._is_short_turn = False  # a chunk of a long context was the last to be computed

    # --- what it holds -----------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether admitted sequences have not finished."""
        return bool(self._memory.running or self._memory.prefills or self._ready)

    def prefilling(self) -> list[Sequence]:
        """Sequences whose contexts are being prefilled."""
        return [sequence for batch in list(self._memory.prefills) for sequence in batch.sequences]

    def in_memory(self) -> list[Sequence]:
        """Running sequences, and those being prefilled."""
        running = self._memory.running
        return [*running, *(sequence for sequence in self.prefilling() if sequence not in running)]

    def next_ready(self) -> list[Sequence]:
        """The sequences of the next context to prefill; none if no context waits."""
        return list(next(iter(self._ready), ()))

    def unfinished(self) -> list[SequenceGroup]:
        """Admitted groups without an outcome."""
        return [*(group for group in self._groups() if not group.is_finished), *self._admitting]

    def load(self, num_used_tokens: int, max_used_tokens: int) -> EngineLoad:
        """What the engine holds; from any thread."""
        num_running = len(self._memory.running) + len(self.prefilling())
        num_ready = len(self._admitting) + len(self._ready)
        num_free = max(0, self._max_sequences - num_running - num_ready)
        return EngineLoad(len(self._queue) + num_ready, num_running, num_used_tokens, max_used_tokens, num_free)

    def reset_limits(self) -> None:
        """Allow as many sequences as at first."""
        self.slot_limit = self._max_sequences

    def _all(self) -> Iterable[Sequence]:
        return [*self._memory.running, *self.prefilling(), *(sequence for group in self._ready for sequence in group)]

    def _groups(self) -> list[SequenceGroup]:
        return list({id(sequence.group): sequence.group for sequence in self._all()}.values())

    # --- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """The next step."""
        self._wait_s = 0.0
        self._drop_ended()
        if self._round is None:
            self._admit()
        if self._inflight and not self._runs_ahead(num_pending=0):
            return ScheduledStep(inflight=self._inflight)
        self._make_room()
        if not self._inflight:
            step = self._schedule_prefill()
            if step is not None:
                return step
        self._round = None
        return ScheduledStep(
            decode=tuple(self._memory.running),
            inflight=self._inflight,
            runs_ahead=self._runs_ahead(num_pending=int(self._inflight is not None)),
            wait_s=self._wait_s,
        )

    def _runs_ahead(self, num_pending: int) -> bool:
        """Whether a decoding step is left in flight.

        Not if contexts wait, which the next step would delay; if the host must see a token before the next is sampled;
        if every sequence is complete with the tokens in flight.

        Args:
            num_pending: Tokens of each sequence that are read before that step's.
        """
        running = self._memory.running
        if not self._traits.can_run_ahead() or self._memory.prefills or self._ready:
            return False
        if any(sequence.sampler.needs_host for sequence in running):
            return False
        return any(sequence.num_left - num_pending > 1 for sequence in running)

    def _drop_ended(self) -> None:
        """Drop sequences that were cancelled or have passed their deadline."""
        for group in self._groups():
            group.drop_if_ended()
        contexts = ([sequence for sequence in context if not sequence.is_done] for context in self._ready)
        self._ready = deque(context for context in contexts if context)
        batches = self._memory.prefills
        batches[:] = [batch for batch in batches if not all(sequence.is_done for sequence in batch.sequences)]
        self._free([slot for slot, sequence in enumerate(self._memory.running) if sequence.is_done])

    def _admit(self) -> None:
        """Admit queued groups while there are slots, in the queue's order."""
        num_free = self._max_sequences - sum(1 for _ in self._all())
        self._admitting.extend(self._queue.take(num_free, takes_any=not (self.is_busy or self._admitting)))
        while self._admitting:
            group = self._admitting[0]
            self._start(group)
            self._admitting.popleft()
            if not group.is_finished:
                self._ready.append(group.sequences)

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _schedule_prefill(self) -> ScheduledStep | None:
        """The next prefill chunk before a decoding step; None if it is the decoding step's turn.

        Between two decoding steps there is one chunk of a long context, or short contexts of one chunk's tokens
        together. After each chunk of a long context, short ones that wait come first.
        """
        batches = self._memory.prefills
        if self._round is None:
            self._round = _Round(is_decoding=bool(self._memory.running))
            passes = self._is_short_turn and self._put_short_first()
            if batches and not passes:
                return self._chunk(batches[-1])
        elif self._round.is_over:
            return None
        requests = self._next_requests()
        if not requests:
            return None
        num_new = num_padded(requests)
        limit = self._traits.chunk_sizes.size(is_decoding=self._round.is_decoding)
        if self._round.num_tokens and self._round.num_tokens + num_new > limit:
            return None
        self._round.num_tokens += num_new
        batches.append(PrefillBatch(requests, self._traits.chunk_sizes, is_whole=self._traits.prefills_whole))
        for request in requests:
            self._ready.popleft()
            self._observer.on_prefix_hit(request.num_cached)
        return self._chunk(batches[-1], is_first=True)

    def _chunk(self, batch: PrefillBatch, *, is_first: bool = False) -> ScheduledStep:
        assert self._round is not None
        end = batch.chunk_end(is_decoding=self._round.is_decoding)
        self._round.is_over = not (is_first and end == batch.longest)
        return ScheduledStep(prefill=batch, chunk_end=end)

    def _put_short_first(self) -> bool:
        """Move the short contexts that wait before the long ones; whether there are any."""
        self._is_short_turn = False
        if any(sequence.is_suspect for sequence in self._all()):
            return False
        short = [context for context in self._ready if not self._is_long(context)]
        self._ready = deque([*short, *filter(self._is_long, self._ready)])
        return bool(short)

    def _is_long(self, context: list[Sequence]) -> bool:
        """Whether a context takes more than one chunk, given its cached prefix at the first look."""
        limit, group = self._traits.chunk_sizes.max_tokens, context[0].group
        if context[0].num_tokens <= limit:
            return False
        if group.num_cached is None:
            group.num_cached = self._memory.prefill_request(context).num_cached
        return context[0].num_tokens - group.num_cached > limit

    def _next_requests(self) -> list[PrefillRequest]:
        """The oldest contexts that are worth one batch; a suspect is alone, and nothing else runs beside it."""
        running, batches = self._memory.running, self._memory.prefills
        requests: list[PrefillRequest] = []
        for context in self._ready:
            if any(sequence.is_suspect for sequence in running) or (requests and requests[0].sequences[0].is_suspect):
                break
            is_first = not (running or batches or requests)
            if not is_first and (context[0].is_suspect or not self._has_room(requests, context)):
                break
            if is_first and not self._memory.reserve([context]):
                return self._wait_for_memory(context)
            together = [*requests, self._memory.prefill_request(context)]
            traits = self._traits
            if requests and not is_worth_one_batch(together, traits.chunk_sizes, traits.recompute_length):
                break
            requests = together
        for request in requests:
            request.sequences[0].group.no_room_since_s = None
        return requests

    def _has_room(self, requests: list[PrefillRequest], context: list[Sequence]) -> bool:
        contexts = [*(request.sequences for request in requests), context]
        num_sequences = len(self._memory.running) + len(self.prefilling()) + sum(map(len, contexts))
        return num_sequences <= self.slot_limit and self._memory.reserve(contexts)

    def _wait_for_memory(self, context: list[Sequence]) -> list[PrefillRequest]:
        """Nothing runs and the next context does not fit: split it, wait for others to free memory, or refuse it."""
        if len(context) > 1:
            self._ready.popleft()
            self._ready.extendleft([sequence] for sequence in reversed(context))
            return self._next_requests()
        group, now_s = context[0].group, time.monotonic()
        group.no_room_since_s = now_s if group.no_room_since_s is None else group.no_room_since_s
        if now_s - group.no_room_since_s < self._config.max_memory_wait_s:
            self._wait_s = self._config.memory_poll_s
        else:
            group.finish(self._memory.no_memory_error(context[0].num_tokens))
            self._ready.popleft()
        return []

    # --- update ------------------------------------------------------------------------------------------------------

    def update(self, output: StepOutput) -> None:
        """Append the tokens of a step to their sequences; finished sequences leave."""
        self._inflight = output.inflight
        if output.prefill:
            self._update_prefill(output.prefill, output)
        elif output.tokens and self._memory.running:
            with self._memory.all_or_nothing():  # until every sequence has its token
                running = list(self._memory.running)
                done = [slot for slot, sequence in enumerate(running) if sequence.append(output.tokens[sequence])]
            self._observer.on_step(len(running))
            self._free(done)
            self._preempt_outgrown()

    def _update_prefill(self, batch: PrefillBatch, output: StepOutput) -> None:
        self._is_short_turn = batch.is_long
        if batch.num_computed == batch.requests[0].pause:
            self._memory.store_prompt(batch, 0, batch.num_computed)
        if not batch.is_complete:
            return
        for at, request in enumerate(batch.requests):
            is_stored = self._traits.stores_prompts
            for sequence in request.sequences:
                if sequence not in output.tokens:
                    continue
                if sequence.append(output.tokens[sequence]):
                    is_stored = True
                else:
                    self._memory.insert(sequence, batch, at)
            if is_stored:
                self._memory.store_prompt(batch, at, request.length)
        self._memory.prefills.remove(batch)
        self._preempt_outgrown()

    def _free(self, slots: list[int]) -> None:
        for slot in reversed(slots):
            is_done = self._memory.running[slot].is_done
            self._memory.free(slot)
            if is_done:
                self.slot_limit = min(self.slot_limit + 1, self._max_sequences)

    # --- preempt -----------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Preempt the youngest sequences while the running ones outgrow the memory."""
        running = self._memory.running
        while running and not self._memory.reserve([]):
            in_memory = self.in_memory()
            if len(in_memory) == 1:
                sequence = running[0]
                sequence.group.finish(self._memory.no_memory_error(sequence.num_tokens + 1))
                self.preempt(in_memory)
            else:
                youngest = max(in_memory, key=lambda sequence: sequence.age)
                batches = self._memory.prefills
                batch = next((batch for batch in batches if youngest in batch.sequences), None)
                error = self._memory.no_memory_error(youngest.num_tokens + 1)
                self.preempt(batch.sequences if batch else [youngest], error)
            running = self._memory.running

    def _preempt_outgrown(self) -> None:
        """Preempt the sequences that have just grown to the length at which their context is recomputed."""
        length = self._traits.recompute_length
        outgrown = [sequence for sequence in self._memory.running if sequence.num_tokens == length]
        if outgrown:
            self.preempt(outgrown)

    def preempt(self, sequences: list[Sequence], error: HfTritonError | None = None) -> None:
        """Take sequences out of memory; those that are not done are ready again, to be recomputed with their tokens.

        If the model cannot recompute a sequence, those that have tokens already are refused instead.

        Args:
            sequences: Running or prefilling.
            error: What to refuse with; None: a failure of the model.
        """
        sequences = list(sequences)
        running = self._memory.running
        if not self._traits.recomputes:
            for sequence in sequences:
                if sequence.token_ids and not sequence.is_done:
                    sequence.group.finish(error or _not_recomputable())
        going_on = [sequence for sequence in sequences if not sequence.is_done]
        self._observer.on_preempt(sum(sequence in running for sequence in going_on))
        # First, so that each of them is known to some list whatever fails below.
        ready = {id(sequence) for context in self._ready for sequence in context}
        self._ready.extendleft([sequence] for sequence in reversed(going_on) if id(sequence) not in ready)
        batches = self._memory.prefills
        batches[:] = [batch for batch in batches if not any(sequence in sequences for sequence in batch.sequences)]
        self._round = None
        if self._memory.is_corrupt:
            self._memory.reset()
        else:
            self._free([slot for slot, sequence in enumerate(running) if sequence in sequences])
        if not self._memory.running:
            self._inflight = None


def _not_recomputable() -> GenerationError:
    return GenerationError(
        "generation_failed",
        "a failure interrupted this sequence, and this model cannot continue an interrupted one: send it again",
    )
