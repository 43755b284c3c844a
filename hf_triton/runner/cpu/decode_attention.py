# SPDX-License-Identifier: Apache-2.0
"""Attention of one token of every row, on a CPU: by a kernel that reads a row's own keys and values, once.

torch's kernels go over the padding too, take each head by itself where heads share keys, and are many times slower in
16 bits than in 32. Without numba, and for heads so small that it is not worth compiling, attention is torch's.
"""

from __future__ import annotations

from array import array
from functools import cache
from types import ModuleType
from typing import Final

import torch

from hf_triton.runner.cpu.availability import is_usable, runs_numba
from hf_triton.runner.numerics import agree

LEAST_WIDTH: Final = 256
"""Numbers of a token's queries, all heads together, from which on a kernel is compiled: the demo model has fewer."""
AT_A_TIME: Final = 8
"""Heads that share keys and are computed together by a thread, at most."""
WORTH_THREADS: Final = 2**16
"""Products of numbers from which on it is worth to wake other threads."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor | None:
    """Attention of one token of every row to its last columns, as many as the mask lets it see.

    None of anything else, which is left to torch: several tokens, another device or mask, training.

    Args:
        query: `[rows, heads, 1, head_dim]`; heads that share keys are neighbours.
        key: `[rows, key heads, columns, head_dim]`.
        value: The same, of any size at the end.
        attn_mask: `[rows, 1, 1, columns]` bool; None: all columns.
        scale: Of the products; None: `head_dim ** -0.5`.

    Returns:
        `[rows, heads, 1, size of the values]` in the query's dtype; sums and softmax are in 32 bits.
    """
    if query.ndim != 4 or query.shape[2] != 1 or query.device.type != "cpu" or torch.is_grad_enabled():
        return None
    if not type(key) is type(value) is torch.Tensor or not key.ndim == value.ndim == 4:
        return None
    rows, heads, _, size = query.shape
    _, key_heads, columns, _ = key.shape
    if not (rows and key_heads and columns and value.shape[3]) or heads * size < LEAST_WIDTH or heads % key_heads:
        return None
    if key.shape != (rows, key_heads, columns, size) or value.shape[:3] != key.shape[:3]:
        return None
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        return None
    if key.stride(3) != 1 or value.stride(3) != 1 or key.is_neg() or value.is_neg():
        return None
    lengths = _lengths(attn_mask, rows, columns)
    kernel = kernel_for(query.dtype, size, value.shape[3])
    if lengths is None or kernel is None:
        return None
    return _compute(kernel, query, key, value, lengths, size**-0.5 if scale is None else scale)


def _compute(
    kernel: ModuleType, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    rows, heads, _, size = query.shape
    _, key_heads, columns, _ = key.shape
    num_threads = torch.get_num_threads() if heads * size * sum(lengths) >= WORTH_THREADS else 1
    sharing = heads // key_heads
    at_a_time = max(1, min(AT_A_TIME, sharing, rows * heads // num_threads))
    queries = (query.float() * scale).contiguous()
    found = queries.new_empty(rows, heads, 1, value.shape[3])
    room = queries.new_empty(num_threads, at_a_time, columns)
    numbers = array("q", (0, 0, *lengths))
    progress, _ = numbers.buffer_info()
    shape = rows, key_heads, sharing, at_a_time, columns, queries.data_ptr(), found.data_ptr(), room.data_ptr()
    keys, values = (key.data_ptr(), *key.stride()[:3]), (value.data_ptr(), *value.stride()[:3])
    task = kernel.Task(progress, progress + 2 * numbers.itemsize, *shape, *keys, *values)
    kernel.run(query.dtype, size, value.shape[3], task, num_threads)
    return found.to(query.dtype)


@cache
def kernel_for(dtype: torch.dtype, size: int, value_size: int) -> ModuleType | None:
    """What has such a kernel ready, tried out; None, and a line in the log, where there is none to be had."""

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
    found = _compute(kernel, query, key, value, [columns], size**-0.5)
    return agree((weights @ value.float()).to(dtype), found, dtype)


def _lengths(attn_mask: torch.Tensor | None, rows: int, columns: int) -> list[int] | None:
    """How many columns each row sees, where those are the last ones.

    Found once for a mask, which all layers have and nobody changes.
    """
    if attn_mask is None:
        return [columns] * rows
    if attn_mask.dtype != torch.bool or attn_mask.shape != (rows, 1, 1, columns):
        return None
    place = rows, columns, attn_mask.data_ptr()  # a copy takes the note along
    noted: tuple[object, list[int] | None] = attn_mask.__dict__.get("lengths", (None, None))
    if noted[0] != place:
        sees = attn_mask[:, 0, 0]
        counts = sees.sum(-1, keepdim=True)
        are_last = bool(counts.all()) and sees.equal(torch.arange(columns, device=sees.device) >= columns - counts)
        noted = place, counts.flatten().tolist() if are_last else None
        attn_mask.__dict__["lengths"] = noted
    return noted[1]
