# SPDX-License-Identifier: Apache-2.0
"""The continuous engine: same output as alone, cancellation, shutdown, idleness."""

import random
import threading
import time
from typing import Any

from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.sequence import Completion
from hf_triton.errors import CancelledError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from tests.support.engine import WAIT_S, Client, StartEngine, check, greedy_ids, prompts, slow_down, token_ids


def test_a_seed_gives_the_same_output_alone_and_in_a_batch(start: StartEngine) -> None:
    source = random.Random(6)
    batched, alone = Client(start()), Client(start())
    items = [
        (
            prompt,
            SamplingParams(
                source.randrange(1, 30),
                do_sample=True,
                temperature=source.choice([0.5, 1.0, 2.0]),
                top_p=source.choice([0.5, 0.9, 1.0]),
                top_k=source.choice([0, 5, 50]),
                seed=source.randrange(99),
                num_return_sequences=source.choice([1, 2, 3]),
            ),
        )
        for prompt in prompts(40, seed=2)
    ]
    for item in items:
        batched.submit(*item)
    outputs = [token_ids(outcome) for outcome in batched.outcomes()]
    assert [len(output) for output in outputs] == [params.num_return_sequences for _, params in items]
    assert [token_ids(alone.ask(*item)) for item in items] == outputs
    three = next(output for output in outputs if len(output) == 3)
    assert len({tuple(ids) for ids in three}) > 1


def test_chunked_prefill_beside_running_sequences_changes_no_output(model: Any, start: StartEngine) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 16, per_weights=16))
    items = [(prompt, SamplingParams(20)) for prompt in prompts(20, seed=3, longest=100)]
    check(model, Client(start(config=config)), items)


def test_the_completion_ends_before_the_eos_token(model: Any, start: StartEngine) -> None:
    item = [5, 6, 7], SamplingParams(20)
    (whole,) = greedy_ids(model, [item])
    engine = start()
    engine._eos_ids = frozenset([whole[4]])
    end = whole.index(whole[4])
    assert Client(engine).ask(*item) == [Completion(whole[:end], "eos")]


def test_cancelled_sequences_leave_and_others_continue(model: Any, start: StartEngine) -> None:
    engine = start(max_num_seqs=4)
    slow_down(engine)
    client = Client(engine)
    is_cancelled = threading.Event()
    for prompt in prompts(6, seed=7):
        client.submit(prompt, SamplingParams(190), is_cancelled.is_set)
    others = [(prompt, SamplingParams(150)) for prompt in prompts(3, seed=8)]
    for item in others:
        client.submit(*item)
    time.sleep(0.15)
    is_cancelled.set()
    outcomes = client.outcomes()
    assert any(isinstance(outcome, CancelledError) for outcome in outcomes[:6])
    assert [token_ids(outcome) for outcome in outcomes[6:]] == [[ids] for ids in greedy_ids(model, others)]


def test_closing_answers_all_requests(model: Any) -> None:
    engine = ContinuousBatchingEngine(model, max_num_seqs=2)
    slow_down(engine)
    client = Client(engine)
    for prompt in prompts(8, seed=9):
        client.submit(prompt, SamplingParams(190))
    engine.close()
    codes = {getattr(outcome, "code", "done") for outcome in client.outcomes()}
    assert "shutting_down" in codes
    assert codes <= {"shutting_down", "done"}


def test_an_idle_engine_frees_its_memory(start: StartEngine) -> None:
    config = EngineConfig(idle_release_s=0.01)
    engine = start(config=config)
    Client(engine).ask([5, 6, 7], SamplingParams(30))
    deadline_s = time.monotonic() + WAIT_S
    while engine.memory.lanes.num_tokens:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
