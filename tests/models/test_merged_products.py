# SPDX-License-Identifier: Apache-2.0
"""Products of layers with one input: one product, and layers that look as before."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from hf_triton.runner.float32 import in_float32
from hf_triton.runner.merged import MergedLinear, merge_products
from hf_triton.runner.seen_calls import see_calls
from tests.support.architectures import BASE, CONTINUOUS, HEADS, build

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])


def merge(model: Any) -> int:
    return merge_products(see_calls(model))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits.float()
    return result


def merged_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), MergedLinear)]


def count_products(monkeypatch: pytest.MonkeyPatch, model: Any) -> int:
    products, linear = [], torch.nn.functional.linear
    with monkeypatch.context() as patch:
        patch.setattr(
            "torch.nn.functional.linear", lambda *given, **names: products.append(given) or linear(*given, **names)
        )
        logits(model)
    return len(products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("config", "options"), [("LlamaConfig", BASE), ("Qwen2Config", BASE)])
def test_seven_products_of_a_layer_are_four(
    config: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config, options).to(dtype)
    expected, before = logits(model), {name: each.clone() for name, each in model.state_dict().items()}
    assert count_products(monkeypatch, model) == 2 * 7 + 1
    assert merge(model) == 2 * 2
    assert count_products(monkeypatch, model) == 2 * 4 + 1
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (logits(model) - expected).abs().max() <= tolerance * expected.abs().max()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert merge(model) == 0, "it is merged already"


@pytest.mark.full
@pytest.mark.parametrize("name", CONTINUOUS)
def test_other_architectures_compute_the_same(name: str) -> None:
    model = build(*CONTINUOUS[name])
    expected = logits(model)
    merge(model)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_no_weight_is_held_twice() -> None:
    model = build("LlamaConfig", BASE)
    merge(model)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    assert sum(storages.values()) == sum(each.nbytes for each in model.parameters())


def test_memory_holds_one_product_more_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("LlamaConfig", BASE)
    made, cat = [], torch.cat

    def note(*given: Any, **options: Any) -> torch.Tensor:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
        made.append(sum(storages.values()))
        return cat(*given, **options)

    monkeypatch.setattr("hf_triton.runner.merged.torch.cat", note)
    size = sum(each.nbytes for each in model.parameters())
    calls = see_calls(model)
    made.clear()
    merge_products(calls)
    assert made == [size] * len(made), "those before it are freed"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_hooks_adapters_and_new_weights_of_a_layer_stay() -> None:
    plain = build("LlamaConfig", BASE | HEADS)
    merged = copy.deepcopy(plain)
    merge(merged)
    assert "model.layers.0.self_attn.k_proj" in merged_layers(merged)
    seen = []
    hook = merged.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: seen.append(call[2].shape))
    torch.testing.assert_close(logits(merged), logits(plain), rtol=0, atol=1e-5)
    hook.remove()
    assert seen == [(1, 5, plain.model.layers[0].self_attn.k_proj.out_features)]
    for model in (plain, merged):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(3)
            layer = model.model.layers[1].self_attn.v_proj
            layer.weight = nn.Parameter(torch.randn(layer.weight.shape, generator=generator))
            model.model.layers[1].mlp.up_proj.weight.mul_(2)
    torch.testing.assert_close(logits(merged), logits(plain), rtol=0, atol=1e-4)
    options = peft.LoraConfig(target_modules=["k_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = peft.get_peft_model(merged, options)
    others = peft.get_peft_model(plain, options)
    others.load_state_dict(adapted.state_dict())
    torch.testing.assert_close(logits(adapted), logits(others), rtol=0, atol=1e-4)


def test_float32_forwards_compute_with_merged_weights() -> None:
    model = build("LlamaConfig", BASE).to(torch.bfloat16)
    expected = logits(copy.deepcopy(model).float())
    merge(model)
    with in_float32(model):
        found = logits(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


class Shifting(nn.Module):
    """Writes to the input between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(input_ids)
        first = self.first(states)
        states += 1
        second: torch.Tensor = self.second(states)
        return first + second


def test_an_input_that_is_written_to_is_another_input() -> None:
    model = Shifting()
    expected = model(TOKENS % 8)
    assert merge(model) == 0
    assert torch.equal(model(TOKENS % 8), expected)


def test_quantised_weights_stay_apart() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = build("LlamaConfig", BASE).to(torch.bfloat16)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
    expected = logits(model)
    assert merge(model) == 0
    assert torch.equal(logits(model), expected)
