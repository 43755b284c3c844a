# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a CPU whose weights oneDNN has packed; for a few rows, a kernel of our own multiplies them.

oneDNN stalls on memory while it loads weights, and leaves memory idle while it multiplies them; the kernel prefetches.
"""

from __future__ import annotations

import bisect
from array import array
from functools import cache
from typing import Final

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_triton.runner.cpu.availability import is_usable
from hf_triton.runner.numerics import agree

MAX_ROWS: Final = 64
"""Rows beyond which oneDNN is as fast."""
ALL_ROWS: Final = frozenset(range(1, MAX_ROWS + 1))
MIN_PARALLEL_PRODUCTS: Final = 2**17
"""Multiplications from which on waking other threads pays."""
MIN_INPUTS: Final = 256
"""Inputs of a layer from which on a kernel is compiled; the demo model has fewer."""
SIZES: Final = (*range(1, 17), *range(24, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
"""Rows that oneDNN multiplies at a time. It generates code for each number of rows, which takes a millisecond and half
a mebibyte that it never frees: other inputs are padded to one of these, or divided."""


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` for any number of rows, with packed weights."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


class LinearKernel:
    """What the kernel needs to multiply with a layer's packed weights; `PackedLinear` calls it.

    Args:
        weight: Packed by oneDNN, `[out_features, in_features]`, in blocks as `linear_kernel.py` reads them.
        rows: Numbers of rows for which the kernel computes.
    """

    def __init__(self, weight: torch.Tensor, rows: frozenset[int] = ALL_ROWS) -> None:
        from hf_triton.runner.cpu.linear_kernel import BLOCK, WORD_BYTES, compile_linear
        from hf_triton.runner.cpu.llvm import openmp_parallel

        self.weight, self.rows = weight, rows
        self.address = torch.ops.mkldnn.data_ptr(weight)
        self.outputs, self.inputs = weight.shape
        self.blocks = self.outputs // BLOCK
        self.words = self.inputs * weight.itemsize // WORD_BYTES
        compiled = compile_linear(weight.dtype)
        self.run, self.entry, self.parallel = compiled.ctypes, compiled.address, openmp_parallel()


class PackedLinear(nn.Linear):
    """`x @ weight.T + bias`, for inference on a CPU; a linear layer becomes one in place.

    Its `weight` keeps shape and dtype, and only oneDNN and the kernel can read it.
    """

    kernel: LinearKernel | None = None
    """Computes a few rows in place of oneDNN."""

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """A layer with packed weights `[out_features, in_features]`."""
        outputs, inputs = weight.shape
        layer = cls(inputs, outputs, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        return layer

    def use_kernel(self, rows: frozenset[int] = ALL_ROWS) -> None:
        """Compute so many rows, of 1 to `MAX_ROWS`, by our kernel, if this processor has one that is right for them."""
        weight = self.weight
        if not rows or weight.shape[1] < MIN_INPUTS or not has_kernel(weight.dtype) or not _is_blocked(weight):
            return
        self.kernel = LinearKernel(weight, rows)
        with torch.inference_mode():
            x = _noise(1, weight.shape[1], weight.dtype)
            if not agree(onednn_linear(x, weight, self.bias), self(x)):  # oneDNN chooses its layouts
                self.kernel = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`; the kernel sums in 32 bits, each row by itself.

        A decoding step calls it for every layer: all is done here, by calls of torch alone.
        """
        if has_torch_function_unary(x):
            return handle_torch_function(PackedLinear.forward, (x,), self, x)
        kernel, weight, bias = self.kernel, self._parameters["weight"], self._parameters["bias"]
        num_rows = x.numel() // x.shape[-1]
        if (
            kernel is None
            or num_rows not in kernel.rows
            or kernel.weight is not weight
            or x.shape[-1] != kernel.inputs
            or torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or not (type(x) is torch.Tensor and x.is_cpu and x.dtype is weight.dtype)
            or x.is_neg()
            or x._is_zerotensor()
        ):
            if num_rows in SIZES:
                return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
            return self._compute_parts(x)
        x, outputs = x.contiguous(), kernel.outputs
        if bias is None:
            result = torch.zeros(*x.shape[:-1], outputs, dtype=torch.float32, device="cpu")
        else:
            result = bias.float().repeat(*x.shape[:-1], 1)
        is_parallel = kernel.parallel and num_rows * kernel.inputs * outputs >= MIN_PARALLEL_PRODUCTS
        num_threads = torch.get_num_threads() if is_parallel else 1
        # Two tasks for each thread, because threads are not equally fast.
        blocks_per_task = kernel.blocks if num_threads == 1 else -(-kernel.blocks // (2 * num_threads))
        sizes = num_rows, kernel.words, outputs, blocks_per_task
        task = array("q", (0, x.data_ptr(), kernel.address, result.data_ptr(), *sizes, 0))  # see `linear_kernel.TASK`
        address, _ = task.buffer_info()
        task[0] = address + 8 * (len(task) - 1)
        if num_threads == 1:
            kernel.run(address)
        else:
            kernel.parallel(kernel.entry, address, num_threads, 0)
        return result if weight.dtype is torch.float32 else result.to(weight.dtype)

    def _compute_parts(self, x: torch.Tensor) -> torch.Tensor:
        products = []
        for part in torch.split(x.reshape(-1, x.shape[-1]), SIZES[-1]):
            size = SIZES[bisect.bisect_left(SIZES, max(2, len(part)))]  # of one row alone oneDNN has other bits
            padded = nn.functional.pad(part, (0, 0, 0, size - len(part)))
            products.append(onednn_linear(padded, self.weight, self.bias)[: len(part)])
        return torch.cat(products).view(*x.shape[:-1], self.weight.shape[0])

    def __deepcopy__(self, memo: object) -> nn.Linear:
        """A plain layer, as which peft trains a copy."""
        copied = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.weight.dtype)
        copied.load_state_dict({"weight": self.weight.to_dense(), "bias": self.bias}, strict=False)
        return copied


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
    """Whether this processor has a kernel, and it is right; logged if it should and is not."""

    def try_out() -> bool | None:
        from hf_triton.runner.cpu.linear_kernel import can_run

        return is_right(dtype) if can_run(dtype) else None

    return is_usable("linear", "oneDNN", try_out)


@torch.inference_mode()
def is_right(dtype: torch.dtype) -> bool:
    """Whether the kernel computes what torch computes, for every number of rows that it multiplies together."""
    from hf_triton.runner.cpu.linear_kernel import BLOCK, CHUNK, MAX_PASSES, ROWS_PER_TILE

    plain = _noise(2 * BLOCK, 2 * MAX_PASSES * CHUNK, dtype)
    layer = PackedLinear.of(torch.ops.mkldnn._reorder_linear_weight(plain, None), None)
    if not _is_blocked(layer.weight):
        return False
    layer.kernel = LinearKernel(layer.weight)
    rows = (_noise(num_rows, plain.shape[1], dtype) for num_rows in range(1, (MAX_PASSES + 1) * ROWS_PER_TILE))
    return all(agree((x.float() @ plain.float().T).to(dtype), layer(x)) for x in rows)
