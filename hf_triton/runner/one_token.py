# SPDX-License-Identifier: Apache-2.0
"""Attention of one token of every row, on a CPU: by products of a row's own keys and values.

torch's kernels go over the padding too, take each head by itself where heads share keys, lay keys out anew for a
product with one vector, and are several times slower in 16 bits than in 32. Products of matrices that have the keys at
the left read what a row has, once; in 16 bits it is converted before, a few heads at a time, which a processor's cache
holds.
"""

from __future__ import annotations

from typing import Final

import torch

SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
DTYPES: Final = (torch.float32, *SIXTEEN_BITS)
CACHED: Final = 2**20
"""Numbers of keys that a thread converts at a time: 4 MiB, about what is its own of a processor's cache."""
WORTH: Final = 2**16
"""Keys of a row, with those of its padding counted twice, as numbers for each thread: from so many on the products of a
row are faster than torch's kernel in 32 bits, which reads the padding, and a row costs what it costs to call."""
WORTH_SHARED_BFLOAT16: Final = 2**18
"""The same for bfloat16 heads that share keys: for the queries of all of them at once, as transformers 5.23 calls it,
torch's kernel has the processor's products."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor | None:
    """Attention of one token of every row to its last columns, as many as the mask lets it see.

    None where torch does as well, and of anything else: several tokens, another device or mask, training.

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
    rows, heads, _, size = query.shape
    _, key_heads, columns, _ = key.shape
    if not (rows and key_heads and columns) or not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
        return None
    worth = torch.get_num_threads() * _worth(query.dtype, attn_mask, heads // key_heads)
    if 2 * key_heads * size * columns < worth:
        return None
    if key.shape[0] != rows or value.shape[:3] != key.shape[:3] or heads % key_heads:
        return None
    lengths = _lengths(attn_mask, rows, columns)
    if lengths is None or key_heads * size * (2 * columns - sum(lengths) / rows) < worth:
        return None
    scaled = query.float() * (size**-0.5 if scale is None else scale)
    queries = scaled.reshape(rows, key_heads, -1, size).transpose(2, 3)
    found = query.new_empty(rows, key_heads, heads // key_heads, value.shape[3])
    for row, length in enumerate(lengths):
        own = slice(columns - length, columns)
        step = key_heads
        if query.dtype in SIXTEEN_BITS:
            step = max(1, torch.get_num_threads() * CACHED // (length * size))
        for first in range(0, key_heads, step):
            some = slice(first, first + step)
            scores = torch.bmm(key[row, some, own].float(), queries[row, some])
            weights = scores.transpose(1, 2).softmax(-1)
            found[row, some] = torch.bmm(weights, value[row, some, own].float())
    return found.view(rows, heads, 1, -1)


def _worth(dtype: torch.dtype, attn_mask: torch.Tensor | None, num_sharing: int) -> int:
    if dtype not in SIXTEEN_BITS:
        return WORTH
    # Without a mask transformers has torch know that heads share keys, and torch takes each by itself.
    has_kernel = dtype == torch.bfloat16 and num_sharing > 1 and attn_mask is not None
    return WORTH_SHARED_BFLOAT16 if has_kernel else 0


def _lengths(attn_mask: torch.Tensor | None, rows: int, columns: int) -> list[int] | None:
    """How many columns each row sees, where those are the last ones.

    Found once for a mask, which all layers have and nobody changes.
    """
    if attn_mask is None:
        return [columns] * rows
    if attn_mask.dtype != torch.bool or attn_mask.shape != (rows, 1, 1, columns):
        return None
    if "lengths" not in attn_mask.__dict__:
        sees = attn_mask[:, 0, 0]
        counts = sees.sum(-1, keepdim=True)
        are_last = bool(counts.all()) and sees.equal(torch.arange(columns, device=sees.device) >= columns - counts)
        attn_mask.__dict__["lengths"] = counts.flatten().tolist() if are_last else None
    found: list[int] | None = attn_mask.__dict__["lengths"]
    return found
