# SPDX-License-Identifier: Apache-2.0
"""Attention of one token of every sequence, on a CPU: by a kernel that reads a row's own keys and values, once.

torch's kernels read the padding too, compute each head by itself where heads share keys, and are many times slower in
16 bits than in 32. Without numba, and for heads too small to be worth compiling, torch computes attention.
"""

from __future__ import annotations

from array import array
from functools import cache
from types import ModuleType
from typing import Final

import torch

from hf_triton.runner.cpu.availability import is_usable, runs_numba
from hf_triton.runner.numerics import agree

MIN_WIDTH: Final = 256
"""Numbers of a token's queries, all heads together, from which on a kernel is compiled; the demo model has fewer."""
MAX_HEADS_PER_TASK: Final = 8
"""Heads that share keys and that a thread computes together."""
MIN_PARALLEL_PRODUCTS: Final = 2**16
"""Multiplications from which on waking other threads pays."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor | None:
    """Attention of one token of every row to its last columns, as many as the mask shows.

    None for anything else, which torch computes: several tokens, another device or mask, training.

    Args:
        query: `[rows, heads, 1, head_dim]`; heads that share keys are adjacent.
        key: `[rows, key heads, columns, head_dim]`.
        value: The same, with a last dimension of any size.
        attn_mask: `[rows, 1, 1, columns]` bool; None: all columns.
        scale: Factor of the products; None: `head_dim ** -0.5`.

    Returns:
        `[rows, heads, 1, value_size]` in the query's dtype; sums and softmax are in 32 bits.
    """
    if not is_supported(query, key, value):
        return None
    rows, _, _, size = query.shape
    lengths = _lengths(attn_mask, rows, key.shape[2])
    kernel = kernel_for(query.dtype, size, value.shape[3])
    if lengths is None or kernel is None:
        return None
    return _compute(kernel, query, key, value, lengths, size**-0.5 if scale is None else scale)


def is_supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel computes such tensors: one new token a row, in inference on a CPU, in contiguous heads."""
    tensors = query, key, value
    if query.ndim != 4 or query.shape[2] != 1 or torch.is_grad_enabled():
        return False
    if not type(key) is type(value) is torch.Tensor or not key.ndim == value.ndim == 4:
        return False
    rows, heads, _, size = query.shape
    _, key_heads, columns, value_size = value.shape
    is_empty = not (rows and key_heads and columns and value_size)
    if is_empty or heads * size < MIN_WIDTH or heads % key_heads or key.shape != (rows, key_heads, columns, size):
        return False
    if value.shape[0] != rows or any(tensor.dtype != query.dtype or not tensor.is_cpu for tensor in tensors):
        return False
    return all(tensor.stride(3) == 1 and not tensor.is_neg() for tensor in (key, value))


def _compute(
    kernel: ModuleType, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    rows, heads, _, size = query.shape
    _, key_heads, columns, _ = key.shape
    num_threads = torch.get_num_threads() if heads * size * sum(lengths) >= MIN_PARALLEL_PRODUCTS else 1
    heads_per_key = heads // key_heads
    heads_per_task = max(1, min(MAX_HEADS_PER_TASK, heads_per_key, rows * heads // num_threads))
    queries = (query.float() * scale).contiguous()
    result = queries.new_empty(rows, heads, 1, value.shape[3])
    scores = queries.new_empty(num_threads, heads_per_task, columns)
    numbers = array("q", (0, 0, *lengths))
    progress, _ = numbers.buffer_info()
    sizes = rows, key_heads, heads_per_key, heads_per_task, columns
    buffers = queries.data_ptr(), result.data_ptr(), scores.data_ptr()
    keys, values = (key.data_ptr(), *key.stride()[:3]), (value.data_ptr(), *value.stride()[:3])
    task = kernel.AttentionTask(progress, progress + 2 * numbers.itemsize, *sizes, *buffers, *keys, *values)
    kernel.run_attention(query.dtype, size, value.shape[3], task, num_threads)
    return result.to(query.dtype)


@cache
def kernel_for(dtype: torch.dtype, size: int, value_size: int) -> ModuleType | None:
    """The module with a kernel for such heads, compiled and checked; None if there is none, which is logged."""

    def try_out() -> bool | None:
        from hf_triton.runner.cpu import attention_kernel as kernel

        return _is_right(kernel, dtype, size, value_size) if dtype in kernel.READERS else None

    if not runs_numba() or not is_usable("attention", "torch", try_out):
        return None
    from hf_triton.runner.cpu import attention_kernel

    return attention_kernel


@torch.inference_mode()
def _is_right(kernel: ModuleType, dtype: torch.dtype, size: int, value_size: int) -> bool:
    heads, columns = 2, 5
    query, key, value = (
        torch.linspace(-1, 1, num * wide, device="cpu").to(dtype).view(1, -1, num // heads, wide)
        for num, wide in ((heads, size), (heads * columns, size), (heads * columns, value_size))
    )
    weights = (query.float() @ key.float().mT * size**-0.5).softmax(-1)
    result = _compute(kernel, query, key, value, [columns], size**-0.5)
    return agree((weights @ value.float()).to(dtype), result, dtype)


def _lengths(attn_mask: torch.Tensor | None, rows: int, columns: int) -> list[int] | None:
    """How many of its last columns each row sees; None if it sees others.

    Computed once for each mask: all layers get the same one.
    """
    if attn_mask is None:
        return [columns] * rows
    if attn_mask.dtype != torch.bool or attn_mask.shape != (rows, 1, 1, columns):
        return None
    identity = rows, columns, attn_mask.data_ptr()  # a copy of the mask keeps the attribute
    cached: tuple[object, list[int] | None] = attn_mask.__dict__.get("lengths", (None, None))
    if cached[0] != identity:
        sees = attn_mask[:, 0, 0]
        counts = sees.sum(-1, keepdim=True)
        are_last = bool(counts.all()) and sees.equal(torch.arange(columns, device=sees.device) >= columns - counts)
        cached = identity, counts.flatten().tolist() if are_last else None
        attn_mask.__dict__["lengths"] = cached
    return cached[1]
