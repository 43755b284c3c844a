# SPDX-License-Identifier: Apache-2.0
"""The key/value memory of all running rows: in lanes, so that a short text is not as wide as a long one beside it.

A lane is a rectangle of rows (`KVCache`), and a step runs the model once for each. That reads the weights once
more and spares the attention the padding: a row gets a lane of its own where its padding in any other weighs more.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers.cache_utils import Cache

from hf_triton.runner.contents import CacheContents
from hf_triton.runner.kv_cache import KVCache, buffer_tokens

if TYPE_CHECKING:
    from hf_triton.runner.decode import Decoder


class Shape(NamedTuple):
    """Of what a lane has in use."""

    rows: int
    columns: int


class KVCacheLanes:
    """All running rows, numbered through, lane after lane.

    Args:
        device: Where the memory lives.
        max_padding: Tokens of padding that a row may bring into a lane; one that brings more gets another. `math.inf`:
            there is one lane.
        slot_tokens: How many tokens weigh as much as what a row has of one size, see `states`.
    """

    def __init__(self, device: torch.device, max_padding: float = math.inf, slot_tokens: int = 0) -> None:
        self._device = device
        self._max_padding = max_padding
        self._slot_tokens = slot_tokens
        self._lanes = [self._new_lane()]
        self._is_corrupt = False

    @property
    def num_tokens(self) -> int:
        """Rows x columns that the buffers have, states counted."""
        return sum(lane.num_tokens for lane in self._lanes)

    @property
    def width(self) -> int:
        """Columns in use in the widest lane."""
        return max(lane.width for lane in self._lanes)

    @property
    def is_corrupt(self) -> bool:
        """What the rows hold is lost: a move broke off, or a step in the middle of the lanes."""
        return self._is_corrupt or any(lane.is_corrupt for lane in self._lanes)

    @is_corrupt.setter
    def is_corrupt(self, value: bool) -> None:
        self._is_corrupt = value

    def tokens_with(self, lengths: list[int]) -> int:
        """Rows x columns of the smallest buffers for what is in use, new rows of these lengths, and a step of all."""
        return sum(self._needs(lengths))

    def most_with(self, lengths: list[int]) -> int:
        """The same, where lanes that hold more keep it."""
        return sum(self._most(lengths))

    def limit(self, lengths: list[int], num_tokens: int) -> None:
        """Let lanes grow ahead of need by what `num_tokens`, at least `most_with` the lengths, leaves over."""
        most = self._most(lengths)
        spare = (num_tokens - sum(most)) // len(most)
        for lane, tokens in zip(self._lanes, most, strict=False):  # new ones grow as far as they need
            lane.max_tokens = tokens + spare

    def add(self, prefilled: Cache, row: int, length: int) -> int:
        """Lay a row of a left-padded prefill, its last `length` columns, into a new row; its number."""
        place = self._place(self._shapes(), length)
        if place < len(self._lanes):
            self._lanes[place].add(prefilled, row, length)
        else:
            lane = self._new_lane()
            lane.max_tokens = 0
            lane.add(prefilled, row, length)
            self._lanes.append(lane)  # only now: where there was no memory for it, there is no lane without rows
        return sum(lane.num_rows for lane in self._lanes[: place + 1]) - 1

    def remove(self, row: int) -> int:
        """Free a row, and give its number to another; that one's, to which those behind it move up."""
        lane, index = self._find(row)
        last = row - index + lane.num_rows - 1
        lane.remove(index)
        self._lanes = [each for each in self._lanes if each.num_rows] or [lane]
        return last

    def length(self, row: int) -> int:
        """Tokens of a row whose keys and values are there."""
        lane, index = self._find(row)
        return lane.length(index)

    def read(self, row: int, length: int) -> CacheContents:
        """Views of the contents of a row's first tokens; its states are those behind its last one."""
        lane, index = self._find(row)
        return CacheContents(lane.read(index, length), lane.states(index))

    def step(self, decoder: Decoder, newest: torch.Tensor) -> torch.Tensor:
        """Run one token for every row, `newest` `[num_rows]` being the last of each; `[num_rows, vocabulary]`.

        Where it breaks off between two lanes, the rows are torn.
        """
        if len(self._lanes) == 1:
            return decoder.step(self._lanes[0], newest)
        logits, start = [], 0
        for lane in self._lanes:
            logits.append(decoder.step(lane, newest[start : start + lane.num_rows]))
            start += lane.num_rows
            self._is_corrupt = True
        all_logits = torch.cat(logits)
        self._is_corrupt = False
        return all_logits

    def trim(self) -> None:
        """Give back what nobody uses."""
        for lane in self._lanes:
            lane.trim()

    def release(self) -> None:
        """Give all memory back; there must be no row in use."""
        self._lanes[0].release()

    def _new_lane(self) -> KVCache:
        return KVCache(self._device, self._slot_tokens)

    def _needs(self, lengths: list[int]) -> list[int]:
        """Rows x columns of the smallest buffers, lane by lane, those included that new rows of these lengths get."""
        shapes = self._shapes()
        for length in lengths:
            place = self._place(shapes, length)
            if place == len(shapes):
                shapes.append(Shape(0, 0))
            shapes[place] = Shape(shapes[place].rows + 1, max(shapes[place].columns, length))
        return [buffer_tokens(shape.rows, shape.columns + 1, self._slot_tokens) for shape in shapes]

    def _most(self, lengths: list[int]) -> list[int]:
        """The same, or what a lane's buffers have where that is more."""
        held = (lane.num_tokens for lane in self._lanes)
        return [max(each) for each in itertools.zip_longest(self._needs(lengths), held, fillvalue=0)]

    def _shapes(self) -> list[Shape]:
        return [Shape(lane.num_rows, lane.width) for lane in self._lanes]

    def _find(self, row: int) -> tuple[KVCache, int]:
        for lane in self._lanes:
            if row < lane.num_rows:
                return lane, row
            row -= lane.num_rows
        raise IndexError(f"there is no row {row}")

    def _place(self, shapes: list[Shape], length: int) -> int:
        """The lane in which a row of a length brings the least padding; beyond the last where it is too much there."""
        padding = [_padding(shape, length) for shape in shapes]
        place = padding.index(min(padding))
        return place if padding[place] <= self._max_padding else len(shapes)


def _padding(lane: Shape, length: int) -> int:
    """Tokens of padding that a row of a length brings: its own, or the other rows'."""
    return lane.rows * max(0, length - lane.columns) + (max(0, lane.columns - length) if lane.rows else 0)
