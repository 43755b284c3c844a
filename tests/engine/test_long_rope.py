# SPDX-License-Identifier: Apache-2.0
"""LongRoPE and dynamic NTK: each sequence's frequencies follow its own length."""

import queue
import random
from contextlib import closing
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import DynamicCache

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.calling import cache_name
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.long_rope import LongRope
from hf_triton.runner.model_runner import PACKED
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import CONTINUOUS, build
from tests.support.engine import Client, token_ids
from tests.support.listener import group_of
from tests.support.reference import solo_ids

SWITCH = 40


def phi3(**changes: Any) -> Any:
    name, arguments = CONTINUOUS["phi3-longrope"]
    return build(name, arguments | changes)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 300) for _ in range(length)]


@pytest.mark.parametrize("num_columns", [1, 7, SWITCH, SWITCH + 1, 90])
def test_a_sequence_alone_has_the_frequencies_of_transformers(num_columns: int) -> None:
    stock, model = phi3(), phi3()
    LongRope(model)
    x, positions = torch.zeros(1, 1, 8), torch.arange(num_columns).unsqueeze(0)
    expected = stock.model.rotary_emb(x, positions)
    assert all(map(torch.equal, model.model.rotary_emb(x, positions), expected))


CHUNKS = [(12, 0, 12), (90, 3, 10), (SWITCH, 0, SWITCH), (SWITCH + 1, SWITCH, SWITCH + 1), (70, 30, 50), (8, 7, 8)]
"""A sequence's length, and the part of it in a forward."""


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("chunks", [CHUNKS, CHUNKS[::-1], CHUNKS[1:2], CHUNKS[::2]])
def test_each_token_has_the_frequencies_of_its_own_sequence(
    chunks: list[tuple[int, int, int]], is_packed: bool
) -> None:
    stock, model, x = phi3().model.rotary_emb, phi3(), torch.zeros(1, 1, 8)
    rope = LongRope(model)
    alone = [[part[0, a:b] for part in stock(x, torch.arange(length).unsqueeze(0))] for length, a, b in chunks]
    positions = torch.cat([torch.arange(a, b) for _, a, b in chunks])
    is_long = torch.cat([torch.full((b - a,), length > rope.switch_length) for length, a, b in chunks])
    with rope.by_token(is_long):
        found = model.model.rotary_emb(x, positions.unsqueeze(0 if is_packed else 1))
    for part in range(2):
        assert torch.equal(found[part].flatten(0, 1), torch.cat([each[part] for each in alone]))


def test_a_forward_without_long_sequences_computes_the_short_frequencies() -> None:
    stock, model, x = phi3().model.rotary_emb, phi3(), torch.zeros(1, 1, 8)
    rope, positions = LongRope(model), torch.tensor([[SWITCH - 1, 0, SWITCH - 1, 5]])
    with rope.by_token(None):
        assert all(map(torch.equal, model.model.rotary_emb(x, positions), stock(x, positions)))
        with rope.by_token(torch.ones(4, dtype=torch.bool)):
            long = model.model.rotary_emb(x, positions)
        assert not torch.equal(long[0], stock(x, positions)[0])
        assert all(map(torch.equal, model.model.rotary_emb(x, positions), stock(x, positions)))


@torch.inference_mode()
def test_chunks_of_a_long_prompt_have_the_logits_of_transformers() -> None:
    model, chunk, prompt = phi3(), 25, torch.tensor([tokens_of(70)])
    rope, cache = LongRope(model), {cache_name(model): DynamicCache()}
    logits = []
    for part in prompt.split((chunk, 70 - chunk), 1):
        with rope.by_token(torch.ones(part.numel(), dtype=torch.bool)):
            logits.append(model(part, **cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), phi3()(prompt).logits)


def test_generate_chooses_frequencies_as_before_once_the_engine_has_run() -> None:
    model = phi3()
    assert find_way(model).way == PACKED
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=2))) as engine:
        Client(engine).ask(tokens_of(50), SamplingParams(3))
    for length in (50, 10, SWITCH - 5, 90):
        assert solo_ids(model, tokens_of(length), 12) == solo_ids(phi3(), tokens_of(length), 12)


def test_hooks_of_the_module_stay() -> None:
    calls: list[int] = []

    class Hook(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return args, kwargs

    model = phi3()
    add_hook_to_module(model.model.rotary_emb, Hook())
    LongRope(model)
    found = model.model.rotary_emb(torch.zeros(1, 1, 8), torch.tensor([[SWITCH + 5]]))
    assert calls == [1]
    assert torch.equal(found[0], phi3().model.rotary_emb(torch.zeros(1, 1, 8), torch.tensor([[SWITCH + 5]]))[0])


def test_chunked_prefill_beside_running_sequences_equals_generate() -> None:
    config = EngineConfig(block_size=16, chunk_sizes=ChunkSizes(16, 8))
    items = [(tokens_of(length, seed=length), SamplingParams(30)) for length in (12, 100, 30, 41, 70, 39, 40, 5, 120)]
    model = phi3()
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=4, config=config))) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        outcomes = client.outcomes()
    for (prompt, params), outcome in zip(items, outcomes, strict=True):
        assert token_ids(outcome) == [solo_ids(phi3(), prompt, params.max_new_tokens)]


def test_long_and_short_prompts_share_a_step() -> None:
    prompts, outcomes = [tokens_of(SWITCH - 3 + number, seed=number) for number in range(8)], queue.SimpleQueue[Any]()
    with closing(ContinuousBatchingEngine(phi3(), EngineOptions(max_num_seqs=8))) as engine:
        engine.submit([group_of(prompt, SamplingParams(1), on_finish=outcomes.put) for prompt in prompts])
        found = sorted(outcomes.get(timeout=60)[0].token_ids for _ in prompts)
    assert found == sorted(solo_ids(phi3(), prompt, 1) for prompt in prompts)
