# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's tokens to their sequences' blocks: what a rule shows, and what plain torch computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from hf_triton.runner.cpu import paged_attention as kernel
from hf_triton.runner.mask_rules import MaskRule, Window, mask_of_rule
from hf_triton.runner.packed_row import PackedRow
from hf_triton.runner.paged_cache import PagedCache
from hf_triton.runner.step import TokenRange
from hf_triton.runner.step_attention import NotPackableError, TorchAttention, attend, attention_of
from hf_triton.runner.step_tensors import StepTensors
from tests.support.marks import full

CPU = torch.device("cpu")
MODULE = torch.nn.Module()
Rule = Callable[..., Any]


def chunked(size: int) -> Rule:
    return and_masks(chunked_overlay(size, torch.zeros(1, dtype=torch.int64)), causal_mask_function)


def skips_one(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 3 != 1)


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (causal_mask_function, Window(0, is_causal=True)),
        (sliding_window_causal_mask_function(1), Window(1, is_causal=True)),
        (sliding_window_causal_mask_function(5), Window(5, is_causal=True)),
        (sliding_window_causal_mask_function(4096), Window(4096, is_causal=True)),
        (
            and_masks(sliding_window_overlay(9), sliding_window_overlay(5), causal_mask_function),
            Window(5, is_causal=True),
        ),
        (bidirectional_mask_function, Window(0, is_causal=False)),
        (sliding_window_bidirectional_mask_function(5), Window(6, is_causal=False)),
        (or_masks(causal_mask_function, bidirectional_mask_function), Window(0, is_causal=False)),
        (or_masks(causal_mask_function, sliding_window_bidirectional_overlay(5)), None),
        (chunked(16), None),
        (chunked(8192), None),
        (chunked_overlay(16, torch.zeros(1, dtype=torch.int64)), None),
        (skips_one, None),
        (lambda batch, head, query, key: key < 0, None),
    ],
)
def test_a_rule_is_recognized_by_what_it_shows(rule: Rule, window: Window | None) -> None:
    assert mask_of_rule(mask_function=rule).rule.window == window
    assert mask_of_rule(mask_function=rule).rule.window == window  # now from the cache


def test_equal_code_with_another_window_is_another_rule() -> None:
    rules = [mask_of_rule(mask_function=sliding_window_causal_mask_function(size)).rule for size in (7, 8, 7)]
    assert [rule.window for rule in rules] == [Window(size, is_causal=True) for size in (7, 8, 7)]


def test_a_mask_keeps_its_rule_on_its_way_to_a_device_alone() -> None:
    mask = mask_of_rule(mask_function=causal_mask_function, device=CPU)
    assert isinstance(mask, MaskRule)
    for moved in (mask.to("meta"), mask.to(CPU), mask.to(torch.bool)):
        assert moved.rule.function is causal_mask_function  # type: ignore[attr-defined]
    for changed in (mask[:, :, :, :1], mask & mask, ~mask, mask.expand(2, 1, 1, 1), mask.float(), mask.clone()):
        assert not hasattr(changed, "rule")


RULES: dict[str, Rule | None] = {
    "plain": None,
    "causal": causal_mask_function,
    "window 5": sliding_window_causal_mask_function(5),
    "window 40": sliding_window_causal_mask_function(40),
    "chunks of 16": chunked(16),
}
BOTH_SIDES: dict[str, Rule] = {
    "all": bidirectional_mask_function,
    "window of 6 on both sides": sliding_window_bidirectional_mask_function(5),
    "chunks of 16, all of them": chunked_overlay(16, torch.zeros(1, dtype=torch.int64)),
}
PARTS = {
    "decode": [(0, 1), (63, 64), (15, 16), (16, 17), (80, 81)],
    "prompts": [(0, 1), (0, 16), (0, 37), (0, 65)],
    "chunks": [(16, 32), (3, 20), (64, 70), (100, 101)],
}
"""Ranges of a step, the decoding ones first."""
ALL = [*PARTS["decode"][1:], *PARTS["prompts"], *PARTS["chunks"][:-1]]


class Layer:
    """A layer whose sequences' tokens are in blocks in random order, and the query of each new token."""

    def __init__(
        self,
        parts: list[tuple[int, int]],
        heads: tuple[int, int] = (4, 2),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        *,
        gathers: bool = False,
    ) -> None:
        source = torch.Generator().manual_seed(len(parts))
        num_heads, num_keys = heads
        width = -(-max(end for _, end in parts) // block_size)
        order = torch.randperm(len(parts) * width, generator=source).view(len(parts), width).tolist()
        self.parts = parts
        self.tokens = [
            tuple(torch.randn(num_keys, end, size, generator=source).to(dtype) for size in (16, 24)) for _, end in parts
        ]
        self.query = torch.randn(1, num_heads, sum(end - start for start, end in parts), 16, generator=source).to(dtype)
        self.cache = PagedCache(LlamaConfig(num_hidden_layers=1), len(parts) * width, block_size, gathers=gathers)
        for row, (start, _) in enumerate(parts):
            if start:
                self._update([TokenRange(row, 0, start, [0] * start, order[row], start)], [(0, start)], [row])
        ranges = [
            TokenRange(row, start, end, [0] * (end - start), order[row], end) for row, (start, end) in enumerate(parts)
        ]
        self.keys, self.values = self._update(ranges, parts, list(range(len(parts))))

    def _update(self, ranges: list[TokenRange], parts: list[tuple[int, int]], rows: list[int]) -> Any:
        self.cache.begin(StepTensors(ranges, self.cache.block_size, CPU))
        new = [
            [tensor[:, start:end] for tensor in self.tokens[row]] for row, (start, end) in zip(rows, parts, strict=True)
        ]
        keys, values = (torch.cat(each, 1).unsqueeze(0) for each in zip(*new, strict=True))
        return self.cache.update(keys, values, 0)

    def attend(self, rule: Rule | None, row: PackedRow | None = None, **options: Any) -> torch.Tensor:
        mask = None if rule is None else mask_of_rule(mask_function=rule)
        with attention_of(self.cache if row is None else row), torch.inference_mode():
            return attend(MODULE, self.query, self.keys, self.values, mask, scaling=0.3, **options)[0]

    def exact(self, rule: Rule | None, softcap: float | None = None, s_aux: torch.Tensor | None = None) -> torch.Tensor:
        outputs, first = [], 0
        for (start, end), (keys, values) in zip(self.parts, self.tokens, strict=True):
            query = self.query[0, :, first : first + end - start].double()
            first += end - start
            groups = len(query) // len(keys)
            scores = query @ keys.double().repeat_interleave(groups, 0).mT * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            places = torch.arange(start, end)[:, None], torch.arange(end)[None]
            seen = (rule or causal_mask_function)(torch.tensor(0), torch.tensor(0), *places)
            scores = scores.masked_fill(~seen, -torch.inf)
            if s_aux is not None:
                scores = torch.cat([scores, s_aux.double().view(-1, 1, 1).expand(-1, end - start, 1)], -1)
            weights = scores.softmax(-1)[..., :end]
            outputs.append((weights @ values.double().repeat_interleave(groups, 0)).transpose(0, 1))
        return torch.cat(outputs).unsqueeze(0).to(self.query.dtype)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small heads go to the kernel, or all to torch."""
    monkeypatch.setattr(kernel, "MIN_WIDTH", 0 if request.param == "kernel" else 1 << 20)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("heads", "block_size"), [((4, 2), 16), *full(((4, 4), 64))])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_mixed_step_is_plain_attention(rule: Rule | None, heads: tuple[int, int], block_size: int) -> None:
    layer = Layer(ALL, heads, block_size)
    torch.testing.assert_close(layer.attend(rule), layer.exact(rule), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_step_of_one_kind_is_plain_attention(parts: list[tuple[int, int]]) -> None:
    for rule in RULES.values():
        layer = Layer(parts)
        torch.testing.assert_close(layer.attend(rule), layer.exact(rule), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"s_aux": torch.tensor([-1.0, 0.0, 1.0, 3.0])}], ids=str)
def test_limited_scores_and_sinks(options: dict[str, Any], rule: Rule | None) -> None:
    layer = Layer(ALL)
    torch.testing.assert_close(layer.attend(rule, **options), layer.exact(rule, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gathered_keys(rule: Rule | None) -> None:
    layer = Layer(ALL, gathers=True)
    assert layer.keys.shape[2] == sum(end for _, end in ALL)
    torch.testing.assert_close(layer.attend(rule), layer.exact(rule), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    layer = Layer(ALL, dtype=dtype)
    torch.testing.assert_close(layer.attend(None), layer.exact(None))


@pytest.mark.parametrize("rule", (RULES | BOTH_SIDES).values(), ids=RULES | BOTH_SIDES)
@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}, {"s_aux": torch.tensor([-1.0, 0.0, 1.0, 3.0])}], ids=str)
def test_a_row_of_whole_sequences(options: dict[str, Any], rule: Rule | None) -> None:
    layer = Layer([(0, 1), (0, 9), (0, 9), (0, 37), (0, 530)])
    found = layer.attend(rule, PackedRow(layer.cache.step), **options)
    torch.testing.assert_close(found, layer.exact(rule, **options), rtol=1e-4, atol=1e-5)


def test_without_a_mask_a_row_is_causal_if_its_layer_is() -> None:
    layer, module = Layer([(0, 9), (0, 37)]), torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    with attention_of(PackedRow(layer.cache.step)):
        found, _ = attend(module, layer.query, layer.keys, layer.values, None, scaling=0.3)
        with pytest.raises(NotPackableError, match="keys of its own"):
            attend(module, layer.query[:, :, 1:], layer.keys, layer.values, None)
    torch.testing.assert_close(found, layer.exact(bidirectional_mask_function), rtol=1e-4, atol=1e-5)


def test_softmax_with_sinks_has_the_scores_type() -> None:
    """As gpt-oss computes it; the others' softmax is in float32."""
    layer, sinks = Layer([(0, 40)], dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    keys, values = (tensor.repeat_interleave(2, 0) for tensor in layer.tokens[0])
    scores = (layer.query[0] @ keys.mT * 0.3).masked_fill(
        torch.ones(40, 40).triu(1).bool(), torch.finfo(torch.bfloat16).min
    )
    column = sinks.view(-1, 1, 1).expand(-1, 40, 1)
    joined = torch.cat([scores, column], -1)
    weights = (joined - joined.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    assert torch.equal(layer.attend(None, s_aux=sinks)[0], (weights @ values).transpose(0, 1))
    capped = (0.5 * torch.tanh(layer.query[0] @ keys.mT * 0.3 / 0.5)).masked_fill(
        scores < -1e30, torch.finfo(torch.bfloat16).min
    )
    weights = capped.softmax(-1, dtype=torch.float32).bfloat16()
    assert torch.equal(layer.attend(None, softcap=0.5)[0], (weights @ values).transpose(0, 1))


def test_rows_of_one_token_are_decoding_sequences() -> None:
    layer = Layer(PARTS["decode"][1:])
    rows = layer.query.transpose(0, 2)  # [rows, heads, 1, size]
    with attention_of(layer.cache), torch.inference_mode():
        output, _ = attend(MODULE, rows, layer.keys, layer.values, None, scaling=0.3)
    torch.testing.assert_close(output.transpose(0, 1), layer.exact(None), rtol=1e-4, atol=1e-5)


def test_torchs_attention_is_replaced_for_the_caches_keys_alone() -> None:
    layer, attention = Layer(ALL), torch.nn.functional.scaled_dot_product_attention
    others = torch.randn(3, 1, 2, 5, 16)
    expected = attention(*others)
    with TorchAttention(), attention_of(layer.cache), torch.inference_mode():
        found = attention(layer.query, layer.keys, layer.values, scale=0.3)
        assert torch.equal(attention(*others), expected)
    torch.testing.assert_close(found.transpose(1, 2), layer.exact(None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda call: call | {"key": call["key"] * 1}, "the keys are changed behind the cache"),
        (lambda call: call | {"attention_mask": torch.ones(1, 1, 1, 1)}, "the mask is changed"),
        (lambda call: call | {"position_bias": torch.ones(1)}, "a bias by position"),
    ],
)
def test_what_a_model_changes_on_the_way_is_refused(change: Callable[..., Any], words: str) -> None:
    layer = Layer(ALL)
    call = {"query": layer.query, "key": layer.keys, "value": layer.values, "attention_mask": None}
    with attention_of(layer.cache), pytest.raises(NotPackableError, match=words):
        attend(MODULE, **change(call))
    with pytest.raises(NotPackableError, match="no step runs in this thread"):
        attend(MODULE, **call)
