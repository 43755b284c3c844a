# SPDX-License-Identifier: Apache-2.0
"""Failures of the model or the memory in the continuous engine change no other sequence's output."""

import random
import threading
import time
from typing import Any

import pytest
import torch
from hf_triton.runner.kv_cache import KVCache
from hf_triton.runner.kv_lanes import KVCacheLanes

from hf_triton.engine import executor
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.sequence import Outcome, SequenceGroup
from hf_triton.errors import GenerationError, HfTritonError, UnavailableError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledTokens
from tests.support.architectures import BASE, build
from tests.support.engine import (
    PROMPT,
    WAIT_S,
    Client,
    Faulty,
    LoadModel,
    StartEngine,
    check,
    error_code,
    greedy_ids,
    prompts,
    slow_down,
    token_ids,
)

POISON = 377


def test_only_the_prompt_that_makes_the_model_raise_is_refused(model: Any, start: StartEngine) -> None:
    engine = start()
    faulty = Faulty(engine, lambda _, ids: POISON in ids, RuntimeError("boom"))
    client = Client(engine)
    clean = [[each for each in prompt if each != POISON] + [4] for prompt in prompts(12, seed=4)]
    items = [(prompt, SamplingParams(1 + index)) for index, prompt in enumerate(clean)]
    for index, (prompt, params) in enumerate(items):
        client.submit([POISON, *prompt] if index == 6 else prompt, params)
    outcomes = client.outcomes()
    assert faulty.num_hits > 0
    for index, (ids, outcome) in enumerate(zip(greedy_ids(model, items), outcomes, strict=True)):
        if index == 6 or POISON in ids[:-1]:
            assert isinstance(outcome, GenerationError)
        else:
            assert token_ids(outcome) == [ids]
    assert engine.is_healthy()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_out_of_memory_changes_no_output(limit: int, model_of: LoadModel, start: StartEngine) -> None:
    model = model_of("falcon", eos_token_id=None)
    engine = start(model)
    faulty = Faulty(engine, lambda num_rows, _: num_rows > limit, torch.OutOfMemoryError("CUDA out of memory"))
    items = [(prompt, SamplingParams(1 + index % 17)) for index, prompt in enumerate(prompts(20, seed=5))]
    check(model, Client(engine), items)
    assert faulty.num_hits > 0


@pytest.mark.parametrize("method", ["add", "_lay_out"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=str)
def test_failure_while_sequences_get_slots_changes_no_output(
    method: str, error: Exception, model: Any, start: StartEngine
) -> None:
    engine = start()
    failures = [error] * 3

    class Failing(KVCache):
        """Fails now and then in the middle of its work, as an allocation does."""

    def fail(self: KVCache, *arguments: Any) -> None:
        if self.num_rows and failures:
            self.is_corrupt = method == "_lay_out"
            raise failures.pop()
        getattr(KVCache, method)(self, *arguments)

    setattr(Failing, method, fail)
    engine.memory.lanes._lanes = [Failing(engine.forward.device)]
    check(model, Client(engine), [(prompt, SamplingParams(5 + at)) for at, prompt in enumerate(prompts(20, seed=12))])
    assert len(failures) < 3


@pytest.mark.parametrize("chunk_size", [16, 512])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
def test_random_failures_change_no_output(seed: int, chunk_size: int, model_of: LoadModel, start: StartEngine) -> None:
    """Each of several sequences survives a failure of their batch; a sequence alone never fails here."""
    config = EngineConfig(chunk_sizes=ChunkSizes(chunk_size, chunk_size // 2, per_weights=16))
    model, source = model_of("falcon", eos_token_id=None), random.Random(seed)
    engine = start(model, config=config)
    error = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")][seed % 2]
    faulty = Faulty(engine, lambda num_rows, _: num_rows > 1 and source.random() < 0.08, error)
    client = Client(engine)
    items = [
        (
            prompt,
            SamplingParams(source.randrange(1, 25), do_sample=True, seed=index, num_return_sequences=1 + index % 3),
        )
        for index, prompt in enumerate(prompts(30, seed=13))
    ]
    for item in items:
        client.submit(*item)
        time.sleep(source.choice([0, 0.002]))
    outcomes = client.outcomes()
    assert faulty.num_hits > 0
    calm = Client(start(model, config=config))
    assert [token_ids(calm.ask(*item)) for item in items] == [token_ids(outcome) for outcome in outcomes]
    assert engine.is_healthy()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("boom")], ids=str)
def test_failure_before_a_prefill_loses_no_request(
    error: Exception, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, engine = random.Random(3), start()
    make, num_failed = executor.Prefill, 0

    def make_or_fail(*arguments: Any, **options: Any) -> Any:
        nonlocal num_failed
        if source.random() < 0.2 and num_failed < 5:
            num_failed += 1
            raise error
        return make(*arguments, **options)

    monkeypatch.setattr(executor, "Prefill", make_or_fail)
    client = Client(engine)
    for prompt in prompts(12, seed=5):
        client.submit(prompt, SamplingParams(4))
    outcomes = client.outcomes()
    assert num_failed > 0
    assert engine.is_healthy()
    assert all(isinstance(outcome, (list, HfTritonError)) for outcome in outcomes)
    assert sum(isinstance(outcome, list) for outcome in outcomes) >= 12 - num_failed


def test_a_prompt_that_never_fits_is_refused_and_the_next_one_runs(model: Any, start: StartEngine) -> None:
    engine = start()
    Faulty(engine, lambda _, ids: len(ids) > 50, torch.OutOfMemoryError("CUDA out of memory"))
    client = Client(engine)
    refused = client.ask(list(range(3, 70)), SamplingParams(4))
    assert isinstance(refused, UnavailableError)
    assert refused.code == "out_of_memory"
    item = [5, 6], SamplingParams(4)
    assert token_ids(client.ask(*item)) == greedy_ids(model, [item])


def test_a_fatal_error_answers_all_requests(model: Any) -> None:
    ended = threading.Event()
    engine = ContinuousBatchingEngine(model, max_num_seqs=3, on_fatal=ended.set)
    Faulty(engine, lambda num_rows, _: num_rows == 3, RuntimeError("CUDA error: device-side assert triggered"))
    client = Client(engine)
    for prompt in prompts(9, seed=6):
        client.submit(prompt, SamplingParams(30))
    assert {error_code(outcome) for outcome in client.outcomes()} == {"engine_failed"}
    assert ended.wait(WAIT_S)
    assert not engine.is_healthy()
    late = client.ask([5], SamplingParams(1))
    assert isinstance(late, UnavailableError)


def test_preempted_sequences_are_answered_if_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, add, num_added = ContinuousBatchingEngine(build("LlamaConfig", BASE), max_num_seqs=4), KVCacheLanes.add, [0]

    def fail_at_the_second(self: KVCacheLanes, *arguments: Any) -> int:
        num_added[0] += 1
        if num_added[0] == 2:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        return add(self, *arguments)

    def fail(self: KVCacheLanes, row: int) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(KVCacheLanes, "add", fail_at_the_second)
    monkeypatch.setattr(KVCacheLanes, "remove", fail)
    client = Client(engine)
    try:
        with engine.queue.changed:
            for _ in range(2):
                client.submit([5] * 6, SamplingParams(30))
        assert [error_code(outcome) for outcome in client.outcomes()] == ["engine_failed"] * 2
    finally:
        engine.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("boom")])
def test_failure_after_a_step_changes_no_output(
    error: Exception, model: Any, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [error] * 3

    def fail(logits: torch.Tensor, rows: Any, num_ahead: int) -> Any:
        if len(rows) > 1 and failures:
            raise failures.pop()
        return SampledTokens(logits, rows, num_ahead)

    monkeypatch.setattr(executor, "SampledTokens", fail)
    check(model, Client(start()), [(prompt, SamplingParams(12)) for prompt in prompts(14, seed=23)])
    assert not failures


def test_batch_that_ran_out_of_memory_is_not_tried_at_every_step(start: StartEngine) -> None:
    engine = start(max_num_seqs=8)
    faulty = Faulty(engine, lambda num_rows, _: num_rows > 4, torch.OutOfMemoryError("CUDA out of memory"))
    client = Client(engine)
    for prompt in prompts(8, seed=24):
        client.submit(prompt, SamplingParams(60))
    assert all(isinstance(outcome, list) for outcome in client.outcomes())
    assert faulty.num_hits <= 3


def test_corrupt_memory_refuses_no_sequence(model: Any, start: StartEngine) -> None:
    engine = start()
    remove, failures = engine.memory.lanes.remove, [RuntimeError("boom")]

    def fail(row: int) -> int:
        if failures:
            raise failures.pop()
        return remove(row)

    engine.memory.lanes.remove = fail  # type: ignore[method-assign]
    check(model, Client(engine), [(prompt, SamplingParams(5 + at)) for at, prompt in enumerate(prompts(8, seed=27))])
    assert engine.is_healthy()


# --- callbacks that raise --------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As the tokenizer's Rust code raises."""


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        ("on_token", PanicException()),
        ("is_cancelled", PanicException()),
        ("is_cancelled", RuntimeError("no answer from Triton")),
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


def test_a_panic_in_on_finish_ends_no_other_sequence(start: StartEngine) -> None:
    def panic(_: Outcome) -> None:
        raise PanicException

    engine = start()
    engine.submit([SequenceGroup([5, 6], SamplingParams(3), panic)])
    assert token_ids(Client(engine).ask([5, 6], SamplingParams(3)))
    assert engine.is_healthy()
