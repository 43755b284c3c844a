# SPDX-License-Identifier: Apache-2.0
"""The continuous engine: same output as alone, cancellation, shutdown, idleness."""

import mmap
import random
import threading
import time
from typing import Any

import pytest

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.errors import CancelledError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import STATES, build
from tests.support.engine import (
    WAIT_S,
    Client,
    Faulty,
    Items,
    PrefixHits,
    StartEngine,
    StepsAhead,
    check,
    greedy_ids,
    prompts,
    slow_down,
    token_ids,
)
from tests.support.marks import full
from tests.support.resident import resident_cache_bytes, resident_process_bytes


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
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 16))
    items = [(prompt, SamplingParams(20)) for prompt in prompts(20, seed=3, longest=100)]
    check(model, Client(start(config=config)), items)


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
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=2))
    slow_down(engine)
    client = Client(engine)
    for prompt in prompts(8, seed=9):
        client.submit(prompt, SamplingParams(190))
    engine.close()
    codes = {getattr(outcome, "code", "done") for outcome in client.outcomes()}
    assert "shutting_down" in codes
    assert codes <= {"shutting_down", "done"}


def various_items(seed: int) -> Items:
    """Greedy and drawn sequences of several groups; some need the host between their tokens."""
    source = random.Random(seed)
    return [
        (
            [token % 300 for token in prompt],
            SamplingParams(
                source.randrange(1, 30),
                do_sample=source.random() < 0.6,
                temperature=1.5,
                seed=index,
                num_return_sequences=source.choice([1, 1, 1, 3]) if index % 2 else 1,
                repetition_penalty=1.3 if index % 16 == 0 else 1.0,
                logprobs=2 if index % 12 == 0 else None,
            ),
        )
        for index, prompt in enumerate(prompts(40, seed=seed))
    ]


def run_various(engine: ContinuousBatchingEngine, items: Items) -> tuple[list[list[tuple[list[int], str]]], int]:
    """Tokens and the reason of each end, and how many steps began before the tokens of the last one were read."""
    engine._eos_ids = frozenset(range(20, 25))
    steps = StepsAhead(engine)
    client = Client(engine)
    for index, (prompt, params) in enumerate(items):
        heard: list[int] = []

        def stop(_: int, token_id: int, __: Any, heard: list[int] = heard, index: int = index) -> bool:
            heard.append(token_id)
            return index % 4 == 0 and len(heard) == 7

        client.submit(prompt, params, on_token=stop)
        time.sleep(0.002 if index % 8 == 0 else 0)
    outcomes = client.outcomes()
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    return [[(each.token_ids, each.finish_reason) for each in outcome] for outcome in outcomes], steps.count  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["lfm2", *full("llama")])
def test_steps_ahead_of_the_host_change_no_output(name: str, model: Any, start: StartEngine) -> None:
    model = build(*STATES[name]) if name in STATES else model
    items = various_items(seed=11)
    ahead, num_ahead = run_various(start(model, config=EngineConfig(runs_ahead=True)), items)
    expected, num_others = run_various(start(model), items)
    assert ahead == expected
    assert {reason for outcome in ahead for _, reason in outcome} == {"eos", "length", "stop_string"}
    assert num_ahead > 50
    assert num_others == 0


@pytest.mark.parametrize("max_cache_tokens", [None, 4096])
def test_an_idle_engine_gives_back_memory_and_keeps_prefixes(max_cache_tokens: int | None, start: StartEngine) -> None:
    hits, config = PrefixHits(), EngineConfig(block_size=64, idle_release_s=0.01)
    engine = start(config=config, observer=hits, max_cache_tokens=max_cache_tokens)
    client, item = Client(engine), (list(range(3, 153)), SamplingParams(20))
    expected = token_ids(client.ask(*item))
    size = 64 * sum(layer.bytes_per_token for layer in engine.runner.cache.blocks())
    deadline_s = time.monotonic() + WAIT_S
    while resident_cache_bytes(engine) != 2 * size:  # two full blocks of three
        assert time.monotonic() < deadline_s, resident_cache_bytes(engine)
        time.sleep(0.01)
    assert token_ids(client.ask(*item)) == expected
    assert hits.counts == [0, 128]
    assert engine.memory.pool.max_kept * size <= 64 << 20


@pytest.mark.parametrize("num_requests", [600, *full(6000)])
def test_distinct_prompts_do_not_grow_memory(num_requests: int, start: StartEngine) -> None:
    """Touched blocks are at most those held at the peak and those that the prefix cache may keep."""
    engine, most_held = start(max_num_seqs=32, config=EngineConfig(block_size=16, min_kept_bytes=0)), 0

    def watch(*_: object) -> bool:
        nonlocal most_held
        most_held = max(most_held, engine.memory.pool.num_held)
        return False

    Faulty(engine, watch, RuntimeError())
    source, pool, sizes = random.Random(1), engine.memory.pool, []
    for _ in range(num_requests // 100):
        client = Client(engine)
        for _ in range(100):
            client.submit([source.randrange(3, 380) for _ in range(40)], SamplingParams(4))
        assert all(isinstance(outcome, list) for outcome in client.outcomes())
        sizes.append(resident_process_bytes())
    print(
        "SIZES", [size >> 20 for size in sizes[:: max(1, len(sizes) // 10)]], most_held, pool.max_kept, pool.num_touched
    )
    most_touched = most_held + pool.max_kept
    assert pool.num_touched <= most_touched < 2 * num_requests  # each has two full blocks
    size = 16 * sum(layer.bytes_per_token for layer in engine.runner.cache.blocks())
    assert resident_cache_bytes(engine) <= most_touched * size + 8 * mmap.PAGESIZE
    engine.close()
    assert not engine.executor.samplers
    assert sizes[-1] - sizes[len(sizes) // 2] < 4 << 20
