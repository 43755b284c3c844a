# SPDX-License-Identifier: Apache-2.0
"""The probe at load of deep half-precision models: right arithmetics pass whatever they round, planted faults fail."""

import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_triton.runner.float32 import in_float32
from hf_triton.runner.model_runner import PACKED
from hf_triton.runner.way_probe import WayProbe, find_way, short_windows
from tests.support.architectures import CONTINUOUS, STATES, WHOLE, load
from tests.support.deep_models import (
    STEP_FAULTS,
    attention_fault,
    build_deep,
    faults_of,
    fused,
    in_steps,
    other_sums,
    step_fault,
)
from tests.support.engine import start_engine
from tests.support.marks import full

DEEP = (("llama", 80, 3), ("qwen3", 36, 4), ("mistral", 32, 6), ("gemma2", 46, 9), ("mixtral", 32, 10))
"""Kind, number of layers and seed of a deep model of each kind."""


def is_right(model: Any) -> bool:
    """Whether a probe of the packed way alone passes."""
    with short_windows(model):
        return WayProbe(model).judge(PACKED).is_right


@pytest.mark.full
@pytest.mark.parametrize(("kind", "num_layers", "seed"), DEEP)
def test_right_arithmetics_pass_and_faults_do_not(kind: str, num_layers: int, seed: int) -> None:
    model = build_deep(kind, num_layers, seed)
    before, accepted = memory_of(model), []
    with short_windows(model):
        probe = WayProbe(model)
        for arithmetics in ((), (other_sums,), (partial(fused, model),), (other_sums, partial(fused, model))):
            with in_steps(*arithmetics):
                assert probe.judge(PACKED).is_right, arithmetics
        for name in faults_of(kind):
            for layers in (range(num_layers), range(num_layers - 2, num_layers)):
                with attention_fault(name, layers):
                    accepted += [f"{name} in {len(layers)}"] if probe.judge(PACKED).is_right else []
        for name in STEP_FAULTS:
            with step_fault(name):
                accepted += [name] if probe.judge(PACKED).is_right else []
    assert not accepted
    assert memory_of(model) == before


def memory_of(model: Any) -> dict[str, tuple[int, torch.dtype, int]]:
    """Where each parameter and buffer lies, and which object it is."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor.dtype, id(tensor)) for name, tensor in tensors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, *full(torch.float16)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("jamba", "falcon-mamba", "qwen3-next", "llama4") else pytest.mark.full)
        for name in (*CONTINUOUS, *STATES, *WHOLE, "falcon", "bloom", "mpt", "gpt-neo", "gptj", "opt", "mamba", "rwkv")
    ],
)
def test_half_precision_chooses_the_way_of_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    exact = find_way(model).way
    model.to(dtype)
    before = memory_of(model)
    assert find_way(model).way == exact
    assert memory_of(model) == before


def test_a_window_that_no_sequence_reaches_is_left_as_it_is(tmp_path: Path) -> None:
    model = load("mistral-window", tmp_path)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.config.sliding_window))
    find_way(model, context_length=256)
    assert set(seen) == {5}
    seen.clear()
    find_way(model, context_length=16)
    assert set(seen) == {16}
    assert model.config.sliding_window == 16


def test_weights_come_back_after_an_exception() -> None:
    model = build_deep("llama", 4, 1)
    before = memory_of(model)
    failing = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no"), in_float32(model):
        model(torch.tensor([[1, 2]]))
    failing.remove()
    assert memory_of(model) == before
    assert model(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16


def fail(*_: Any) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_means_float32(precision: str) -> None:
    model, exact = build_deep("gemma2", 6, 3), build_deep("gemma2", 6, 3).float()
    ids = torch.arange(9)[None]
    seen = []
    model.model.layers[3].register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.inference_mode(), in_float32(model):
            found = model(ids).logits
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["highest"]
    torch.testing.assert_close(found, exact(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_model_that_insists_on_its_dtype_is_judged_in_it(caplog: pytest.LogCaptureFixture) -> None:
    model = build_deep("llama", 32, 1)
    insisting = model.model.layers[0].register_forward_pre_hook(insist)
    with in_steps(other_sums), attention_fault("no first token", range(32)):
        assert not is_right(model)
    assert "compares in bfloat16, as the model does not run in float32 (TypeError: bfloat16 alone)" in caplog.text
    assert "of the largest output in bfloat16, where 5.0e-02 is allowed for rounding, and a right way" in caplog.text
    insisting.remove()


def insist(_: nn.Module, args: Any) -> None:
    if args[0].dtype != torch.bfloat16:
        raise TypeError("bfloat16 alone")


@pytest.mark.full
def test_a_kernel_that_is_wrong_in_half_precision_alone_is_refused() -> None:
    """In float32 it is exact: only how far it is from there shows."""

    def wrong() -> Any:
        return patch.object(nn.Linear, "forward", rounded_to_two_bits)

    model = build_deep("llama", 32, 1)
    with in_steps(wrong):
        finding = find_way(model)
    assert finding.way is None
    assert "times as far from float32 as the reference in bfloat16, where 4 is allowed" in finding.obstacle


@pytest.mark.parametrize(("num_layers", "seed"), [(4, 2), (4, 7), (5, 115)])
def test_another_expert_by_rounding_is_no_fault_and_hides_none(num_layers: int, seed: int) -> None:
    """Over all rows right arithmetics are 14 and 6 times as far from float32 as the reference, and wrong ones twice."""
    model = build_deep("mixtral", num_layers, seed)
    with in_steps(partial(fused, model)):
        assert is_right(model)
    with in_steps(lambda: patch.object(nn.Linear, "forward", rounded_to_two_bits)):
        assert not is_right(model)


def rounded_to_two_bits(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    output = functional.linear(states, layer.weight, layer.bias)
    if output.dtype == torch.float32:
        return output
    scale = 2.0 ** (output.abs().clamp(min=1e-30).float().log2().floor() - 2)
    return ((output.float() / scale).round() * scale).to(output.dtype)


def test_what_was_measured_and_what_is_allowed_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = load("bloom", tmp_path).to(torch.bfloat16)
    with caplog.at_level(logging.DEBUG, logger="hf_triton"):
        engine = start_engine(model, max_num_seqs=2, context_length=64)
    engine.close()
    told = (
        r"its logits differ from those of generate by \d\.\de[+-]\d\d of the largest output in float32, where 1.0e-03"
    )
    assert re.search(f"engine batch, where a sequence waits for the batch before it, because .*{told}", caplog.text)
    assert re.search(rf"runs in the batch engine, where a sequence waits .*: .*{told}", engine.slower[0])
    assert re.search(r"the probe at load took \d+\.\d\d s; in float32 it takes up to \d+\.\d MB more", caplog.text)


@pytest.mark.full
@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_quantised_weights_are_judged_by_what_they_mean(bits: str) -> None:
    model = build_deep("llama", 32, 1)
    if bits == "nf4":
        quantise_by_bitsandbytes(model)
    else:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    before = memory_of(model)
    with in_steps(partial(fused, model)):
        assert is_right(model)
    with attention_fault("scale by a tenth", range(31, 32)):
        assert not is_right(model)
    assert memory_of(model) == before


def quantise_by_bitsandbytes(model: Any) -> None:
    from bitsandbytes.nn import Linear4bit

    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and name != "lm_head":
                own = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
                own.load_state_dict({"weight": layer.weight})
                setattr(module, name, own.to("cpu"))


MEASURED = """
import resource, torch
from hf_triton.runner import model_comparison
from hf_triton.runner.float32 import largest_layer_bytes
from hf_triton.runner.way_probe import find_way
from tests.support.deep_models import build_deep

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
model_comparison.NEAR = -1.0
find_way(build_deep("llama", 2, 1)).way
model = build_deep("llama", 8, 1, intermediate_size=32768)
before = peak()
assert find_way(model).way is not None
print(sum(own.numel() * 2 for own in model.parameters()), largest_layer_bytes(model), peak() - before)
"""


@pytest.mark.full
def test_float32_takes_the_memory_of_one_layer() -> None:
    returned = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed is the system's at once
    folder = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", MEASURED], check=True, capture_output=True, text=True, cwd=folder, env=returned
    )
    weights, layer, more = map(int, result.stdout.split())
    assert layer < weights / 3
    assert more < 2 * layer + (16 << 20), (weights, layer, more)
