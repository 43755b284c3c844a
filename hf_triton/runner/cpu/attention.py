# SPDX-License-Identifier: Apache-2.0
"""Faster attention, substituted for transformers' `sdpa` and torch's `scaled_dot_product_attention`.

Most models take `sdpa` from transformers' `AttentionInterface`; `attend_fast` replaces it and computes decoding steps
on a CPU by `decode_attention.py`. Falcon, and code that comes with a checkpoint, call torch; `FastTorch` replaces that.
Both act only in a thread that has entered `FastAttention`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_triton.runner.cpu.decode_attention import attend

SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SPECIAL: Final = ("softcap", "position_bias", "cache")
"""Arguments of `sdpa` that only transformers implements."""


class _Thread(threading.local):
    is_fast = False
    is_in_transformers = False


_thread = _Thread()


class FastAttention:
    """A context for a model's forward in which attention is faster, and equal up to rounding.

    Entered by one thread at a time, not nested. The first instance registers `attend_fast` for the whole process.

    Args:
        patches_torch: Whether to serve models that call torch's attention; leaving this mode makes `torch.compile`
            compile again.
    """

    def __init__(self, *, patches_torch: bool = True) -> None:
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:  # not a replacement by other code
            AttentionInterface.register("sdpa", attend_fast)
        self._torch = FastTorch() if patches_torch else None

    def __enter__(self) -> None:
        _thread.is_fast = True
        if self._torch:
            self._torch.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        _thread.is_fast = False
        if self._torch:
            self._torch.__exit__(error_type, error, traceback)  # type: ignore[no-untyped-call]
            if not self._torch.is_usable and error is None:
                self._torch = None  # this model never calls it


def attend_fast(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa` as transformers calls it: queries `[rows, heads, new, head_dim]`; the result has heads and new swapped."""
    plain = partial(sdpa_attention_forward, module, query, key, value, attention_mask, dropout, scaling, **others)
    if torch.compiler.is_compiling():
        return plain()
    is_special = others and any(others.get(name) is not None for name in SPECIAL)
    if _thread.is_fast and not dropout and not is_special:
        result = attend(query, key, value, attention_mask, scaling)
        if result is not None:
            return result.transpose(1, 2), None
    _thread.is_in_transformers = True
    try:
        return plain()
    finally:
        _thread.is_in_transformers = False


class FastTorch(TorchFunctionMode):
    """While it is entered, a model's own calls of torch's attention are faster.

    If all heads share one of keys and values (Falcon-7B: 71), torch copies keys and values for each head: in a batch,
    most of a step's time. Decoding steps on a CPU go to `decode_attention.py` in that case and in 16 bits; other steps
    in 32 bits stay with torch, as they would gain less than the mode costs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_usable = False
        """Whether it has served a call; while entered, it costs each call of torch two microseconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        is_asked = func is scaled_dot_product_attention and not torch.compiler.is_compiling()
        if is_asked and not _thread.is_in_transformers:
            result = self._attend(**dict(zip(NAMES, args, strict=False)) | kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> torch.Tensor | None:
        if not query.ndim == key.ndim == value.ndim == 4:
            return None
        broadcasts = _broadcasts(query, key, value, **others)
        if broadcasts or (query.device.type == "cpu" and query.dtype in SIXTEEN_BITS):
            self.is_usable = True
            has_known_heads = broadcasts or others.get("enable_gqa") or query.shape[1] == key.shape[1]
            if has_known_heads and not is_causal and not dropout_p:
                result = attend(query, key, value, attn_mask, others.get("scale"))
                if result is not None:
                    return result
        if broadcasts:
            return _fused(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, **others)
        return None


def _broadcasts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool = False, **_: Any
) -> bool:
    return not enable_gqa and key.shape[1] == value.shape[1] == 1 < query.shape[1]


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attention of `[rows, heads, new, head_dim]` to `[rows, 1, columns, head_dim]`, of the query's shape.

    If each head has one query, they become the queries of one head; else the heads of keys and values become views of
    one. As in torch's own path, 16 bits are computed in 32 on a CPU.
    """
    if query.device.type == "cpu" and query.dtype in SIXTEEN_BITS:
        if attn_mask is not None and attn_mask.dtype in SIXTEEN_BITS:
            attn_mask = attn_mask.float()
        return _fused(query.float(), key.float(), value.float(), attn_mask, **others).to(query.dtype)
    heads, new = query.shape[1:3]
    is_same_mask = attn_mask is None or attn_mask.ndim < 3 or attn_mask.shape[-3] == 1
    if new == 1 and is_same_mask and not others.get("is_causal"):
        result = scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask, **others)
        return result.transpose(1, 2)
    keys, values = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return scaled_dot_product_attention(query, keys, values, attn_mask, **others)
