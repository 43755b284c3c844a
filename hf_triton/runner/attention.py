# SPDX-License-Identifier: Apache-2.0
"""Attention in the forms that torch has fast kernels for: what transformers calls, called in another way.

*Many heads to one of keys and values.* Falcon-7B has 71 for one and leaves it to torch to broadcast, which computes it
by plain products and writes the keys and values out 71 times for that: in a batch, most of a step.

*One query a row in 16 bits on a CPU.* torch's kernel for that is several times slower than the one for 32 bits, so that
it pays to convert the columns that a row has, a few heads at a time, which a processor's cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
CACHED: Final = 2**20
"""Numbers of keys that a thread converts at a time: 4 MiB, about what is its own of a processor's cache."""


class FastAttention(TorchFunctionMode):
    """While it is entered, such attention is computed in another way, with the same result up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.is_of_use = False
        """Whether there has been attention of heads and a dtype that it is for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            for is_such, attend in ((_broadcasts, _fused), (_is_slow_in_16_bits, _by_row)):
                if is_such(**given):
                    self.is_of_use = True
                    found = attend(**given)
                    return func(*args, **kwargs) if found is None else found
        return func(*args, **kwargs)


def _broadcasts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool = False, **_: Any
) -> bool:
    if enable_gqa or not query.ndim == key.ndim == value.ndim == 4:
        return False
    return key.shape[1] == value.shape[1] == 1 < query.shape[1]


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attention of `[rows, heads, new, head_dim]` to `[rows, 1, columns, head_dim]`, of the query's shape.

    Where each head has one query, they are the queries of one head; else the heads of keys and values are views of one.
    As in torch's plain products, 16 bits are computed in 32 on a CPU.
    """
    if query.device.type == "cpu" and query.dtype in SIXTEEN_BITS:
        if attn_mask is not None and attn_mask.dtype in SIXTEEN_BITS:
            attn_mask = attn_mask.float()
        return _fused(query.float(), key.float(), value.float(), attn_mask, **others).to(query.dtype)
    heads, new = query.shape[1:3]
    is_same_mask = attn_mask is None or attn_mask.ndim < 3 or attn_mask.shape[-3] == 1
    if new == 1 and is_same_mask and not others.get("is_causal"):
        found = scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask, **others)
        return found.transpose(1, 2)
    keys, values = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return scaled_dot_product_attention(query, keys, values, attn_mask, **others)


def _is_slow_in_16_bits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> bool:
    if query.device.type != "cpu" or not query.ndim == key.ndim == value.ndim == 4:
        return False
    if not len(query) == len(key) == len(value) or key.shape[1] != value.shape[1]:
        return False
    if query.dtype == torch.bfloat16:
        return query.shape[1] == key.shape[1]
    return query.dtype == torch.float16 and query.shape[1] >= key.shape[1]


def _by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """Attention of one token of every row to the last columns, as many as the mask lets it see; None of anything else.

    In bfloat16 only where no heads share keys: for several queries torch's kernel has the processor's products.

    Args:
        query: `[rows, heads, 1, head_dim]`, or `[rows, key heads, heads that share one, head_dim]` with a mask.
        key: `[rows, key heads, columns, head_dim]`.
        value: The same.
        attn_mask: `[rows, 1, 1, columns]` bool.
        dropout_p: Must be 0.
        is_causal: Must be false.
        others: Arguments that torch takes.
    """
    rows, key_heads, columns, size = key.shape
    is_one_query = query.shape[2] == 1 or (attn_mask is not None and query.dtype == torch.float16)
    lengths = _lengths(attn_mask, rows, columns) if is_one_query else None
    if lengths is None or is_causal or dropout_p:
        return None
    found = query.new_empty(*query.shape[:3], value.shape[3])
    num_sharing = query.shape[1] // key_heads
    for row, length in enumerate(lengths):
        step = max(1, torch.get_num_threads() * CACHED // (length * size))
        for first in range(0, key_heads, step):
            of_keys = slice(first, first + step)
            of_queries = slice(num_sharing * first, num_sharing * (first + step))
            keys, values = (each[row : row + 1, of_keys, columns - length :].float() for each in (key, value))
            queries = query[row : row + 1, of_queries].float()
            found[row, of_queries] = scaled_dot_product_attention(queries, keys, values, **others)[0]
    return found


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
        are_last = bool(counts.all()) and sees.equal(torch.arange(columns) >= columns - counts)
        attn_mask.__dict__["lengths"] = counts.flatten().tolist() if are_last else None
    found: list[int] | None = attn_mask.__dict__["lengths"]
    return found
