# SPDX-License-Identifier: Apache-2.0
"""Replaces what a model computes in many kernels by one each: norms with sums, rotary embeddings, gates, products.

What a module computes is found by trying. It is replaced if its output on random numbers, on its device and in its
dtype, stays the same up to rounding; else it stays as it is. Linear layers are still called as modules, so adapters,
quantised weights and hooks keep working.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from hf_triton.runner.cuda.early_writes import rotate, write_early
from hf_triton.runner.cuda.fused_layers import fuse_layers
from hf_triton.runner.cuda.fused_norms import Forward, build_norm
from hf_triton.runner.cuda.fused_operations import gelu_mul, is_usable, rotary, silu_mul, writes_early
from hf_triton.runner.faults import described
from hf_triton.runner.merged import merge_products
from hf_triton.runner.norms import is_like_norm, random_numbers
from hf_triton.runner.numerics import agree
from hf_triton.runner.seen_calls import see_calls

logger = logging.getLogger(__name__)

ROTARY: Final = "apply_rotary_pos_emb"
"""The function of transformers' modeling modules that rotates query and key."""
GATES: Final = (silu_mul, functional.silu), (gelu_mul, partial(functional.gelu, approximate="tanh"))
"""Operations, and their activations."""
LARGE: Final = 50.0
"""A gate that a trial reaches, beyond the limits that some models set."""


@torch.no_grad()
def fuse_modules(model: Any) -> None:
    """Replace what can be replaced in a model in eval mode, on its devices; its forwards run in inference mode."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        try:
            replaced = _replace_forward(module, model.dtype)
        except Exception as error:  # a module may do anything in its forward
            logger.debug("%s (%s) is not fused (%s)", name, type(module).__name__, described(error))
            continue
        if replaced:
            counts[replaced] += 1
    for module_name in {type(module).__module__ for module in model.modules()}:
        if _replace_rotary(module_name, model):
            counts["rotary embeddings"] += 1
    try:
        calls = see_calls(model)
        if is_usable(model.device, model.dtype):
            counts["layers"] = fuse_layers(calls)
        counts["products of one input"] = merge_products(calls)
    except Exception as error:  # a model that takes no token ids
        logger.debug("no layers are fused (%s)", described(error))
    try:
        if counts["rotary embeddings"] and writes_early(model.device, model.dtype):
            counts["writes of keys"] = write_early(model)
    except Exception as error:  # a model that takes no such cache
        logger.debug("no keys are written as they are rotated (%s)", described(error))
    logger.info("fused kernels: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none")


def _replace_forward(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Replace a norm's or a gate's forward; what was replaced, None: nothing."""
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hooks stay around it
    original = getattr(module, name)
    build = build_norm if is_like_norm(module, "cuda") else _build_gate if hasattr(module, "down_proj") else None
    if build is None or len(inspect.signature(original).parameters) != 1:
        return None
    trial = build(module, dtype, original)
    if trial is None:
        return None
    fused, states = trial
    if not agree(module(states), fused(states)):
        raise ValueError("its output changes")
    setattr(module, name, fused)
    return "norms" if build is build_norm else "gates"


# --- gates -----------------------------------------------------------------------------------------------------------


@dataclass
class FusedGate:
    """The forward of a gated MLP, whose projections of gate and up are one layer or two."""

    module: Any
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        module = self.module
        if hasattr(module, "gate_up_proj"):
            gate, up = module.gate_up_proj(states).chunk(2, -1)
        else:
            gate, up = module.gate_proj(states), module.up_proj(states)
        output: torch.Tensor = module.down_proj(self.multiply(gate, up))
        return output


def _build_gate(module: Any, dtype: torch.dtype, _: Forward) -> tuple[FusedGate, torch.Tensor] | None:
    """The replacement and states to compare it with, of usual size and large."""
    first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.gate_proj
    device = next(chain(first.parameters(), first.buffers())).device
    multiply = _multiply_of(module)
    if multiply is None or device.type != "cuda" or not is_usable(device, dtype):
        return None
    states = random_numbers(3, first.in_features, dtype=dtype, device=device)
    return FusedGate(module, multiply), torch.cat([states, states * (LARGE / first(states).abs().max())])


def _multiply_of(module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The operation of the activation that a module has, told in 32 bits; None: there is none."""
    numbers = torch.linspace(-8, 8, 1001)
    for child in module.children():
        if next(child.parameters(), None) is None and not list(child.children()):
            output = child(numbers)
            for multiply, activate in GATES:
                if torch.allclose(output, activate(numbers), rtol=1e-4, atol=1e-6):
                    return multiply
    return None


# --- rotary embeddings -----------------------------------------------------------------------------------------------


class FusedRotary:
    """Stands in for a modeling module's function; what it was not compared for goes to the original."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.compared: set[tuple[torch.device, torch.dtype]] = set()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if options in ({}, {"unsqueeze_dim": 1}) and len(arguments) == 4 and self._takes(*arguments):
            return rotate(*arguments)
        return self.original(*arguments, **options)

    def _takes(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        if query.ndim != 4:
            return False
        rows, _, positions, size = query.shape
        return (
            (query.device, query.dtype) in self.compared
            and key.dtype == cos.dtype == sin.dtype == query.dtype
            and (key.shape[0], *key.shape[2:]) == (rows, positions, size)
            and cos.shape == sin.shape
            and cos.shape in ((rows, positions, size), (1, positions, size))
        )


def _replace_rotary(module_name: str, model: Any) -> bool:
    """Replace the function of a modeling module for the devices of a model; other models use the same function."""
    module = sys.modules.get(module_name)
    function = getattr(module, ROTARY, None)
    if function is None:
        return False
    fused = function if isinstance(function, FusedRotary) else FusedRotary(function)
    for device in {each.device for each in model.parameters() if each.device.type == "cuda"}:
        try:
            if is_usable(device, model.dtype) and _rotates_halves(fused.original, device, model):
                fused.compared.add((device, model.dtype))
        except Exception as error:  # a function of the same name that takes other arguments
            logger.debug("%s of %s is not fused (%s)", ROTARY, module_name, described(error))
    if fused.compared:
        setattr(module, ROTARY, fused)
    return bool(fused.compared)


def _rotates_halves(function: Callable[..., Any], device: torch.device, model: Any) -> bool:
    """Whether a function rotates number `i` of a head with number `i + size / 2`."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = random_numbers(1, 5, 8, size, dtype=model.dtype, device=device)
    query, key = numbers[:, :, :4].transpose(1, 2), numbers[:, :, 4:6].transpose(1, 2)
    arguments = query, key, numbers[:, :, 6], numbers[:, :, 7]
    return all(map(agree, function(*arguments), rotary(*arguments)))
