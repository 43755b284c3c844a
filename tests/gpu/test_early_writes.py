# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are written as keys are rotated: in which models, and that nothing else reaches the blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from hf_triton.runner.calling import CACHE_NAMES
from hf_triton.runner.cuda import fuse
from hf_triton.runner.cuda.early_writes import ValueHook
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.paged_cache import PagedLayer
from hf_triton.runner.step import Step, TokenRange
from tests.support.architectures import BASE, CONTINUOUS, build
from tests.support.simulated_gpu import Device

pytestmark = pytest.mark.full

LAYERS = {
    "llama": ("LlamaConfig", BASE, 2),
    "mistral-window": (*CONTINUOUS["mistral-window"], 2),
    "gpt-oss": (*CONTINUOUS["gpt-oss"], 0),  # rotates by a function of other arguments
    "gemma3": (*CONTINUOUS["gemma3"], 2),
    "phi3-longrope": (*CONTINUOUS["phi3-longrope"], 2),
    "qwen3.5": (*CONTINUOUS["qwen3.5"], 0),  # rotates a quarter of each head
    "falcon-h1": (*CONTINUOUS["falcon-h1"], 2),
    "deepseek-v3": (*CONTINUOUS["deepseek-v3"], 0),
    "cohere": (*CONTINUOUS["cohere"], 0),
    "hunyuan": ("HunYuanDenseV1Config", BASE | {"head_dim": 8}, 0),  # normalises keys that are rotated
}
"""Options of a model of two layers, and in how many of them the trial allows it."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each `update` found its key and value in their blocks."""
    noted: list[bool] = []
    update = PagedLayer.update

    def note(layer: PagedLayer, *arguments: Any, **options: Any) -> Any:
        result = update(layer, *arguments, **options)
        if arguments[0].device.type == "cuda":
            noted.append(layer.is_written)
        return result

    monkeypatch.setattr(PagedLayer, "update", note)
    return noted


def hooks(model: nn.Module) -> int:
    return sum(isinstance(hook, ValueHook) for each in model.modules() for hook in each._forward_hooks.values())


def part(number: int, start: int, end: int) -> TokenRange:
    """Of a sequence with three blocks of 16 tokens."""
    ids, table = [(7 * at + number) % 300 for at in range(start, end)], [number, number + 3, number + 6]
    return TokenRange(number, start, end, ids, table[: -(-end // 16)], end, samples=(number,), slot=number)


def logits(model: Any) -> torch.Tensor:
    """Those of a prompt beside a chunk, of its rest beside a decoding sequence, and of three decoding ones."""
    runner = ModelRunner(model, Way())
    runner.allocate(9, 3)
    steps = [
        *([part(0, 0, 20), part(1, 0, 9)], [part(0, 20, 21), part(1, 9, 30)], [part(2, 0, 30)]),
        [part(0, 21, 22), part(1, 30, 31), part(2, 30, 31)],
    ]
    return torch.cat([runner.run(Step(tuple(ranges))).clone().float().cpu() for ranges in steps])


def assert_same(model: Any) -> None:
    """On the device, in float32, it computes what it computes on a CPU."""
    expected = logits(copy.deepcopy(model))
    model = model.to("cuda")
    fuse(model)
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()


def packs(name: str) -> bool:
    return name not in ("deepseek-v3", "qwen3.5", "falcon-h1")


@pytest.mark.parametrize("name", LAYERS)
def test_models_whose_rotation_writes_are_told_by_trying(name: str, early: list[bool]) -> None:
    config, options, expected = LAYERS[name]
    model = build(config, options)
    if packs(name):
        assert_same(model)
        assert any(early) == bool(expected)
    else:  # runs otherwise; see test_continuous_on_gpu.py
        model = model.to("cuda")
        fuse(model)
    assert hooks(model) == expected


class Passing(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


CHANGES: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "reads them": (lambda _, key, value: (key, value, key.sum() + value.sum())[:2], True, True),
    "another key": (lambda _, key, value: (key + 1, value), False, False),
    "a key that is written to": (lambda _, key, value: (key.mul_(2), value), False, False),
    "another value": (lambda _, key, value: (key, value * 2), False, False),
    "a value that is written to": (lambda _, key, value: (key, value.mul_(2)), False, False),
    "a module with the key": (lambda layer, key, value: (layer.between(key), value), False, False),
}
"""What a layer does with key and value, whether the trial allows it, and whether its update finds them written."""


class Attention(modeling_llama.LlamaAttention):
    """Llama's, which changes its keys or values on the way to the cache."""

    change: Callable[..., Any]

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **options: Any) -> Any:
        cache = next((options.pop(name) for name in CACHE_NAMES if name in options), None)
        layers = self.q_proj, self.k_proj, self.v_proj
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = self.change(key, value)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = modeling_llama.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **options)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


def changing(change: Callable[..., Any]) -> Any:
    model = build("LlamaConfig", BASE)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Changing", (Attention,), {"change": change})
        layer.self_attn.between = Passing()
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_rotation_and_update_is_written(name: str, early: list[bool]) -> None:
    change, is_allowed, is_written = CHANGES[name]
    model = changing(change)
    assert_same(model)
    assert (hooks(model) == 2) == is_allowed
    assert any(early) == is_written


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_since_the_trial_is_written(name: str, early: list[bool]) -> None:
    """Unless a value is changed in place behind the rotation, for which the layer's code would have to change."""
    change, _, is_written = CHANGES[name]
    if "written to" in name:
        pytest.skip("the code of a layer does not change")
    model, plain = changing(lambda _, key, value: (key, value)), changing(change)
    plain.load_state_dict(model.state_dict())
    model = model.to("cuda")
    fuse(model)
    assert hooks(model) == 2
    for layer in model.model.layers:
        type(layer.self_attn).change = change
    expected = logits(plain)
    early.clear()
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert any(early) == (is_written or "module" in name)


class Adapted(nn.Module):
    """A linear layer with an adapter, which adds to its output or makes another one."""

    def __init__(self, base: nn.Linear, *, in_place: bool) -> None:
        super().__init__()
        self.base, self.in_place = base, in_place

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output, more = self.base(states), 0.1 * states[..., : self.base.out_features]
        return output.add_(more) if self.in_place else output + more


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("is_late", [True, False])
def test_adapters_of_keys_and_values(name: str, in_place: bool, is_late: bool, early: list[bool]) -> None:
    model = build("LlamaConfig", BASE)

    def adapt(model: Any) -> None:
        for layer in model.model.layers:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), in_place=in_place))

    plain = copy.deepcopy(model)
    adapt(plain)
    expected = logits(plain)
    model = model.to("cuda")
    if is_late:
        fuse(model)
        adapt(model)
    else:
        adapt(model)
        fuse(model)
    early.clear()
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    if is_late:
        assert any(early) == (name == "k_proj" or in_place)


class Quantised(nn.Module):
    """A linear layer of no known kind."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.base.weight.mT


def test_products_that_stay_apart_are_written_too(early: list[bool]) -> None:
    model = build("LlamaConfig", BASE)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, Quantised(getattr(layer.self_attn, name)))
    assert_same(model)
    assert hooks(model) == 2
    assert any(early)


@torch.inference_mode()
def test_padding_of_a_graph_writes_nothing(simulated: Device | None, early: list[bool]) -> None:
    model = build("LlamaConfig", BASE).to("cuda")
    fuse(model)
    runner = ModelRunner(model, Way())
    runner.allocate(9, 3)
    runner.run(Step((part(0, 0, 20), part(1, 0, 9), part(2, 0, 9))))
    assert runner.capture(3) is None
    for blocks in runner.cache.blocks():
        blocks.keys.fill_(-9)
        blocks.values.fill_(-9)
    early.clear()
    runner.run(Step((part(0, 20, 21), part(1, 9, 10), part(2, 9, 10))))  # the graph of four tokens
    assert not early, "it was no replay"
    for blocks in runner.cache.blocks():
        written = [
            (states.cpu() != -9).flatten(1).any(1).nonzero().flatten() for states in (blocks.keys, blocks.values)
        ]
        assert [each.tolist() for each in written] == [[1, 2, 3]] * 2
        assert [int((states.cpu() != -9).any(-1).any(1).sum()) for states in (blocks.keys, blocks.values)] == [3, 3]


def test_a_forward_that_fails_leaves_nothing_behind(early: list[bool]) -> None:
    model = build("LlamaConfig", BASE)
    expected = logits(copy.deepcopy(model))
    model = model.to("cuda")
    fuse(model)
    runner = ModelRunner(model, Way())
    runner.allocate(9, 3)
    hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.run(Step((part(0, 0, 20), part(1, 0, 9))))
    hook.remove()
    early.clear()
    found = runner.run(Step((part(0, 0, 20), part(1, 0, 9)))).float().cpu()
    assert early == [True, True]
    assert (found - expected[:2]).abs().max() <= 1e-5 * expected.abs().max()
