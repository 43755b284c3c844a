# SPDX-License-Identifier: Apache-2.0
"""CPU inference: packed weights, kernels for decoding, threads and malloc. The rest of the package imports this alone.

Importing it loads neither torch nor numba.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from hf_triton.runner.cpu.threads import SharedCores

if TYPE_CHECKING:
    import torch

__all__ = [
    "SharedCores",
    "accelerate",
    "accelerate_encoder",
    "give_back_freed_memory",
    "grouped_layers",
    "paged_kernels",
    "small_layers",
]


def accelerate(model: Any, *, pack_weights: Literal["auto"] | bool = "auto") -> None:
    """Prepare a loaded model for inference, in place; a model on another device stays as it is.

    Args:
        model: A transformers model in eval mode.
        pack_weights: Whether its linear layers get the layout that oneDNN computes with; `auto` packs the layers that
            are faster so, by timing each shape (a second for a small model).
    """
    if model.device.type != "cpu":
        return
    from hf_triton.runner.cpu.fewer_calls import reduce_calls
    from hf_triton.runner.cpu.layer_packing import pack
    from hf_triton.runner.cpu.malloc import keep_freed_memory

    keep_freed_memory()
    if pack_weights:
        pack(model, "auto" if pack_weights == "auto" else "all")
    has_codes = any(hasattr(module, "widened") for module in model.modules())
    if pack_weights == "auto" and has_codes and (small := small_layers()):
        small.compare_speed(model)
    reduce_calls(model)


def accelerate_encoder(
    model: Any, compute: Callable[[], torch.Tensor], *, pack_weights: Literal["auto"] | bool = "auto"
) -> None:
    """Prepare a loaded model that does not generate, see `accelerate`; `compute` always returns the same outputs."""
    if model.device.type != "cpu":
        return
    from hf_triton.runner.cpu.layer_packing import pack_encoder
    from hf_triton.runner.cpu.malloc import keep_freed_memory

    keep_freed_memory()
    if pack_weights:
        pack_encoder(model, compute, "auto" if pack_weights == "auto" else "all")


def give_back_freed_memory() -> None:
    """Give the system the memory that the C library's heap keeps for later."""
    from hf_triton.runner.cpu.malloc import trim

    trim()


def small_layers() -> ModuleType | None:
    """The module with `SmallWeights`, `make_small` and `small_bytes`; None: see `grouped_layers`."""
    if grouped_layers() is None:
        return None
    from hf_triton.runner.cpu import small_weights as module

    return module


def paged_kernels() -> ModuleType:
    """The module with `kernel_for` and `write_tokens`, for keys and values in blocks."""
    from hf_triton.runner.cpu import paged_attention as module

    return module


def grouped_layers() -> ModuleType | None:
    """The module with `GroupedLinear` and `GroupedEmbedding`; None: this processor has no kernel for them."""
    from hf_triton.runner.cpu import grouped_linear as module

    return module if module.has_grouped_kernel() else None
