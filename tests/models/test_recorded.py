# SPDX-License-Identifier: Apache-2.0
"""The recorded calls of small steps on a CPU give the model's own bits, or the model runs as it is."""

import functools
import itertools
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_triton.runner.cpu import accelerate
from hf_triton.runner.model_runner import MAX_RECORDED_S, PACKED, ModelRunner
from hf_triton.runner.own_code import has_own_code
from hf_triton.runner.step import Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.architectures import CONTINUOUS, build
from tests.support.engine import Client, start_engine, token_ids

NUM_BLOCKS = 8
OTHERS = {
    *(
        "bamba",
        "falcon-h1",
        "falcon-mamba",
        "granite4",
        "jamba",
        "kimi-linear",
        "lfm2",
        "mamba",
        "mamba2",
        "nemotron-h",
    ),
    *("olmo-hybrid", "qwen3-next", "qwen3.5", "qwen3.5-moe", "zamba", "zamba2"),  # have states
    *("deepseek-v3", "jetmoe", "longcat"),  # are not packed
    *("llama4", "phi3-longrope"),
}
"""Architectures whose calls are not recorded."""


class Counted:
    """A model's embedding, which counts its calls: a forward of the model is one."""

    def __init__(self, model: Any) -> None:
        embedding = model.get_input_embeddings()
        self._forward, self.num_calls = embedding.forward, 0
        embedding.forward = self

    def __call__(self, ids: torch.Tensor) -> Any:
        self.num_calls += 1
        return self._forward(ids)


def load(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_checkpoint(folder, kind), dtype=dtype).eval()
    accelerate(model)
    return model


def build_runner(model: Any, *, records: bool = True) -> ModelRunner:
    runner = ModelRunner(model, PACKED)
    runner.allocate(NUM_BLOCKS)
    if records:
        runner.record(NUM_BLOCKS)
    return runner


def part(number: int, start: int, end: int, num_drafted: int = 0) -> TokenRange:
    token_ids = [11 + number + 3 * at for at in range(start, end)]
    return TokenRange(number, start, end, token_ids, [number], end, samples=(number,), num_drafted=num_drafted)


def decode(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits of steps behind prompts of unequal lengths, of ever fewer sequences, and one with a proposal."""
    runner.run(Step(tuple(part(number, 0, 2 + number) for number in range(NUM_BLOCKS))))
    steps = [Step(tuple(part(number, 2 + number, 3 + number) for number in range(num))) for num in (8, 5, 2, 1)]
    steps.append(Step((part(0, 3, 7, num_drafted=3), part(1, 4, 5))))
    return [runner.run(step) for step in steps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "qwen3"])
def test_recorded_calls_give_the_same_bits_without_the_modules(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = load(tmp_path, kind, dtype)
    expected = decode(build_runner(model, records=False))
    counted, runner = Counted(model), build_runner(model)
    counted.num_calls = 0
    assert all(map(torch.equal, expected, decode(runner)))
    assert counted.num_calls == 1  # the prompts


@pytest.mark.parametrize("is_slow_once", [True, False])
def test_a_step_that_takes_long_once_is_recorded(tmp_path: Path, is_slow_once: bool) -> None:
    model = load(tmp_path)
    counted, runner = Counted(model), build_runner(model, records=False)
    run, slept = runner.run, []

    def run_slowly(step: Step) -> torch.Tensor:
        if len(step.ranges) == 1 and not (slept and is_slow_once):
            slept.append(time.sleep(2 * MAX_RECORDED_S))
        return run(step)

    runner.run = run_slowly  # type: ignore[method-assign]
    runner.record(NUM_BLOCKS)
    counted.num_calls = 0
    decode(runner)
    assert (counted.num_calls == 1) == is_slow_once


@pytest.mark.parametrize("change", ["hook", "forward", "model"])
def test_a_model_that_has_changed_runs_as_it_is(tmp_path: Path, change: str) -> None:
    model = load(tmp_path)
    counted, runner = Counted(model), build_runner(model)
    forward = model.forward
    if change == "hook":
        model.get_output_embeddings().register_forward_hook(lambda module, given, output: 2 * output)
    elif change == "forward":
        model.forward = lambda *given, **options: forward(*given, **options)
    else:
        runner.model = lambda *given, **options: model(*given, **options)
    counted.num_calls = 0
    found = decode(runner)
    assert counted.num_calls == 1 + len(found)
    factor = 2 if change == "hook" else 1
    plain = decode(build_runner(load(tmp_path), records=False))
    assert all(torch.equal(factor * logits, other) for logits, other in zip(plain, found, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CONTINUOUS.keys() - OTHERS))
def test_each_architecture_keeps_its_bits_beyond_its_windows(name: str) -> None:
    model = build(*CONTINUOUS[name])
    accelerate(model)
    plain, counted, recorded = build_runner(model, records=False), Counted(model), build_runner(model)
    for runner, number in itertools.product((plain, recorded), range(6)):
        runner.run(Step((part(number, 0, number + 1),)))
    for length, num in itertools.product(range(1, 50), (6, 1, 3)):  # tokens that are computed again stay the same
        step = Step(tuple(part(number, length + number, length + number + 1) for number in range(num)))
        expected, before = plain.run(step), counted.num_calls
        assert torch.equal(recorded.run(step), expected)
        assert counted.num_calls == before


def test_code_that_is_neither_ours_nor_transformers_is_found(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert not has_own_code(model)
    hook = model.model.norm.register_forward_hook(lambda *given: None)
    assert has_own_code(model)
    hook.remove()
    model.model.norm.forward, forward = (lambda states: states), model.model.norm.forward
    assert has_own_code(model)
    model.model.norm.forward = forward
    assert not has_own_code(model)
    model.generate = functools.partial(model.generate)
    assert has_own_code(model)
    del model.generate
    model.model.norm = type("Norm", (type(model.model.norm),), {"__module__": "modeling"})(32)
    assert has_own_code(model)


@pytest.mark.parametrize("owner", ["model", "load", "none"])
def test_an_engine_runs_own_code_in_each_step(tmp_path: Path, owner: str) -> None:
    model = load(tmp_path)
    counted = (Counted if owner == "model" else type("Known", (Counted,), {"__module__": "transformers.modeling"}))(
        model
    )
    with closing(start_engine(model, max_num_seqs=4, has_own_code=owner == "load")) as engine:
        before = counted.num_calls
        [ids] = token_ids(Client(engine).ask([11, 12, 13], SamplingParams(9, min_new_tokens=9)))
    assert len(ids) == 9
    assert counted.num_calls == before + (1 if owner == "none" else 9)


@pytest.mark.parametrize("change", ["reads", "counts", "remembers", "shapes", "chooses", "repeats", "cuts"])
def test_a_forward_that_is_more_than_its_calls_is_not_recorded(tmp_path: Path, change: str) -> None:
    model, seen = load(tmp_path), [torch.ones(())]
    forward = model.forward

    def changed(*given: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        output = forward(*given, input_ids=input_ids, **options)
        seen.append(input_ids.float().mean())
        factors = {
            "reads": lambda: seen[-1].item(),
            "counts": lambda: len(seen),
            "remembers": lambda: seen[-2],
            "shapes": lambda: len(input_ids.nonzero()),
            "chooses": lambda: len(input_ids[input_ids > 0]),
            "repeats": lambda: len(torch.repeat_interleave(input_ids[0])),
            "cuts": lambda: len(input_ids[0][: (input_ids > 0).sum()]),
        }
        output.logits = output.logits * factors[change]()
        return output

    model.forward = functools.wraps(forward)(changed)
    runner = build_runner(model, records=False)
    counted = Counted(model)
    runner.record(NUM_BLOCKS)
    before = counted.num_calls
    runner.run(Step((part(0, 0, 1),)))
    assert counted.num_calls == before + 1
