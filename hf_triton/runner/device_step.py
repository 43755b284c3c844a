# SPDX-License-Identifier: Apache-2.0
"""The numbers of a step that a GPU reads, as views of one tensor: one copy brings them all to the device.

Their places depend on the most tokens, sequences and rows alone. What a step does not use of them is padding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.step import TokenRange

NO_SEQUENCE: Final = -1
"""The sequence of a token that is padding."""
NO_SLOT: Final = -1
"""The state slot of a sequence that is padding: the last one, which no sequence has."""
NUM_TOKENS: Final = (
    *(1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)),
    *(*range(320, 513, 64), *range(640, 1025, 128)),
)
"""CUDA graphs are of so many; larger steps keep the device busy for longer than Python needs."""
FEW_ROWS: Final = 64
"""Steps of more tokens than these have graphs with so many rows of logits and with more."""
MOST_DRAFTED_ROWS: Final = 256
"""Steps with proposals have graphs with so many rows of logits, or with one of each sequence if that is more."""


@dataclass(frozen=True)
class StepSize:
    num_tokens: int
    num_sequences: int
    num_rows: int
    """Rows of logits."""
    num_axes: int = 0
    """Axes of positions beside a token's number in its sequence, see `StepTensors.positions_on_axes`."""

    @property
    def num_fixed(self) -> int:
        """Numbers before the block tables."""
        return sum(self._counts())

    def _counts(self) -> tuple[int, ...]:
        tokens, sequences = self.num_tokens, self.num_sequences
        positions = (1 + self.num_axes) * tokens
        return tokens, positions, tokens, sequences + 1, sequences, sequences, sequences, self.num_rows

    def split(self, numbers: torch.Tensor) -> DeviceStep:
        ids, positions, *others = torch.split(numbers, [*self._counts(), len(numbers) - self.num_fixed])
        return DeviceStep(ids, positions.view(-1, self.num_tokens) if self.num_axes else positions, *others)

    def fill(
        self, ranges: Sequence[TokenRange], positions: npt.NDArray[np.int64], rows: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """The numbers of a step, `[num_fixed + blocks of all ranges]`.

        `positions` are `[tokens]`, or `[1 + num_axes, tokens]`; `rows` are the tokens with logits.
        """
        if self.num_axes:
            missing = self.num_tokens - positions.shape[-1]
            positions = np.pad(np.atleast_2d(positions), ((0, 0), (0, missing))).ravel()
        tables = array("q")  # which takes in arrays as fast as it copies them
        starts = []
        for part in ranges:
            starts.append(len(tables))
            tables.extend(part.block_table)
        counts = [part.end - part.start for part in ranges]
        columns: tuple[Sequence[int] | npt.NDArray[np.int64], ...] = (
            [token for part in ranges for token in part.token_ids or (0,)],
            positions,
            np.repeat(np.arange(len(ranges)), counts),
            np.cumsum([0, *counts]),
            [part.end for part in ranges],
            starts,
            [part.slot for part in ranges],
            rows,
        )
        paddings = 0, 0, NO_SEQUENCE, sum(counts), 0, 0, NO_SLOT, 0
        numbers = np.empty(self.num_fixed + len(tables), np.int64)
        at = 0
        for column, count, padding in zip(columns, self._counts(), paddings, strict=True):
            numbers[at : at + len(column)] = column
            numbers[at + len(column) : at + count] = padding
            at += count
        numbers[at:] = tables
        return numbers


class Places(NamedTuple):
    """Tells attention where the tokens of a packed row and those before them are: int64, on the row's device."""

    sequences: torch.Tensor
    """`[tokens]`: each token's sequence, from 0, ascending; `NO_SEQUENCE` for padding, which comes last."""
    bounds: torch.Tensor
    """`[sequences + 1]`: sequence `i` has the tokens `[bounds[i]:bounds[i + 1]]` of the row, its last ones."""
    lengths: torch.Tensor | None = None
    """`[sequences]`: tokens of each, those of the row included; None: the row has all of them."""
    starts: torch.Tensor | None = None
    """`[sequences]`: where its blocks begin in `tables`."""
    tables: torch.Tensor | None = None
    """`[numbers]`: the blocks of all sequences, each in order."""


@dataclass(frozen=True)
class DeviceStep:
    """A step's numbers on the device, int64; see `Places`."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    """`[tokens]`, or `[1 + axes, tokens]`."""
    sequences: torch.Tensor
    bounds: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    state_slots: torch.Tensor
    """`[sequences]`: where each has its states."""
    rows: torch.Tensor
    """The tokens whose logits are wanted; for an encoder, the type of each token."""
    tables: torch.Tensor

    def places(self) -> Places:
        """Tell attention to blocks where every token is."""
        return Places(self.sequences, self.bounds, self.lengths, self.starts, self.tables)


def step_sizes(max_sequences: int, num_axes: int = 0, num_drafted: int = 0) -> list[StepSize]:
    """The sizes of the graphs of a model that generates, ascending; a sequence has so many proposed tokens at most."""
    sizes = []
    max_rows = max(max_sequences, min(max_sequences * (1 + num_drafted), MOST_DRAFTED_ROWS))
    for num_tokens in NUM_TOKENS:
        num_sequences, most_rows = min(num_tokens, max_sequences), min(num_tokens, max_rows)
        for num_rows in sorted({min(most_rows, FEW_ROWS), most_rows}):
            sizes.append(StepSize(num_tokens, num_sequences, num_rows, num_axes))
    return sizes


def decode_sizes(max_sequences: int, num_axes: int = 0) -> list[StepSize]:
    """The sizes of the graphs of a model with states, ascending: a token of each sequence."""
    counts = sorted({min(count, max_sequences) for count in NUM_TOKENS})
    return [StepSize(count, count, count, num_axes) for count in counts]
