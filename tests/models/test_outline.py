# SPDX-License-Identifier: Apache-2.0
"""What is found without weights is what the engine allocates and the model computes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.folders.capacity import Room, Speed
from hf_triton.folders.cards import CARDS
from hf_triton.hub.pretrained import auto_class_of
from hf_triton.runner.budget import FreeMemory
from hf_triton.runner.gpu_memory import GpuPart, LoadMemory, weight_bytes
from hf_triton.runner.outline import Outline, measure_outline
from hf_triton.runner.way_probe import probe_ways
from hf_triton.testing import ARCHITECTURES
from tests.support.architectures import BASE, CONTINUOUS, EXPERTS, HEADS, LATENT, WHOLE, load, some_in_make_test
from tests.support.engine import NOT_CONTINUOUS

UNSEEN = ("jetmoe", "longcat")
"""They read on the host which experts are chosen."""
SEEN = [name for name in (*CONTINUOUS, *WHOLE, *ARCHITECTURES) if name not in (*NOT_CONTINUOUS, *UNSEEN, "t5", "bart")]
NUM_BLOCKS, NUM_SLOTS = 6, 3
GIB = 1 << 30
PLAIN = Outline(1000, True, 0, 2e9, 0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def caches_are_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export in another test of this process makes torch look into caches, and ours lead back to themselves."""
    for kind in list(_pytree.SUPPORTED_NODES):
        if isinstance(kind, type) and issubclass(kind, Cache):
            monkeypatch.delitem(_pytree.SUPPORTED_NODES, kind)


def without_weights(model: Any) -> Any:
    with torch.device("meta"):
        return auto_class_of(model.config).from_config(copy.deepcopy(model.config), dtype=model.dtype).eval()


@pytest.mark.parametrize("name", some_in_make_test(SEEN))
def test_bytes_are_those_that_the_engine_allocates(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    outline = measure_outline(without_weights(model))
    way = probe_ways(model)
    assert outline is not None
    assert way is not None
    engine = ContinuousBatchingEngine(
        model, way=way, max_num_seqs=NUM_SLOTS, max_cache_tokens=NUM_BLOCKS * 64, context_length=256
    )
    try:
        runner = engine.runner
        runner.run_token(NUM_SLOTS - 1)
        kept = sum(blocks.keys.nbytes + blocks.values.nbytes for blocks in runner.cache.blocks())
        states = sum(state.nbytes for layer in runner.cache.layers for state in getattr(layer, "states", list)())
    finally:
        engine.close()
    assert kept == (NUM_BLOCKS * 64 * outline.bytes_per_token if outline.has_keys else 0)
    assert 0 <= outline.slot_tokens * outline.bytes_per_token - states / NUM_SLOTS < outline.bytes_per_token


@pytest.mark.parametrize("name", [*UNSEEN, "rwkv"])
def test_what_cannot_be_seen_is_not_guessed(name: str, tmp_path: Path) -> None:
    assert measure_outline(without_weights(load(name, tmp_path))) is None


@pytest.mark.parametrize(
    ("config_name", "arguments"),
    [
        ("LlamaConfig", BASE | HEADS),
        ("Qwen3MoeConfig", BASE | HEADS | EXPERTS),
        ("DeepseekV3Config", BASE | LATENT),
        ("FalconConfig", BASE | {"multi_query": True}),
    ],
)
def test_operations_are_those_of_transformers_own_forward(config_name: str, arguments: dict[str, Any]) -> None:
    config = getattr(transformers, config_name)(**arguments)
    model = auto_class_of(config).from_config(config).eval()
    outline = measure_outline(without_weights(model))
    assert outline is not None
    model.set_attn_implementation("eager")  # torch does not count its own attention on a CPU, nor grouped products
    model.config._experts_implementation = "eager"
    for length in (32, 64):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False)
        full = length**2 / 2 * outline.attention_flop  # torch counts what a causal mask leaves out
        counted = outline.prompt_flop(length, 1024) + full + (length - 1) * outline.logits_flop
        assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_latent_attention_expands_what_is_cached_once_a_chunk() -> None:
    outline = Outline(100, True, 0, 10.0, 5.0, 0.0, 2.0)
    assert outline.prompt_flop(1000, 1000) == 1000 * (10 + 2) + 5
    assert outline.prompt_flop(2000, 1000) == 2000 * 10 + (1000 + 2000) * 2 + 5
    assert outline.decoding_flop(300) == 10 + 5 + 300 * 2


# --- what fits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "zamba2"])
@pytest.mark.parametrize("context", [100, 1024, 5000])
def test_so_many_sequences_fit_a_gpu_and_no_more(name: str, context: int, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    outline = measure_outline(without_weights(model))
    assert outline is not None
    gpu = torch.device("cuda")
    total = 50 * sum(weight_bytes(model).values())
    weights = sum(weight_bytes(model).values())
    room = Room(outline, weights, "cuda", total)
    number = room.num_sequences(context)
    assert number > 1

    class OnGpu:
        def parameters(self) -> list[Any]:
            return [type("Tensor", (), {"device": gpu, "nbytes": weights})]

        def buffers(self) -> list[Any]:
            return []

    def num_blocks(num_seqs: int) -> int:
        part, states = GpuPart(1.0, is_set=True), num_seqs * outline.slot_tokens
        memory = LoadMemory(OnGpu(), {gpu: outline.bytes_per_token}, part, states, lambda _: (total, total))
        return memory.cache_tokens(num_seqs, context) // 16

    assert num_blocks(number) >= number * -(-context // 16)
    assert num_blocks(number + 1) < (number + 1) * -(-context // 16)


@pytest.mark.parametrize("name", ["llama", "zamba2"])
def test_a_cpu_has_the_tokens_of_its_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeMemory, "of", lambda *_: GIB // 8)
    model = load(name, tmp_path)
    outline, way = measure_outline(without_weights(model)), probe_ways(model)
    assert outline is not None
    assert way is not None
    engine = ContinuousBatchingEngine(model, way=way, max_num_seqs=4, context_length=256)
    try:
        room = Room(outline, 10**6, "cpu", GIB // 8 + 10**6)  # the weights have been taken when the engine looks
        assert engine.memory.budget.most == room.num_tokens
        assert engine.memory.block_size == room.block_size
    finally:
        engine.close()


def test_settings_bound_what_fits() -> None:
    room = Room(PLAIN, 8 * GIB, "cuda", 80 * GIB)
    assert room.num_sequences(1000) == room.num_tokens // 1008
    assert room.num_tokens == (72 - 8) * GIB // 1000
    assert Room(PLAIN, 8 * GIB, "cuda", 80 * GIB, fraction=0.5).num_tokens == (36 - 8) * GIB // 1000
    assert Room(PLAIN, 8 * GIB, "cuda", 80 * GIB, max_cache_tokens=5000).num_sequences(1000) == 4
    assert Room(PLAIN, 90 * GIB, "cuda", 80 * GIB).num_sequences(1000) == 0
    assert Room(PLAIN, 90 * GIB, "cpu", 80 * GIB).num_sequences(1000) == 0


# --- how long it takes --------------------------------------------------------------------------------------------


def speed(*, outline: Outline = PLAIN, num_parameters: int = 10**9) -> Speed:
    return Speed(Room(outline, 2 * 10**9, "cuda", 80 * 10**9), num_parameters, CARDS["h100"])


def test_a_step_reads_the_weights_and_what_is_cached() -> None:
    assert speed().step_s(1, 1000) == pytest.approx((2e9 + 1e6) / 3350e9)
    assert speed().step_s(64, 1000) == pytest.approx((2e9 + 64e6) / 3350e9)


def test_a_long_prompt_takes_arithmetic_and_a_short_one_memory() -> None:
    assert speed().prefill_s(4096) == pytest.approx(4096 * 2e9 / 989e12)
    assert speed().prefill_s(1) == pytest.approx(2e9 / 3350e9)


def test_a_step_of_many_computes_longer_than_it_reads() -> None:
    assert speed().step_s(4096, 0) == pytest.approx(4096 * 2e9 / 989e12)


def test_few_tokens_read_the_experts_that_they_choose() -> None:
    """A tenth of the parameters for each token; ten tokens may choose all."""
    sparse = speed(num_parameters=10**10)
    assert sparse.step_s(1, 0) == pytest.approx(0.2e9 / 3350e9)
    assert sparse.step_s(5, 0) == pytest.approx(1e9 / 3350e9)
    assert sparse.step_s(20, 0) == sparse.step_s(10, 0) == pytest.approx(2e9 / 3350e9)


def test_requests_per_second_are_those_of_prefill_and_steps() -> None:
    one = speed().prefill_s(1000) + 100 * speed().step_s(32, 1050) / 32
    assert speed().requests_per_s(32, 1000, 100) == pytest.approx(1 / one)
