# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: captured where torch's grouped product does not wait for the host, for few tokens elsewhere."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_triton.runner import experts, model_runner
from hf_triton.runner.device_step import step_sizes
from hf_triton.runner.model_runner import PACKED, ModelRunner
from hf_triton.runner.numerics import agree
from hf_triton.runner.step import Step, TokenRange
from tests.gpu.conftest import Replays
from tests.support.architectures import load
from tests.support.engine import start_engine
from tests.support.simulated_gpu import Device

pytestmark = pytest.mark.full
MODELS = ("mixtral", "gpt-oss", "qwen3-moe")
EAGER = "runs eagerly, up to four times slower while few sequences run, as there are no CUDA graphs: "


def why(dtype: str, capability: str) -> str:
    return (
        f"the grouped product of its experts waits for the host in {dtype} on a GPU of compute capability {capability},"
        " and does not in bfloat16 on 9.0 and 10.x"
    )


@pytest.fixture
def device(simulated: Device | None, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Its models have graphs of few sizes."""
    if simulated is None:
        pytest.skip("a real device has the compute capability that it has, and rounds padded steps in its own way")
    sizes = [size for size in step_sizes(4) if size.num_tokens in (1, 4, 8, 16, 80)]
    monkeypatch.setattr(model_runner, "step_sizes", lambda *_: sizes)
    return simulated


def build_runner(name: str, dtype: torch.dtype, folder: Path) -> ModelRunner:
    runner = ModelRunner(load(name, folder).to("cuda", dtype), PACKED)
    runner.allocate(8)
    return runner


def check_beside_eager(runner: ModelRunner, replays: Replays) -> tuple[list[int], int]:
    """Compare steps of a captured model with eager ones of the same tokens; the steps' graphs, and how many had none.

    Their 24, 6, 3 and 1 tokens are fewer than those of the graphs, but for the last.
    """
    first, second, more = list(range(30, 50)), [3, 250, 17, 99], [7, 8, 9, 60, 61]
    parts = [
        [TokenRange(0, 0, 20, first, [0, 1], 20, samples=(0,)), TokenRange(1, 0, 4, second, [2], 4, samples=(1,))],
        [TokenRange(0, 20, 21, [5], [0, 1], 21, samples=(0,)), TokenRange(1, 4, 9, more, [2], 9, samples=(1,))],
        [TokenRange(0, 21, 22, [6], [0, 1], 22, samples=(0,)), TokenRange(1, 9, 11, [8, 10], [2], 11, samples=(1,))],
        [TokenRange(1, 11, 12, [12], [2], 12, samples=(1,))],
    ]  # fmt: skip
    steps = [Step(tuple(each)) for each in parts]
    replays.sizes.clear()
    replays.num_eager = 0
    captured = [runner.run(step).cpu() for step in steps]
    noted = [size.num_tokens for size in replays.sizes], replays.num_eager
    runner._graphs = None
    for step, logits in zip(steps, captured, strict=True):
        assert agree(runner.run(step).cpu(), logits)
    return noted


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_on_some_gpus_all_small_steps_are_captured(
    name: str, device: Device, replays: Replays, tmp_path: Path
) -> None:
    device.capability = (10, 3) if name == "mixtral" else (9, 0)
    runner = build_runner(name, torch.bfloat16, tmp_path)
    assert runner.capture(4) is None
    assert runner.partly == []
    assert check_beside_eager(runner, replays) == ([80, 8, 4, 1], 0)


@pytest.mark.parametrize(
    ("name", "dtype", "capability"),
    [
        ("mixtral", torch.float32, (9, 0)),
        ("gpt-oss", torch.float16, (8, 9)),
        ("qwen3-moe", torch.bfloat16, (8, 0)),
        ("qwen3-moe", torch.float16, (7, 5)),  # torch has no grouped product there, and transformers loops
    ],
)
def test_elsewhere_steps_of_few_tokens_gather_weights_and_others_run_eagerly(
    name: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    device: Device,
    replays: Replays,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.capability = capability
    runner = build_runner(name, dtype, tmp_path)
    layer = next(module for module in runner.model.modules() if hasattr(module, "_is_expert_parallel"))
    of_expert = sum(own.nbytes for own in layer.parameters()) // layer.num_experts
    monkeypatch.setattr(experts, "GATHERED_BYTES", 8 * 2 * of_expert // layer.num_experts)  # eight tokens, two experts
    assert runner.capture(4) is None
    reason = why(str(dtype).removeprefix("torch."), ".".join(map(str, capability)))
    assert runner.partly == [f"runs steps of 9 tokens or more eagerly, as {reason}"]
    assert runner.model.config._experts_implementation == "grouped_mm"
    assert check_beside_eager(runner, replays) == ([8, 4, 1], 1)


def test_experts_whose_weights_take_long_to_gather_run_eagerly(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "GATHERED_BYTES", 1)
    assert build_runner("mixtral", torch.float32, tmp_path).capture(4) == why("float32", "9.0")


def test_experts_that_gathering_computes_wrongly_run_eagerly(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", lambda *given: right(*given) * 1.1)
    assert build_runner("mixtral", torch.float32, tmp_path).capture(4) == why("float32", "9.0")


def test_the_log_and_the_engine_say_which_steps_run_eagerly(
    device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(start_engine(load("mixtral", tmp_path).to("cuda"), max_num_seqs=2, context_length=64)) as engine:
        assert engine.slower == [f"runs steps of 81 tokens or more eagerly, as {why('float32', '9.0')}"]
    assert [record.message for record in caplog.records if "eagerly" in record.message] == [
        f"the model {engine.slower[0]}"
    ]


def test_latent_attention_says_why_it_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load("deepseek-v3", tmp_path).to("cuda")
    with closing(start_engine(model, max_num_seqs=2, context_length=64)) as engine:
        reason = "the keys and values of each sequence are copied at every step, as for multi-head latent attention"
        assert engine.slower[0] == EAGER + reason
    assert [record.message for record in caplog.records if "eagerly" in record.message] == [
        f"the model {engine.slower[0]}"
    ]
