# SPDX-License-Identifier: Apache-2.0
"""Attention within each sequence of a packed row, behind transformers' `AttentionInterface`.

The name is registered for the whole process; it computes `sdpa` in threads that run no packed row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_triton.encoder.packing import PackedRow
from hf_triton.runner.cuda import packed_attention_for

NAME: Final = "hf_triton_packed"
PART_TOKENS: Final = 256
"""Tokens that attend together where a window bounds how far."""
UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
"""Arguments that change attention in a way which is not computed here."""


class NotPackableError(RuntimeError):
    """The model's attention needs what a packed row does not have."""


class _Thread(threading.local):
    row: PackedRow | None = None


_thread = _Thread()


def register() -> None:
    """Make the attention known to transformers under `NAME`."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


@contextmanager
def running(row: PackedRow) -> Iterator[None]:
    """While it is entered, attention of this thread is that of `row`."""
    _thread.row = row
    try:
        yield
    finally:
        _thread.row = None


def current_row() -> PackedRow | None:
    """The packed row that this thread runs."""
    return _thread.row


def make_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """None for a packed row, which needs no mask; else that of `sdpa`."""
    if _thread.row is not None:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: queries `[1, heads, tokens, head_dim]` to outputs `[1, tokens, heads, head_dim]`."""
    row = _thread.row
    if row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    unsupported = [name for name in UNSUPPORTED if others.get(name) is not None]
    if attention_mask is not None or unsupported or query.shape[2] != key.shape[2]:
        raise NotPackableError(f"attention has {', '.join(unsupported) or 'a mask or keys of its own'}")
    row.num_attention_calls += 1
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    attend_packed = packed_attention_for(query)
    if attend_packed is not None:
        states = (each[0].transpose(0, 1) for each in (query, key, value))
        places = row.sequences.to(query.device), row.bounds.to(query.device)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_packed(*states, *places, scale, sliding_window or 0, is_causal).unsqueeze(0), None
    return _attend_by_length(row, module, query, key, value, scaling, is_causal, sliding_window), None


def _attend_by_length(
    row: PackedRow,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """`sdpa` once for the sequences of each length: their states are views of the row."""
    outputs = []
    for block in row.blocks:
        queries, keys, values = (
            states[0, :, block.tokens].view(states.shape[1], block.count, block.length, -1).transpose(0, 1)
            for states in (query, key, value)
        )
        parts = []
        for asking, asked in window_parts(block.length, window, is_causal):
            part = queries[:, :, asking], keys[:, :, asked], values[:, :, asked]
            mask = _window_mask(row, query.device, asking, asked, window, is_causal)
            output, _ = sdpa_attention_forward(module, *part, mask, 0.0, scaling, is_causal)
            parts.append(output)
        outputs.append(torch.cat(parts, 1).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def window_parts(length: int, window: int | None, is_causal: bool) -> list[tuple[slice, slice]]:
    """Parts of a sequence and the keys within their windows: far less than all keys of a long sequence."""
    if window is None or length <= window:
        return [(slice(0, length), slice(0, length))]
    parts = []
    for start in range(0, length, PART_TOKENS):
        end = min(start + PART_TOKENS, length)
        last = end if is_causal else min(length, end + window - 1)
        parts.append((slice(start, end), slice(max(0, start - window + 1), last)))
    return parts


def _window_mask(
    row: PackedRow, device: torch.device, asking: slice, asked: slice, window: int | None, is_causal: bool
) -> torch.Tensor | None:
    """Which keys `asked` the tokens `asking` attend to, `[1, 1, tokens, keys]` bool; None: all, or causally all."""
    if window is None or (asking.stop <= window and asked == asking):
        return None
    offset = asking.start - asked.start
    num_tokens, num_keys = asking.stop - asking.start, asked.stop - asked.start
    shape = device, num_tokens, num_keys, offset, window, is_causal
    mask = row.masks.get(shape)
    if mask is None:
        positions = torch.arange(offset, offset + num_tokens, device=device)
        distance = positions.unsqueeze(1) - torch.arange(num_keys, device=device)
        mask = (distance >= 0) & (distance < window) if is_causal else distance.abs() < window
        mask = row.masks[shape] = mask.unsqueeze(0).unsqueeze(0)
    return mask
