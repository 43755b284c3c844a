# SPDX-License-Identifier: Apache-2.0
"""Fused kernels in models on a CUDA device: which modules are replaced, and how many kernels a layer runs."""

import copy
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

from hf_triton.runner.cuda import fuse
from hf_triton.runner.cuda.fused import FusedGate
from hf_triton.runner.cuda.fused_layers import FusedLayer
from hf_triton.runner.cuda.fused_norms import FusedNorm
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.step import Step, TokenRange
from tests.support.architectures import BASE, CONTINUOUS, HEADS, WINDOWS, build
from tests.support.simulated_gpu import Device

pytestmark = pytest.mark.full

LAYERS = {
    "LlamaConfig": (BASE, 10),
    "Qwen3Config": (BASE | HEADS, 12),
    "Gemma3TextConfig": (BASE | HEADS | WINDOWS, 16),
    "Phi3Config": (BASE, 10),
}
"""Options of a model, and kernels of a layer in a decode step."""
MODELS = {
    "llama": ("LlamaConfig", BASE, 5, 2, 2),
    "qwen3": ("Qwen3Config", BASE | HEADS, 9, 2, 2),
    "gemma3": (*CONTINUOUS["gemma3"], 13, 2, 2),
    "phi3": (*CONTINUOUS["phi3"], 5, 2, 2),
    "glm": (*CONTINUOUS["glm"], 5, 2, 0),  # rotates neighbours, and half of each head
    "cohere": (*CONTINUOUS["cohere"], 0, 2, 0),  # LayerNorm, and rotates neighbours
    "stablelm": (*CONTINUOUS["stablelm"], 0, 2, 2),  # rotates a quarter of each head
    "gpt-neox": ("GPTNeoXConfig", BASE, 0, 0, 0),  # an MLP without a gate
    "falcon-h1": (CONTINUOUS["falcon-h1"][0], CONTINUOUS["falcon-h1"][1] | {"mlp_multipliers": [0.5, 2.0]}, 5, 0, 2),
    "mamba2": (*CONTINUOUS["mamba2"], 3, 0, 0),  # its other norms have a gate
}
"""Options of a model of two layers; norms, gates and rotary embeddings that are fused in it."""


def replaced(model: Any) -> Counter[type]:
    forwards = (vars(module).get("_old_forward", vars(module).get("forward")) for module in model.modules())
    return Counter(type(forward) for forward in forwards if isinstance(forward, FusedNorm | FusedGate))


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers]).to("cuda")


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(ids(5, 6, 7, 8, 9)).logits.float().cpu()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_fused_model_computes_the_same(name: str, dtype: torch.dtype, simulated: Device | None) -> None:
    config, options, num_norms, num_gates, num_rotary = MODELS[name]
    model = build(config, options).to("cuda", dtype)
    expected = logits(model)
    fuse(model)
    assert replaced(model) == Counter({FusedNorm: num_norms, FusedGate: num_gates})
    before = Counter() if simulated is None else simulated.kernels.copy()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (logits(model) - expected).abs().max() <= tolerance * expected.abs().max()
    if simulated is not None:
        assert (simulated.kernels - before)["hf_triton::rotary"] == num_rotary


@pytest.mark.parametrize("name", CONTINUOUS)
def test_every_architecture_computes_the_same(name: str) -> None:
    model = build(*CONTINUOUS[name]).to("cuda")
    rows = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]], device="cuda")
    with torch.inference_mode():
        expected = logits(model), model(rows).logits.float().cpu()
        fuse(model)
        found = logits(model), model(rows).logits.float().cpu()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(
    ("name", "more", "is_fused"),
    [
        ("mixtral", {}, True),
        ("granite", {"residual_multiplier": 1.0}, True),
        ("granite", {"residual_multiplier": 0.99}, False),
        ("olmo2", {}, False),
    ],
)
def test_layers_that_add_are_told_by_trying(name: str, more: dict[str, Any], is_fused: bool) -> None:
    config, options = CONTINUOUS[name]
    model = build(config, options | more).to("cuda", torch.bfloat16)
    fuse(model)
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert any(isinstance(each, FusedLayer) for each in forwards) == is_fused


def test_a_layer_whose_norm_is_another_module_runs_as_it_is() -> None:
    model = build("LlamaConfig", BASE).to("cuda")
    fuse(model)
    model.model.layers[1].post_attention_layernorm = torch.nn.Tanh()
    model.model.layers[1].input_layernorm = torch.nn.Tanh()
    own = build("LlamaConfig", BASE).to("cuda")
    own.model.layers[1].post_attention_layernorm = torch.nn.Tanh()
    own.model.layers[1].input_layernorm = torch.nn.Tanh()
    torch.testing.assert_close(logits(model), logits(own))


@pytest.mark.parametrize("config", LAYERS)
def test_kernels_of_a_layer(config: str, simulated: Device | None) -> None:
    if simulated is None:
        pytest.skip("a real device does not count")
    options, expected = LAYERS[config]
    few, many = (num_kernels(config, options, number, simulated) for number in (2, 4))
    assert (many - few) / 2 == expected


def num_kernels(config: str, options: dict[str, Any], num_layers: int, device: Device) -> int:
    """Kernels of a step in which three sequences decode."""
    more = {"layer_types": options["layer_types"] * (num_layers // 2)} if "layer_types" in options else {}
    model = build(config, options | more | {"num_hidden_layers": num_layers}).to("cuda")
    fuse(model)
    runner = ModelRunner(model, Way())
    runner.allocate(4)
    runner.run(Step(tuple(part(number, 0, 5 + number) for number in range(3))))
    before = device.kernels.total()
    runner.run(Step(tuple(part(number, 5 + number, 6 + number) for number in range(3))))
    return device.kernels.total() - before


def part(number: int, start: int, end: int) -> TokenRange:
    return TokenRange(number, start, end, list(range(start, end)), [number], end, samples=(number,), slot=number)


def test_adapters_and_hooks_of_linear_layers_stay() -> None:
    model = build("LlamaConfig", BASE).to("cuda")
    fuse(model)
    layer = model.model.layers[0].mlp.down_proj
    before = logits(model)
    seen = []
    hook = layer.register_forward_hook(lambda *arguments: seen.append(arguments))
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(layer, torch.nn.Tanh())
    assert not torch.equal(logits(model), before)
    assert len(seen) == 1
    model.model.layers[0].mlp.down_proj = layer
    hook.remove()
    assert torch.equal(logits(model), before)


def test_a_copy_has_weights_of_its_own() -> None:
    model = build("Gemma3TextConfig", BASE | HEADS | WINDOWS).to("cuda")
    fuse(model)
    expected = logits(model)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not logits(copied).any()
    assert torch.equal(logits(model), expected)


def test_hooks_of_accelerate_stay() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    plain = build("LlamaConfig", BASE)
    first = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "cuda:0")
    second = dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "cuda:1")
    model = dispatch_model(plain, first | second)
    expected = logits(model)
    fuse(model)
    assert replaced(model) == Counter({FusedNorm: 5, FusedGate: 2})
    torch.testing.assert_close(logits(model), expected)


def test_states_of_another_dtype_go_to_the_module_itself() -> None:
    model = build("LlamaConfig", BASE).to("cuda", torch.bfloat16)
    norm, states = model.model.norm, torch.randn(3, 32).to("cuda")
    expected = norm(states)
    fuse(model)
    assert replaced(model)[FusedNorm] == 5
    assert torch.equal(norm(states).cpu(), expected.cpu())


def test_without_kernels_norms_are_fused_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fused", "fused_norms"):
        monkeypatch.setattr(f"hf_triton.runner.cuda.{module}.is_usable", lambda *_: False)
    model = build("LlamaConfig", BASE).to("cuda", torch.float16)
    fuse(model)
    assert replaced(model) == Counter({FusedNorm: 5})
    other = build("Gemma3TextConfig", BASE | HEADS | WINDOWS).to("cuda", torch.float16)
    fuse(other)
    assert not replaced(other)  # torch's kernel takes no weight of more bits


def test_what_computes_something_else_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = build("LlamaConfig", BASE).to("cuda")
    norm, gate = model.model.norm, model.model.layers[0].mlp
    own = norm.forward
    norm.forward = lambda states: own(states).abs()
    gate.forward = lambda states: gate.down_proj(
        gate.act_fn(gate.gate_proj(states).clamp(max=10)) * gate.up_proj(states)
    )
    with caplog.at_level(logging.DEBUG, "hf_triton"):
        fuse(model)
    assert "model.layers.0.mlp (LlamaMLP) is not fused (ValueError: its output changes)" in caplog.text
    assert "fused kernels: 4 norms, 1 gates, 1 rotary embeddings" in caplog.text


def test_a_model_on_a_cpu_stays() -> None:
    model = build("LlamaConfig", BASE)
    fuse(model)
    assert not replaced(model)
