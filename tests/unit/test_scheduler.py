# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: what it plans, given what the memory says."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.plan import PrefillBatch, PrefillRequest, StepOutput
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import Outcome, Sequence, SequenceGroup
from hf_triton.engine.types import Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import HfTritonError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams


class Memory:
    """A KV cache of so many tokens, without tensors."""

    is_corrupt = False

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.running: list[Sequence] = []
        self.prefills: list[PrefillBatch] = []

    def all_or_nothing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reserve(self, contexts: list[list[Sequence]]) -> bool:
        sequences = [*self.running, *(each for batch in self.prefills for each in batch.sequences)]
        sequences += [each for context in contexts for each in context]
        return sum(each.num_tokens + 1 for each in sequences) <= self.max_tokens

    def insert(self, sequence: Sequence, batch: PrefillBatch, at: int) -> None:
        self.running.append(sequence)

    def free(self, slot: int) -> None:
        del self.running[slot]

    def reset(self) -> None:
        self.running = []

    def prefill_request(self, sequences: list[Sequence]) -> PrefillRequest:
        return PrefillRequest(sequences, sequences[0].context())

    def store_prompt(self, batch: PrefillBatch, at: int, num_tokens: int) -> None: ...

    def no_memory_error(self, num_tokens: int) -> HfTritonError:
        return HfTritonError("out_of_memory", "too long")


class Sampler:
    needs_host = False

    def accept(self, token_id: int) -> None: ...


class Token:
    token_id, logprobs = 7, None


class Rig:
    """A scheduler and what runs its steps: every token is 7."""

    def __init__(self, max_tokens: int = 1000, max_sequences: int = 4) -> None:
        self.memory, self.queue = Memory(max_tokens), WaitingQueue(0.1)
        self.outcomes: list[Outcome] = []
        self.scheduler = Scheduler(
            self.memory,
            self.queue,
            ModelTraits(ChunkSizes(16, 8, per_weights=4)),
            max_sequences=max_sequences,
            start=self._start,
            observer=Observer(),
            config=EngineConfig(),
        )
        self._count = 0

    def _start(self, group: SequenceGroup) -> None:
        self._count += 1
        sampler: Any = Sampler()
        group.start(lambda _: sampler, frozenset(), Observer().on_admit(group), self._count)

    def submit(self, *lengths: int, max_new_tokens: int = 20) -> None:
        params = SamplingParams(max_new_tokens)
        self.queue.add([SequenceGroup([3] * length, params, self.outcomes.append) for length in lengths])

    def step(self) -> str:
        """`prefill N` with the computed tokens of a context, or `decode N` with the number of sequences."""
        step = self.scheduler.schedule()
        token: Any = Token()
        if step.prefill is None:
            self.scheduler.update(StepOutput(dict.fromkeys(step.decode, token)))
            return f"decode {len(step.decode)}"
        start, step.prefill.num_computed = step.prefill.num_computed, step.chunk_end
        tokens = dict.fromkeys(step.prefill.sequences, token) if step.prefill.is_complete else {}
        self.scheduler.update(StepOutput(tokens, prefill=step.prefill))
        return f"prefill {step.chunk_end - start}"


def test_similar_prompts_share_a_prefill_batch() -> None:
    rig = Rig()
    rig.submit(5, 4)
    assert [rig.step() for _ in range(2)] == ["prefill 5", "decode 2"]


def test_a_long_prompt_is_prefilled_in_chunks_and_short_ones_pass_it() -> None:
    rig = Rig()
    rig.submit(40, 5)
    assert [rig.step() for _ in range(4)] == ["prefill 16", "decode 0", "prefill 5", "decode 1"]
    assert [rig.step() for _ in range(4)] == ["prefill 8", "decode 1", "prefill 8", "decode 1"]


def test_admission_is_bounded_by_slots() -> None:
    rig = Rig(max_sequences=2)
    rig.submit(3, 3, 3)
    rig.step()
    assert len(rig.memory.running) == 2
    assert rig.scheduler.load(0, 0).num_waiting == 1


def test_the_youngest_is_preempted_and_finishes_later() -> None:
    rig = Rig(max_tokens=30)
    rig.submit(4, 4)
    for _ in range(12):
        rig.step()
    assert len(rig.memory.running) == 1
    assert rig.memory.running[0].group.arrival_number == 1
    for _ in range(60):
        rig.step()
    assert [len(outcome[0].token_ids) for outcome in rig.outcomes if isinstance(outcome, list)] == [20, 20]
