# SPDX-License-Identifier: Apache-2.0
"""Lays sequences one behind the other in one row, or beside each other with padding. Knows no model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.encoder.types import EncoderInput

PositionIds = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""The position ids of one sequence's token ids, both `[tokens]`."""


@dataclass(frozen=True)
class EqualLengths:
    """Sequences of one length that lie side by side in a packed row."""

    start: int
    count: int
    length: int

    @property
    def tokens(self) -> slice:
        """Their tokens in the row."""
        return slice(self.start, self.start + self.count * self.length)


@dataclass
class PackedRow:
    """Sequences in one row `[1, tokens]`, the shortest first."""

    ids: torch.Tensor
    type_ids: torch.Tensor | None
    position_ids: torch.Tensor
    lengths: list[int]
    """Tokens of each sequence, ascending."""
    kept: torch.Tensor | None = None
    """Indices of the tokens whose outputs are wanted; None: all."""
    num_attention_calls: int = 0
    """How often attention was computed for the row."""
    masks: dict[tuple[torch.device, int, int, int, int, bool], torch.Tensor] = field(default_factory=dict)
    """Masks of sliding windows, by device and shape: every layer needs the same."""

    @cached_property
    def blocks(self) -> list[EqualLengths]:
        """The row's sequences by length."""
        blocks, start = [], 0
        for length, equal in itertools.groupby(self.lengths):
            blocks.append(EqualLengths(start, sum(1 for _ in equal), length))
            start += blocks[-1].count * length
        return blocks

    @cached_property
    def sequences(self) -> torch.Tensor:
        """The sequence of each token, `[tokens]` int64 on the device."""
        lengths = torch.tensor(self.lengths)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(self.ids.device)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """Where sequences begin, and the row's end, `[sequences + 1]` int64 on the device."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)]).to(self.ids.device)

    @cached_property
    def cells(self) -> torch.Tensor:
        """The place of each token in a padded batch `[sequences, longest]` that is flattened, `[tokens]`."""
        lengths = torch.tensor(self.lengths)
        columns = torch.cat([torch.arange(length) for length in self.lengths])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return (rows * self.lengths[-1] + columns).to(self.ids.device)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Give each sequence a row of its own: `[1, tokens, size]` to `[sequences, longest, size]`, zeros elsewhere."""
        num_rows, longest = len(self.lengths), self.lengths[-1]
        padded = packed.new_zeros(num_rows * longest, packed.shape[-1])
        padded[self.cells.to(packed.device)] = packed[0]
        return padded.view(num_rows, longest, -1)


@dataclass
class PaddedBatch:
    """Sequences beside each other, `[sequences, longest]`, padded at the right."""

    ids: torch.Tensor
    type_ids: torch.Tensor | None
    mask: torch.Tensor
    """1 for tokens, 0 for padding."""


def pack_row(inputs: list[EncoderInput], position_ids: PositionIds, device: torch.device) -> PackedRow:
    """Lay sequences one behind the other.

    Args:
        inputs: Sorted by length, ascending.
        position_ids: The model's own rule.
        device: Where the row goes.
    """
    ids = [np.asarray(each.ids, np.int64) for each in inputs]

    def row(arrays: list[npt.NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).unsqueeze(0).to(device)

    has_types = any(each.type_ids is not None for each in inputs)
    return PackedRow(
        ids=row(ids),
        type_ids=row([_type_ids(each) for each in inputs]) if has_types else None,
        position_ids=row([position_ids(each) for each in ids]),
        lengths=[len(each) for each in ids],
        kept=_kept(inputs, device),
    )


def pad_batch(inputs: list[EncoderInput], pad_id: int, device: torch.device) -> PaddedBatch:
    """Lay sequences beside each other."""
    longest = max(len(each.ids) for each in inputs)
    ids = np.full((len(inputs), longest), pad_id, np.int64)
    type_ids, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row, each in enumerate(inputs):
        length = len(each.ids)
        ids[row, :length], type_ids[row, :length], mask[row, :length] = each.ids, _type_ids(each), 1
    has_types = any(each.type_ids is not None for each in inputs)
    return PaddedBatch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(type_ids).to(device) if has_types else None,
        torch.from_numpy(mask).to(device),
    )


def split_by_padding(
    order: list[int], lengths: list[int], max_padded_tokens: int, max_padding: float = math.inf
) -> Iterator[list[int]]:
    """Split sequences into batches of bounded size, padding counted; one sequence may be larger.

    Args:
        order: Indices of the sequences by length, ascending.
        lengths: Tokens of each sequence.
        max_padded_tokens: Sequences times the longest one's tokens.
        max_padding: The same without the sequences' own tokens.
    """
    batch: list[int] = []
    num_tokens = 0
    for index in order:
        num_tokens += lengths[index]
        num_padded = (len(batch) + 1) * lengths[index]
        if batch and (num_padded > max_padded_tokens or num_padded - num_tokens > max_padding):
            yield batch
            batch, num_tokens = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def split_by_total(order: list[int], sizes: list[int], max_total: int) -> Iterator[list[int]]:
    """Split sequences into batches whose sizes together are bounded; one sequence may be larger.

    Args:
        order: Indices of the sequences.
        sizes: Of each sequence.
        max_total: Of a batch.
    """
    batch: list[int] = []
    total = 0
    for index in order:
        if batch and total + sizes[index] > max_total:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += sizes[index]
    if batch:
        yield batch


def _type_ids(each: EncoderInput) -> npt.NDArray[np.int64]:
    return np.zeros(len(each.ids), np.int64) if each.type_ids is None else np.asarray(each.type_ids, np.int64)


def _kept(inputs: list[EncoderInput], device: torch.device) -> torch.Tensor | None:
    """Where the wanted tokens of a row are; None: all are wanted."""
    if all(each.output_positions is None for each in inputs):
        return None
    starts = itertools.accumulate((len(each.ids) for each in inputs), initial=0)
    kept = [
        start + position
        for start, each in zip(starts, inputs, strict=False)
        for position in (range(len(each.ids)) if each.output_positions is None else each.output_positions)
    ]
    return torch.tensor(kept, dtype=torch.long, device=device)
