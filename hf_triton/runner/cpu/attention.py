# SPDX-License-Identifier: Apache-2.0
"""Faster attention for `generate`, substituted for transformers' `sdpa`.

Most models take `sdpa` from transformers' `AttentionInterface`; `attend_fast` replaces it and computes decoding steps
on a CPU by `decode_attention.py`. It acts only in a thread that has entered `FastAttention`.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_triton.runner.cpu.decode_attention import attend

SPECIAL: Final = ("softcap", "position_bias", "cache")
"""Arguments of `sdpa` that only transformers implements."""


class _Thread(threading.local):
    is_fast = False


_thread = _Thread()


class FastAttention:
    """A context for a model's forward in which attention is faster, and equal up to rounding.

    Entered by one thread at a time, not nested. The first instance registers `attend_fast` for the whole process.
    """

    def __init__(self) -> None:
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:  # not a replacement by other code
            AttentionInterface.register("sdpa", attend_fast)

    def __enter__(self) -> None:
        _thread.is_fast = True

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        _thread.is_fast = False


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
    return plain()
