# SPDX-License-Identifier: Apache-2.0
"""Decides what the next step computes: admission, prefill batches and chunks, preemption. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hf_triton.engine.arrival_delay import ArrivalDelay
from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.plan import (
    PrefillBatch,
    PrefillRequest,
    ScheduledStep,
    StepOutput,
    is_worth_one_batch,
    num_padded,
)
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.engine.stages import Memory, Stages
from hf_triton.engine.types import EngineLoad, Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import GenerationError, HfTritonError


@dataclass
class _Round:
    """The prefill chunks between two decoding steps."""

    is_decoding: bool
    """Whether running sequences wait for these chunks."""
    num_tokens: int = 0
    is_over: bool = False


class Scheduler:
    """Schedules steps, each a prefill chunk or a decoding step, and takes their results.

    Args:
        memory: The KV cache and the prefix cache.
        queue: Groups that wait for admission.
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
        self.stages = Stages(memory)
        self._inflight: object = None  # the executor's decoding step whose tokens have not been taken
        self._round: _Round | None = None
        self._wait_s = 0.0
        self._began_s = 0.0
        self._arrival_delay = ArrivalDelay(config.max_arrival_delay_s)
        self._follows_long_chunk = False  # whether the last chunk was one of a long context

    def load(self, num_used_tokens: int, max_used_tokens: int) -> EngineLoad:
        """What the engine holds; from any thread."""
        num_running = len(self._memory.running) + len(self.stages.prefilling())
        num_ready = len(self.stages.admitting) + len(self.stages.ready)
        num_free = max(0, self._max_sequences - num_running - num_ready)
        return EngineLoad(len(self._queue) + num_ready, num_running, num_used_tokens, max_used_tokens, num_free)

    def reset_limits(self) -> None:
        """Allow as many sequences as at first."""
        self.slot_limit = self._max_sequences

    # --- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """The next step."""
        self._wait_s, self._began_s = 0.0, time.monotonic()
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
        if not self._traits.can_run_ahead() or self._memory.prefills or self.stages.ready:
            return False
        if any(sequence.sampler.needs_host for sequence in running):
            return False
        return any(sequence.num_left - num_pending > 1 for sequence in running)

    def _drop_ended(self) -> None:
        """Drop sequences that were cancelled or have passed their deadline."""
        for group in self.stages.groups():
            group.drop_if_ended()
        contexts = ([sequence for sequence in context if not sequence.is_done] for context in self.stages.ready)
        self.stages.ready = deque(context for context in contexts if context)
        batches = self._memory.prefills
        batches[:] = [batch for batch in batches if not all(sequence.is_done for sequence in batch.sequences)]
        self._free([slot for slot, sequence in enumerate(self._memory.running) if sequence.is_done])

    def _admit(self) -> None:
        """Admit queued groups while there are slots, in the queue's order."""
        num_free = self._max_sequences - len(self.stages.sequences())
        self.stages.admitting.extend(
            self._queue.take(num_free, takes_any=not (self.stages.is_busy or self.stages.admitting))
        )
        while self.stages.admitting:
            group = self.stages.admitting[0]
            self._start(group)
            self.stages.admitting.popleft()
            if not group.is_finished:
                self.stages.ready.append(group.sequences)
                self._arrival_delay.on_arrival(len(group.sequences))

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _schedule_prefill(self) -> ScheduledStep | None:
        """The next prefill chunk before a decoding step; None if it is the decoding step's turn.

        Between two decoding steps there is one chunk of a long context, or short contexts of one chunk's tokens
        together. After each chunk of a long context, short ones that wait come first.
        """
        batches = self._memory.prefills
        if self._round is None:
            self._round = _Round(is_decoding=bool(self._memory.running))
            passes = self._follows_long_chunk and self._put_short_first()
            if batches and not passes:
                return self._chunk(batches[-1])
        elif self._round.is_over:
            return None
        if self._waits_for_arrivals():
            return None
        requests = self._next_requests()
        if not requests:
            return None
        num_new = num_padded(requests)
        limit = self._traits.chunk_sizes.size(is_decoding=self._round.is_decoding)
        if self._round.num_tokens and self._round.num_tokens + num_new > limit:
            return None
        self._round.num_tokens += num_new
        self._arrival_delay.on_prefill()
        batches.append(PrefillBatch(requests, self._traits.chunk_sizes, is_whole=self._traits.prefills_whole))
        for request in requests:
            self.stages.ready.popleft()
            self._observer.on_prefix_hit(request.num_cached)
        return self._chunk(batches[-1], is_first=True)

    def _waits_for_arrivals(self) -> bool:
        """Whether ready contexts wait for others, see `ArrivalDelay`; running sequences decode meanwhile."""
        rest_s = self._arrival_delay.rest_s() if self.stages.ready else 0.0
        if rest_s and not self._memory.running:
            self._wait_s = min(rest_s, self._config.arrival_poll_s)
        return rest_s > 0

    def _chunk(self, batch: PrefillBatch, *, is_first: bool = False) -> ScheduledStep:
        assert self._round is not None
        end = batch.chunk_end(is_decoding=self._round.is_decoding)
        self._round.is_over = not (is_first and end == batch.longest)
        return ScheduledStep(prefill=batch, chunk_end=end)

    def _put_short_first(self) -> bool:
        """Move the short contexts that wait before the long ones; whether there are any."""
        self._follows_long_chunk = False
        if any(sequence.is_suspect for sequence in self.stages.sequences()):
            return False
        short = [context for context in self.stages.ready if not self._is_long(context)]
        self.stages.ready = deque([*short, *filter(self._is_long, self.stages.ready)])
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
        """The oldest contexts that are worth one batch; a suspect sequence runs alone."""
        running, batches = self._memory.running, self._memory.prefills
        requests: list[PrefillRequest] = []
        for context in self.stages.ready:
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
        num_sequences = len(self._memory.running) + len(self.stages.prefilling()) + sum(map(len, contexts))
        return num_sequences <= self.slot_limit and self._memory.reserve(contexts)

    def _wait_for_memory(self, context: list[Sequence]) -> list[PrefillRequest]:
        """Nothing runs and the next context does not fit: split it, wait for others to free memory, or refuse it."""
        if len(context) > 1:
            self.stages.ready.popleft()
            self.stages.ready.extendleft([sequence] for sequence in reversed(context))
            return self._next_requests()
        group, now_s = context[0].group, time.monotonic()
        group.no_room_since_s = now_s if group.no_room_since_s is None else group.no_room_since_s
        if now_s - group.no_room_since_s < self._config.max_memory_wait_s:
            self._wait_s = self._config.memory_poll_s
        else:
            group.finish(self._memory.no_memory_error(context[0].num_tokens))
            self.stages.ready.popleft()
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
            self._arrival_delay.on_step(time.monotonic() - self._began_s, len(done))
            self._free(done)
            self._preempt_outgrown()

    def _update_prefill(self, batch: PrefillBatch, output: StepOutput) -> None:
        self._follows_long_chunk = batch.is_long
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
            in_memory = self.stages.in_memory()
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
            refusal = error or GenerationError(
                "generation_failed",
                "a failure interrupted this sequence, and this model cannot continue an interrupted one: send it again",
            )
            for sequence in sequences:
                if sequence.token_ids and not sequence.is_done:
                    sequence.group.finish(refusal)
        unfinished = [sequence for sequence in sequences if not sequence.is_done]
        self._observer.on_preempt(sum(sequence in running for sequence in unfinished))
        # First, so that no failure below loses a sequence.
        ready = {id(sequence) for context in self.stages.ready for sequence in context}
        self.stages.ready.extendleft([sequence] for sequence in reversed(unfinished) if id(sequence) not in ready)
        batches = self._memory.prefills
        batches[:] = [batch for batch in batches if not any(sequence in sequences for sequence in batch.sequences)]
        self._round = None
        if self._memory.is_corrupt:
            self._memory.reset()
        else:
            self._free([slot for slot, sequence in enumerate(running) if sequence in sequences])
        if not self._memory.running:
            self._inflight = None
