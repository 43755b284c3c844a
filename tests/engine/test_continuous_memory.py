# SPDX-License-Identifier: Apache-2.0
"""Memory limits, prefix caching and failed steps of the continuous engine."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hf_triton.engine import executor
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.errors import RequestError, UnavailableError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledTokens
from hf_triton.testing.checkpoints import VOCAB_SIZE
from tests.support.engine import (
    DRAWN,
    PROMPT,
    Client,
    Counting,
    Faulty,
    error_code,
    only,
    prompts,
    slow_down,
    token_ids,
)
from tests.support.reference import solo_ids

# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [16, 512])
@pytest.mark.parametrize("max_tokens", [256, 600, 1500])
def test_small_kv_cache_is_never_exceeded_and_changes_no_output(
    max_tokens: int, piece: int, model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(piece, piece // 2, per_weights=16))
    source = random.Random(max_tokens)
    engine = start(max_num_seqs=8, max_cache_tokens=max_tokens, config=config)
    most: list[int] = []

    def watch(*_: object) -> bool:
        most.append(engine.memory.num_used_tokens)
        return False

    Faulty(engine, watch, RuntimeError())
    client = Client(engine)
    items = [(prompt, SamplingParams(source.randrange(1, 60))) for prompt in prompts(40, seed=22)]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert only(outcome).token_ids == solo_ids(model, prompt, plan.max_new_tokens)
    assert max(most) <= max_tokens


def test_prompt_that_can_never_fit_is_refused_at_submit(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    refused = Client(start(max_cache_tokens=256)).ask(PROMPT, SamplingParams(200))
    assert isinstance(refused, RequestError)
    assert refused.code == "memory_exceeded"
    for words in ("4 tokens", "max_new_tokens 200", "512 tokens", "256 tokens", "max_cache_tokens"):
        assert words in refused.sentence


def test_shrunken_memory_refuses_no_sequence_for_good(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    config = EngineConfig(max_memory_wait_s=0.1)
    engine = start(config=config)
    allowed = [0]
    engine.memory.budget.tokens = lambda held: allowed[0]  # type: ignore[method-assign]
    client = Client(engine)
    refused = client.ask(PROMPT, SamplingParams(5))
    assert isinstance(refused, UnavailableError)
    assert refused.code == "out_of_memory"
    allowed[0] = 10_000
    assert only(client.ask(PROMPT, SamplingParams(5))).token_ids == solo_ids(model, PROMPT, 5)


def test_each_context_waits_for_memory_anew(start: Callable[..., ContinuousBatchingEngine]) -> None:
    config = EngineConfig(max_memory_wait_s=1.0)
    engine = start(config=config)
    engine.memory.budget.tokens = lambda held: 0  # type: ignore[method-assign]
    client = Client(engine)
    gone = threading.Event()
    client.submit(PROMPT, SamplingParams(5), is_cancelled=gone.is_set)
    client.submit(PROMPT, SamplingParams(5))
    time.sleep(0.7)
    gone.set()
    left_s = time.monotonic()
    assert [error_code(outcome) for outcome in client.outcomes()] == ["cancelled", "out_of_memory"]
    assert time.monotonic() - left_s >= 0.9
    for _ in range(2):
        started_s = time.monotonic()
        assert error_code(client.ask(PROMPT, SamplingParams(5))) == "out_of_memory"
        assert time.monotonic() - started_s >= 1.0


# --- shared prefixes -------------------------------------------------------------------------------------------------


def shared_prompts(seed: int) -> list[list[int]]:
    """Prompts of which many begin alike: some with a system prompt, some going on from another."""
    source = random.Random(seed)
    systems = [[source.randrange(3, 380) for _ in range(length)] for length in (20, 45, 70)]
    items: list[list[int]] = []
    for _ in range(50):
        start = source.choice([*systems, *items, []])
        items.append(
            [*start[: source.randrange(10, 150)], *(source.randrange(3, 380) for _ in range(source.randrange(1, 30)))]
        )
    return items


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_prefix_is_computed_once_and_changes_no_text(
    seed: int, model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    source = random.Random(seed)
    items = [(prompt, SamplingParams(source.randrange(1, 25))) for prompt in shared_prompts(seed)]
    counts = []
    for enable_prefix_caching in (True, False):
        engine = start(enable_prefix_caching=enable_prefix_caching)
        counting = Counting(engine)
        client = Client(engine)
        for item in items:
            client.submit(*item)
            time.sleep(source.choice([0, 0, 0.005]))
        for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
            assert only(outcome).token_ids == solo_ids(model, prompt, plan.max_new_tokens)
        counts.append(counting.num_tokens)
    assert counts[0] < 0.8 * counts[1]


def test_the_next_turn_computes_only_what_is_new(model: Any, start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start()
    counting, client = Counting(engine), Client(engine)
    conversation = list(range(10, 70))
    for turn in range(3):
        before = counting.num_tokens
        answer = only(client.ask(conversation, SamplingParams(10))).token_ids
        assert answer == solo_ids(model, conversation, 10)
        # 9 steps, the last token of the turn before, and the 5 tokens of this turn
        assert counting.num_tokens - before == (60 + 9 if turn == 0 else 9 + 1 + 5)
        conversation = [*conversation, *answer, 200, 201, 202, 203, 204]


class Closing:
    """Lets a text hold anything, and has it end with tokens of its own."""

    def bitmask(self) -> npt.NDArray[np.uint8]:
        return np.full(VOCAB_SIZE // 8 + 1, 255, np.uint8)

    def enforce(self, token_id: int) -> int:
        return token_id

    def completion_tokens(self) -> list[int]:
        return [50, 51, 52, 53, 54, 2]

    def accept(self, token_id: int) -> None: ...


def test_tokens_that_a_deadline_adds_to_a_text_were_not_computed(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    engine, prompt = start(), list(range(10, 40))
    slow_down(engine, 0.02)
    client = Client(engine)
    plan = SamplingParams(240, eos_ids=frozenset([2]))
    late = only(client.ask(prompt, plan, constraint=Closing, deadline_s=time.monotonic() + 2))
    assert late.finish_reason == "deadline"
    assert late.token_ids[-5:] == [50, 51, 52, 53, 54]
    conversation = [*prompt, *late.token_ids, 200, 201]
    (found,) = only(client.ask(conversation, SamplingParams(1, logprobs=0))).logprobs or []
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([conversation])).logits[0, -1].log_softmax(-1)
    assert found.logprob == pytest.approx(expected[found.token_id].item(), abs=1e-4)


def test_sharing_off_computes_everything(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(enable_prefix_caching=False)
    counting, client = Counting(engine), Client(engine)
    for _ in range(3):
        client.ask(list(range(10, 70)), SamplingParams(1))
    assert counting.num_tokens == 180


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("boom")])
def test_a_failure_after_a_step_changes_no_text(
    error: Exception, model: Any, start: Callable[..., ContinuousBatchingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [error] * 3

    def fail(logits: torch.Tensor, rows: Any, num_ahead: int) -> Any:
        if len(rows) > 1 and failures:
            raise failures.pop()
        return SampledTokens(logits, rows, num_ahead)

    monkeypatch.setattr(executor, "SampledTokens", fail)
    client = Client(start())
    items = [(prompt, SamplingParams(12)) for prompt in prompts(14, seed=23)]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert only(outcome).token_ids == solo_ids(model, prompt, plan.max_new_tokens)
    assert not failures


def test_memory_that_ran_out_is_not_asked_for_again_at_every_step(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    engine = start(max_num_seqs=8)
    faulty = Faulty(engine, lambda num_rows, _: num_rows > 4, torch.OutOfMemoryError("CUDA out of memory"))
    client = Client(engine)
    for prompt in prompts(8, seed=24):
        client.submit(prompt, SamplingParams(60))
    assert all(isinstance(outcome, list) for outcome in client.outcomes())
    assert faulty.num_hits <= 3


def test_a_long_prompt_into_full_buffers_keeps_to_the_memory(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    engine = start(max_num_seqs=4, max_cache_tokens=640)
    most: list[int] = []
    Faulty(engine, lambda *_: bool(most.append(engine.memory.num_used_tokens)), RuntimeError())
    client = Client(engine)
    for prompt in prompts(4, seed=25, longest=30):
        client.submit(prompt, SamplingParams(20))
    client.outcomes()
    long = prompts(1, seed=26, longest=2)[0] * 200
    assert only(client.ask(long, SamplingParams(8))).token_ids == solo_ids(model, long, 8)
    assert max(most) <= 640


def test_more_texts_than_fit_at_a_time_are_written_one_after_another(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    wanted = Client(start(max_num_seqs=8)).ask(PROMPT, replace(DRAWN, num_return_sequences=8))
    found = Client(start(max_num_seqs=8, max_cache_tokens=512)).ask(PROMPT, replace(DRAWN, num_return_sequences=8))
    assert token_ids(found) == token_ids(wanted)


def test_a_panic_while_asking_for_a_cancel_ends_its_own_text_alone(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    class PanicException(BaseException):
        """As Rust code raises."""

    def panic() -> bool:
        raise PanicException

    engine = start()
    client = Client(engine)
    client.submit(PROMPT, SamplingParams(20), panic)
    client.submit(PROMPT, SamplingParams(20))
    guilty, other = client.outcomes()
    assert error_code(guilty) == "internal"
    assert only(other).finish_reason == "length"
    assert engine.is_healthy()


def test_corrupt_memory_refuses_no_sequence(model: Any, start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start()
    remove, failures = engine.memory.lanes.remove, [RuntimeError("boom")]

    def fail(row: int) -> int:
        if failures:
            raise failures.pop()
        return remove(row)

    engine.memory.lanes.remove = fail  # type: ignore[method-assign]
    client = Client(engine)
    items = [(prompt, SamplingParams(5 + index)) for index, prompt in enumerate(prompts(8, seed=27))]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert only(outcome).token_ids == solo_ids(model, prompt, plan.max_new_tokens)
    assert engine.is_healthy()
