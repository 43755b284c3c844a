# SPDX-License-Identifier: Apache-2.0
"""LongRoPE and dynamic NTK: each sequence's frequencies follow its own length."""

import queue
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hf_triton.runner.decode import DecodingMode
from transformers import AutoModelForCausalLM, DynamicCache

from hf_triton.engine.choose import build_engine
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.engine.types import Observer
from hf_triton.runner.calling import cache_name
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.long_rope import LongRope, has_long_rope
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.architectures import BASE, CONTINUOUS, build
from tests.support.engine import Client, start_engine, token_ids
from tests.support.reference import solo_ids

SWITCH = 40


def phi3(**changes: Any) -> Any:
    name, arguments = CONTINUOUS["phi3-longrope"]
    return build(name, arguments | changes)


class Watcher(Observer):
    def __init__(self) -> None:
        self.shared: list[int] = []
        self.num_preempted = 0

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.shared.append(num_tokens)

    def on_preempt(self, num_sequences: int) -> None:
        self.num_preempted += num_sequences


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


def test_sequences_have_the_frequencies_of_their_own_length() -> None:
    stock, model = phi3(), phi3()
    rope = LongRope(model)
    x, positions = torch.zeros(2, 1, 8), torch.tensor([[SWITCH - 1], [SWITCH]])
    expected = [stock.model.rotary_emb(x[:1], positions[row : row + 1]) for row in range(2)]
    found = model.model.rotary_emb(x, positions)
    for part in range(2):
        assert torch.equal(found[part], torch.cat([each[part] for each in expected]))
    with rope.prefilling(SWITCH + 1):
        first = model.model.rotary_emb(x, positions - 20)
    assert torch.equal(first[0][:1], model.model.rotary_emb(x[:1], torch.arange(SWITCH + 1).unsqueeze(0))[0][:, 19:20])


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


@pytest.mark.parametrize("decoding", ["eager", "static"])
def test_chunked_prefill_beside_running_sequences_equals_generate(decoding: DecodingMode) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 8, per_weights=16))
    items = [(tokens_of(length, seed=length), SamplingParams(30)) for length in (12, 100, 30, 41, 70, 39, 40, 5, 120)]
    model = phi3()
    with closing(ContinuousBatchingEngine(model, max_num_seqs=4, decoding=decoding, config=config)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        outcomes = client.outcomes()
    for (prompt, params), outcome in zip(items, outcomes, strict=True):
        assert token_ids(outcome) == [solo_ids(phi3(), prompt, params.max_new_tokens)]


def test_long_and_short_contexts_share_no_prefill_batch() -> None:
    prompts, outcomes = [tokens_of(SWITCH - 3 + number, seed=number) for number in range(8)], queue.SimpleQueue[Any]()
    with closing(ContinuousBatchingEngine(phi3(), max_num_seqs=8)) as engine:
        engine.submit([SequenceGroup(prompt, SamplingParams(1), outcomes.put) for prompt in prompts])
        found = sorted(outcomes.get(timeout=60)[0].token_ids for _ in prompts)
    assert found == sorted(solo_ids(phi3(), prompt, 1) for prompt in prompts)


def test_the_batch_engine_runs_each_sequence_alone() -> None:
    model, items = phi3(), [(tokens_of(length, seed=length), SamplingParams(20)) for length in (30, 38, 5, 60, 25)]
    options: dict[str, Any] = {"max_cache_tokens": None, "enable_prefix_caching": True}
    with closing(
        build_engine(
            model, "batch", max_num_seqs=4, context_length=256, decoding="auto", on_fatal=lambda: None, **options
        )
    ) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        for (prompt, params), outcome in zip(items, client.outcomes(), strict=True):
            assert token_ids(outcome) == [solo_ids(phi3(), prompt, params.max_new_tokens)]


def test_a_sequence_that_outgrows_the_short_frequencies_is_recomputed_once() -> None:
    watcher = Watcher()
    with closing(ContinuousBatchingEngine(phi3(), max_num_seqs=4, observer=watcher)) as engine:
        found = Client(engine).ask(tokens_of(30), SamplingParams(50))
    assert token_ids(found) == [solo_ids(phi3(), tokens_of(30), 50)]
    assert watcher.num_preempted == 1


def test_prefixes_are_shared_among_long_and_among_short_contexts() -> None:
    watcher, start = Watcher(), tokens_of(32)
    with closing(ContinuousBatchingEngine(phi3(), max_num_seqs=1, observer=watcher)) as engine:
        client = Client(engine)
        for tail in (3, 30, 4, 31):
            prompt = [*start, *tokens_of(tail, seed=tail)]
            assert token_ids(client.ask(prompt, SamplingParams(2))) == [solo_ids(phi3(), prompt, 2)]
    assert watcher.shared == [0, 0, len(start), len(start)]


@pytest.mark.parametrize("decoding", ["eager", "static"])
def test_a_sequence_that_ends_at_the_limit_is_stored_as_a_short_one(decoding: DecodingMode) -> None:
    first, shorter, longer = (
        tokens_of(SWITCH - 6),
        [*tokens_of(25), *tokens_of(3, seed=1)],
        [*tokens_of(25), *tokens_of(40, seed=2)],
    )
    with closing(ContinuousBatchingEngine(phi3(), max_num_seqs=4, decoding=decoding)) as engine:
        client = Client(engine)
        client.submit(tokens_of(5, seed=3), SamplingParams(60))  # beside it, a static step runs ahead
        client.submit(first, SamplingParams(7))
        client.outcomes()
        for prompt in (longer, shorter):
            assert token_ids(client.ask(prompt, SamplingParams(10))) == [solo_ids(phi3(), prompt, 10)]


@pytest.mark.parametrize("decoding", ["eager", "static"])
def test_sampled_output_is_the_same_alone_and_in_a_batch(decoding: DecodingMode) -> None:
    all_params = [SamplingParams(40, do_sample=True, temperature=0.9, seed=seed) for seed in range(6)]
    items = [(tokens_of(10 + 5 * seed, seed), params) for seed, params in enumerate(all_params)]
    found = []
    for max_num_seqs in (1, 6):
        with closing(ContinuousBatchingEngine(phi3(), max_num_seqs=max_num_seqs, decoding=decoding)) as engine:
            client = Client(engine)
            for item in items:
                client.submit(*item)
            found.append([token_ids(outcome) for outcome in client.outcomes()])
    assert found[0] == found[1]


def test_prompt_logprobs_of_a_long_prompt() -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 8, per_weights=16))
    model, prompt = phi3(), tokens_of(60)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with closing(ContinuousBatchingEngine(phi3(), max_num_seqs=2, config=config)) as engine:
        [completion] = Client(engine).ask(prompt, SamplingParams(1, prompt_logprobs=0))  # type: ignore[misc]
    assert completion.prompt_logprobs is not None
    found = torch.tensor([each.logprob for each in completion.prompt_logprobs])
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).flatten()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_model_that_mixes_keys_of_both_frequencies_has_no_long_rope() -> None:
    name, arguments = "LlamaConfig", dict(CONTINUOUS["phi3-longrope"][1])
    model = build(name, arguments)
    assert not has_long_rope(model)
    assert not has_long_rope(build(*CONTINUOUS["phi3"]))
    with closing(start_engine(model, max_num_seqs=4, context_length=SWITCH + 1)) as engine:
        assert not isinstance(engine, ContinuousBatchingEngine)
    with closing(start_engine(model, max_num_seqs=4, context_length=SWITCH)) as engine:
        assert isinstance(engine, ContinuousBatchingEngine)


@pytest.mark.parametrize("context_length", [32, 33])
def test_dynamic_frequencies_are_continuous_up_to_the_original_length(context_length: int, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    build_tiny_checkpoint(tmp_path, "llama", eos_token_id=None, rope_parameters=rope, max_position_embeddings=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with closing(start_engine(model, max_num_seqs=8, context_length=context_length)) as engine:
        assert isinstance(engine, ContinuousBatchingEngine) is (context_length == 32)
        client = Client(engine)
        prompts = [tokens_of(length, seed=length) for length in (3, 20, 9, 22)]
        for prompt in prompts:
            client.submit(prompt, SamplingParams(10))
        for prompt, outcome in zip(prompts, client.outcomes(), strict=True):
            assert token_ids(outcome) == [solo_ids(model, prompt, 10)]


def dynamic() -> Any:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return build("LlamaConfig", BASE | {"max_position_embeddings": 32, "rope_parameters": rope})


def test_dynamic_frequencies_are_not_those_of_an_earlier_prompt() -> None:
    prompts = [tokens_of(length, seed=length) for length in (100, 60, 32, 40)]
    with closing(start_engine(dynamic(), max_num_seqs=8, context_length=128)) as engine:
        client = Client(engine)
        for prompt in prompts:
            assert token_ids(client.ask(prompt, SamplingParams(12))) == [solo_ids(dynamic(), prompt, 12)]
