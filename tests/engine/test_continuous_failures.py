# SPDX-License-Identifier: Apache-2.0
"""Failures of the model or the memory in the continuous engine change no other sequence's output."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.executor import InflightStep
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.step_draft import StepDraft
from hf_triton.errors import GenerationError, UnavailableError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import STATES, build
from tests.support.engine import (
    PROMPT,
    WAIT_S,
    Client,
    Faulty,
    Items,
    StartEngine,
    StepsAhead,
    check,
    error_code,
    greedy_ids,
    prompts,
    slow_down,
    token_ids,
)
from tests.support.marks import full

POISON = 299
NO_MEMORY, BOOM = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")
SMALL = ChunkSizes(48, 24)
PLACES: dict[str, Callable[[ContinuousBatchingEngine], tuple[Any, str]]] = {
    "schedule": lambda _: (StepDraft, "add"),
    "allocate": lambda engine: (engine.memory.pool, "allocate"),
    "copy blocks": lambda engine: (engine.runner.cache, "copy_blocks"),
    "forward": lambda engine: (engine.runner.cache.layers[1], "update"),
    "sample": lambda engine: (engine.executor, "_launch"),
    "read": lambda _: (InflightStep, "read"),
    "update": lambda engine: (engine.scheduler, "_append"),
    "fork": lambda engine: (engine.scheduler, "_share_blocks"),
}
"""The methods in which a step fails: most are called several times a step, so a part of the step is done."""


def mixed_items() -> Items:
    """Greedy and drawn sequences, several of a prompt, and some that the host must see token by token."""
    source = random.Random(13)
    return [
        (
            prompt,
            SamplingParams(
                source.randrange(1, 25),
                do_sample=index % 2 == 0,
                seed=index,
                num_return_sequences=1 + index % 3 if index % 2 == 0 else 1,
                repetition_penalty=1.3 if index % 12 == 0 else 1.0,
                prompt_logprobs=0 if index % 9 == 0 else None,
            ),
        )
        for index, prompt in enumerate(prompts(16, seed=13))
    ]


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[list[int]]]:
    """The tokens of `mixed_items`, each alone."""
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=6))
    outputs = [token_ids(Client(engine).ask(prompt, params)) for prompt, params in mixed_items()]
    engine.close()
    return outputs


@contextmanager
def together(engine: ContinuousBatchingEngine) -> Iterator[Client]:
    """What is submitted to this client is queued before the engine takes any of it."""
    with engine.queue.changed:
        yield Client(engine)


class Failures:
    """A method of the engine that fails now and then, but never while one prompt is alone."""

    def __init__(
        self, engine: ContinuousBatchingEngine, place: str, error: Exception, patch: pytest.MonkeyPatch
    ) -> None:
        owner, name = PLACES[place](engine)
        self._engine, self._error, self._work = engine, error, getattr(owner, name)
        self._source, self.num_hits = random.Random(place), 0
        patch.setattr(owner, name, lambda *arguments, **options: self._call(*arguments, **options))
        self._is_after = place == "sample"

    def _call(self, *arguments: Any, **options: Any) -> Any:
        fails = self._fails()
        if not fails or self._is_after:
            result = self._work(*arguments, **options)
        if fails:
            self.num_hits += 1
            raise self._error
        return result

    def _fails(self) -> bool:
        groups = {id(sequence.group) for sequence in self._engine.scheduler.running}
        return len(groups) > 1 and self.num_hits < 6 and self._source.random() < 0.2


def check_nothing_is_held(engine: ContinuousBatchingEngine) -> None:
    assert engine.is_healthy()
    engine.close()
    assert (engine.memory.pool.num_held, engine.scheduler.running, list(engine.scheduler.waiting)) == (0, [], [])


@pytest.mark.parametrize(
    ("error", "runs_ahead"),
    [(BOOM, True), *full((BOOM, False), (NO_MEMORY, True))],
    ids=str,
)
@pytest.mark.parametrize("place", [*list(PLACES)[::2], *full(*list(PLACES)[1::2])])
def test_a_failed_step_changes_no_output(
    place: str,
    error: Exception,
    runs_ahead: bool,
    expected: list[list[list[int]]],
    start: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start(config=EngineConfig(block_size=16, chunk_sizes=SMALL, runs_ahead=runs_ahead))
    failures, steps = Failures(engine, place, error, monkeypatch), StepsAhead(engine)
    with together(engine) as client:
        for item in mixed_items():
            client.submit(*item)
    assert [token_ids(outcome) for outcome in client.outcomes()] == expected
    assert failures.num_hits > 0
    assert (steps.count > 9) == runs_ahead
    check_nothing_is_held(engine)


@pytest.mark.parametrize(("name", "error"), [("lfm2", NO_MEMORY), *full(("falcon-h1", BOOM))], ids=str)
def test_a_failed_step_changes_no_states(
    name: str, error: Exception, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(*STATES[name])
    engine = start(model, config=EngineConfig(block_size=16, chunk_sizes=SMALL))
    failures = Failures(engine, "sample", error, monkeypatch)
    items = [([token % 300 for token in prompt], params) for prompt, params in mixed_items()[:12]]
    with together(engine) as client:
        for item in items:
            client.submit(*item)
    outcomes = client.outcomes()
    assert failures.num_hits > 0
    calm = Client(start(model))
    assert [token_ids(outcome) for outcome in outcomes] == [token_ids(calm.ask(*item)) for item in items]


# --- the one at fault ------------------------------------------------------------------------------------------------


def poisoned(count: int, at: int) -> Items:
    """Prompts of which one has the token that makes the model fail."""
    items = [
        ([token % 290 + 3 for token in prompt] + [4], SamplingParams(3)) for prompt in prompts(count, 4, longest=9)
    ]
    items[at][0].insert(0, POISON)
    return items


@pytest.mark.parametrize("at", [0, 6, 15])
def test_the_prompt_at_fault_is_found_by_halves(at: int, model: Any, start: StartEngine) -> None:
    engine, items = start(max_num_seqs=16), poisoned(16, at)
    faulty = Faulty(engine, lambda _, ids: POISON in ids, BOOM)
    with together(engine) as client:
        for item in items:
            client.submit(*item)
    outcomes = client.outcomes()
    assert isinstance(outcomes.pop(at), GenerationError)
    del items[at]
    assert [token_ids(outcome) for outcome in outcomes] == [[ids] for ids in greedy_ids(model, items)]
    assert faulty.num_hits == 5  # in companies of 16, 8, 4, 2, and alone
    check_nothing_is_held(engine)


def test_a_prompt_that_cannot_be_scheduled_is_refused_alone(
    model: Any, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, items = start(), poisoned(8, at=3)
    work = engine.scheduler._take_blocks

    def fail(sequence: Any, *arguments: Any) -> None:
        if POISON in sequence.group.prompt_ids:
            raise BOOM
        work(sequence, *arguments)

    monkeypatch.setattr(engine.scheduler, "_take_blocks", fail)
    with together(engine) as client:
        for item in items:
            client.submit(*item)
    outcomes = client.outcomes()
    assert isinstance(outcomes.pop(3), GenerationError)
    del items[3]
    assert [token_ids(outcome) for outcome in outcomes] == [[ids] for ids in greedy_ids(model, items)]
    check_nothing_is_held(engine)


def test_sequences_that_cannot_be_recomputed_are_refused_if_they_had_tokens(start: StartEngine) -> None:
    name, arguments = STATES["mamba2"]
    model = build(name, {**arguments, "time_step_limit": (0.01, 0.1)})
    engine = start(model)
    faulty = Faulty(engine, lambda _, ids: POISON in ids and faulty.num_hits == 0, BOOM)
    client = Client(engine)
    late = [POISON, 5, 6], SamplingParams(8)

    def join(index: int, token_id: int, _: Any) -> bool:
        if client.num_submitted == 1:
            client.submit(*late)
        return False

    client.submit([7, 8, 9], SamplingParams(100), on_token=join)
    begun, waited = client.outcomes()[0], client.outcomes()[1]
    assert error_code(begun) == "generation_failed"
    assert token_ids(waited) == greedy_ids(model, [late])
    assert faulty.num_hits == 1


@pytest.mark.parametrize("name", ["llama", *full("falcon-h1")])
def test_nan_stays_in_its_own_sequence(name: str, model: Any, start: StartEngine) -> None:
    model = build(*STATES[name]) if name in STATES else model
    engine = start(model, max_cache_tokens=16 * 16, config=EngineConfig(block_size=16))

    def spoil(_: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where(arguments[0][..., None] == POISON, float("nan"), output)

    items = [([token % 290 + 3 for token in prompt], SamplingParams(9)) for prompt in prompts(30, seed=6)]
    for prompt, _ in items[::5]:
        prompt.insert(0, POISON)
    healthy = [item for index, item in enumerate(items) if index % 5]
    expected = greedy_ids(model, healthy)
    hook = model.get_input_embeddings().register_forward_hook(spoil)
    try:
        with together(engine) as client:
            for item in items:
                client.submit(*item)
        outcomes = client.outcomes()
    finally:
        hook.remove()
    assert [token_ids(outcome) for index, outcome in enumerate(outcomes) if index % 5] == [[ids] for ids in expected]


# --- out of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_out_of_memory_lowers_the_number_that_run(limit: int, model: Any, start: StartEngine) -> None:
    engine = start()
    faulty = Faulty(engine, lambda num_ranges, _: num_ranges > limit, NO_MEMORY)
    items = [(prompt, SamplingParams(1 + index % 17)) for index, prompt in enumerate(prompts(20, seed=5))]
    check(model, Client(engine), items)
    assert faulty.num_hits > 0


def test_a_step_that_ran_out_of_memory_is_not_tried_at_once_again(start: StartEngine) -> None:
    engine = start(max_num_seqs=8)
    faulty = Faulty(engine, lambda num_ranges, _: num_ranges > 4, NO_MEMORY)
    with together(engine) as client:
        for prompt in prompts(8, seed=24):
            client.submit(prompt, SamplingParams(60))
    assert all(isinstance(outcome, list) for outcome in client.outcomes())
    assert faulty.num_hits <= 3


def test_a_prompt_that_never_fits_is_refused_and_the_next_one_runs(model: Any, start: StartEngine) -> None:
    engine = start()
    Faulty(engine, lambda _, ids: len(ids) > 50, NO_MEMORY)
    client = Client(engine)
    refused = client.ask(list(range(3, 70)), SamplingParams(4))
    assert isinstance(refused, UnavailableError)
    assert refused.code == "out_of_memory"
    item = [5, 6], SamplingParams(4)
    assert token_ids(client.ask(*item)) == greedy_ids(model, [item])


# --- a lost device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("errors", [[], [BOOM]], ids=["at once", "after another failure"])
def test_a_lost_device_answers_all_requests(errors: list[Exception], runs_ahead: bool, model: Any) -> None:
    ended = threading.Event()
    config = EngineConfig(runs_ahead=runs_ahead)
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=3, on_fatal=ended.set, config=config))
    left, steps = [*errors, RuntimeError("CUDA error: device-side assert triggered")], iter(range(99))

    def fail(*_: Any) -> bool:
        if next(steps) >= 5 and left:
            raise left.pop(0)
        return False

    Faulty(engine, fail, BOOM)
    with together(engine) as client:
        for prompt in prompts(9, seed=6):
            client.submit(prompt, SamplingParams(30))
    assert {error_code(outcome) for outcome in client.outcomes()} == {"engine_failed"}
    assert ended.wait(WAIT_S)
    assert not engine.is_healthy()
    late = client.ask([5], SamplingParams(1))
    assert isinstance(late, UnavailableError)


# --- callbacks that raise --------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As the tokenizer's Rust code raises."""


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        ("on_token", PanicException()),
        *full(("is_cancelled", PanicException()), ("is_cancelled", RuntimeError("no answer from Triton"))),
    ],
    ids=repr,
)
def test_a_callback_that_raises_refuses_its_own_request_only(
    callback: str, error: BaseException, model: Any, start: StartEngine
) -> None:
    def fail(*_: object) -> bool:
        raise error

    engine = start()
    slow_down(engine)
    client = Client(engine)
    client.submit(PROMPT, SamplingParams(190), **{callback: fail})
    client.submit(PROMPT, SamplingParams(150))
    guilty, other = client.outcomes()
    assert error_code(guilty) == "internal"
    assert token_ids(other) == greedy_ids(model, [(PROMPT, SamplingParams(150))])
    assert engine.is_healthy()
