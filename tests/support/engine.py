# SPDX-License-Identifier: Apache-2.0
"""Clients of an engine, models that fail or count, and observers."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_triton.engine.choose import build_engine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import Observer
from hf_triton.engine.scheduler import StepOutput
from hf_triton.engine.sequence import Completion, Outcome
from hf_triton.errors import HfTritonError
from hf_triton.runner.step import Step
from hf_triton.sampling.params import SamplingParams
from tests.support.listener import group_of
from tests.support.reference import solo_ids

NOT_CONTINUOUS = ("t5", "bart", "rwkv", "bloom", "mpt", "falcon-rw")
WAIT_S = 60.0
PROMPT = [5, 6, 7, 8]
DRAWN = SamplingParams(12, do_sample=True, temperature=1.5, seed=1)

LoadModel = Callable[..., Any]
"""Of an architecture and a tiny checkpoint's options."""
StartEngine = Callable[..., ContinuousBatchingEngine]
"""Of the engine's options."""


class Client:
    """Submits to an engine and collects outcomes; a second outcome for one sequence fails."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self.num_submitted = 0

    def submit(
        self, prompt: list[int], plan: SamplingParams, is_cancelled: Callable[[], bool] = lambda: False, **options: Any
    ) -> int:
        number = self.num_submitted
        self.num_submitted += 1

        def finish(outcome: Outcome) -> None:
            with self._lock:
                assert number not in self._outcomes, "a second outcome"
                self._outcomes[number] = outcome
                self._lock.notify_all()

        self._engine.submit([group_of(prompt, plan, on_finish=finish, is_cancelled=is_cancelled, **options)])
        return number

    def outcomes(self) -> list[Outcome]:
        with self._lock:
            is_answered = self._lock.wait_for(lambda: len(self._outcomes) == self.num_submitted, WAIT_S)
            assert is_answered, "a request was not answered"
            return [self._outcomes[number] for number in range(self.num_submitted)]

    def ask(self, prompt: list[int], plan: SamplingParams, **options: Any) -> Outcome:
        self.submit(prompt, plan, **options)
        return self.outcomes()[-1]


def start_engine(model: Any, engine: str = "auto", **options: Any) -> Any:
    """The engine that a folder without settings gets, unless `options` say otherwise."""
    return build_engine(model, engine, EngineOptions(**options))


def prompts(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 380) for _ in range(source.randrange(1, longest))] for _ in range(count)]


def token_ids(outcome: Outcome) -> list[list[int]]:
    assert isinstance(outcome, list), outcome
    return [completion.token_ids for completion in outcome]


class Faulty:
    """The engine's model, which fails when `is_hit`, asked with the number of ranges and the new tokens, says so."""

    def __init__(
        self, engine: ContinuousBatchingEngine, is_hit: Callable[[int, list[int]], bool], error: Exception
    ) -> None:
        self._runner, self._model = engine.runner, engine.runner.model
        self._is_hit, self._error = is_hit, error
        self.num_hits = 0
        engine.runner.model = self

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        if self._is_hit(len(self._runner.cache.step.ranges), input_ids.flatten().tolist()):
            self.num_hits += 1
            raise self._error
        return self._model(input_ids=input_ids, **arguments)


class StepsAhead:
    """Counts the steps that began before the tokens of the last one were read."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._run, self.count = engine.executor.run, 0
        engine.executor.run = self._note  # type: ignore[method-assign]

    def _note(self, step: Step) -> Iterator[StepOutput]:
        self.count += step.stays_inflight
        return self._run(step)


def slow_down(engine: ContinuousBatchingEngine, pause_s: float = 0.005) -> None:
    """Make every forward of a tiny model as slow as that of a real one."""

    def pause(*_: object) -> bool:
        time.sleep(pause_s)
        return False

    Faulty(engine, pause, RuntimeError())


Items = list[tuple[list[int], SamplingParams]]


def greedy_ids(model: Any, items: Items) -> list[list[int]]:
    """What `model.generate` generates for each prompt alone."""
    return [
        solo_ids(model, prompt, params.max_new_tokens, repetition_penalty=params.repetition_penalty)
        for prompt, params in items
    ]


def check(
    model: Any,
    client: Client,
    items: Items,
    pause: Callable[[], None] = lambda: None,
    *,
    expected: list[list[int]] | None = None,
) -> None:
    """Submit greedy requests, and compare the outcomes with `expected`, by default `greedy_ids`."""
    if expected is None:  # before submitting: Reformer draws its hashes from torch's generator, which threads share
        expected = greedy_ids(model, items)
    for item in items:
        client.submit(*item)
        pause()
    assert [token_ids(outcome) for outcome in client.outcomes()] == [[ids] for ids in expected]
    assert len({tuple(ids) for ids in expected}) > len(items) / 3  # the output does depend on the prompt


class PreemptCounter(Observer):
    num_sequences = 0

    def on_preempt(self, num_sequences: int) -> None:
        self.num_sequences += num_sequences


class PrefixHits(Observer):
    """Notes the cached tokens of each context."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.counts.append(num_tokens)


def only(outcome: Outcome) -> Completion:
    assert isinstance(outcome, list), outcome
    assert len(outcome) == 1
    return outcome[0]


def error_code(outcome: Outcome) -> str:
    assert isinstance(outcome, HfTritonError), outcome
    return outcome.code


class Counting:
    """The engine's model, which counts the tokens that it is given."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._model, self.num_tokens = engine.runner.model, 0
        engine.runner.model = self

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        self.num_tokens += input_ids.numel()
        return self._model(input_ids=input_ids, **arguments)
