# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token of every row over the blocks of the KV cache, on a CPU, by a kernel of numba.

It reads a row's own keys and values, once, for all heads that share them. Without numba, and for heads too small to be
worth compiling, there is no kernel: torch computes attention on gathered blocks.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from functools import cache
from struct import pack
from typing import Any, Final

import torch

from hf_triton.runner.cpu.availability import is_usable
from hf_triton.runner.numerics import agree

MIN_WIDTH: Final = 256
"""Numbers of a token's queries, all heads together, from which on a kernel is compiled; the demo model has fewer."""
MIN_PARALLEL_PRODUCTS: Final = 2**16
"""Multiplications from which on waking other threads pays."""
COLUMNS: Final = 4
"""Tokens that are computed together; block sizes are multiples of it."""
TASKS_PER_THREAD: Final = 4
"""Rows of unequal lengths make so many tasks, if there are enough."""


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
    _, key_heads, _, size = key_blocks.shape
    compiled = compiled_for(key_blocks.dtype, size, value_blocks.shape[3], 1 if num_heads == key_heads else 2)
    return None if compiled is None else PagedKernel(compiled, num_heads, key_blocks, value_blocks)


def is_supported(num_heads: int, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> bool:
    """Whether the kernel computes with such blocks: contiguous ones on a CPU, of heads that are worth compiling it."""
    pair = key_blocks, value_blocks
    if any(type(blocks) is not torch.Tensor or blocks.ndim != 4 or not blocks.numel() for blocks in pair):
        return False
    _, key_heads, block_size, size = key_blocks.shape
    if num_heads % key_heads or num_heads * size < MIN_WIDTH or block_size % COLUMNS:
        return False
    if key_blocks.shape[:3] != value_blocks.shape[:3] or key_blocks.dtype != value_blocks.dtype:
        return False
    return all(blocks.is_cpu and blocks.is_contiguous() and not blocks.is_neg() for blocks in pair)


class PagedKernel:
    """Decode attention over the blocks of one layer. A decoding step calls it once a layer: it calls torch alone."""

    def __init__(self, compiled: Any, num_heads: int, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> None:
        """Take blocks that `is_supported` accepts, and the kernel of `compiled_for`."""
        from hf_triton.runner.cpu.llvm import openmp_parallel

        self._blocks = key_blocks, value_blocks
        self._compiled, self._parallel, self._entry = compiled, openmp_parallel(), compiled.address
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._entry)
        self._dtype, self._addresses = key_blocks.dtype, (key_blocks.data_ptr(), value_blocks.data_ptr())
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
        """Write each row's newest token, and attend to the row's tokens; None: neither is done, torch must do both.

        Args:
            query: `[rows, heads, size]`.
            keys: `[rows, key_heads, size]`, to be written at `lengths - 1`; None: they are there already.
            values: `[rows, key_heads, value_size]`; None if the keys are.
            tables: int32 `[rows, width]`, contiguous: the blocks of each row in order; the rest is not read.
            lengths: int64 `[rows]`, contiguous: tokens of each row, at least one.
            scale: Factor of the products.
            window: How many of its last tokens a row attends to; 0: all.
            softcap: Scores become `softcap * tanh(score / softcap)`; 0: they stay.
            sinks: float32 `[heads]`, contiguous: one more score of each head, with a value of zero.

        Returns:
            `[rows, heads, value_size]` in the query's dtype; sums and softmax are in 32 bits.
        """
        dtype, heads, key_heads, size = self._dtype, self._num_heads, self._key_heads, self._size
        value_size, block_size, (rows, width) = self._value_size, self._block_size, tables.shape
        has_tokens = keys is not None
        if keys is None or values is None:
            keys = values = query
        if not rows or torch.is_grad_enabled() or not (query.dtype is keys.dtype is values.dtype is dtype):
            return None
        if not (type(query) is type(keys) is type(values) is torch.Tensor and query.is_cpu):
            return None
        num_products = rows * width * block_size * heads * size
        num_threads = torch.get_num_threads() if num_products >= MIN_PARALLEL_PRODUCTS else 1
        heads_per_task = heads // key_heads
        if num_threads == 1:
            heads_per_task = heads
        elif rows * key_heads < num_threads:
            heads_per_task = max(1, rows * heads // num_threads)
        else:
            heads_per_task *= max(1, min(key_heads, rows * key_heads // (num_threads * TASKS_PER_THREAD)))
        result = torch.empty(rows, heads, value_size, dtype=torch.float32)
        floats = num_threads * heads_per_task
        num_floats = floats * (size + block_size + value_size + 2) + num_threads * value_size
        memory = torch.empty(num_floats, dtype=torch.float32)
        queries = memory.data_ptr()
        scores = queries + 4 * floats * size
        sums = scores + 4 * floats * block_size
        states = sums + 4 * (floats + num_threads) * value_size
        task = array(
            "q",
            (
                *(0, query.data_ptr(), keys.data_ptr(), values.data_ptr(), *self._addresses),
                *(tables.data_ptr(), lengths.data_ptr(), 0 if sinks is None else sinks.data_ptr(), result.data_ptr()),
                *(queries, scores, sums, states, 0, 0, num_threads, rows, key_heads, heads // key_heads),
                *(heads_per_task, block_size, width, window, has_tokens, sinks is not None),
                *(*query.stride(), *keys.stride(), *values.stride()),
            ),
        )
        task.frombytes(pack("2d", scale, softcap))
        task[0], _ = task.buffer_info()
        if num_threads == 1 or self._parallel is None:
            self._run(task[0])
        else:
            self._parallel(self._entry, task[0], num_threads, 0)
        return result if dtype is torch.float32 else result.to(dtype)


@cache
def compiled_for(dtype: torch.dtype, size: int, value_size: int, heads_together: int) -> Any | None:
    """A kernel for such heads, compiled and checked; None if there is none, which is logged."""
    sizes = dtype, size, value_size, heads_together

    def try_out() -> bool | None:
        from hf_triton.runner.cpu.paged_kernel import WIDENED, compile_attention

        return _is_right(compile_attention(*sizes), *sizes) if dtype in WIDENED else None

    if not is_usable("attention", "torch", try_out):
        return None
    from hf_triton.runner.cpu.paged_kernel import compile_attention

    return compile_attention(*sizes)


@torch.inference_mode()
def _is_right(compiled: Any, dtype: torch.dtype, size: int, value_size: int, heads: int) -> bool:
    blocks, block_size, length = 2, 16, 17
    query, key_blocks, value_blocks = (
        torch.linspace(-1, 1, math.prod(shape), device="cpu").to(dtype).view(shape)
        for shape in ((1, heads, size), (blocks, 1, block_size, size), (blocks, 1, block_size, value_size))
    )
    keys, values = (tensor.flip(0).flatten(0, 2)[:length].float() for tensor in (key_blocks, value_blocks))
    expected = (query.float() @ keys.T * size**-0.5).softmax(-1) @ values
    kernel = PagedKernel(compiled, heads, key_blocks, value_blocks)
    tables, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([length])
    result = kernel(query, None, None, tables, lengths, size**-0.5)
    return result is not None and agree(expected.to(dtype), result)
