# SPDX-License-Identifier: Apache-2.0
"""What a cache holds of one sequence: to be stored, and to be copied into the cache of another that begins like it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_triton.runner.numerics import are_finite
from hf_triton.runner.states import TextStates, cloned, go_on_from, text_states


@dataclass(frozen=True, eq=False)
class CacheContents:
    """The KV of a sequence's first tokens, and the states behind the last of them."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values `[heads, tokens, head_dim]` of each layer that keeps them."""
    states: Sequence[TextStates] = ()
    """Of each layer that keeps some."""

    def first(self, num_tokens: int) -> CacheContents:
        """Views of the first tokens; all of them if there are states, which cannot go back."""
        layers = [(keys[:, :num_tokens], values[:, :num_tokens]) for keys, values in self.layers]
        return CacheContents(layers, self.states)

    def clone(self) -> CacheContents:
        """A copy in memory of its own."""
        layers = [(keys.clone(), values.clone()) for keys, values in self.layers]
        return CacheContents(layers, [cloned(states) for states in self.states])

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite, which would have spread to the last layer of each kind."""
        tensors = [*itertools.chain(*self.layers[-1:])]
        tensors += [state for states in self.states[-1:] for each in states for state in each.values()]
        return are_finite(tensors)


def contents_of(cache: Cache, row: int, columns: slice) -> CacheContents:
    """Views of some columns of a row, and of its states."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    pairs = [(layer.keys[row, :, columns], layer.values[row, :, columns]) for layer in layers]  # type: ignore[index]
    return CacheContents(pairs, text_states(cache, row))


def fill(cache: Cache, prefixes: Mapping[int, CacheContents], num_rows: int, num_columns: int) -> None:
    """Lay contents into the first columns of an empty cache, right-aligned; the rest is zero.

    Args:
        cache: To prefill into.
        prefixes: Contents by row; with states only if there is one row.
        num_rows: Rows of the batch.
        num_columns: Columns to fill.
    """
    filled: list[tuple[torch.Tensor, torch.Tensor]] = []
    states: Sequence[TextStates] = ()
    for row, contents in prefixes.items():
        states = contents.states
        for number, pair in enumerate(contents.layers):
            if number == len(filled):
                keys, values = (part.new_zeros(num_rows, part.shape[0], num_columns, part.shape[2]) for part in pair)
                filled.append((keys, values))
            for columns, part in zip(filled[number], pair, strict=True):
                columns[row, :, num_columns - part.shape[1] :] = part
    go_on_from(cache, filled, states)
