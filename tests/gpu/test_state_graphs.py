# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of models with states: decoding sequences replay, chunks run eagerly, and no state is advanced twice."""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.engine.engine_config import EngineConfig
from hf_triton.errors import CheckpointError
from hf_triton.runner import state_slots
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.device_step import NUM_TOKENS, decode_sizes
from hf_triton.runner.model_runner import PACKED, ModelRunner, Way
from hf_triton.runner.step import Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from tests.gpu.conftest import Replays
from tests.support.architectures import load, requests
from tests.support.engine import Client, PreemptCounter, check, greedy_ids, start_engine
from tests.support.simulated_gpu import HAS_GPU

pytestmark = pytest.mark.full
WAYS = {"qwen3-next": PACKED, "jamba": Way(prefills_whole=True), "mamba2": PACKED, "lfm2": PACKED}
OTHERS = ("granite4", "falcon-h1", "qwen3.5-moe", "nemotron-h", "falcon-mamba")


class Shapes:
    """The rows and new tokens of each forward of a model that was not a replay."""

    def __init__(self, model: Any) -> None:
        self.noted: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, __: Any, arguments: dict[str, Any]) -> None:
        self.noted.append(tuple(arguments["input_ids"].shape))


def states_of(runner: ModelRunner) -> list[torch.Tensor]:
    layers = [layer for layer in runner.cache.layers if isinstance(layer, state_slots.SlotStatesLayer)]
    return [states for layer in layers for states in layer.states()]


@pytest.mark.parametrize("name", [*WAYS, *OTHERS])
def test_sequences_that_come_and_go_equal_generate_and_decode_by_replays(
    name: str, replays: Replays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, preempted = load(name, tmp_path), PreemptCounter()
    model = copy.deepcopy(plain).to("cuda")
    config = EngineConfig(chunk_sizes=ChunkSizes(64, 16))
    options: dict[str, Any] = {"decoding": "cuda_graphs", "observer": preempted, "config": config}
    is_scarce = name in WAYS and name != "mamba2"  # whose cache has no keys, and is never full
    if is_scarce:
        options["max_cache_tokens"] = 144
    items = requests(24 if name in WAYS else 8, random.Random(5))
    expected = greedy_ids(model if HAS_GPU else plain, items)
    with closing(start_engine(model, max_num_seqs=7, context_length=128, **options)) as engine:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", None)  # none is captured after the load
        replays.sizes.clear()
        shapes = Shapes(model)
        check(plain, Client(engine), items, expected=expected)
    assert replays.num_eager == 0
    assert {size.num_tokens for size in replays.sizes} >= {1, 2, 4}, "three are padded to four"
    assert {rows for rows, _ in shapes.noted} == {1}, "chunks alone run eagerly"
    assert (preempted.num_sequences > 0) is is_scarce


@pytest.mark.parametrize("name", WAYS)
def test_a_sequence_begins_without_its_slots_former_state(name: str, replays: Replays, tmp_path: Path) -> None:
    """Neither a former sequence's state nor that of padding, here NaN, reaches another sequence."""
    plain = load(name, tmp_path)
    model = copy.deepcopy(plain).to("cuda")
    source = random.Random(3)
    items = [([source.randrange(3, 300) for _ in range(length)], SamplingParams(9)) for length in (1, 5, 30)]
    expected = greedy_ids(model if HAS_GPU else plain, items)
    options: dict[str, Any] = {"decoding": "cuda_graphs", "enable_prefix_caching": False}
    with closing(start_engine(model, max_num_seqs=4, context_length=128, **options)) as engine:
        check(plain, Client(engine), items, expected=expected)
        with torch.inference_mode():
            for states in states_of(engine.runner):
                assert len(states) == 5, "one for padding"
                states.fill_(torch.nan)
        replays.sizes.clear()
        check(plain, Client(engine), items, expected=expected)
    assert 4 in {size.num_tokens for size in replays.sizes}


def tokens(number: int, start: int, end: int) -> TokenRange:
    """Of a sequence with a block of its own."""
    token_ids = [(7 * number + 3 * at) % 300 for at in range(start, end)]
    return TokenRange(number, start, end, token_ids, [number], end, samples=(number,), slot=number)


def decodes(slots: Sequence[int], at: int) -> tuple[TokenRange, ...]:
    return tuple(tokens(slot, at, at + 1) for slot in slots)


@pytest.fixture(params=WAYS)
def runners(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    model = load(request.param, tmp_path).to("cuda")
    pair = ModelRunner(model, WAYS[request.param]), ModelRunner(model, WAYS[request.param])
    for runner in pair:
        runner.allocate(8, 6)
    assert pair[0].capture(6) is None
    return pair


def test_replays_change_the_states_of_their_sequences_as_forwards_do(
    runners: tuple[ModelRunner, ModelRunner], replays: Replays
) -> None:
    """Slots in any order, with gaps and padding; a chunk beside them; a state that no step computes stays."""
    found, kept = [], []
    for runner in runners:
        logits = [runner.run(Step(tuple(tokens(slot, 0, 4) for slot in range(5)))).clone()]
        kept.append([states[2].clone() for states in states_of(runner)])
        logits.append(runner.run(Step(decodes([4, 1, 0], 4))).clone())
        logits.append(runner.run(Step((*decodes([0, 4, 1], 5), tokens(5, 0, 6)))).clone())
        logits.append(runner.run(Step((*decodes([0, 1, 4], 6), tokens(5, 6, 7)))).clone())
        found.append(torch.cat(logits).cpu())
        assert all(torch.equal(states[2], before) for states, before in zip(states_of(runner), kept[-1], strict=True))
    assert [size.num_tokens for size in replays.sizes] == [4, 4, 4]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    for replayed, eager in zip(*map(states_of, runners), strict=True):
        torch.testing.assert_close(replayed[:6].cpu(), eager[:6].cpu(), rtol=1e-4, atol=1e-4)


def test_sizes_are_numbers_of_sequences() -> None:
    assert [size.num_tokens for size in decode_sizes(7)] == [1, 2, 4, 7]
    assert [size.num_tokens for size in decode_sizes(5000)] == list(NUM_TOKENS)
    assert {(size.num_sequences, size.num_rows) for size in decode_sizes(1)} == {(1, 1)}


def test_replays_that_do_not_keep_states_are_found_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = state_slots._Slots.end

    def forget(slots: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            slots._rows = {}
        end(slots)

    monkeypatch.setattr(state_slots._Slots, "end", forget)
    runner = ModelRunner(load("mamba2", tmp_path).to("cuda"), PACKED)
    runner.allocate(8, 6)
    assert "captured logits differ" in (runner.capture(6) or "")


def test_states_beside_latent_attention_decode_eagerly(tmp_path: Path) -> None:
    model = load("kimi-linear", tmp_path).to("cuda")
    with pytest.raises(CheckpointError, match=r"decoding cuda_graphs .*keys and values of each sequence are copied"):
        start_engine(model, max_num_seqs=5, context_length=128, decoding="cuda_graphs")
