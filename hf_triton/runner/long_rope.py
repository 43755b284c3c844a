# SPDX-License-Identifier: Apache-2.0
"""LongRoPE (Ding et al. 2024), as in Phi-3.5 and Phi-4-mini: rotary frequencies by the length of each token's sequence.

There are two sets of frequencies: for sequences up to a length, and for longer ones. transformers chooses one for all
tokens of a forward, by the highest position, so that a sequence's result would depend on the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

RECOMPUTED: Final = ("phi3",)
"""Model types whose `generate` recomputes a sequence that outgrows the first set; others mix keys of both."""

_is_long: ContextVar[torch.Tensor | None] = ContextVar("is_long")
"""See `LongRope.by_token`; unset outside it, where the module itself chooses."""

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, `[rows, new, rotary dim]`."""


class LongRope:
    """Gives each token of a model's forward the frequencies of its own sequence's length, from now on."""

    def __init__(self, model: Any) -> None:
        self.switch_length: int = model.config.original_max_position_embeddings
        """The most tokens of a sequence that has the first set."""
        for module in _rotary_modules(model):
            compute = ROPE_INIT_FUNCTIONS["longrope"]
            frequencies, _ = compute(module.config, module.inv_freq.device, seq_len=self.switch_length + 1)
            long = partial(_stock_forward(module), _Frequencies(module, frequencies))
            short = partial(_stock_forward(module), _Frequencies(module, module.original_inv_freq))
            name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hooks stay around it
            setattr(module, name, partial(self._forward, module, short, long))

    @contextmanager
    def by_token(self, is_long: torch.Tensor | None) -> Iterator[None]:
        """While it is entered, a forward's tokens belong to any sequences, packed in one row or a token in each row.

        Args:
            is_long: Bool, `[tokens]`, on the model's device: whether each token's sequence, not only the part so far,
                is longer than `switch_length`; None: no token's is, and only the first set is computed.
        """
        token = _is_long.set(is_long)
        try:
            yield
        finally:
            _is_long.reset(token)

    def _forward(
        self, module: Any, short: Callable[..., Rotary], long: Callable[..., Rotary], x: torch.Tensor, position_ids: Any
    ) -> Rotary:
        """Replaces the rotary module's forward: `position_ids` `[rows, new]`, dtype and device of `x`."""
        try:
            is_long = _is_long.get()
        except LookupError:
            cosines, sines = type(module).forward(module, x, position_ids)
            return cosines, sines
        if is_long is None:
            return short(x, position_ids)
        is_long = is_long.to(position_ids.device)  # accelerate may place the module elsewhere than the embedding
        return _select(is_long.view(position_ids.shape), long(x, position_ids), short(x, position_ids))


def has_long_rope(model: Any) -> bool:
    """Whether a model has two sets of frequencies that can differ between rows."""
    modules = _rotary_modules(model)
    return (
        model.config.model_type in RECOMPUTED
        and isinstance(getattr(model.config, "original_max_position_embeddings", None), int)
        and bool(modules)
        and all(_stock_forward(module) is not type(module).forward for module in modules)
    )


def _select(is_long: torch.Tensor, long: Rotary, short: Rotary) -> Rotary:
    """The long set where `is_long` `[rows, new or 1]`."""
    cosines, sines = (torch.where(is_long[..., None], *both) for both in zip(long, short, strict=True))
    return cosines, sines


class _Frequencies:
    """A rotary module with another set of frequencies."""

    def __init__(self, module: torch.nn.Module, inv_freq: torch.Tensor) -> None:
        self._module = module
        self.inv_freq = inv_freq

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _rotary_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]


def _stock_forward(module: torch.nn.Module) -> Callable[..., Rotary]:
    """The module's own forward, without the wrapper that chooses a set for all rows."""
    forward: Callable[..., Rotary] = inspect.unwrap(type(module).forward)
    return forward
