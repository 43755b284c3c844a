# SPDX-License-Identifier: Apache-2.0
"""Memory limits of the continuous engine."""

import random
from dataclasses import replace
from typing import Any

import pytest

from hf_triton.engine.engine_config import EngineConfig
from hf_triton.errors import RequestError, UnavailableError
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from tests.support.engine import DRAWN, PROMPT, Client, Faulty, StartEngine, only, prompts, token_ids
from tests.support.reference import solo_ids

pytestmark = pytest.mark.full


@pytest.mark.parametrize("chunk_size", [16, 512])
@pytest.mark.parametrize("max_tokens", [256, 600, 1500])
def test_small_kv_cache_is_never_exceeded_and_changes_no_output(
    max_tokens: int, chunk_size: int, model: Any, start: StartEngine
) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(chunk_size, chunk_size // 2))
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
    for (prompt, params), outcome in zip(items, client.outcomes(), strict=True):
        assert only(outcome).token_ids == solo_ids(model, prompt, params.max_new_tokens)
    assert max(most) <= max_tokens


def test_prompt_that_can_never_fit_is_refused_at_submit(start: StartEngine) -> None:
    refused = Client(start(max_cache_tokens=256)).ask(PROMPT, SamplingParams(300))
    assert isinstance(refused, RequestError)
    assert refused.code == "memory_exceeded"
    for words in ("4 tokens", "max_new_tokens 300", "320 tokens", "256 tokens", "max_cache_tokens"):
        assert words in refused.sentence


def test_shrunken_memory_refuses_requests_until_it_grows(model: Any, start: StartEngine) -> None:
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


def test_a_group_that_does_not_fit_at_once_is_generated_in_parts(start: StartEngine) -> None:
    expected = Client(start(max_num_seqs=8)).ask(PROMPT, replace(DRAWN, num_return_sequences=8))
    outcome = Client(start(max_num_seqs=8, max_cache_tokens=512)).ask(PROMPT, replace(DRAWN, num_return_sequences=8))
    assert token_ids(outcome) == token_ids(expected)
