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
MIN_PARALLEL_PRODUCTS: Final = 2**17
"""Multiplications from which on waking other threads pays."""
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
        from hf_triton.runner.cpu.linear_kernel import BLOCK, WORD_BYTES, compile_linear
        from hf_triton.runner.cpu.llvm import openmp_parallel

        self.weight, self._dtype = weight, weight.dtype
        self._address = torch.ops.mkldnn.data_ptr(weight)
        self._outputs, self._inputs = weight.shape
        self._blocks = self._outputs // BLOCK
        self._words = self._inputs * weight.itemsize // WORD_BYTES
        self._compiled, self._parallel = compile_linear(weight.dtype), openmp_parallel()
        self._run, self._entry = self._compiled.ctypes, self._compiled.address
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
            result = kernel(x, bias)
            is_right = result is not None and agree(onednn_linear(x, weight, bias), result, weight.dtype)
        return kernel if is_right else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """`x @ weight.T + bias`, summed in 32 bits; a row's result is independent of the other rows.

        A decoding step calls it for every layer: it calls torch alone.

        Args:
            x: `[..., in_features]`.
            bias: `[out_features]`.

        Returns:
            None if the input is not a plain tensor of few rows, in inference: oneDNN must compute it.
        """
        inputs, outputs, dtype = self._inputs, self._outputs, self._dtype
        if type(x) is not torch.Tensor or x.dtype is not dtype or not x.is_cpu or x.shape[-1] != inputs:
            return None
        num_rows = x.numel() // inputs
        if num_rows not in self.rows or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if x.is_neg() or x._is_zerotensor():
            return None
        x = x.contiguous()
        if bias is None:
            result = torch.zeros(*x.shape[:-1], outputs, dtype=torch.float32, device="cpu")
        else:
            result = bias.float().repeat(*x.shape[:-1], 1)
        is_parallel = num_rows * inputs * outputs >= MIN_PARALLEL_PRODUCTS
        num_threads = torch.get_num_threads() if is_parallel and self._parallel else 1
        # Two tasks for each thread, because threads are not equally fast.
        blocks_per_task = self._blocks if num_threads == 1 else -(-self._blocks // (2 * num_threads))
        addresses = x.data_ptr(), self._address, result.data_ptr()
        task = array("q", (0, *addresses, num_rows, self._words, outputs, blocks_per_task, 0))
        address, _ = task.buffer_info()  # of a `LinearTask`
        task[0] = address + 8 * (len(task) - 1)
        if num_threads == 1:
            self._run(address)
        else:
            self._parallel(self._entry, address, num_threads, 0)
        return result if dtype is torch.float32 else result.to(dtype)


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
        result = LinearKernel(weight)(x, None)
        if result is None or not agree((x.float() @ plain.float().T).to(dtype), result, dtype):
            return False
    return True
