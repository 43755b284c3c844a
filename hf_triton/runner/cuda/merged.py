# SPDX-License-Identifier: Apache-2.0
"""One product in place of those of several linear layers that get the same input (query, key, value; gate, up).

Which layers do is seen in a forward. The first one that is called computes for all, the others take their part. Their
weights become views of one tensor, so that parameters, hooks, state dicts and adapters stay; quantised weights stay
apart. While it is made, memory holds the weights of one product twice.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_triton.runner.cuda.seen_calls import Call
from hf_triton.runner.numerics import agree


@dataclass
class MergedProduct:
    """The product of layers with the same input; belongs to the thread of the model's forwards."""

    weight: torch.Tensor
    """`[all outputs, inputs]`."""
    bias: torch.Tensor | None
    num_parts: int
    states: torch.Tensor | None = None
    """The input of the product that is there; the same object is the same input."""
    output: torch.Tensor | None = None
    num_left: int = 0
    """Layers that have not taken their part."""

    def part(self, states: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """One layer's outputs, a view."""
        if self.states is not states or self.output is None:
            self.output = functional.linear(states, self.weight, self.bias)
            self.states, self.num_left = states, self.num_parts
        part = self.output[..., start:end]
        self.num_left -= 1
        if self.num_left == 0:
            self.states = self.output = None
        return part


@dataclass
class MergedLinear:
    """The forward of a layer whose weight is the rows `start` to `end` of a product's."""

    layer: Any
    product: MergedProduct | None
    """None: the layer is a copy, and computes by itself."""
    start: int = 0
    end: int = 0
    address: int = 0
    """Its weight is there; one that was given another computes by itself."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        weight, product = self.layer.weight, self.product
        if (
            product is None
            or states.dtype != product.weight.dtype
            or weight.data_ptr() != self.address
            or torch.is_grad_enabled()
        ):
            return functional.linear(states, weight, self.layer.bias)
        return product.part(states, self.start, self.end)

    def __deepcopy__(self, memo: dict[int, Any]) -> MergedLinear:
        return MergedLinear(copy.deepcopy(self.layer, memo), None)


def merge_products(calls: Sequence[Call]) -> int:
    """Merge what can be merged, by the calls of one forward; how many products took the place of others."""
    by_input: dict[tuple[int, int], list[Call]] = defaultdict(list)
    num_calls: dict[int, int] = defaultdict(int)
    num_owners: dict[int, int] = defaultdict(int)
    for call in calls:
        num_calls[id(call.module)] += 1
        if num_calls[id(call.module)] == 1:
            for weight in call.module.parameters(recurse=False):
                num_owners[id(weight)] += 1
        if _is_plain(call.module) and len(call.arguments) == 1 and not call.options:
            by_input[id(call.arguments[0]), call.versions[0]].append(call)
    merged = 0
    for siblings in by_input.values():
        kinds: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for call in siblings:
            layer = call.module
            if num_calls[id(layer)] == 1 and num_owners[id(layer.weight)] == 1:
                kinds[layer.weight.device, layer.weight.dtype, layer.bias is None].append(layer)
        merged += sum(_merge(layers, siblings[0].arguments[0]) for layers in kinds.values() if len(layers) > 1)
    return merged


def _is_plain(layer: Any) -> bool:
    """Whether all that a layer does is `x @ weight.T + bias`, with weights that are numbers and not quantised."""
    if type(layer) is not nn.Linear or {"forward", "_old_forward"} & vars(layer).keys():
        return False
    return layer.weight.is_floating_point() and type(layer.weight).dequantize is torch.Tensor.dequantize


@torch.no_grad()
def _merge(layers: Sequence[Any], states: torch.Tensor) -> bool:
    """Merge layers whose product stays the same up to rounding."""
    has_bias = layers[0].bias is not None
    expected = [layer(states) for layer in layers]
    ends = torch.tensor([len(layer.weight) for layer in layers]).cumsum(0).tolist()
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers]) if has_bias else None
    product = MergedProduct(weight, bias, len(layers))
    parts = [product.part(states, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if not all(map(agree, expected, parts)):
        return False
    for layer, start, end in zip(layers, [0, *ends], ends, strict=False):
        layer.weight = nn.Parameter(weight[start:end], requires_grad=layer.weight.requires_grad)
        if bias is not None:
            layer.bias = nn.Parameter(bias[start:end], requires_grad=layer.bias.requires_grad)
        layer.forward = MergedLinear(layer, product, start, end, layer.weight.data_ptr())
    return True
