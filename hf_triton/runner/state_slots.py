# SPDX-License-Identifier: Apache-2.0
"""Layers that keep states of one size per sequence, whatever its length: state space, linear attention, convolution.

Hybrid models (Qwen3.5, Granite 4, Falcon-H1, Nemotron-H, LFM2 ...) have such layers beside attention, or both in one. A
state is that of the last token: it cannot go back, and running a token twice corrupts it. Each sequence has a slot. A
forward whose slots are not consecutive, or known to the device alone, has copies, of one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from hf_triton.runner.device_step import NO_SLOT
from hf_triton.runner.step_tensors import StepTensors
from hf_triton.runner.transfer import to_index

EMPTY: Final[type] = getattr(cache_utils, "DummyLayer", type(None))
"""A layer that keeps nothing; 5.18 of transformers has none yet."""


class _Slots(dict[int, torch.Tensor | None]):
    """Buffers `[slots, ...]` by number; indexing gives the rows of the forward that runs."""

    def __init__(self, numbers: Sequence[int], layer: SlotStatesLayer) -> None:
        super().__init__(dict.fromkeys(numbers))
        self._layer = layer
        self._slots: list[int] = []
        self._used: set[int] = set()  # slots that have had states
        self._step: StepTensors
        self._rows: dict[int, torch.Tensor] = {}
        self._is_copied = False

    def __getitem__(self, number: int) -> torch.Tensor | None:
        if number not in self._rows and super().__getitem__(number) is not None:
            self._take_rows(number)
        return self._rows.get(number)

    def __setitem__(self, number: int, states: torch.Tensor | None) -> None:
        """The first use of a state: its zeros `[rows, ...]` show the shape."""
        if states is not None:
            super().__setitem__(number, states.new_zeros(max(self._slots) + 1, *states.shape[1:]))

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in super().values() if buffer is not None]

    def begin(self, step: StepTensors, slots: list[int], *, is_new: bool) -> None:
        """Rows are views if the slots are consecutive, else copies that `end` writes back; no slots: the device's."""
        self._step, self._slots, self._rows = step, slots, {}
        self._is_copied = not slots or slots != list(range(slots[0], slots[0] + len(slots)))
        self._used.update(slots)
        self._grow(max(slots, default=NO_SLOT) + 1)
        if is_new:  # one sequence, whose rows are views
            for number in self:
                if (rows := self[number]) is not None:
                    rows.zero_()

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states, each from one slot to another; all are read before any is written."""
        self._used.update(target for _, target in pairs)
        self._grow(max(target for _, target in pairs) + 1)
        for buffer in self.buffers():
            if len(pairs) == 1:
                buffer[pairs[0][1]] = buffer[pairs[0][0]]
            else:
                sources, targets = (to_index(numbers, buffer.device) for numbers in zip(*pairs, strict=True))
                buffer[targets] = buffer[sources]

    def trim(self, num_slots: int) -> None:
        """Give back the memory of slots from this one on."""
        self._used = {slot for slot in self._used if slot < num_slots}
        for number, buffer in self.items():
            if buffer is not None and len(buffer) > num_slots:
                self._resize(number, buffer, num_slots)

    def _grow(self, num_slots: int) -> None:
        """Have room for so many."""
        for number, buffer in self.items():
            if buffer is not None and len(buffer) < num_slots:
                self._resize(number, buffer, max(2 * len(buffer), num_slots))

    def _resize(self, number: int, buffer: torch.Tensor, num_slots: int) -> None:
        """Move the states that there are; on a CPU the memory of unused slots is not touched."""
        resized = buffer.new_empty(num_slots, *buffer.shape[1:])
        for slot in self._used:
            if slot < len(buffer):
                resized[slot] = buffer[slot]
        super().__setitem__(number, resized)

    def end(self) -> None:
        if self._is_copied:
            for number, rows in self._rows.items():
                buffer = super().__getitem__(number)
                assert buffer is not None
                buffer[self._index(buffer)] = rows
        self._rows = {}

    def _take_rows(self, number: int) -> None:
        buffer = super().__getitem__(number)
        assert buffer is not None
        if self._is_copied:
            self._layer.take_turn()
            self._rows[number] = buffer[self._index(buffer)]
        else:
            self._rows[number] = buffer[self._slots[0] : self._slots[0] + len(self._slots)]

    def _index(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._step.on(buffer.device, "state_slots")


@dataclass
class Turn:
    """Says which of a cache's layers has copies of rows, as only one has: together they would be as large as all."""

    layer: SlotStatesLayer | None = None


class SlotStatesLayer(LinearAttentionLayer):
    """The states of all sequences in one layer; a forward sees and changes the rows of its sequences."""

    conv_states: Any
    recurrent_states: Any

    def __init__(self, number_of_states: int = 1, turn: Turn | None = None) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._numbers = range(number_of_states)
        self._turn = turn or Turn()
        self.conv_states = _Slots(self._numbers, self)
        self.recurrent_states = _Slots(self._numbers, self)

    def begin(self, step: StepTensors) -> None:
        """Show a forward the states of its sequences; new ones begin without. A step without ranges only decodes."""
        slots, is_new = [part.slot for part in step.ranges], bool(step.ranges) and not step.ranges[0].start
        self._turn.layer = None
        self.conv_states.begin(step, slots, is_new=is_new)
        self.recurrent_states.begin(step, slots, is_new=is_new)
        self.has_previous_state = dict.fromkeys(self._numbers, not is_new)

    def take_turn(self) -> None:
        """Keep what the forward has computed in the layer before this one, which has run."""
        if self._turn.layer not in (None, self):
            self._turn.layer.end()
        self._turn.layer = self

    def end(self) -> None:
        """Keep what the forward has computed."""
        self.conv_states.end()
        self.recurrent_states.end()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.conv_states.copy_slots(pairs)
        self.recurrent_states.copy_slots(pairs)

    def trim(self, num_slots: int) -> None:
        self.conv_states.trim(num_slots)
        self.recurrent_states.trim(num_slots)

    def states(self) -> list[torch.Tensor]:
        """The buffers `[slots, ...]` of all states."""
        return [*self.conv_states.buffers(), *self.recurrent_states.buffers()]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize states, as transformers calls it, with names."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)


def decodes_as_it_prefills(model: Any) -> bool:
    """Whether no layer limits its time steps: transformers does so in prefill (Mamba2's scan), and in no step."""
    limits = (getattr(module, "time_step_limit", None) for module in model.modules())
    return all(limit is None or tuple(limit) == (0.0, math.inf) for limit in limits)
