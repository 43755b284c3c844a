# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a few rows, on a CPU: a kernel of our own for weights that oneDNN has packed.

oneDNN stalls on memory while it loads weights, and leaves memory idle while it multiplies them; the kernel prefetches.
"""

from __future__ import annotations

from array import array
from functools import cache
from typing import Final

import torch

from hf_triton.runner.cpu.availability import is_usable, runs_numba
from hf_triton.runner.numerics import agree

MAX_ROWS: Final = 64
"""Rows beyond which oneDNN is as fast."""
ALL_ROWS: Final = frozenset(range(1, MAX_ROWS + 1))
MIN_INPUTS: Final = 256
"""Inputs of a layer from which on a kernel is compiled; the demo model has fewer."""


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` for any number of rows, with packed weights."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


class LinearKernel:
    """Multiplies a few rows with a layer's packed weights. Use `build`, which checks the result.

    Args:
        weight: Packed by oneDNN, `[out_features, in_features]`, in blocks as `linear_kernel.py` reads them.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        from hf_triton.runner.cpu import linear_kernel

        self._kernel = linear_kernel
        self._weight, self._dtype = weight, weight.dtype
        self._address = torch.ops.mkldnn.data_ptr(weight)
        self._outputs, self._inputs = weight.shape
        self._blocks = self._outputs // linear_kernel.BLOCK
        self._words = self._inputs * weight.itemsize // linear_kernel.WORD_BYTES
        self.rows = ALL_ROWS
        """Numbers of rows for which the kernel computes; of 1 to `MAX_ROWS`."""

    @classmethod
    def build(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel | None:
        """The kernel of a layer; None if this processor has none, or it computes something else.

        Args:
            weight: Packed by oneDNN, in a layout of its own choice: the kernel is tried.
            bias: `[out_features]`.
        """
        if weight.shape[1] < MIN_INPUTS or not has_kernel(weight.dtype) or not _is_blocked(weight):
            return None
        kernel = cls(weight)
        with torch.inference_mode():
            x = _noise(1, weight.shape[1], weight.dtype)
            is_right = agree(onednn_linear(x, weight, bias), kernel.multiply(x, bias), weight.dtype)
        return kernel if is_right else None

    def accepts(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernel computes this input: a plain tensor of few rows, in inference.

        Args:
            x: `[..., in_features]`.
            weight: The layer's present weights.
        """
        if weight is not self._weight or x.dtype is not self._dtype or x.shape[-1] != self._inputs:
            return False
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        is_plain = type(x) is torch.Tensor and x.is_cpu and not x.is_neg() and not x._is_zerotensor()
        return is_plain and x.numel() // self._inputs in self.rows

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`, summed in 32 bits; a row's result is independent of the other rows.

        Args:
            x: `[..., in_features]` for which `accepts` is true.
            bias: `[out_features]`.
        """
        x = x.contiguous()
        num_rows = x.numel() // self._inputs
        shape = *x.shape[:-1], self._outputs
        if bias is None:
            result = torch.zeros(shape, dtype=torch.float32, device="cpu")
        else:
            result = bias.float().repeat(*x.shape[:-1], 1)
        is_parallel = num_rows * self._inputs * self._outputs >= 2**17  # else waking other threads does not pay
        num_threads = torch.get_num_threads() if is_parallel else 1
        # Two tasks for each thread, because threads are not equally fast.
        blocks_per_task = self._blocks if num_threads == 1 else -(-self._blocks // (2 * num_threads))
        progress = array("q", (0,))
        address, _ = progress.buffer_info()
        sizes = num_rows, self._words, self._outputs, blocks_per_task
        task = self._kernel.LinearTask(address, x.data_ptr(), self._address, result.data_ptr(), *sizes)
        self._kernel.run_linear(self._dtype, task, num_threads)
        return result if self._dtype is torch.float32 else result.to(self._dtype)


def _noise(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random `[num_rows, width]`, so that any exchange of two numbers shows in the result."""
    source = torch.Generator(device="cpu").manual_seed(num_rows * width)
    return torch.randn(num_rows, width, generator=source, dtype=torch.float32, device="cpu").to(dtype)


def _is_blocked(weight: torch.Tensor) -> bool:
    """Whether the sizes of packed weights allow whole blocks without padding."""
    from hf_triton.runner.cpu.linear_kernel import BLOCK, STEP, WORD_BYTES

    outputs, inputs = weight.shape
    num_bytes = torch.ops.mkldnn._nbytes(weight)
    has_blocks = outputs % BLOCK == 0 and inputs * weight.itemsize % (STEP * WORD_BYTES) == 0
    return has_blocks and num_bytes == outputs * inputs * weight.itemsize


@cache
def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this processor has a kernel, and it is right."""

    def try_out() -> bool | None:
        from hf_triton.runner.cpu.linear_kernel import can_run

        return is_right(dtype) if can_run(dtype) else None

    return runs_numba() and is_usable("linear", "oneDNN", try_out)


@torch.inference_mode()
def is_right(dtype: torch.dtype) -> bool:
    """Whether the kernel computes what torch computes, for every number of rows that it multiplies together."""
    from hf_triton.runner.cpu.linear_kernel import BLOCK, CHUNK, MAX_PASSES, ROWS_PER_TILE

    inputs, outputs = 2 * MAX_PASSES * CHUNK, 2 * BLOCK
    plain = _noise(outputs, inputs, dtype)
    weight = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    if not _is_blocked(weight):
        return False
    for num_rows in range(1, (MAX_PASSES + 1) * ROWS_PER_TILE):
        x = _noise(num_rows, inputs, dtype)
        if not agree((x.float() @ plain.float().T).to(dtype), LinearKernel(weight).multiply(x, None), dtype):
            return False
    return True
