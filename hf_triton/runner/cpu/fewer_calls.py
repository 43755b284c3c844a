# SPDX-License-Identifier: Apache-2.0
"""One call of torch in place of several: a small model's decoding step spends most of its time between them.

RMSNorms in float32 become torch's own operation, and rotary embeddings one that turns halves around, if the bits stay
the same; layers of codes with one input become one. A few wide rows are normalised by a kernel: torch takes nine calls.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_triton.runner.cpu.availability import is_usable
from hf_triton.runner.faults import described
from hf_triton.runner.float32 import is_small
from hf_triton.runner.merged import merge_products
from hf_triton.runner.norms import find_norm, is_like_norm, random_numbers
from hf_triton.runner.numerics import agree
from hf_triton.runner.seen_calls import see_calls

logger = logging.getLogger(__name__)

ROTARY: Final = "apply_rotary_pos_emb"
"""The function of transformers' modeling modules that rotates query and key."""
SCALES: Final = 1.0, 30.0, 1e-3, 1e3, 1e-9
"""Sizes of the states that a norm is tried with."""
MIN_SIZE: Final = 256
"""Numbers of a row from which on a kernel is compiled; the demo model's rows are smaller."""
MAX_NUMBERS: Final = 2**16
"""Of all rows; torch computes more in several threads."""


@torch.no_grad()
def reduce_calls(model: Any) -> None:
    """Replace what can be replaced in a model that generates, in place."""
    num_norms, num_products = sum(map(_replace_norm, model.modules())), 0
    if any(map(is_small, model.modules())):
        try:
            num_products = merge_products([call for call in see_calls(model) if is_small(call.module)])
        except Exception as error:  # a model that takes no token ids
            logger.debug("no products are merged (%s)", described(error))
    for name in {type(module).__module__ for module in model.modules()} & sys.modules.keys():
        _replace_rotary(sys.modules[name])
    logger.info("fewer calls: %d norms, %d products of one input", num_norms, num_products)


@dataclass
class Norm:
    """The forward of an RMSNorm."""

    original: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor
    eps: float
    has_kernel: bool = False

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not states.dtype is weight.dtype is torch.float32:  # a model may have been cast since
            return self.original(states)
        if not self.has_kernel or states.numel() > MAX_NUMBERS or torch.is_grad_enabled():
            return torch.rms_norm(states, weight.shape, weight, self.eps)
        if has_torch_function_unary(states):
            output: torch.Tensor = handle_torch_function(Norm.__call__, (states,), self, states)
            return output
        rows, size = states.contiguous(), weight.shape[0]
        result = torch.empty_like(rows)
        _kernel()(rows.data_ptr(), weight.data_ptr(), result.data_ptr(), rows.numel() // size, size, self.eps)
        return result


@cache
def _kernel() -> Any:
    from hf_triton.runner.cpu.norm_kernel import compile_norm

    address, number = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(None, address, address, address, number, number, ctypes.c_float)
    return kind(compile_norm().address)


@cache
def has_norm_kernel() -> bool:
    """Whether the kernel compiles here and computes what torch does."""

    @torch.inference_mode()
    def is_right() -> bool:
        states = random_numbers(3, MIN_SIZE + 3, dtype=torch.float32, device=torch.device("cpu"))
        norm = Norm(torch.nn.Identity(), states[0], 1e-5)
        expected, norm.has_kernel = norm(states), True
        return agree(expected, norm(states))

    return is_usable("norm", "torch", is_right)


def _replace_norm(module: nn.Module) -> bool:
    """Replace a norm of one weight and nothing else; whether it was one."""
    if not is_like_norm(module, "cpu") or "forward" in vars(module):
        return False
    (weight,) = module.parameters()
    if weight.dtype is not torch.float32 or len(inspect.signature(module.forward).parameters) != 1:
        return False  # others have a gate beside the states
    try:
        found = find_norm(module, SCALES, torch.equal)
    except Exception as error:  # a module may do anything in its forward
        logger.debug("%s is no norm (%s)", type(module).__name__, described(error))
        return False
    if found is None:
        return False
    (eps, offset), _ = found
    has_kernel = len(weight) >= MIN_SIZE and weight.is_contiguous() and has_norm_kernel()
    module.forward = Norm(module.forward, weight if offset == 0 else offset + weight, eps, has_kernel)
    return True


class Rotary:
    """Stands in for a modeling module's function, which computes what is not float32 on a CPU, or has other options."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.kept: tuple[Any, ...] = (None, None, None, None)
        """Cosines and sines of a step, and both as they are multiplied: all its layers have the same."""

    def __call__(self, *given: Any, **options: Any) -> Any:
        is_plain = not options and len(given) == 4 and given[0].ndim == 4 and given[2].ndim == 3
        if not is_plain:
            return self.original(*given, **options)
        query, key, cos, sin = given
        if not (query.is_cpu and query.dtype is key.dtype is cos.dtype is sin.dtype is torch.float32):
            return self.original(*given)
        size = query.shape[-1]
        if not cos.shape[-1] == sin.shape[-1] == key.shape[-1] == size or torch.is_grad_enabled():
            return self.original(*given)
        kept = self.kept
        if kept[0] is not cos or kept[1] is not sin:
            turned = torch.cat((-sin[..., : size // 2], sin[..., size // 2 :]), -1)
            kept = self.kept = cos, sin, cos.unsqueeze(1), turned.unsqueeze(1)
        cos, turned = kept[2:]
        return (
            (query * cos).add_(query.roll(size // 2, -1).mul_(turned)),
            (key * cos).add_(key.roll(size // 2, -1).mul_(turned)),
        )


def _replace_rotary(module: Any) -> None:
    """Replace the function of a modeling module if it rotates number `i` of a head with number `i + size / 2`."""
    original = getattr(module, ROTARY, None)
    if original is None or isinstance(original, Rotary):
        return
    rotary = Rotary(original)
    states = random_numbers(2, 8, 3, 16, dtype=torch.float32, device=torch.device("cpu"))
    given = states[:, :6], states[:, 2:4], states[:, 6], states[:, 7]
    try:
        if all(map(torch.equal, original(*given), rotary(*given))):
            setattr(module, ROTARY, rotary)
    except Exception as error:  # a function of the same name that takes other arguments
        logger.debug("%s of %s stays (%s)", ROTARY, module.__name__, described(error))
