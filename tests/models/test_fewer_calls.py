# SPDX-License-Identifier: Apache-2.0
"""What takes the place of several calls of torch on a CPU gives the same bits."""

import copy
import sys
from typing import Any

import pytest
import torch

from hf_triton.runner.cpu import grouped_layers, small_layers
from hf_triton.runner.cpu.availability import runs_numba
from hf_triton.runner.cpu.fewer_calls import ROTARY, Norm, Rotary, reduce_calls
from hf_triton.runner.merged import MergedLinear
from tests.support.architectures import BASE, CONTINUOUS, WHOLE, build

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits
    return result


def count(model: Any, kind: type) -> int:
    return sum(isinstance(vars(module).get("forward"), kind) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "num_norms"),
    [("gemma", 5), ("qwen3-moe", 9), ("granite4", 5), ("starcoder2", 0), ("gpt-bigcode", 0), ("falcon-mamba", 3)],
)
def test_norms_and_rotary_embeddings_keep_all_bits(name: str, num_norms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = (CONTINUOUS | WHOLE)[name]
    model = build(*architecture)
    modeling: Any = sys.modules[type(model).__module__]
    if has_rotary := hasattr(modeling, ROTARY):
        function = getattr(modeling, ROTARY)
        monkeypatch.setattr(modeling, ROTARY, getattr(function, "original", function))
    expected = logits(model)
    reduce_calls(model)
    assert count(model, Norm) == num_norms
    assert isinstance(getattr(modeling, ROTARY, None), Rotary) == has_rotary
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    half, plain = copy.deepcopy(model).bfloat16(), build(*architecture).bfloat16()
    plain.load_state_dict(half.state_dict())
    assert torch.equal(logits(half), logits(plain)), "other dtypes go to the model's own forward"


@pytest.mark.skipif(not runs_numba(), reason="numba does not run here")
@torch.inference_mode()
def test_wide_rows_are_normalised_by_a_kernel() -> None:
    model = build("LlamaConfig", BASE | {"hidden_size": 260, "num_attention_heads": 13})
    norm, plain = model.model.norm, copy.deepcopy(model.model.norm)
    norm.weight.copy_(torch.linspace(-2, 2, 260))
    plain.load_state_dict(norm.state_dict())
    reduce_calls(model)
    assert norm.forward.has_kernel
    states = (
        torch.randn(7, 5, 260, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 7)[:, None, None]
    )
    states[0, 0] = 0
    for each in (states, states.transpose(0, 1), states[:, :, :260], states[:0], copy.deepcopy(states)):
        torch.testing.assert_close(norm(each), plain(each), rtol=1e-5, atol=1e-6)
    assert torch.equal(norm(states)[3, 2], norm(states[3, 2])), "a row has the same bits in any company"
    states[1, 1, 3], states[2, 2, 5] = torch.nan, torch.inf
    found, expected = copy.deepcopy(norm)(states), plain(states)
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found[3:], expected[3:], rtol=1e-5, atol=1e-6)
    many = states.expand(60, 7, 5, 260)  # torch's
    torch.testing.assert_close(norm(many)[7, 3:], expected[3:], rtol=1e-5, atol=1e-6)


def test_what_is_no_plain_norm_or_rotation_stays() -> None:
    model = build(*CONTINUOUS["glm"])  # rotates numbers that are next to each other
    modeling: Any = sys.modules[type(model).__module__]
    calls: list[Any] = []

    class Unregistered(torch.nn.Sequential):
        """A module around a norm, of code that is in no imported module."""

    Unregistered.__module__ = "own_code_that_is_not_imported"
    wrapped = model.model.layers[0].input_layernorm
    wrapped.register_forward_hook(lambda *given: calls.append(given))
    model.model.layers[0].input_layernorm = Unregistered(wrapped)
    expected = logits(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        reduce_calls(model)
    finally:
        torch.set_default_dtype(torch.float32)
    calls.clear()
    assert torch.equal(logits(model), expected)
    assert len(calls) == 1, "a hook inside of a module is called"
    assert not isinstance(getattr(modeling, ROTARY), Rotary)


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen2Config"])
def test_layers_of_codes_with_one_input_are_one_product(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not grouped_layers():  # asked here, as it compiles
        pytest.skip("there is no kernel for this processor")
    whole_blocks = {"num_key_value_heads": 4}  # of the kernel's rows: padding stands between others
    model, small = build(config, BASE | whole_blocks), small_layers()
    assert small
    small.make_small(model, 4)
    expected = logits(model)
    reduce_calls(model)
    assert count(model, MergedLinear) == 2 * (3 + 2)
    assert torch.equal(logits(model), expected)
    products, run = [], grouped_layers().GroupedLinear.forward
    monkeypatch.setattr(grouped_layers().GroupedLinear, "forward", lambda *given: products.append(given) or run(*given))
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), expected)
    assert len(products) == 2 * 7 + 1, "layers of a copy compute by themselves"
    for each in (model, copied):
        layer = each.model.layers[0].self_attn.q_proj  # Qwen2's has a bias
        layer.codes = layer.codes.flip(0)
    assert torch.equal(logits(model), logits(copied)), "a layer that was given other weights computes with them"
