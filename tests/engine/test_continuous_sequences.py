# SPDX-License-Identifier: Apache-2.0
"""What a row of the continuous engine may ask for: stops, deadlines, log probabilities, memory, shared prefixes."""

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hf_triton.engine import executor
from hf_triton.engine import worker as thread
from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.plan import PrefillRequest, is_worth_one_batch
from hf_triton.engine.types import Completion, Observer, Outcome, SequenceGroup
from hf_triton.errors import CancelledError, HfTritonError, RequestError, UnavailableError
from hf_triton.runner.device import CHUNK_SIZES, ChunkSizes, DeviceContext
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledTokens
from hf_triton.testing import build_tiny_checkpoint
from hf_triton.testing.checkpoints import VOCAB_SIZE
from tests.support.architectures import BASE, build
from tests.support.engine import Client, Faulty, prompts, slow_down, token_ids
from tests.support.reference import load_reference, solo_ids

PROMPT = [5, 6, 7, 8]
DRAWN = SamplingParams(12, do_sample=True, temperature=1.5, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    build_tiny_checkpoint(folder, "llama", eos_token_id=None)
    return load_reference(folder).model


@pytest.fixture(params=["eager", "static"])
def start(model: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., ContinuousBatchingEngine]]:
    engines: list[ContinuousBatchingEngine] = []

    def start(**options: Any) -> ContinuousBatchingEngine:
        engines.append(ContinuousBatchingEngine(model, **{"max_num_seqs": 6, "decoding": request.param, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


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
        self._model, self.num_tokens = engine.forward._model, 0
        engine.forward._model = self

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        self.num_tokens += input_ids.numel()
        return self._model(input_ids=input_ids, **arguments)


# --- how a text ends -------------------------------------------------------------------------------------------------


def test_a_listener_hears_every_token_and_can_end_the_text(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    whole = solo_ids(model, PROMPT, 20)
    heard: list[tuple[int, int]] = []

    def listen(copy: int, token_id: int) -> bool:
        heard.append((copy, token_id))
        return len(heard) == 7

    completion = only(Client(start()).ask(PROMPT, SamplingParams(20), on_token=listen))
    assert completion == Completion(whole[:7], "stop_string")
    assert heard == [(0, token_id) for token_id in whole[:7]]


def test_the_finish_reason_says_how_a_text_ended(model: Any, start: Callable[..., ContinuousBatchingEngine]) -> None:
    whole = solo_ids(model, PROMPT, 20)
    client = Client(start())
    assert only(client.ask(PROMPT, SamplingParams(20))).finish_reason == "length"
    own = only(client.ask(PROMPT, SamplingParams(20, eos_ids=frozenset([whole[3]]))))
    assert own == Completion(whole[: whole.index(whole[3])], "eos")
    late = only(client.ask(PROMPT, SamplingParams(20, min_new_tokens=10, eos_ids=frozenset([whole[3]]))))
    assert len(late.token_ids) >= 10
    assert whole[3] not in late.token_ids[:10]


def test_a_listener_that_raises_harms_its_own_text_alone(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    class PanicException(BaseException):
        """As the tokenizer's Rust code raises."""

    def panic(*_: int) -> bool:
        raise PanicException

    engine = start()
    client = Client(engine)
    client.submit(PROMPT, SamplingParams(20), on_token=panic)
    client.submit(PROMPT, SamplingParams(20))
    guilty, other = client.outcomes()
    assert error_code(guilty) == "internal"
    assert only(other).token_ids == solo_ids(model, PROMPT, 20)
    assert engine.is_healthy()


def test_a_prompt_whose_time_is_up_is_not_begun(model: Any, start: Callable[..., ContinuousBatchingEngine]) -> None:
    client = Client(start())
    for _ in range(20):
        assert error_code(client.ask(PROMPT, SamplingParams(3), deadline_s=time.monotonic())) == "deadline_exceeded"
    cancelled = client.ask(PROMPT, SamplingParams(3), is_cancelled=lambda: True)
    assert error_code(cancelled) == "cancelled"


def test_a_text_ends_at_its_deadline_with_what_it_has(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    engine = start()
    slow_down(engine)
    client = Client(engine)
    heard = threading.Event()

    def listen(*_: int) -> bool:
        heard.set()
        return False

    # Generous, because the first token must come before it on a busy machine; the whole would take longer.
    plan = SamplingParams(240)
    slow_down(engine, 0.02)
    client.submit(PROMPT, plan, deadline_s=time.monotonic() + 2, on_token=listen)
    completion = only(client.outcomes()[0])
    assert heard.is_set()
    assert completion.finish_reason == "deadline"
    assert 0 < len(completion.token_ids) < 240
    assert completion.token_ids == solo_ids(model, PROMPT, len(completion.token_ids))


def test_waiting_counts_and_what_comes_too_late_is_refused(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(max_num_seqs=1)
    slow_down(engine, 0.02)
    client = Client(engine)
    client.submit(PROMPT, SamplingParams(100))
    client.submit(PROMPT, SamplingParams(1), deadline_s=time.monotonic() + 0.2)
    first, second = client.outcomes()
    assert only(first).finish_reason == "length"
    assert error_code(second) == "deadline_exceeded"


def test_a_cancelled_text_takes_part_in_no_further_step(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start()
    heard: list[int] = []
    gone = threading.Event()

    def listen(_: int, token_id: int) -> bool:
        heard.append(token_id)
        if len(heard) == 5:
            gone.set()
        return False

    outcome = Client(engine).ask(PROMPT, SamplingParams(100), is_cancelled=gone.is_set, on_token=listen)
    assert isinstance(outcome, CancelledError)
    assert len(heard) == 5


# --- the queue -------------------------------------------------------------------------------------------------------


def test_a_folders_code_that_waits_keeps_nobody_from_the_queue(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(max_num_seqs=2)
    client, is_entered, may_go = Client(engine), threading.Event(), threading.Event()

    def wait() -> None:
        is_entered.set()
        assert may_go.wait(60)

    client.submit(PROMPT, SamplingParams(3), logits_processor=wait)
    assert is_entered.wait(60)
    with ThreadPoolExecutor(1) as pool:
        others = [pool.submit(client.submit, PROMPT, SamplingParams(3)) for _ in range(2)]
        wait_for(others, 30)
        are_taken = [each.done() for each in others]
        may_go.set()
    assert are_taken == [True, True]
    assert all(isinstance(outcome, list) for outcome in client.outcomes())


def test_who_is_admitted_when_the_engine_fails_is_answered(
    start: Callable[..., ContinuousBatchingEngine], caplog: pytest.LogCaptureFixture
) -> None:
    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("as the prompt says, secret")

    client = Client(start(max_num_seqs=2))
    client.submit(PROMPT, SamplingParams(3), logits_processor=panic)
    client.submit(PROMPT, SamplingParams(3))
    assert [error_code(outcome) for outcome in client.outcomes()] == ["engine_failed"] * 2
    assert f"PanicException in panic ({Path(__file__).name}:" in caplog.text
    assert "secret" not in caplog.text


def test_a_failed_engine_answers_everyone_though_the_log_takes_no_line(
    start: Callable[..., ContinuousBatchingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread.logger, "error", Mock(side_effect=RuntimeError("the log is gone")))
    engine = start(max_num_seqs=2)
    engine.step = Mock(side_effect=SystemError)  # type: ignore[method-assign]
    client = Client(engine)
    client.submit(PROMPT, SamplingParams(3))
    assert [error_code(outcome) for outcome in client.outcomes()] == ["engine_failed"]
    assert not engine.is_healthy()


def test_the_load_tells_free_slots(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(max_num_seqs=4)
    client = Client(engine)
    assert engine.load().num_free_slots == 4
    with engine.queue.changed:  # it takes none meanwhile
        for _ in range(6):
            client.submit(PROMPT, SamplingParams(3))
        load = engine.load()
    assert (load.num_waiting, load.num_free_slots) == (6, 4)
    assert all(isinstance(outcome, list) for outcome in client.outcomes())


def test_the_queue_is_served_by_priority_then_in_order(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(max_num_seqs=1)
    slow_down(engine, 0.01)
    client = Client(engine)
    started, order = threading.Event(), []

    def note(name: str) -> Callable[[int, int], bool]:
        def listen(*_: int) -> bool:
            order.append(name)
            started.set()
            return False

        return listen

    client.submit(PROMPT, SamplingParams(30), on_token=note("first"))
    assert started.wait(60)
    for name, priority in (("c", 0), ("e", 5), ("d", 0), ("a", -3), ("f", 5), ("b", -3)):
        client.submit(PROMPT, SamplingParams(1), on_token=note(name), priority=priority)
    client.outcomes()
    assert [name for name in order if name != "first"] == list("abcdef")


def test_requests_of_many_prompts_let_others_in_between(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine, order = start(max_num_seqs=1), list[str]()

    def request(name: str, count: int, priority: int = 0) -> None:
        def note(number: int) -> Callable[[Outcome], None]:
            return lambda _: order.append(f"{name}{number}")

        asked = [SequenceGroup(PROMPT, SamplingParams(1), note(number), priority=priority) for number in range(count)]
        engine.submit(asked)

    with engine.queue.changed:  # it takes nobody meanwhile
        request("a", 4)
        request("b", 2)
        request("c", 1)
        engine.scheduler._admit()  # a0 leaves: nobody joins its turn any more
        request("urgent", 2, priority=-1)
        request("d", 2)
    deadline_s = time.monotonic() + 60
    while len(order) < 11 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert order == ["a0", "urgent0", "urgent1", "b0", "c0", "a1", "b1", "d0", "a2", "d1", "a3"]


@pytest.mark.parametrize("make", [ContinuousBatchingEngine, BatchEngine])
def test_a_request_of_many_prompts_is_not_kept_waiting_by_those_that_go_on_coming(
    model: Any, make: Callable[..., ContinuousBatchingEngine | BatchEngine]
) -> None:
    done, is_done = list[Outcome](), threading.Event()
    num_singles, most = itertools.count(), 1000
    options: dict[str, Any] = {} if make is ContinuousBatchingEngine else {"context_length": 512, "sharing": "alone"}
    engine = make(model, max_num_seqs=2, **options)

    def take(outcome: Outcome) -> None:
        done.append(outcome)
        if len(done) == 8:
            is_done.set()

    def come_again(outcome: Outcome) -> None:
        if not is_done.is_set() and next(num_singles) < most:
            engine.submit([SequenceGroup(PROMPT, SamplingParams(1), come_again)])

    with engine.queue.changed:  # it takes nobody meanwhile
        for _ in range(6):
            engine.submit([SequenceGroup(PROMPT, SamplingParams(1), come_again)])
        engine.submit([SequenceGroup(PROMPT, SamplingParams(1), take) for _ in range(8)])
    assert is_done.wait(120)
    engine.close()
    assert next(num_singles) < 8 * 8


# --- several texts of one prompt -------------------------------------------------------------------------------------


def test_texts_of_one_prompt_share_its_prefill(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(enable_prefix_caching=False)
    counting = Counting(engine)
    outcome = Client(engine).ask(list(range(10, 110)), replace(DRAWN, max_new_tokens=1, num_return_sequences=6))
    assert len(token_ids(outcome)) == 6
    assert counting.num_tokens == 100


def test_best_of_gives_the_likeliest_texts(start: Callable[..., ContinuousBatchingEngine]) -> None:
    client = Client(start())
    everyone = client.ask(PROMPT, replace(DRAWN, num_return_sequences=5, logprobs=0))
    assert isinstance(everyone, list)

    def mean(completion: Completion) -> float:
        assert completion.logprobs is not None
        return sum(each.logprob for each in completion.logprobs) / len(completion.logprobs)

    best = client.ask(PROMPT, replace(DRAWN, num_return_sequences=2, best_of=5))
    ranked = sorted(everyone, key=mean, reverse=True)
    assert token_ids(best) == [each.token_ids for each in ranked[:2]]
    assert isinstance(best, list)
    assert best[0].logprobs is None  # nobody asked for them


# --- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [16, 512])
def test_log_probabilities_are_those_of_the_models_own_logits(
    piece: int, model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(piece, 256, per_weights=16))
    client = Client(start(config=config))
    plan = SamplingParams(9, logprobs=3, prompt_logprobs=2, repetition_penalty=1.4)
    items = prompts(12, seed=21, longest=50)
    for prompt in items:
        client.submit(prompt, plan)
    for prompt, outcome in zip(items, client.outcomes(), strict=True):
        completion = only(outcome)
        whole = torch.tensor([prompt + completion.token_ids])
        with torch.inference_mode():
            expected = model(input_ids=whole).logits[0].log_softmax(-1)
        assert completion.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert len(completion.prompt_logprobs) == len(prompt) - 1
        assert len(completion.logprobs) == len(completion.token_ids)
        for place, found in enumerate([*completion.prompt_logprobs, *completion.logprobs]):
            assert found.token_id == whole[0, place + 1]
            assert found.logprob == pytest.approx(expected[place, found.token_id].item(), abs=1e-4)
            wanted = expected[place].topk(len(found.top)).values.tolist()
            assert [value for _, value in found.top] == pytest.approx(wanted, abs=1e-4)
        assert {len(each.top) for each in completion.logprobs} == {3}
        assert {len(each.top) for each in completion.prompt_logprobs} <= {2}


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [16, 512])
@pytest.mark.parametrize("max_tokens", [256, 600, 1500])
def test_a_small_memory_is_never_overrun_and_changes_nobodys_text(
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


def test_what_could_never_fit_is_refused_at_once_with_the_numbers(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    refused = Client(start(max_cache_tokens=256)).ask(PROMPT, SamplingParams(200))
    assert isinstance(refused, RequestError)
    assert refused.code == "memory_exceeded"
    for words in ("4 tokens", "max_new_tokens 200", "512 tokens", "256 tokens", "max_cache_tokens"):
        assert words in refused.sentence


def test_a_memory_that_has_shrunk_refuses_nobody_for_good(
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


def test_a_failure_of_the_memory_itself_refuses_nobody(
    model: Any, start: Callable[..., ContinuousBatchingEngine]
) -> None:
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


# --- prefill order ---------------------------------------------------------------------------------------------------


class Forwards:
    """What an engine does: it reads so many rows of so many columns, or runs steps."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._model, self.seen = engine.forward._model, list[Any]()
        engine.forward._model = self

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        rows, columns = input_ids.shape
        if columns > 1 or self.seen[-1:] != ["steps"]:
            self.seen.append((rows, columns) if columns > 1 else "steps")
        return self._model(input_ids=input_ids, **arguments)

    @property
    def read(self) -> list[int]:
        """How many contexts were read at a time."""
        return [each[0] for each in self.seen if each != "steps"]


def test_prompts_that_come_one_after_the_other_do_not_hold_up_the_first(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    engine = start(max_num_seqs=16)
    client, forwards, plan = Client(engine), Forwards(engine), SamplingParams(12)
    call = forwards.__call__

    def call_and_submit(*, input_ids: torch.Tensor, **arguments: Any) -> Any:
        if input_ids.shape[1] > 1 and len(forwards.read) < 10:
            client.submit([5, 7, 11], plan)
        return call(input_ids=input_ids, **arguments)

    engine.forward._model = call_and_submit
    client.submit([3, 5, 7], plan)
    while len(forwards.read) < 10:
        time.sleep(0.01)
    client.outcomes()
    assert forwards.seen.index("steps") <= 2


def submit_lengths(engine: ContinuousBatchingEngine, lengths: list[int]) -> threading.Semaphore:
    """Prompts at one moment; what is released for each that is answered."""
    answered = threading.Semaphore(0)
    plan = SamplingParams(12)  # so that nobody is waited for, who is about to end
    engine.submit(
        [
            SequenceGroup([3 + number] * length, plan, lambda _: answered.release())
            for number, length in enumerate(lengths)
        ]
    )
    return answered


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([60, 44, 58], [(3, 60), "steps"]),
        ([60, 20, 58, 21], [(1, 60), (1, 20), (1, 58), (1, 21), "steps"]),
        ([60, 61, 20, 21], [(2, 61), (2, 21), "steps"]),
        ([300, 20, 260], [(1, 300), (1, 20), "steps", (1, 256), "steps", (1, 4), "steps"]),
        # Longer than a piece that nobody waits for: short ones pass after each of its pieces.
        ([900, 800, 20, 21], [(1, 512), (2, 21), "steps", (1, 256), "steps", (1, 132), "steps", (1, 256), "steps"]),
        ([900, 20, 300], [(1, 512), (1, 20), (1, 300), "steps", (1, 256), "steps", (1, 132), "steps"]),
        (
            [900, 20, 500],
            [(1, 512), (1, 20), "steps", (1, 256), "steps", (1, 256), "steps", (1, 244), "steps", (1, 132), "steps"],
        ),
    ],
)
def test_prompts_of_unlike_lengths_are_read_one_after_the_other(
    lengths: list[int], wanted: list[Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    engine = start()
    forwards = Forwards(engine)
    answered = submit_lengths(engine, lengths)
    for _ in lengths:
        assert answered.acquire(timeout=60)
    assert forwards.seen[: len(wanted)] == wanted


def test_short_prompts_pass_long_ones_that_are_read_whole(start: Callable[..., ContinuousBatchingEngine]) -> None:
    engine = start(prefills_whole=True)
    forwards = Forwards(engine)
    answered = submit_lengths(engine, [900, 800, 20, 21])
    for _ in range(4):
        assert answered.acquire(timeout=60)
    assert forwards.seen == [(1, 900), "steps", (2, 21), "steps", (1, 800), "steps"]


def test_running_rows_wait_for_one_piece_at_most(start: Callable[..., ContinuousBatchingEngine]) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(512, 70, per_weights=16))
    engine = start(config=config)
    forwards, company = Forwards(engine), list[threading.Semaphore]()

    def on_token(*_: int) -> bool:
        if not company and "steps" in forwards.seen:
            company.append(submit_lengths(engine, [40, 20, 2, 60]))
        return False

    Client(engine).ask([5] * 9, SamplingParams(40), on_token=on_token)
    for _ in range(4):
        assert company[0].acquire(timeout=60)
    seen = forwards.seen[forwards.seen.index((1, 40)) :]
    assert seen[:5] == [(1, 40), (1, 20), (1, 2), "steps", (1, 60)]


def test_a_piece_in_company_is_smaller_the_more_a_cpu_has_read() -> None:
    cpu, cuda, other = (DeviceContext(torch.device(name)).chunk_sizes for name in ("cpu", "cuda:1", "xpu"))
    assert [cpu.size(is_decoding=True, num_cached=columns) for columns in (0, 2047, 2048, 8192)] == [256, 256, 128, 51]
    assert cpu.size(is_decoding=False, num_cached=8192) == 512
    assert cuda.size(is_decoding=True, num_cached=8192) == 512
    assert cuda.size(is_decoding=False) == 1024
    assert other == cuda


def test_what_is_worth_one_batch() -> None:
    cpu, cuda = CHUNK_SIZES["cpu"], CHUNK_SIZES["cuda"]

    def is_worth(requests: list[PrefillRequest], sizes: ChunkSizes) -> bool:
        return is_worth_one_batch(requests, sizes, math.inf)

    requests = [PrefillRequest([], [0] * 100), PrefillRequest([], [0] * 84)]
    assert is_worth(requests, cpu)
    requests[1] = PrefillRequest([], [0] * 83)
    assert not is_worth(requests, cpu)
    assert is_worth(requests, cuda)
    assert is_worth([replace(requests[0], num_cached=17), requests[1]], cpu)  # which leaves no padding
    assert not is_worth([PrefillRequest([], [0] * 513)] * 2, cuda)


# --- one step ahead --------------------------------------------------------------------------------------------------


class Events:
    """What the engine does and when: a step of so many rows begins, or a token goes out."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._step, self.seen = engine.decoder.step, list[str]()
        engine.decoder.step = self.step  # type: ignore[method-assign]

    def step(self, *arguments: Any) -> torch.Tensor:
        self.seen.append("step")
        return self._step(*arguments)

    def token(self, *_: int) -> bool:
        self.seen.append("token")
        return False

    def ask(self, client: Client, **settings: Any) -> list[str]:
        self.seen.clear()
        only(client.ask(PROMPT, SamplingParams(5, **settings), on_token=self.token))
        return self.seen


TOKEN_BY_TOKEN = ["token", *["step", "token"] * 4]  # the prompt gives the first one


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "seed": 3}], ids=str)
def test_static_steps_begin_before_the_host_has_seen_the_last_one(
    settings: dict[str, Any], start: Callable[..., ContinuousBatchingEngine], request: pytest.FixtureRequest
) -> None:
    engine = start()
    seen = Events(engine).ask(Client(engine), **settings)
    if "static" in request.node.callspec.params.values():
        assert seen == ["token", "step", "step", "token", "step", "token", "step", "token", "token"]
    else:
        assert seen == TOKEN_BY_TOKEN


@pytest.mark.parametrize(
    "settings", [{"logprobs": 1}, {"repetition_penalty": 1.3}, {"logit_bias": ((7, 2.0),)}], ids=str
)
def test_a_text_whose_next_token_needs_the_host_goes_token_by_token(
    settings: dict[str, Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    engine = start()
    assert Events(engine).ask(Client(engine), **settings) == TOKEN_BY_TOKEN


def test_a_mix_of_such_texts_is_what_each_is_alone(model: Any, start: Callable[..., ContinuousBatchingEngine]) -> None:
    source, engine = random.Random(31), start(max_num_seqs=5)
    client = Client(engine)
    items = [
        (prompt, SamplingParams(source.randrange(1, 40), repetition_penalty=source.choice([1.0, 1.0, 1.4])))
        for prompt in prompts(40, seed=32)
    ]
    for item in items:
        client.submit(*item)
        time.sleep(source.choice([0, 0, 0.02]))
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        wanted = solo_ids(model, prompt, plan.max_new_tokens, repetition_penalty=plan.repetition_penalty)
        assert only(outcome).token_ids == wanted


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=repr)
@pytest.mark.parametrize("failing", [2, 3, 9])
def test_a_step_ahead_that_fails_changes_no_text(
    error: Exception,
    failing: int,
    model: Any,
    start: Callable[..., ContinuousBatchingEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, count = start(max_num_seqs=8), [0]
    step = engine.decoder.step

    def fail(*arguments: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == failing:
            raise error
        return step(*arguments)

    monkeypatch.setattr(engine.decoder, "step", fail)
    client = Client(engine)
    heard: dict[int, list[int]] = {}
    items = prompts(6, seed=33)
    for number, prompt in enumerate(items):
        listen = heard.setdefault(number, []).append
        client.submit(prompt, SamplingParams(12), on_token=lambda _, token_id, listen=listen: bool(listen(token_id)))
    for number, (prompt, outcome) in enumerate(zip(items, client.outcomes(), strict=True)):
        assert only(outcome).token_ids == solo_ids(model, prompt, 12) == heard[number]
    assert count[0] > failing


class Steps(Observer):
    """Notes how many rows each step has served."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def on_step(self, num_rows: int) -> None:
        self.num_rows.append(num_rows)


def test_a_step_ahead_of_texts_that_have_all_ended_counts_for_nothing(
    start: Callable[..., ContinuousBatchingEngine],
) -> None:
    observer = Steps()
    engine = start(observer=observer)
    client = Client(engine)
    heard: list[int] = []

    def listen(_: int, token_id: int) -> bool:
        heard.append(token_id)
        return len(heard) == 4

    client.ask(PROMPT, SamplingParams(20), on_token=listen)
    client.ask(PROMPT, SamplingParams(1))
    assert observer.num_rows == [1, 1, 1]  # the first token is the prompt's


def test_nothing_is_kept_of_a_text_that_failed_one_step_ahead(
    start: Callable[..., ContinuousBatchingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, count = start(), [0]
    step = engine.decoder.step

    def fail(*arguments: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] > 4:
            raise RuntimeError("boom")
        return step(*arguments)

    monkeypatch.setattr(engine.decoder, "step", fail)
    outcome = Client(engine).ask(PROMPT, SamplingParams(20))
    assert error_code(outcome) == "generation_failed"
    engine.close()
    assert engine.scheduler._inflight is None


@pytest.mark.parametrize("is_running", [False, True])
def test_a_text_that_comes_to_nan_spoils_no_prefix(is_running: bool) -> None:
    model, source = build("LlamaConfig", BASE), random.Random(1)
    beginning = [source.randrange(3, 290) for _ in range(30)]
    prompts = [[*beginning, number, 60, 70] for number in (50, 51, 52)]
    wanted = [solo_ids(model, prompt, 6) for prompt in prompts]
    with torch.no_grad():
        model.get_input_embeddings().weight[299] = torch.nan
    engine = ContinuousBatchingEngine(model, max_num_seqs=4)
    client = Client(engine)
    try:
        client.submit([*beginning, 299, 7, 8], SamplingParams(60 if is_running else 3))
        if not is_running:
            client.outcomes()
        assert [token_ids(client.ask(prompt, SamplingParams(6))) for prompt in prompts] == [[ids] for ids in wanted]
    finally:
        engine.close()
