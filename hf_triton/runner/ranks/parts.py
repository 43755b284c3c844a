# SPDX-License-Identifier: Apache-2.0
"""Tries at load whether the parts of a model's layers, in all ranks together, compute what the whole layers compute.

A model's plan for its division is transformers' own, and another rank's part of a wrong one looks as right as this
one's: steps would be compared with a `generate` that is as wrong. So each layer is put together once, on each rank,
and computes what the parts have computed. Memory holds one whole layer more, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, Final

import torch
from torch import nn

from hf_triton.errors import CheckpointError
from hf_triton.runner.float32 import HALF, in_float32, layers_of
from hf_triton.runner.model_comparison import LIMIT, distance
from hf_triton.runner.reference import make_prompt

NUM_TOKENS: Final = 12

Shared = dict[int, tuple[MutableMapping[Any, Any], MutableMapping[Any, Any]]]
"""A dictionary that layers are given, and that of the whole layers, by the id of the first."""


def check_parts(model: Any) -> None:
    """Refuse a model of which a layer computes something else in parts; called on all ranks.

    Raises:
        CheckpointError: It does.
    """
    layers = {id(layer) for layer in layers_of(model)}
    inside = {id(module) for layer in layers_of(model) for module in layer.modules()}
    units = {
        name: module
        for name, module in model.named_modules()
        if id(module) in layers or (id(module) not in inside and any(map(_is_divided, module._parameters.values())))
    }
    apart: dict[str, float] = {}
    shared: Shared = {}
    ids = torch.tensor([make_prompt(model, NUM_TOKENS, seed=3)], device=model.get_input_embeddings().weight.device)
    with torch.no_grad(), ExitStack() as stack:
        if model.dtype in HALF:
            stack.enter_context(in_float32(model))  # whose hooks come first
        for name, unit in units.items():
            stack.enter_context(_comparing(unit, name, apart, shared))
        model(input_ids=ids, use_cache=False)
    name = max(apart, key=lambda name: apart[name])
    if apart[name] > LIMIT:
        raise CheckpointError(
            "unsupported_model",
            f"transformers' plan for its division is wrong: in ranks {name} computes something else than as a whole, "
            f"by {apart[name]:.1e} of the largest number, where {LIMIT:.1e} is allowed: leave out tensor_parallel_size",
        )


@contextmanager
def _comparing(unit: nn.Module, name: str, apart: dict[str, float], shared: Shared) -> Iterator[None]:
    """While it is entered, note how far a module's output is from that of the same module with whole weights.

    Whole layers have dictionaries of their own in place of those in which layers leave keys for later ones (Gemma 4).
    """
    expected: list[torch.Tensor] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        for key, value in kwargs.items():
            if isinstance(value, MutableMapping):
                kwargs = kwargs | {key: shared.setdefault(id(value), (value, copy(value)))[1]}
        with _whole(unit):
            expected.append(_tensor(type(unit).forward(unit, *args, **kwargs)))

    def after(_: nn.Module, __: Any, output: Any) -> None:
        rows = (each.float().flatten(0, -2) for each in (expected.pop(), _tensor(output)))
        apart[name] = max(apart.get(name, 0.0), distance(*rows))

    handles = [unit.register_forward_pre_hook(before, with_kwargs=True), unit.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _whole(unit: nn.Module) -> Iterator[None]:
    """While it is entered, a module has whole weights, gathered from all ranks, and its classes' own forwards."""
    forwards, parts = [], []
    for module in unit.modules():
        if (forward := vars(module).pop("forward", None)) is not None:
            forwards.append((module, forward))
        for name, tensor in module._parameters.items():
            if _is_divided(tensor):
                parts.append((module._parameters, name, tensor))
    try:
        for owner, name, tensor in parts:
            owner[name] = nn.Parameter(tensor.full_tensor(), requires_grad=False)  # type: ignore[union-attr]
        yield
    finally:
        for owner, name, tensor in parts:
            owner[name] = tensor
        for module, forward in forwards:
            vars(module)["forward"] = forward


def _is_divided(tensor: torch.Tensor | None) -> bool:
    return hasattr(tensor, "full_tensor")


def _tensor(output: Any) -> torch.Tensor:
    """The first tensor of a module's output."""
    return output if isinstance(output, torch.Tensor) else next(iter(output))
