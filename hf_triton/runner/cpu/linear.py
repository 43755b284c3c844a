# SPDX-License-Identifier: Apache-2.0
"""Products of a few vectors with the packed weights of a linear layer, on a CPU: by a kernel of our own where it can.

oneDNN has the processor wait while weights come from memory, and the memory while they are multiplied.
"""

from __future__ import annotations

from array import array
from functools import cache
from typing import Final

import torch

from hf_triton.runner.cpu.availability import is_usable, runs_numba
from hf_triton.runner.numerics import agree

MOST_VECTORS: Final = 64
"""Of more, oneDNN is as fast."""
LEAST_WIDTH: Final = 256
"""Numbers of a vector from which on a kernel is compiled: the demo model has fewer."""
WORTH_THREADS: Final = 2**17
"""Products of numbers from which on it is worth to wake other threads."""
PARTS: Final = 2
"""Of a thread's share, which it takes one after another: threads are not equally fast."""


def by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` of any number of vectors with packed weights."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


class FewVectors:
    """Computes the products of a few vectors with a layer's weights.

    Args:
        weight: Packed, `[out_features, in_features]`, as the kernel reads it: `make` tries that out.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        from hf_triton.runner.cpu import linear_kernel as product_kernel

        self._kernel = product_kernel
        self._weight, self._dtype = weight, weight.dtype
        self._address = torch.ops.mkldnn.data_ptr(weight)
        self._outputs, self._inputs = weight.shape
        self._blocks = self._outputs // product_kernel.BLOCK
        self._words = self._inputs * weight.itemsize // product_kernel.WORD_BYTES

    @classmethod
    def make(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> FewVectors | None:
        """What does so; None where there is no kernel, or it computes something else.

        Args:
            weight: How oneDNN lays it out, which is its own affair, is tried out.
            bias: `[out_features]`.
        """
        if weight.shape[1] < LEAST_WIDTH or not _has_kernel(weight.dtype) or not _is_laid_out(weight):
            return None
        found = cls(weight)
        with torch.inference_mode():
            x = _noise(1, weight.shape[1], weight.dtype)
            return found if agree(by_onednn(x, weight, bias), found.multiply(x, bias), weight.dtype) else None

    def suits(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether to ask it: plain vectors, few of them, for these weights, and no training.

        Args:
            x: `[..., in_features]`.
            weight: What the layer has now.
        """
        if weight is not self._weight or x.dtype is not self._dtype or x.shape[-1] != self._inputs:
            return False
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not 0 < x.numel() <= MOST_VECTORS * self._inputs:
            return False
        return type(x) is torch.Tensor and x.is_cpu and not x.is_neg() and not x._is_zerotensor()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`; sums are in 32 bits, and a vector's product depends on no other vector.

        Args:
            x: `[..., in_features]`, of which `suits` is true.
            bias: `[out_features]`.
        """
        x = x.contiguous()
        num = x.numel() // self._inputs
        shape = *x.shape[:-1], self._outputs
        if bias is None:
            found = torch.zeros(shape, dtype=torch.float32, device="cpu")
        else:
            found = bias.float().repeat(*x.shape[:-1], 1)
        is_worth_threads = num * self._inputs * self._outputs >= WORTH_THREADS
        num_threads = torch.get_num_threads() if is_worth_threads else 1
        at_once = self._blocks if num_threads == 1 else -(-self._blocks // (PARTS * num_threads))
        progress = array("q", (0,))
        address, _ = progress.buffer_info()
        sizes = num, self._words, self._outputs, at_once
        task = self._kernel.Task(address, x.data_ptr(), self._address, found.data_ptr(), *sizes)
        self._kernel.run(self._dtype, task, num_threads)
        return found if self._dtype is torch.float32 else found.to(self._dtype)


def _noise(num: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """`[num, width]`, of which no two numbers may change places unnoticed."""
    source = torch.Generator(device="cpu").manual_seed(num * width)
    return torch.randn(num, width, generator=source, dtype=torch.float32, device="cpu").to(dtype)


def _is_laid_out(weight: torch.Tensor) -> bool:
    """Whether packed weights may be blocks of words, without anything else."""
    from hf_triton.runner.cpu.linear_kernel import BLOCK, STEP, WORD_BYTES

    outputs, inputs = weight.shape
    num_bytes = torch.ops.mkldnn._nbytes(weight)
    has_blocks = outputs % BLOCK == 0 and inputs * weight.itemsize % (STEP * WORD_BYTES) == 0
    return has_blocks and num_bytes == outputs * inputs * weight.itemsize


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel, tried out with every number of vectors that it computes together."""

    def try_out() -> bool | None:
        from hf_triton.runner.cpu.linear_kernel import can_run

        return _is_right(dtype) if can_run(dtype) else None

    return runs_numba() and is_usable("linear layers", "oneDNN computes them", try_out)


@torch.inference_mode()
def _is_right(dtype: torch.dtype) -> bool:
    from hf_triton.runner.cpu.linear_kernel import AT_A_TIME, BLOCK, CHUNK, SPREAD

    inputs, outputs = 2 * SPREAD * CHUNK, 2 * BLOCK
    plain = _noise(outputs, inputs, dtype)
    weight = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    if not _is_laid_out(weight):
        return False
    for num in range(1, (SPREAD + 1) * AT_A_TIME):
        x = _noise(num, inputs, dtype)
        if not agree((x.float() @ plain.float().T).to(dtype), FewVectors(weight).multiply(x, None), dtype):
            return False
    return True
