# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin like others share their blocks, and get the tokens that they get alone."""

import random
import time
from contextlib import closing
from typing import Any

import pytest

from hf_triton.engine.engine_config import EngineConfig
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import STATES, WHOLE, build
from tests.support.engine import Client, Counting, PrefixHits, StartEngine, only, start_engine
from tests.support.reference import solo_ids

BLOCK = 8
CONFIG = EngineConfig(block_size=BLOCK)


def shared_prompts(seed: int) -> list[list[int]]:
    """Prompts with common prefixes: some share a system prompt, some continue another prompt."""
    source = random.Random(seed)
    systems = [[source.randrange(3, 380) for _ in range(length)] for length in (20, 45, 70)]
    items: list[list[int]] = []
    for _ in range(50):
        start = source.choice([*systems, *items, []])
        items.append(
            [*start[: source.randrange(10, 150)], *(source.randrange(3, 380) for _ in range(source.randrange(1, 30)))]
        )
    return items


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_shared_prefix_is_computed_once_and_changes_no_output(seed: int, model: Any, start: StartEngine) -> None:
    source = random.Random(seed)
    items = [(prompt, SamplingParams(source.randrange(1, 25))) for prompt in shared_prompts(seed)]
    counts = []
    for enable_prefix_caching in (True, False):
        engine = start(enable_prefix_caching=enable_prefix_caching, config=CONFIG)
        counting = Counting(engine)
        client = Client(engine)
        for item in items:
            client.submit(*item)
            time.sleep(source.choice([0, 0, 0.005]))
        for (prompt, params), outcome in zip(items, client.outcomes(), strict=True):
            assert only(outcome).token_ids == solo_ids(model, prompt, params.max_new_tokens)
        counts.append(counting.num_tokens)
    assert counts[0] < 0.8 * counts[1]


def test_the_next_turn_computes_only_what_is_in_no_full_block(model: Any, start: StartEngine) -> None:
    engine = start(config=CONFIG)
    counting, client = Counting(engine), Client(engine)
    conversation, num_cached = list(range(10, 70)), 0
    for _ in range(3):
        before = counting.num_tokens
        completion = only(client.ask(conversation, SamplingParams(10)))
        answer = completion.token_ids
        assert completion.num_cached == num_cached
        assert answer == solo_ids(model, conversation, 10)
        assert counting.num_tokens - before == len(conversation) - num_cached + 9
        num_cached = (len(conversation) + 9) // BLOCK * BLOCK  # the last token's keys were not computed
        conversation = [*conversation, *answer, 200, 201, 202, 203, 204]


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-mamba"])
def test_the_second_turn_of_a_model_with_states_computes_a_tenth(name: str) -> None:
    model, source = build(*(STATES | WHOLE)[name]), random.Random(0)
    conversation = [source.randrange(3, 300) for _ in range(230)]
    with closing(start_engine(model, max_num_seqs=3, context_length=256, config=CONFIG)) as engine:
        counting, client = Counting(engine), Client(engine)
        computed = []
        for _ in range(2):
            before, completion = counting.num_tokens, only(client.ask(conversation, SamplingParams(6)))
            assert completion.token_ids == solo_ids(model, conversation, 6)
            computed.append(counting.num_tokens - before)
            assert computed[-1] == len(conversation) - completion.num_cached + 5
            conversation = [*conversation, *completion.token_ids, 200, 201, 202]
    assert computed[1] <= 0.1 * computed[0]


def test_the_least_recently_used_prefix_makes_room(start: StartEngine) -> None:
    hits = PrefixHits()
    config = EngineConfig(block_size=BLOCK, prefix_cache_fraction=1.0)
    client = Client(start(max_cache_tokens=8 * BLOCK, config=config, observer=hits))
    first, second, third = ([number] * 3 * BLOCK for number in (5, 6, 7))
    for prompt in (first, second, first, third, first, second):
        client.ask(prompt, SamplingParams(2))
    assert hits.counts[:5] == [0, 0, 2 * BLOCK, 0, 2 * BLOCK]
    assert hits.counts[5] < 2 * BLOCK


def test_prefixes_are_kept_in_part_of_the_memory(start: StartEngine) -> None:
    engine = start(config=EngineConfig(block_size=BLOCK, min_kept_bytes=0, prefix_cache_fraction=0.0))
    client = Client(engine)
    for number in range(5, 15):
        client.ask([number] * 3 * BLOCK, SamplingParams(2))
    assert engine.memory.pool.num_touched == 4
    assert engine.memory.pool.num_kept == 3


def test_prompts_share_blocks_with_those_of_the_same_salt_alone(model: Any, start: StartEngine) -> None:
    """Neither a salt that is another one's beginning, nor one that spells what stands before it, is the same."""
    client = Client(start(config=CONFIG))
    prompt, expected = list(range(10, 70)), solo_ids(model, list(range(10, 70)), 2)
    salts = ["", "alice", "ali", "alice ", "None False", "None False ", "\ud800", "ä" * 1000]
    for num_cached in (0, len(prompt) // BLOCK * BLOCK):
        for salt in salts:
            completion = only(client.ask(prompt, SamplingParams(2), cache_salt=salt))
            assert (completion.num_cached, completion.token_ids) == (num_cached, expected), salt
