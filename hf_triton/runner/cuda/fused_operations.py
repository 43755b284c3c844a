# SPDX-License-Identifier: Apache-2.0
"""Operations that compute in one kernel what models compute in several; see `fused.py`.

A CUDA device runs the kernels of `fused_kernels.py`. On a CPU torch computes them in 32 bits: the simulated device runs
that, and kernels are tested beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from hf_triton.runner.cuda import why_no_kernel
from hf_triton.runner.cuda.attention_reference import write
from hf_triton.runner.cuda.kernel_cache import have_kernel_cache
from hf_triton.runner.device_step import Places

logger = logging.getLogger(__name__)

LIBRARY: Any = torch.library.Library("hf_triton", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, Tensor? value=None, "
    "Tensor(a!)? key_blocks=None, Tensor(b!)? value_blocks=None, Tensor? sequences=None, Tensor? bounds=None, "
    "Tensor? lengths=None, Tensor? starts=None, Tensor? tables=None) -> (Tensor, Tensor)"
)
LIBRARY.define("silu_mul(Tensor gate, Tensor up) -> Tensor")
LIBRARY.define("gelu_mul(Tensor gate, Tensor up) -> Tensor")
LIBRARY.define("rms_norm(Tensor states, Tensor weight, float eps) -> Tensor")
LIBRARY.define("add_rms_norm(Tensor residual, Tensor states, Tensor weight, float eps) -> (Tensor, Tensor)")


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *written: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate number `i` of each head with number `i + size / 2`.

    Args:
        query: `[rows, heads, positions, size]`, any strides.
        key: `[rows, key_heads, positions, size]`.
        cos: `[rows, positions, size]`, or one row for all.
        sin: As `cos`.
        written: None, or the value `[rows, key_heads, positions, value_size]`, the blocks of keys and of values, and
            the fields of `Places`: the rotated key and the value are written to their blocks.

    Returns:
        Query and key, of their shapes and dtypes.
    """
    rotated: tuple[torch.Tensor, torch.Tensor] = torch.ops.hf_triton.rotary(query, key, cos, sin, *written)
    return rotated


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, of two tensors of one shape and dtype."""
    product: torch.Tensor = torch.ops.hf_triton.silu_mul(gate, up)
    return product


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, see `silu_mul`; GELU is the one approximated by tanh."""
    product: torch.Tensor = torch.ops.hf_triton.gelu_mul(gate, up)
    return product


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide rows `[..., size]` by the root of their mean square and `eps`, and multiply with a weight of more bits.

    The weight is `[size]` float32; the result has the shape and dtype of `states`.
    """
    normed: torch.Tensor = torch.ops.hf_triton.rms_norm(states, weight, eps)
    return normed


def add_rms_norm(
    residual: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows, and `rms_norm` of the sums as they are after rounding; both have the shape and dtype of `residual`.

    The weight is `[size]`, of any bits.
    """
    both: tuple[torch.Tensor, torch.Tensor] = torch.ops.hf_triton.add_rms_norm(residual, states, weight, eps)
    return both


# --- on a CPU --------------------------------------------------------------------------------------------------------


def _rotary_on_cpu(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *written: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)

    def rotated(states: torch.Tensor) -> torch.Tensor:
        first, second = states.float().chunk(2, -1)
        return (states * cos + torch.cat((-second, first), -1) * sin).to(states.dtype)

    both = rotated(query), rotated(key)
    if written and written[0] is not None:
        value, key_blocks, value_blocks, *places = written
        keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (both[1], value))
        write(keys, values, key_blocks, value_blocks, Places(*places))
    return both


def _gated_on_cpu(
    activate: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    return (activate(gate.float()) * up.float()).to(gate.dtype)


def _rms_norm_on_cpu(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(states.float(), weight.shape, weight, eps).to(states.dtype)


def _add_rms_norm_on_cpu(
    residual: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + states
    return total, _rms_norm_on_cpu(total, weight.float(), eps)


LIBRARY.impl("rotary", _rotary_on_cpu, "CPU")
LIBRARY.impl("silu_mul", partial(_gated_on_cpu, functional.silu), "CPU")
LIBRARY.impl("gelu_mul", partial(_gated_on_cpu, partial(functional.gelu, approximate="tanh")), "CPU")
LIBRARY.impl("rms_norm", _rms_norm_on_cpu, "CPU")
LIBRARY.impl("add_rms_norm", _add_rms_norm_on_cpu, "CPU")


# --- on a CUDA device ------------------------------------------------------------------------------------------------


@cache
def _kernels() -> ModuleType:
    have_kernel_cache()
    from hf_triton.runner.cuda import fused_kernels

    return fused_kernels


def _rotary_on_cuda(query: torch.Tensor, *others: torch.Tensor) -> Any:
    with torch.cuda.device(query.device):  # Triton launches on the current one
        return _kernels().rotary(query, *others)


def _gated_on_cuda(gate: torch.Tensor, up: torch.Tensor, *, is_gelu: bool) -> Any:
    with torch.cuda.device(gate.device):
        return _kernels().gated(gate, up, is_gelu=is_gelu)


def _rms_norm_on_cuda(states: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    with torch.cuda.device(states.device):
        return _kernels().rms_norm(states, weight, eps)


def _add_rms_norm_on_cuda(residual: torch.Tensor, *others: Any) -> Any:
    with torch.cuda.device(residual.device):
        return _kernels().add_rms_norm(residual, *others)


LIBRARY.impl("rotary", _rotary_on_cuda, "CUDA")
LIBRARY.impl("silu_mul", partial(_gated_on_cuda, is_gelu=False), "CUDA")
LIBRARY.impl("gelu_mul", partial(_gated_on_cuda, is_gelu=True), "CUDA")
LIBRARY.impl("rms_norm", _rms_norm_on_cuda, "CUDA")
LIBRARY.impl("add_rms_norm", _add_rms_norm_on_cuda, "CUDA")


@cache
def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device can run the kernels, which is tried once; if not, the log says why."""
    reason = why_no_kernel(partial(_run, device, dtype))
    if reason is None:
        return True
    logger.warning("no fused kernels on %s (%s): models run torch's, more of them", device, reason)
    return False


@cache
def writes_early(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel that rotates keys can write them on a device, tried once; if not, the log says why."""
    reason = why_no_kernel(partial(_write, device, dtype))
    if reason is not None:
        logger.warning("keys are written apart from their rotation on %s (%s): a kernel more a layer", device, reason)
    return reason is None


def _write(device: torch.device, dtype: torch.dtype) -> bool:
    states = torch.ones(1, 2, 3, 8, dtype=dtype, device=device)
    keys, values = states.new_zeros(2, 2, 2, 2, 8)
    places = (torch.tensor(numbers, device=device) for numbers in ([0, 0, 0], [0, 3], [3], [0], [1, 0]))
    _, rotated = rotary(states, states, states[:, 0], states[:, 0], states, keys, values, *places)
    return all(
        torch.equal(blocks.flip(0).transpose(0, 1).flatten(1, 2)[:, :3], new[0])
        for blocks, new in ((keys, rotated), (values, states))
    )


def _run(device: torch.device, dtype: torch.dtype) -> bool:
    """Run each once; what they compute is compared in each module that they may replace."""
    states = torch.ones(1, 2, 3, 8, dtype=dtype, device=device)
    rotary(states, states, states[:, 0], states[:, 0])
    silu_mul(states, states)
    gelu_mul(states, states)
    rms_norm(states, torch.ones(8, device=device), 1e-6)
    add_rms_norm(states, states, torch.ones(8, device=device), 1e-6)
    return True
