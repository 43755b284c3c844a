# SPDX-License-Identifier: Apache-2.0
"""Lays sequences one behind the other in one row, and says which share a forward. Knows no model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.runner.packed_row import PackedRow
from hf_triton.runner.padding import pad
from hf_triton.runner.step import TokenRange
from hf_triton.runner.step_tensors import StepTensors
from hf_triton.runner.transfer import array_to_device

PositionIds = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""The position ids of one sequence's token ids, both `[tokens]`."""


@dataclass
class EncoderRow:
    """Sequences in one row, the shortest first; `[1, tokens]` on the device."""

    packed: PackedRow
    ids: torch.Tensor
    position_ids: torch.Tensor
    type_ids: torch.Tensor | None
    kept: torch.Tensor | None
    """Indices of the tokens whose outputs are wanted; None: all."""
    has_adapters: bool = False
    computed: tuple[Any, torch.Tensor] | None = None
    """The outputs of the model's base, and the states `[1, tokens, size]` in it, for a head that comes again."""

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """Give each sequence a row of its own: `[1, tokens, size]` to `[sequences, longest, size]`, zeros elsewhere."""
        lengths = self.packed.step.ends
        cells = np.concatenate([np.arange(length) + row * lengths[-1] for row, length in enumerate(lengths)])
        padded = states.new_zeros(len(lengths) * lengths[-1], states.shape[-1])
        padded[array_to_device(cells, states.device)] = states[0]
        return padded.view(len(lengths), lengths[-1], -1)


def pack_row(inputs: list[EncoderInput], position_ids: PositionIds | None, device: torch.device) -> EncoderRow:
    """Lay sequences, sorted by ascending length, one behind the other; without a rule, positions count from 0."""
    sized = [(sequence.ids, len(sequence.ids)) for sequence in inputs]
    ranges = [TokenRange(row, 0, length, ids, (), length) for row, (ids, length) in enumerate(sized)]
    positions = position_ids and np.concatenate([position_ids(np.array(sequence.ids, np.int64)) for sequence in inputs])
    step = StepTensors(ranges, 1, device, positions=positions)
    kept = None
    if any(sequence.output_positions is not None for sequence in inputs):
        starts = zip(step.bounds, inputs, strict=False)
        kept = [start + position for start, sequence in starts for position in wanted_positions(sequence)]
    ids, places, rows = step.inputs(kept or ())
    types = None
    if any(sequence.type_ids is not None for sequence in inputs):
        row = np.fromiter(itertools.chain.from_iterable(map(_type_ids, inputs)), np.int64, step.num_tokens)
        types = array_to_device(row, device)[None]
    has_adapters = any(sequence.adapter for sequence in inputs)
    return EncoderRow(PackedRow(step), ids[None], places[None], types, None if kept is None else rows, has_adapters)


def pad_batch(
    inputs: list[EncoderInput], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Token ids, types and attention mask of sequences beside each other, `[sequences, longest]`."""
    ids, mask = pad([sequence.ids for sequence in inputs], pad_id, device, at_left=False)
    has_types = any(sequence.type_ids is not None for sequence in inputs)
    types = pad([_type_ids(sequence) for sequence in inputs], 0, device, at_left=False)[0] if has_types else None
    return ids, types, mask


def split(
    order: list[int],
    sizes: list[int],
    *,
    max_padded: float = math.inf,
    max_padding: float = math.inf,
    max_total: float = math.inf,
) -> Iterator[list[int]]:
    """Split sequences into batches of bounded size; one sequence may be larger.

    Args:
        order: Indices of the sequences; ascending by size if padding is bounded.
        sizes: Each sequence's.
        max_padded: Sequences of a batch times the largest one's size.
        max_padding: The same without the sequences' own sizes.
        max_total: The most of their own sizes together.
    """
    batch: list[int] = []
    total = 0
    for index in order:
        total += sizes[index]
        padded = (len(batch) + 1) * sizes[index]
        if batch and (padded > max_padded or padded - total > max_padding or total > max_total):
            yield batch
            batch, total = [], sizes[index]
        batch.append(index)
    if batch:
        yield batch


def wanted_positions(sequence: EncoderInput) -> list[int] | range:
    """The tokens of a sequence whose outputs are wanted."""
    return range(len(sequence.ids)) if sequence.output_positions is None else sequence.output_positions


def _type_ids(sequence: EncoderInput) -> list[int]:
    return [0] * len(sequence.ids) if sequence.type_ids is None else sequence.type_ids
