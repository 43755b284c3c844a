# SPDX-License-Identifier: Apache-2.0
"""The tensors of one forward: what its layers need to find every token's place. Made once for a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.step import TokenRange
from hf_triton.runner.transfer import array_to_device, to_index


@dataclass(frozen=True)
class InflightTokens:
    """The tokens that the step in flight samples."""

    token_ids: torch.Tensor
    """`[sequences]` int64, on the device."""
    row_of: Mapping[int, int]
    """The place of a sequence's token, by the sequence's id."""


class StepTensors:
    """A step's ranges as tensors, the tokens of all ranges one behind the other.

    Args:
        ranges: Those of the forward; decoding sequences first.
        block_size: Tokens of a block.
        device: Of the model's input embedding; layers elsewhere get copies, see `on`.
        inflight: Tokens of ranges that have none; None: all ranges have theirs.
    """

    def __init__(
        self,
        ranges: Sequence[TokenRange],
        block_size: int,
        device: torch.device,
        inflight: InflightTokens | None = None,
    ) -> None:
        self.ranges = ranges
        self.block_size = block_size
        self.device = device
        self.num_decodes = next((at for at, part in enumerate(ranges) if not part.is_decode), len(ranges))
        """Ranges of one token behind cached ones, which come first."""
        self.ends = [part.end for part in ranges]
        self.bounds = [0, *accumulate(part.num_tokens for part in ranges)]
        """Range `i` has the tokens `[bounds[i]:bounds[i + 1]]` of the forward."""
        width = max(len(part.block_table) for part in ranges)
        tables = np.zeros((len(ranges), width), np.int32)
        for row, part in enumerate(ranges):
            tables[row, : len(part.block_table)] = part.block_table
        positions = self._positions()
        self.token_ids = self._token_ids(inflight)  # [tokens]
        self.positions = self._to_device(positions)  # [tokens]
        self.tables = torch.from_numpy(tables)
        """`[ranges, width]` int32 on the host: the blocks of each range's sequence."""
        self.lengths = torch.tensor(self.ends)
        """`[ranges]` int64 on the host: tokens of each sequence, the new ones included."""
        self.slots = self._slots(tables, positions)
        """`[tokens]` int64 on the host: block times block size plus the place in it, where each new token goes."""
        self.state_slots = torch.tensor([part.slot for part in ranges])
        """`[ranges]` int64 on the host: where each sequence has its states."""
        self._on: dict[tuple[torch.device, str], torch.Tensor] = {}
        self.masks: dict[Any, Any] = {}
        """Attention's own: masks of this forward."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.bounds[-1]

    def on(self, device: torch.device, name: str) -> torch.Tensor:
        """One of `tables`, `lengths`, `slots` and `state_slots` on a layer's device."""
        tensor: torch.Tensor = getattr(self, name)
        if device.type == "cpu":
            return tensor
        key = device, name
        if key not in self._on:
            self._on[key] = array_to_device(tensor.numpy(), device)
        return self._on[key]

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array) if self.device.type == "cpu" else array_to_device(array, self.device)

    def _token_ids(self, inflight: InflightTokens | None) -> torch.Tensor:
        """The tokens; those that the step in flight samples are never on the host."""
        known = np.array([token for part in self.ranges for token in part.token_ids or (0,)], np.int64)
        token_ids = self._to_device(known)
        unknown = [at for at, part in enumerate(self.ranges) if not part.token_ids]
        if unknown:
            assert inflight is not None
            rows = [inflight.row_of[self.ranges[at].sequence_id] for at in unknown]
            newest = inflight.token_ids[to_index(rows, inflight.token_ids.device)]
            token_ids[to_index([self.bounds[at] for at in unknown], self.device)] = newest.to(self.device)
        return token_ids

    def _positions(self) -> npt.NDArray[np.int64]:
        if self.num_decodes == len(self.ranges):
            return np.array(self.ends, np.int64) - 1
        return np.concatenate([np.arange(part.start, part.end) for part in self.ranges])

    def _slots(self, tables: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        blocks, places = np.divmod(positions, self.block_size)
        rows = np.repeat(np.arange(len(self.ranges)), np.diff(self.bounds))
        return torch.from_numpy(tables[rows, blocks].astype(np.int64) * self.block_size + places)
