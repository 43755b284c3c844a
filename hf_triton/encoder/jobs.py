# SPDX-License-Identifier: Apache-2.0
"""What goes in and out of an encoder's engine. Knows no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from hf_triton.engine.group import Group
from hf_triton.errors import HfTritonError

if TYPE_CHECKING:
    from hf_triton.runner.lora.model_adapters import Adapter

Outputs = list[npt.NDArray[np.float32]]
"""One array for each input of a group."""
TURN_TOKENS: Final = 512
"""A group with more waits for the other groups after so many tokens, so that a short text passes by hundreds."""


@dataclass(frozen=True)
class EncoderInput:
    """One sequence, special tokens included."""

    ids: list[int]
    type_ids: list[int] | None = None
    """`token_type_ids`; None if the tokenizer gives none."""
    output_positions: list[int] | None = None
    """The tokens whose outputs are wanted, ascending, if there are outputs per token; None: all. A masked-language head
    is computed for these alone."""
    adapter: Adapter | None = None
    """The LoRA adapter that computes it; None: the model alone."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class ArrayInput:
    """What a model that reads images computes of an image or a text; inputs of equal shapes share a forward."""

    arrays: Mapping[str, npt.NDArray[Any]]
    """The model's arguments, without the dimension of a batch."""
    num_tokens: int
    """What it costs: tokens, or an image's patches."""


@dataclass(frozen=True)
class Job:
    group: EncoderGroup
    index: int

    @property
    def input(self) -> EncoderInput | ArrayInput:
        return self.group.inputs[self.index]


@dataclass(eq=False)
class EncoderGroup(Group[Outputs]):
    """The sequences of one request, which are answered together, with one array for each."""

    inputs: Sequence[EncoderInput | ArrayInput]

    turns: deque[list[Job]] = field(default_factory=deque, init=False)
    """What was taken, but has not begun."""

    _outputs: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict, init=False)
    _has_begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.num_waiting = len(self.inputs)

    def take_turn(self, budget: int, *, takes_any: bool) -> int:
        """Take the next inputs, up to `TURN_TOKENS` or a longer one; they cost their tokens."""
        turn: list[Job] = []
        cost = 0
        while self.num_waiting:
            job = Job(self, len(self.inputs) - self.num_waiting)
            num_tokens = job.input.num_tokens
            fits = cost + num_tokens <= (min(budget, TURN_TOKENS) if turn else budget)
            if not fits and (turn or not takes_any):
                break
            turn.append(job)
            self.num_waiting -= 1
            cost += num_tokens
        if turn:
            self.turns.append(turn)
        return cost

    def begin(self) -> None:
        """Note that a forward with some of its inputs begins."""
        if not self._has_begun:
            self._has_begun = True
            self.listener.on_begin()

    def give(self, index: int, output: npt.NDArray[np.float32]) -> None:
        """Take an input's output; the last one finishes the group."""
        if self.is_finished:
            return
        self._outputs[index] = output
        if len(self._outputs) == len(self.inputs):
            self.finish([self._outputs[index] for index in range(len(self.inputs))])

    def finish(self, outcome: Outputs | HfTritonError) -> None:
        self._outputs = {}
        super().finish(outcome)
