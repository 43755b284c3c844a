# SPDX-License-Identifier: Apache-2.0
"""One product in place of those of several linear layers that get the same input (query, key, value; gate, up).

Which layers do is seen in a forward. The first one that is called computes for all, the others take their part. Their
weights become views of one tensor, so that parameters, hooks, state dicts and adapters stay; quantised weights of
other packages stay apart. While it is made, memory holds the weights of one product twice.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_triton.runner.float32 import is_small
from hf_triton.runner.numerics import agree
from hf_triton.runner.seen_calls import Call


@dataclass
class MergedProduct:
    """The product of layers with the same input; belongs to the thread of the model's forwards."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    """Gives all outputs."""
    dtype: torch.dtype
    """Of the input."""
    name: str
    """Of the tensor, weight or codes, whose parts are the layers'."""
    joined: torch.Tensor
    """That tensor. It moves when a model that sleeps gives back its memory."""
    num_parts: int
    states: torch.Tensor | None = None
    """The input of the product that is there; the same object is the same input."""
    output: torch.Tensor | None = None
    num_left: int = 0
    """Layers that have not taken their part."""

    def part(self, states: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """One layer's outputs, a view."""
        if self.states is not states or self.output is None:
            self.output = self.compute(states)
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
    offset: int = 0
    """Bytes from the product's tensor to its own; a layer that was given another computes by itself."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        layer, product = self.layer, self.product
        if (
            product is None
            or states.dtype != product.dtype
            or getattr(layer, product.name).data_ptr() - product.joined.data_ptr() != self.offset
            or torch.is_grad_enabled()
        ):
            output: torch.Tensor = type(layer).forward(layer, states)
            return output
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
            for tensor in _tensors(call.module).values():
                num_owners[id(tensor)] += 1
        if _is_plain(call.module) and len(call.arguments) == 1 and not call.options:
            by_input[id(call.arguments[0]), call.versions[0]].append(call)
    merged = 0
    for siblings in by_input.values():
        kinds: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for call in siblings:
            layer, tensors = call.module, _tensors(call.module)
            if num_calls[id(layer)] == 1 and all(num_owners[id(each)] == 1 for each in tensors.values()):
                sizes = ((name, each.device, each.dtype, each.shape[1:]) for name, each in tensors.items())
                kinds[getattr(layer, "zero", None), *sizes].append(layer)
        merged += sum(_merge(layers, siblings[0].arguments[0]) for layers in kinds.values() if len(layers) > 1)
    return merged


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers."""
    return {name: each for name, each in (*module._parameters.items(), *module._buffers.items()) if each is not None}


def _is_plain(layer: Any) -> bool:
    """Whether all that a layer does is `x @ weight.T + bias`, with weights that are numbers, or codes as ours."""
    if {"forward", "_old_forward"} & vars(layer).keys():
        return False
    if type(layer) is not nn.Linear:
        return is_small(layer)
    return layer.weight.is_floating_point() and type(layer.weight).dequantize is torch.Tensor.dequantize


@torch.no_grad()
def _merge(layers: Sequence[Any], states: torch.Tensor) -> bool:
    """Merge layers whose product stays the same up to rounding."""
    expected = [layer(states) for layer in layers]
    ends = torch.tensor([layer.out_features for layer in layers]).cumsum(0).tolist()
    whole = copy.copy(layers[0])
    whole.out_features = ends[-1]
    for kind in ("_parameters", "_buffers"):
        same = [vars(layer)[kind] for layer in layers]
        vars(whole)[kind] = {name: _joined([each[name] for each in same]) for name in same[0]}
    name = "codes" if is_small(whole) else "weight"
    compute = partial(type(whole).forward, whole)
    product = MergedProduct(compute, states.dtype, name, getattr(whole, name), len(layers))
    parts = [product.part(states, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if not all(map(agree, expected, parts)):
        return False
    for own, joined in _tensors(whole).items():
        sizes = [len(_tensors(layer)[own]) for layer in layers]
        for layer, part in zip(layers, torch.split(joined, sizes), strict=True):
            before = getattr(layer, own)
            is_parameter = isinstance(before, nn.Parameter)
            setattr(layer, own, nn.Parameter(part, requires_grad=before.requires_grad) if is_parameter else part)
    for layer, start, end in zip(layers, [0, *ends], ends, strict=False):
        offset = getattr(layer, name).data_ptr() - product.joined.data_ptr()
        layer.forward = MergedLinear(layer, product, start, end, offset)
    return True


def _joined(tensors: list[Any]) -> torch.Tensor | None:
    return None if tensors[0] is None else torch.cat(tensors)
