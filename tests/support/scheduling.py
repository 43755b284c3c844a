# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a memory without tensors, whose steps give every sequence the same token. No model, no torch."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from hf_triton.engine.plan import PrefillBatch, PrefillRequest, StepOutput

from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import Outcome, Sequence, SequenceGroup
from hf_triton.engine.types import Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import HfTritonError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams

CHUNK_SIZES = ChunkSizes(16, 8, per_weights=4)


class FakeMemory:
    """A KV cache of so many tokens: the `Memory` of the scheduler."""

    is_corrupt = False

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_cached = 0
        """Tokens of every prompt that the prefix cache has."""
        self.running: list[Sequence] = []
        self.prefills: list[PrefillBatch] = []

    def all_or_nothing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reserve(self, contexts: list[list[Sequence]]) -> bool:
        sequences = itertools.chain(self.running, *(batch.sequences for batch in self.prefills), *contexts)
        return sum(sequence.num_tokens + 1 for sequence in sequences) <= self.max_tokens

    def insert(self, sequence: Sequence, batch: PrefillBatch, at: int) -> None:
        self.running.append(sequence)

    def free(self, slot: int) -> None:
        del self.running[slot]

    def reset(self) -> None:
        self.running = []

    def prefill_request(self, sequences: list[Sequence]) -> PrefillRequest:
        return PrefillRequest(sequences, sequences[0].context(), self.num_cached)

    def store_prompt(self, batch: PrefillBatch, at: int, num_tokens: int) -> None: ...

    def no_memory_error(self, num_tokens: int) -> HfTritonError:
        return HfTritonError("out_of_memory", f"{num_tokens} tokens do not fit")


class FakeSampler:
    needs_host = is_complete = False

    def accept(self, token_id: int) -> None: ...


class FakeToken:
    token_id, logprobs = 7, None


class PreemptObserver(Observer):
    """Notes the number of running sequences in each preemption."""

    def __init__(self) -> None:
        self.preempted: list[int] = []

    def on_preempt(self, num_sequences: int) -> None:
        self.preempted.append(num_sequences)


class Simulation:
    """Requests, a scheduler, and steps that check that what is scheduled fits the memory.

    Args:
        max_tokens: Of the memory.
        max_sequences: Slots.
        refuses: Whether the engine refuses a group when it is admitted.
        max_memory_wait_s: See `EngineConfig`.
        traits: See `ModelTraits`.
    """

    def __init__(
        self,
        max_tokens: int = 1000,
        max_sequences: int = 4,
        *,
        refuses: Callable[[SequenceGroup], bool] = lambda _: False,
        max_memory_wait_s: float = 0.0,
        **traits: Any,
    ) -> None:
        self.memory, self.queue, self.observer = FakeMemory(max_tokens), WaitingQueue(0.0), PreemptObserver()
        self.outcomes: dict[SequenceGroup, Outcome] = {}
        self.prefilled: list[list[SequenceGroup]] = []
        """The groups of each prefill batch, in the order of their first chunks."""
        self.scheduler = Scheduler(
            self.memory,
            self.queue,
            ModelTraits(CHUNK_SIZES, **traits),
            max_sequences=max_sequences,
            start=self._start,
            observer=self.observer,
            config=EngineConfig(max_memory_wait_s=max_memory_wait_s, max_arrival_delay_s=0.0),
        )
        self._refuses = refuses
        self._arrival_numbers = itertools.count(1)

    def _start(self, group: SequenceGroup) -> None:
        if self._refuses(group):
            group.finish(HfTritonError("invalid_parameter", "refused"))
            return
        sampler: Any = FakeSampler()
        group.start(lambda _: sampler, frozenset(), self.observer.on_admit(group), next(self._arrival_numbers))

    def submit(self, *lengths: int, max_new_tokens: int = 20, priority: int = 0, **params: Any) -> list[SequenceGroup]:
        """Queue one request with prompts of these lengths."""
        sampling = SamplingParams(max_new_tokens, **params)
        groups = [SequenceGroup([3] * length, sampling, lambda _: None, priority=priority) for length in lengths]
        for group in groups:
            group.on_finish = partial(self.outcomes.__setitem__, group)
        self.queue.add(groups)
        return groups

    def step(self) -> str:
        """`prefill N` with the computed tokens of a context, or `decode N` with the number of sequences."""
        step = self.scheduler.schedule()
        assert self.memory.reserve([])
        token: Any = FakeToken()
        if step.prefill is None:
            self.scheduler.update(StepOutput(dict.fromkeys(step.decode, token)))
            return f"decode {len(step.decode)}"
        batch = step.prefill
        if batch.state is None:
            batch.state = "begun"
            self.prefilled.append([request.sequences[0].group for request in batch.requests])
        start, batch.num_computed = batch.num_computed, step.chunk_end
        tokens = dict.fromkeys(batch.sequences, token) if batch.is_complete else {}
        self.scheduler.update(StepOutput(tokens, prefill=batch))
        return f"prefill {step.chunk_end - start}"

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def finish(self, max_steps: int = 2000) -> list[str]:
        """Step until every group has its outcome."""
        steps: list[str] = []
        while len(self.queue) or self.scheduler.stages.is_busy:
            steps.append(self.step())
            assert len(steps) <= max_steps, "groups without an outcome"
        return steps

    def lengths(self, group: SequenceGroup) -> list[int]:
        """Tokens of each completion."""
        outcome = self.outcomes[group]
        assert isinstance(outcome, list), outcome
        return [len(completion.token_ids) for completion in outcome]

    def error_code(self, group: SequenceGroup) -> str:
        outcome = self.outcomes[group]
        assert isinstance(outcome, HfTritonError), outcome
        return outcome.code
