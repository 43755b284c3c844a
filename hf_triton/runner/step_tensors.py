# SPDX-License-Identifier: Apache-2.0
"""The tensors of one forward: what its layers need to find every token's place. Made once for a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.device_step import DeviceStep, StepSize
from hf_triton.runner.step import TokenRange
from hf_triton.runner.transfer import array_to_device


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
        device: Of the model's input embedding; layers elsewhere get copies, see `on`.
        device_step: Its numbers on the device, for a forward that reads no others; None: none are there yet.
        positions: Of all tokens, as the model counts them; None: from 0.
    """

    def __init__(
        self,
        ranges: Sequence[TokenRange],
        block_size: int,
        device: torch.device,
        device_step: DeviceStep | None = None,
        positions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.ranges = ranges
        self.block_size = block_size
        self.device = device
        self._counted = positions
        self.num_decodes = next((at for at, part in enumerate(ranges) if not part.is_decode), len(ranges))
        """Ranges of one token behind cached ones, some with a proposal, which come first."""
        self.ends = [part.end for part in ranges]
        self.bounds = [0, *accumulate([part.end - part.start for part in ranges])]
        """Range `i` has the tokens `[bounds[i]:bounds[i + 1]]` of the forward."""
        self.num_tokens = self.bounds[-1]
        """Tokens to compute."""
        self.has_proposals = self.bounds[self.num_decodes] > self.num_decodes
        """Whether some of the decoding ranges have one."""
        self._device_steps = {} if device_step is None else {device: device_step}
        self._on: dict[tuple[torch.device, str], torch.Tensor] = {}
        if device_step is not None:
            self._on[device, "state_slots"] = device_step.state_slots
        self.masks: dict[Any, Any] = {}
        """Attention's own: masks of this forward."""

    @cached_property
    def tables(self) -> torch.Tensor:
        """`[ranges, width]` int32 on the host: the blocks of each range's sequence."""
        tables = np.zeros((len(self.ranges), max([len(part.block_table) for part in self.ranges])), np.int32)
        for row, part in enumerate(self.ranges):
            tables[row, : len(part.block_table)] = part.block_table
        return torch.from_numpy(tables)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """`[ranges]` int64 on the host: tokens of each sequence, the new ones included."""
        return torch.tensor(self.ends)

    @cached_property
    def decodes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, width]` int32 and `[tokens]` int64, on the host: the blocks of each decoding token, and its length.

        The tokens of a proposal are as many decoding ones, of which each sees those before it.
        """
        tables, num = self.tables[: self.num_decodes], self.num_decodes
        if not self.has_proposals:
            return tables, self.lengths[:num]
        counts = torch.tensor(self.bounds[1 : num + 1]) - torch.tensor(self.bounds[:num])
        return tables.repeat_interleave(counts, 0), torch.from_numpy(self.positions[: self.bounds[num]] + 1)

    @cached_property
    def slots(self) -> torch.Tensor:
        """`[tokens]` int64 on the host: block times block size plus the place in it, where each new token goes."""
        blocks, places = np.divmod(self.positions, self.block_size)
        rows = np.repeat(np.arange(len(self.ranges)), np.diff(self.bounds))
        return torch.from_numpy(self.tables.numpy()[rows, blocks].astype(np.int64) * self.block_size + places)

    @cached_property
    def state_slots(self) -> torch.Tensor:
        """`[ranges]` int64 on the host: where each sequence has its states."""
        return torch.tensor([part.slot for part in self.ranges])

    def on(self, device: torch.device, name: str) -> torch.Tensor:
        """One of `tables`, `lengths`, `slots` and `state_slots` on a layer's device."""
        tensor: torch.Tensor = getattr(self, name)
        if device.type == "cpu":
            return tensor
        key = device, name
        if key not in self._on:
            self._on[key] = array_to_device(tensor.numpy(), device)
        return self._on[key]

    def numbers(self, size: StepSize, rows: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """What a GPU reads of this step; see `StepSize.fill`."""
        positions = self.positions_on_axes(size.num_axes) if size.num_axes else self.positions
        return size.fill(self.ranges, positions, rows)

    def device_step(self, device: torch.device, rows: Sequence[int] = ()) -> DeviceStep:
        """The numbers of this step on a GPU; `rows` are wanted from the first call."""
        if device not in self._device_steps:
            size = StepSize(self.num_tokens, len(self.ranges), len(rows), self.num_axes)
            self._device_steps[device] = size.split(array_to_device(self.numbers(size, rows), device))
        return self._device_steps[device]

    def token_ids(self) -> torch.Tensor:
        """`[tokens]` int64 on the host; 0 for those that the step in flight samples."""
        return torch.tensor([token for part in self.ranges for token in part.token_ids or (0,)])

    def put_inflight(self, token_ids: torch.Tensor, inflight: InflightTokens | None) -> None:
        """Put the tokens that the step in flight samples, never on the host, among a forward's, `[at least tokens]`."""
        unknown = [at for at, part in enumerate(self.ranges) if not part.token_ids]
        if unknown:
            assert inflight is not None
            rows = [inflight.row_of[self.ranges[at].sequence_id] for at in unknown]
            places = np.array([rows, [self.bounds[at] for at in unknown]])
            sources, targets = array_to_device(places, self.device)
            token_ids[targets] = inflight.token_ids.to(self.device)[sources]

    def inputs(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bring token ids `[tokens]`, positions, as `DeviceStep` has them, and `rows` to the device, int64."""
        if self.device.type == "cuda":
            on_device = self.device_step(self.device, rows)
            return on_device.token_ids, on_device.positions, on_device.rows
        positions = self.positions_on_axes(self.num_axes) if self.num_axes else self.positions
        tensors = self.token_ids(), torch.from_numpy(positions), torch.tensor(rows)
        return tensors[0].to(self.device), tensors[1].to(self.device), tensors[2].to(self.device)

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """`[tokens]` on the host."""
        if self._counted is not None:
            return self._counted
        if self.num_decodes == len(self.ranges) and not self.has_proposals:
            return np.array(self.ends, np.int64) - 1
        return np.concatenate([np.arange(part.start, part.end) for part in self.ranges])

    @cached_property
    def num_axes(self) -> int:
        """Axes of positions that an image has changed; 0: each token's position is its number in its sequence."""
        return max((len(part.positions) for part in self.ranges if part.positions is not None), default=0)

    def positions_on_axes(self, num_axes: int) -> npt.NDArray[np.int64]:
        """`[1 + num_axes, tokens]` on the host: each token's number in its sequence, then its position on each axis."""
        rows = np.tile(self.positions, (1 + num_axes, 1))
        for part, start, end in zip(self.ranges, self.bounds, self.bounds[1:], strict=False):
            if part.positions is not None:
                rows[1:, start:end] = part.positions
        return rows
