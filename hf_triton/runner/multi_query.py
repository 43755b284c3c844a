# SPDX-License-Identifier: Apache-2.0
"""Attention of many query heads to one head of keys and values, without a copy of those for every head.

Falcon-7B has 71 heads for one, and leaves it to torch's attention to broadcast. That computes it by plain products,
for which it writes the keys and values out 71 times: in a batch, more than half of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class MultiQueryAttention(TorchFunctionMode):
    """While it is entered, such an attention is called in a form for which torch has a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.is_of_use = False
        """Whether there has been one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            if _broadcasts(**given):
                self.is_of_use = True
                return _fused(**given)
        return func(*args, **kwargs)


def _broadcasts(query: torch.Tensor, key: torch.Tensor, *, enable_gqa: bool = False, **_: Any) -> bool:
    return query.ndim == 4 and not enable_gqa and key.shape[1] == 1 < query.shape[1]


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attention of `[rows, heads, new, head_dim]` to `[rows, 1, columns, head_dim]`, of the query's shape.

    Where each head has one query, they are the queries of one head; else the heads of keys and values are views of one.
    """
    heads, new = query.shape[1:3]
    is_same_mask = attn_mask is None or attn_mask.ndim < 4 or attn_mask.shape[1] == 1
    if new == 1 and is_same_mask and not others.get("is_causal"):
        found = scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask, **others)
        return found.transpose(1, 2)
    keys, values = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return scaled_dot_product_attention(query, keys, values, attn_mask, **others)
