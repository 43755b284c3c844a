# SPDX-License-Identifier: Apache-2.0
"""What is found without weights is what the engine allocates."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from transformers import Cache

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.folders.capacity import Room
from hf_triton.hub.pretrained import auto_class_of
from hf_triton.runner.budget import FreeMemory
from hf_triton.runner.gpu_memory import GpuPart, LoadMemory, weight_bytes
from hf_triton.runner.outline import Outline, measure_outline
from hf_triton.runner.way_probe import find_way
from hf_triton.testing import ARCHITECTURES
from tests.support.architectures import CONTINUOUS, WHOLE, load, some_in_make_test
from tests.support.engine import NOT_CONTINUOUS

UNSEEN = ("jetmoe", "longcat")
"""They read on the host which experts are chosen."""
SEEN = [name for name in (*CONTINUOUS, *WHOLE, *ARCHITECTURES) if name not in (*NOT_CONTINUOUS, *UNSEEN, "t5", "bart")]
NUM_BLOCKS, NUM_SLOTS = 6, 3
GIB = 1 << 30
PLAIN = Outline(1000, True, 0)


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
    way = find_way(model).way
    assert outline is not None
    assert way is not None
    engine = ContinuousBatchingEngine(
        model, EngineOptions(max_num_seqs=NUM_SLOTS, max_cache_tokens=NUM_BLOCKS * 64, context_length=256), way
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
    outline, way = measure_outline(without_weights(model)), find_way(model).way
    assert outline is not None
    assert way is not None
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=4, context_length=256), way)
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
