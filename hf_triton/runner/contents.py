# SPDX-License-Identifier: Apache-2.0
"""The KV of one sequence, to store it and to copy it into the cache of another sequence with the same prefix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_triton.runner.states import SequenceStates, restore, sequence_states


@dataclass(frozen=True, eq=False)
class CacheContents:
    """The KV of a sequence's first tokens, and the states behind the last of them."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values `[heads, tokens, head_dim]` of each layer that keeps them."""
    states: Sequence[SequenceStates] = ()
    """Of each layer that keeps some."""

    def first(self, num_tokens: int) -> CacheContents:
        """Views of the first tokens; the states stay, since they cannot go back."""
        layers = [(keys[:, :num_tokens], values[:, :num_tokens]) for keys, values in self.layers]
        return CacheContents(layers, self.states)

    def clone(self) -> CacheContents:
        """A copy in memory of its own."""
        layers = [(keys.clone(), values.clone()) for keys, values in self.layers]
        states = [(_cloned(conv_states), _cloned(recurrent_states)) for conv_states, recurrent_states in self.states]
        return CacheContents(layers, states)

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite, by the last layer of each kind, to which such values spread."""
        states = [state for pair in self.states[-1:] for by_number in pair for state in by_number.values()]
        return all(bool(tensor.isfinite().all()) for tensor in (*itertools.chain(*self.layers[-1:]), *states))


def _cloned(states: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {number: state.clone() for number, state in states.items()}


def contents_of(cache: Cache, row: int, columns: slice) -> CacheContents:
    """Views of some columns of a row, and of its states."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    pairs = [(layer.keys[row, :, columns], layer.values[row, :, columns]) for layer in layers]  # type: ignore[index]
    return CacheContents(pairs, sequence_states(cache, row))


def fill(cache: Cache, prefixes: Mapping[int, CacheContents], num_rows: int, num_columns: int) -> None:
    """Copy contents to the first columns of an empty cache, right-aligned; the rest is zero.

    Args:
        cache: To prefill into.
        prefixes: Contents by row; with states only if there is one row.
        num_rows: Rows of the batch.
        num_columns: Columns to fill.
    """
    filled: list[tuple[torch.Tensor, torch.Tensor]] = []
    states: Sequence[SequenceStates] = ()
    for row, contents in prefixes.items():
        states = contents.states
        for number, pair in enumerate(contents.layers):
            if number == len(filled):
                keys, values = (part.new_zeros(num_rows, part.shape[0], num_columns, part.shape[2]) for part in pair)
                filled.append((keys, values))
            for columns, part in zip(filled[number], pair, strict=True):
                columns[row, :, num_columns - part.shape[1] :] = part
    restore(cache, filled, states)
