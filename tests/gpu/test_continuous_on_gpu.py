# SPDX-License-Identifier: Apache-2.0
"""The continuous engine on CUDA devices: the output of `generate`, no waiting but for tokens, memory at load."""

import copy
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from accelerate import dispatch_model

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.executor import Executor
from hf_triton.engine.scheduler import StepOutput
from hf_triton.errors import CheckpointError
from hf_triton.runner.cuda import fuse
from hf_triton.runner.model_runner import PACKED, ModelRunner
from hf_triton.runner.step import Step
from hf_triton.runner.way_probe import Finding
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import load, requests
from tests.support.engine import Client, check, greedy_ids, start_engine, token_ids
from tests.support.simulated_gpu import HAS_GPU, Device

pytestmark = pytest.mark.full
MODELS = (
    *("llama", "falcon", "gpt-bigcode", "phi3-longrope", "mistral-window", "gemma2", "gpt-oss", "llama4"),
    *("deepseek-v3", "falcon-h1"),
)
"""Of each way to run, each kind of mask and each kind of attention."""
PLANS = {
    "greedy": SamplingParams(24),
    "drawn": SamplingParams(24, do_sample=True, temperature=0.8, top_k=20, top_p=0.9, seed=3),
    "penalised": SamplingParams(24, repetition_penalty=1.2),
    "scored": SamplingParams(24, logprobs=1, prompt_logprobs=2),
}


def check_beside_generate(engine: Any, reference: Any, count: int) -> None:
    items = requests(count, random.Random(5))
    check(reference, Client(engine), items, expected=greedy_ids(reference, items))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host has waited for in an engine's thread, but for tokens; a real device does not say."""
    noted: list[str] = []
    wait = Device.wait

    def note(device: Device, operation: object) -> None:
        wait(device, operation)
        if threading.current_thread().name == "hf_triton-engine":
            noted.append(str(operation))

    monkeypatch.setattr(Device, "wait", note)
    return noted


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_equals_generate_and_no_step_waits_but_for_experts(
    name: str, waits: list[str], tmp_path: Path
) -> None:
    plain = load(name, tmp_path)
    model = copy.deepcopy(plain).to("cuda")
    fuse(model)
    with closing(start_engine(model, max_num_seqs=5, context_length=128)) as engine:
        assert isinstance(engine, ContinuousBatchingEngine)
        check_beside_generate(engine, model if HAS_GPU else plain, 10)
    assert set(waits) <= {"aten._grouped_mm.default"}, "which waits in float32; see test_experts_on_gpu"


@pytest.mark.parametrize("name", ["granite", "deepseek-v3", "phi3-longrope", "qwen3-next"])
def test_a_model_on_several_devices(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    plain = load(name, tmp_path)
    model = copy.deepcopy(plain)
    model = dispatch_model(model, in_two(model))
    with closing(start_engine(model, max_num_seqs=5, context_length=128)) as engine:
        assert isinstance(engine, ContinuousBatchingEngine)
        assert {blocks.device.index for blocks in engine.runner.cache.blocks()} <= {0, 1}
        check_beside_generate(engine, plain, 8)


def in_two(model: torch.nn.Module) -> dict[str, str]:
    """A device map: the first half of the layers and what is before them, and the rest."""
    base = next(iter(model.named_children()))[0]
    layers = [name for name, child in getattr(model, base).named_children() if isinstance(child, torch.nn.ModuleList)]
    places = {}
    for name, child in getattr(model, base).named_children():
        if name in layers[:1]:
            half = len(child) // 2
            places |= {f"{base}.{name}.{index}": f"cuda:{int(index >= half)}" for index in range(len(child))}
        else:
            places[f"{base}.{name}"] = "cuda:1" if places and "emb" not in name else "cuda:0"
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return places | {name: "cuda:0" if is_tied else "cuda:1" for name, _ in model.named_children() if name != base}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    noted: list[Step] = []
    run = Executor.run

    def note(executor: Executor, step: Step) -> Iterator[StepOutput]:
        noted.append(step)
        return run(executor, step)

    monkeypatch.setattr(Executor, "run", note)
    return noted


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_steps_start_before_the_tokens_of_the_last_are_read(
    plan: SamplingParams, waits: list[str], steps: list[Step], tmp_path: Path
) -> None:
    with closing(start_engine(load("llama", tmp_path).to("cuda"), max_num_seqs=4, context_length=128)) as engine:
        client = Client(engine)
        for prompt, _ in requests(8, random.Random(5)):
            client.submit(prompt, plan)
        outputs = [ids for outcome in client.outcomes() for ids in token_ids(outcome)]
    assert {len(ids) for ids in outputs} == {plan.max_new_tokens}
    assert waits == []
    num_ahead = sum(step.stays_inflight for step in steps)
    assert num_ahead == 0 if plan in (PLANS["penalised"], PLANS["scored"]) else num_ahead > len(steps) / 2


class EvenTokens:
    """A constraint that allows every second token."""

    is_complete = False

    def bitmask(self) -> npt.NDArray[np.uint8]:
        return np.full(100, 0b01010101, np.uint8)

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0


NEEDING_HOST: list[tuple[SamplingParams, dict[str, Any]]] = [
    (SamplingParams(20, repetition_penalty=1.2), {}),
    (SamplingParams(20), {"constraint": EvenTokens}),
    (SamplingParams(20), {"logits_processor": lambda: lambda _, scores: -scores}),
    (SamplingParams(20, logprobs=1), {}),  # the last one: reading them waits for the device
]


def test_a_sequence_that_needs_the_host_stops_no_other(waits: list[str], steps: list[Step], tmp_path: Path) -> None:
    plain = load("llama", tmp_path)
    prompt, *prompts = [prompt for prompt, _ in requests(4, random.Random(5))]
    expected = greedy_ids(plain, [(each, SamplingParams(40)) for each in prompts])
    with closing(start_engine(copy.deepcopy(plain).to("cuda"), max_num_seqs=4, context_length=128)) as engine:
        for plan, options in NEEDING_HOST:
            assert waits == []
            alone = token_ids(Client(engine).ask(prompt, plan, **options))
            steps.clear()
            client = Client(engine)
            for each in prompts:
                client.submit(each, SamplingParams(40))
            client.submit(prompt, plan, **options)
            assert [ids for outcome in client.outcomes() for ids in token_ids(outcome)] == expected + alone
            ahead = [step.stays_inflight for step in steps if step.ranges]
            assert sum(ahead) >= len(ahead) - 2
            assert sum(len(step.ranges) == 3 for step in steps) >= 18  # it sits out, or has ended


@pytest.mark.parametrize("name", ["llama", "granite4"])
def test_all_memory_is_allocated_at_load(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path).to("cuda")
    with closing(start_engine(model, max_num_seqs=5, context_length=128, max_cache_tokens=4096)) as engine:
        cache = engine.runner.cache
        before = [blocks.keys for blocks in cache.blocks()]
        assert {len(keys) * keys.shape[2] for keys in before} == {4096}
        states = [buffer for layer in cache.layers if hasattr(layer, "states") for buffer in layer.states()]
        num_slots = 5 + engine.memory.pool.states.num_slots + 1  # of sequences, of kept states, and a spare one
        assert {len(buffer) for buffer in states} == ({num_slots} if name == "granite4" else set())
        Client(engine).ask([5, 6, 7], SamplingParams(3))
        assert all(blocks.keys is keys for blocks, keys in zip(cache.blocks(), before, strict=True))


def test_a_cache_that_does_not_fit_is_refused_at_load(tmp_path: Path) -> None:
    model = load("llama", tmp_path).to("cuda")
    with pytest.raises(CheckpointError, match=r"out_of_memory: .* cuda:0 has .* max_cache_tokens"):
        start_engine(model, max_num_seqs=5, context_length=128, max_cache_tokens=2**31 - 1)


@pytest.mark.parametrize("max_cache_tokens", [None, 1024])
def test_states_of_many_sequences_that_do_not_fit_are_refused_at_load(
    max_cache_tokens: int | None, tmp_path: Path
) -> None:
    model = load("granite4", tmp_path).to("cuda")
    with pytest.raises(CheckpointError, match=r"out_of_memory: .* states of .* for max_num_seqs sequences: cuda:0 has"):
        start_engine(model, max_num_seqs=10**8, context_length=128, max_cache_tokens=max_cache_tokens)


@pytest.mark.parametrize(("probes", "num_runs"), [(True, 2), (False, 0), (False, 4)])
def test_memory_that_runs_out_in_a_trial_names_the_settings(
    probes: bool, num_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a probe, when a token's memory is measured, and in a large step."""
    model, left, run = load("llama", tmp_path).to("cuda"), num_runs, ModelRunner.run

    def run_out(runner: ModelRunner, *args: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return run(runner, *args)

    if not probes:
        monkeypatch.setattr("hf_triton.engine.choose.find_way_again", lambda *_: Finding(PACKED, ""))
    monkeypatch.setattr(ModelRunner, "run", run_out)
    with pytest.raises(CheckpointError, match=r"out_of_memory: .* ran out .*max_cache_tokens"):
        start_engine(model, max_num_seqs=5, context_length=128)
