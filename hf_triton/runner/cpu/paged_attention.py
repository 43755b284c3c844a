# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token of every row over the blocks of the KV cache, on a CPU, by a kernel of numba.

It reads a row's own keys and values, once, for all heads that share them. Without numba, and for heads too small to be
worth compiling, there is no kernel: torch computes attention on gathered blocks.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache
from typing import Any, Final

import torch

from hf_triton.runner.cpu.availability import is_usable, runs_numba
from hf_triton.runner.numerics import agree

MIN_WIDTH: Final = 256
"""Numbers of a token's queries, all heads together, from which on a kernel is compiled; the demo model has fewer."""
MAX_HEADS_PER_TASK: Final = 8
"""Heads that share keys and that a thread computes together."""
MIN_PARALLEL_PRODUCTS: Final = 2**16
"""Multiplications from which on waking other threads pays."""


def attend_decode(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor | None:
    """Attention of one token of every row to the row's tokens; None where there is no kernel.

    Args:
        query: `[rows, heads, size]`; heads that share keys are adjacent.
        key_blocks: `[blocks, key_heads, block_size, size]`, contiguous.
        value_blocks: `[blocks, key_heads, block_size, value_size]`, contiguous.
        tables: int32 `[rows, width]`, contiguous: the blocks of each row in order; the rest is not read.
        lengths: int64 `[rows]`: tokens of each row, at least one.
        scale: Factor of the products.
        window: How many of its last tokens a row attends to; 0: all.

    Returns:
        `[rows, heads, value_size]` in the query's dtype; sums and softmax are in 32 bits.
    """
    kernel = kernel_for(query.shape[1], key_blocks, value_blocks)
    return None if kernel is None else kernel(query, None, None, tables, lengths, scale, window)


def write_tokens(
    key_blocks: torch.Tensor, value_blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write keys and values of tokens to their slots.

    Args:
        key_blocks: `[blocks, key_heads, block_size, size]`.
        value_blocks: `[blocks, key_heads, block_size, value_size]`.
        keys: `[tokens, key_heads, size]`.
        values: `[tokens, key_heads, value_size]`.
        slots: int64 `[tokens]`: `block * block_size + offset`.
    """
    block_size = key_blocks.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_blocks[blocks, :, offsets] = keys
    value_blocks[blocks, :, offsets] = values


def kernel_for(num_heads: int, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> PagedKernel | None:
    """The kernel for the blocks of one layer, which it holds; None if there is none."""
    if not is_supported(num_heads, key_blocks, value_blocks):
        return None
    _, _, block_size, size = key_blocks.shape
    compiled = compiled_for(key_blocks.dtype, size, value_blocks.shape[3], block_size)
    return None if compiled is None else PagedKernel(compiled, num_heads, key_blocks, value_blocks)


def is_supported(num_heads: int, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> bool:
    """Whether the kernel computes with such blocks: contiguous ones on a CPU."""
    if not type(key_blocks) is type(value_blocks) is torch.Tensor or not key_blocks.ndim == value_blocks.ndim == 4:
        return False
    _, key_heads, _, size = key_blocks.shape
    if not (key_blocks.numel() and value_blocks.numel()) or num_heads % key_heads or num_heads * size < MIN_WIDTH:
        return False
    if key_blocks.shape[:3] != value_blocks.shape[:3] or key_blocks.dtype != value_blocks.dtype:
        return False
    return all(
        blocks.is_cpu and blocks.is_contiguous() and not blocks.is_neg() for blocks in (key_blocks, value_blocks)
    )


class PagedKernel:
    """Decode attention over the blocks of one layer. One thread at a time calls it."""

    def __init__(self, compiled: Any, num_heads: int, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> None:
        """For blocks that `is_supported` accepts, and the kernel of `compiled_for`."""
        from hf_triton.runner.cpu.llvm import openmp_parallel

        self._blocks = key_blocks, value_blocks
        self._compiled, self._parallel = compiled, openmp_parallel()
        self._entry = compiled.address
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._entry)
        self._addresses = key_blocks.data_ptr(), value_blocks.data_ptr()
        self._dtype = key_blocks.dtype
        _, self._key_heads, self._block_size, self._size = key_blocks.shape
        self._num_heads, self._value_size = num_heads, value_blocks.shape[3]

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Write each row's newest token and attend to the row's tokens, see `attend_decode`; None: torch must do both.

        Args:
            query: `[rows, heads, size]`.
            keys: `[rows, key_heads, size]`, written at `lengths - 1`; None: it is written already.
            values: `[rows, key_heads, value_size]`.
            tables: int32 `[rows, width]`, contiguous.
            lengths: int64 `[rows]`, contiguous.
            scale: Factor of the products.
            window: How many of its last tokens a row attends to; 0: all.
            softcap: Scores become `softcap * tanh(score / softcap)`; 0: they do not.
            sinks: float32 `[heads]`, contiguous: a further score in the softmax's total.
        """
        dtype, rows, width, has_tokens = self._dtype, *tables.shape, keys is not None
        if keys is None or values is None:
            keys = values = query
        if torch.is_grad_enabled() or not query.dtype is keys.dtype is values.dtype is dtype or not rows:
            return None
        if not type(query) is type(keys) is type(values) is torch.Tensor or not query.is_cpu:
            return None
        heads, size, value_size = self._num_heads, self._size, self._value_size
        heads_per_key = heads // self._key_heads
        num_products = rows * width * self._block_size * heads * size
        num_threads = torch.get_num_threads() if num_products >= MIN_PARALLEL_PRODUCTS else 1
        heads_per_task = max(1, min(MAX_HEADS_PER_TASK, heads_per_key, rows * heads // num_threads))
        result = torch.empty(rows, heads, value_size, dtype=torch.float32)
        memory = torch.empty(num_threads * heads_per_task * (size + self._block_size + 2), dtype=torch.float32)
        queries = memory.data_ptr()
        scores = queries + 4 * num_threads * heads_per_task * size
        states = scores + 4 * num_threads * heads_per_task * self._block_size
        factors = array("d", (scale, softcap))
        task = array(
            "q",
            (
                *(0, factors.buffer_info()[0], query.data_ptr(), keys.data_ptr(), values.data_ptr(), *self._addresses),
                *(tables.data_ptr(), lengths.data_ptr(), 0 if sinks is None else sinks.data_ptr(), result.data_ptr()),
                *(queries, scores, states, 0, 0, rows, self._key_heads, heads_per_key, heads_per_task, num_threads),
                *(width, window, has_tokens, sinks is not None),
                *(*query.stride(), *keys.stride(), *values.stride()),
            ),
        )
        task[0], _ = address, _ = task.buffer_info()
        if num_threads == 1 or self._parallel is None:
            self._run(address)
        else:
            self._parallel(self._entry, address, num_threads, 0)
        return result if dtype is torch.float32 else result.to(dtype)


@cache
def compiled_for(dtype: torch.dtype, size: int, value_size: int, block_size: int) -> Any | None:
    """A kernel for such blocks, compiled and checked; None if there is none, which is logged."""

    def try_out() -> bool | None:
        from hf_triton.runner.cpu import paged_kernel

        if dtype not in paged_kernel.WIDENED:
            return None
        return _is_right(paged_kernel.compile_attention(dtype, *sizes), dtype, *sizes)

    sizes = size, value_size, block_size
    if not runs_numba() or not is_usable("attention", "torch", try_out):
        return None
    from hf_triton.runner.cpu import paged_kernel

    return paged_kernel.compile_attention(dtype, *sizes)


@torch.inference_mode()
def _is_right(compiled: Any, dtype: torch.dtype, size: int, value_size: int, block_size: int) -> bool:
    heads, length = 2, block_size + 1
    query, key_blocks, value_blocks = (
        torch.linspace(-1, 1, num * wide, device="cpu").to(dtype).view(num // rows, 1, rows, wide)
        for num, rows, wide in (
            (heads, heads, size),
            (2 * block_size, block_size, size),
            (2 * block_size, block_size, value_size),
        )
    )
    keys, values = (blocks.flip(0).flatten(0, 2)[:length].float() for blocks in (key_blocks, value_blocks))
    expected = (query[0, 0].float() @ keys.T * size**-0.5).softmax(-1) @ values
    kernel = PagedKernel(compiled, heads, key_blocks, value_blocks)
    tables, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([length])
    result = kernel(query[0], None, None, tables, lengths, size**-0.5)
    return result is not None and agree(expected.to(dtype), result[0], dtype)
