# SPDX-License-Identifier: Apache-2.0
"""What calling a transformers model needs to know of it: the name of its cache, and how `generate` begins anew."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")
"""Argument names of the cache: since transformers 5.24, before, and in models with states only."""


def cache_name(model: Any) -> str:
    """The argument name of a model's cache."""
    accepts = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepts), CACHE_NAMES[0])


def has_bare_state(model: Any) -> bool:
    """Whether a model's memory is a list of tensors (RWKV), whose rows beam search cannot reorder."""
    return "state" in inspect.signature(model.forward).parameters and not hasattr(model, "_reorder_cache")


def begin_anew(model: Any, num_rows: int, device: torch.device) -> None:
    """Reset what a model keeps in its modules of an earlier batch.

    RecurrentGemma keeps its states and resets them only for prompts of two tokens or more. Dynamic NTK keeps the
    frequencies of the longest sequence so far.
    """
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "max_seq_len_cached"):
            module(first.float(), first)  # a short sequence restores the first frequencies
    begin = getattr(model.base_model, "_setup_cache", None)
    if begin is not None:
        begin(model.config, num_rows, device, model.dtype)
