# SPDX-License-Identifier: Apache-2.0
"""Outcomes of the continuous engine: listeners, deadlines, cancellation, queue order, logprobs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.sequence import Completion
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from tests.support.engine import (
    DRAWN,
    PROMPT,
    Client,
    Counting,
    StartEngine,
    error_code,
    only,
    prompts,
    slow_down,
    token_ids,
)
from tests.support.reference import solo_ids


def test_listener_gets_every_token_and_can_stop_the_sequence(model: Any, start: StartEngine) -> None:
    whole = solo_ids(model, PROMPT, 20)
    tokens: list[tuple[int, int]] = []

    def listen(index: int, token_id: int, *_: object) -> bool:
        tokens.append((index, token_id))
        return len(tokens) == 7

    completion = only(Client(start()).ask(PROMPT, SamplingParams(20), on_token=listen))
    assert completion == Completion(whole[:7], "stop_string")
    assert tokens == [(0, token_id) for token_id in whole[:7]]


def test_finish_reasons(model: Any, start: StartEngine) -> None:
    whole = solo_ids(model, PROMPT, 20)
    client = Client(start())
    assert only(client.ask(PROMPT, SamplingParams(20))).finish_reason == "length"
    own = only(client.ask(PROMPT, SamplingParams(20, eos_ids=frozenset([whole[3]]))))
    assert own == Completion(whole[: whole.index(whole[3])], "eos")
    late = only(client.ask(PROMPT, SamplingParams(20, min_new_tokens=10, eos_ids=frozenset([whole[3]]))))
    assert len(late.token_ids) >= 10
    assert whole[3] not in late.token_ids[:10]


def test_a_sequence_ends_at_its_deadline_with_its_tokens(model: Any, start: StartEngine) -> None:
    engine = start()
    slow_down(engine)
    client = Client(engine)
    tokens = threading.Event()

    def listen(*_: object) -> bool:
        tokens.set()
        return False

    # Long enough for the first token on a busy machine; all tokens would take longer.
    params = SamplingParams(240)
    slow_down(engine, 0.02)
    client.submit(PROMPT, params, deadline_s=time.monotonic() + 2, on_token=listen)
    completion = only(client.outcomes()[0])
    assert tokens.is_set()
    assert completion.finish_reason == "deadline"
    assert 0 < len(completion.token_ids) < 240
    assert completion.token_ids == solo_ids(model, PROMPT, len(completion.token_ids))


def test_slow_constraint_does_not_block_the_queue(start: StartEngine) -> None:
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


def test_admitted_group_is_answered_if_the_engine_fails(start: StartEngine, caplog: pytest.LogCaptureFixture) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: object) -> Any:
        raise PanicException("as the prompt says, secret")

    client = Client(start(max_num_seqs=2))
    client.submit(PROMPT, SamplingParams(3), logits_processor=lambda: panic)
    client.submit(PROMPT, SamplingParams(3))
    assert [error_code(outcome) for outcome in client.outcomes()] == ["engine_failed"] * 2
    assert f"PanicException in panic ({Path(__file__).name}:" in caplog.text
    assert "secret" not in caplog.text


def test_panic_while_sequences_are_created_refuses_their_group(start: StartEngine) -> None:
    def leave() -> Any:
        raise SystemExit

    client = Client(start(max_num_seqs=2))
    client.submit(PROMPT, SamplingParams(3), logits_processor=leave)
    client.submit(PROMPT, SamplingParams(3))
    refused, answered = client.outcomes()
    assert error_code(refused) == "generation_failed"
    assert isinstance(answered, list)


def test_the_load_counts_free_slots(start: StartEngine) -> None:
    engine = start(max_num_seqs=4)
    client = Client(engine)
    assert engine.load().num_free_slots == 4
    with engine.queue.changed:  # it admits none meanwhile
        for _ in range(6):
            client.submit(PROMPT, SamplingParams(3))
        load = engine.load()
    assert (load.num_waiting, load.num_free_slots) == (6, 4)
    assert all(isinstance(outcome, list) for outcome in client.outcomes())


def test_sequences_of_a_group_share_its_prefill(start: StartEngine) -> None:
    engine = start(enable_prefix_caching=False)
    counting = Counting(engine)
    outcome = Client(engine).ask(list(range(10, 110)), replace(DRAWN, max_new_tokens=1, num_return_sequences=6))
    assert len(token_ids(outcome)) == 6
    assert counting.num_tokens == 100


@pytest.mark.parametrize("chunk_size", [16, 512])
def test_logprobs_are_those_of_the_models_logits(chunk_size: int, model: Any, start: StartEngine) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(chunk_size, 256))
    client = Client(start(config=config))
    params = SamplingParams(9, logprobs=3, prompt_logprobs=2, repetition_penalty=1.4)
    items = prompts(12, seed=21, longest=50)
    for prompt in items:
        client.submit(prompt, params)
    for prompt, outcome in zip(items, client.outcomes(), strict=True):
        completion = only(outcome)
        whole = torch.tensor([prompt + completion.token_ids])
        with torch.inference_mode():
            expected = model(input_ids=whole).logits[0].log_softmax(-1)
        assert completion.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert len(completion.prompt_logprobs) == len(prompt) - 1
        assert len(completion.logprobs) == len(completion.token_ids)
        for at, token in enumerate([*completion.prompt_logprobs, *completion.logprobs]):
            assert token.token_id == whole[0, at + 1]
            assert token.logprob == pytest.approx(expected[at, token.token_id].item(), abs=1e-4)
            expected_top = expected[at].topk(len(token.top)).values.tolist()
            assert [value for _, value in token.top] == pytest.approx(expected_top, abs=1e-4)
        assert {len(each.top) for each in completion.logprobs} == {3}
        assert {len(each.top) for each in completion.prompt_logprobs} <= {2}
