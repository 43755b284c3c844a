# SPDX-License-Identifier: Apache-2.0
"""KVCacheLanes: the KV cache in lanes, so that a short sequence does not get the width of a long one.

A lane is a `KVCache`, and a step runs the model once for each. That reads the weights once more and spares attention
the padding: a sequence gets a new lane if its padding in any other costs more.
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
    from hf_triton.runner.adapters import AdapterRows
    from hf_triton.runner.decode import Decoder


class _LaneSize(NamedTuple):
    """What a lane has in use."""

    slots: int
    columns: int

    def padding(self, length: int) -> int:
        """Tokens of padding that a sequence of a length brings: its own, or the others'."""
        return self.slots * max(0, length - self.columns) + (max(0, self.columns - length) if self.slots else 0)


class KVCacheLanes:
    """All slots, numbered lane after lane.

    Args:
        device: Of the buffers.
        max_padding: Tokens of padding that a sequence may bring into a lane. `math.inf`: there is one lane.
        slot_tokens: Tokens that take as much memory as the states of a slot, see `states`.
    """

    def __init__(self, device: torch.device, max_padding: float = math.inf, slot_tokens: int = 0) -> None:
        self._device = device
        self._max_padding = max_padding
        self._slot_tokens = slot_tokens
        self._lanes = [KVCache(device, slot_tokens)]
        self._is_corrupt = False

    @property
    def num_tokens(self) -> int:
        """Slots x columns of the buffers, states counted."""
        return sum(lane.num_tokens for lane in self._lanes)

    @property
    def width(self) -> int:
        """Columns in use in the widest lane."""
        return max(lane.width for lane in self._lanes)

    @property
    def is_corrupt(self) -> bool:
        """Whether a failure broke off a change of the slots, or a step between two lanes: their contents are lost."""
        return self._is_corrupt or any(lane.is_corrupt for lane in self._lanes)

    @is_corrupt.setter
    def is_corrupt(self, value: bool) -> None:
        self._is_corrupt = value

    def tokens_with(self, lengths: list[int]) -> int:
        """Slots x columns of the smallest buffers for all slots, new sequences of these lengths, and a step of all."""
        return sum(self._needs(lengths))

    def most_with(self, lengths: list[int]) -> int:
        """The same if no lane shrinks."""
        return sum(self._most(lengths))

    def limit(self, lengths: list[int], num_tokens: int) -> None:
        """Let lanes grow ahead of need by what `num_tokens`, at least `most_with` the lengths, leaves over."""
        most = self._most(lengths)
        spare = (num_tokens - sum(most)) // len(most)
        for lane, tokens in zip(self._lanes, most, strict=False):  # new ones grow only as needed
            lane.max_tokens = tokens + spare

    def add(self, prefilled: Cache, row: int, length: int) -> int:
        """Copy the last `length` columns of a row of a left-padded prefill batch to a new slot; returns its number."""
        number = self._lane_for(self._sizes(), length)
        if number < len(self._lanes):
            self._lanes[number].add(prefilled, row, length)
        else:
            lane = KVCache(self._device, self._slot_tokens)
            lane.max_tokens = 0
            lane.add(prefilled, row, length)
            self._lanes.append(lane)  # after `add`, which fails without memory: every lane has a sequence
        return sum(lane.num_rows for lane in self._lanes[: number + 1]) - 1

    def remove(self, slot: int) -> int:
        """Free a slot. Returns the slot whose sequence moves there; the slots behind that one move up."""
        lane, index = self._find(slot)
        last = slot - index + lane.num_rows - 1
        lane.remove(index)
        self._lanes = [lane for lane in self._lanes if lane.num_rows] or [lane]
        return last

    def length(self, slot: int) -> int:
        """Cached tokens of a slot."""
        lane, index = self._find(slot)
        return lane.length(index)

    def read(self, slot: int, length: int) -> CacheContents:
        """Views of the KV of a slot's first tokens, and of the states behind its last token."""
        lane, index = self._find(slot)
        return lane.read(index, length)

    def step(self, decoder: Decoder, newest: torch.Tensor, adapters: AdapterRows = None) -> torch.Tensor:
        """Run one token of every slot, `newest` `[slots]`; returns logits `[slots, vocabulary]`.

        `adapters` are those of the slots.

        If a lane fails after another has run, the contents are corrupt.
        """
        if len(self._lanes) == 1:
            return decoder.step(self._lanes[0], newest, adapters)
        logits, start = [], 0
        for lane in self._lanes:
            end = start + lane.num_rows
            logits.append(decoder.step(lane, newest[start:end], adapters and adapters[start:end]))
            start = end
            self._is_corrupt = True
        all_logits = torch.cat(logits)
        self._is_corrupt = False
        return all_logits

    def trim(self) -> None:
        """Free unused memory."""
        for lane in self._lanes:
            lane.trim()

    def release(self) -> None:
        """Free all memory; no slot may be in use."""
        self._lanes[0].release()

    def _needs(self, lengths: list[int]) -> list[int]:
        """Slots x columns of the smallest buffers by lane, lanes that sequences of these lengths add included."""
        sizes = self._sizes()
        for length in lengths:
            number = self._lane_for(sizes, length)
            if number == len(sizes):
                sizes.append(_LaneSize(0, 0))
            sizes[number] = _LaneSize(sizes[number].slots + 1, max(sizes[number].columns, length))
        return [buffer_tokens(size.slots, size.columns + 1, self._slot_tokens) for size in sizes]

    def _most(self, lengths: list[int]) -> list[int]:
        """The same, or the size of a lane's present buffers if that is more."""
        held = (lane.num_tokens for lane in self._lanes)
        return [max(pair) for pair in itertools.zip_longest(self._needs(lengths), held, fillvalue=0)]

    def _sizes(self) -> list[_LaneSize]:
        return [_LaneSize(lane.num_rows, lane.width) for lane in self._lanes]

    def _find(self, slot: int) -> tuple[KVCache, int]:
        for lane in self._lanes:
            if slot < lane.num_rows:
                return lane, slot
            slot -= lane.num_rows
        raise IndexError(f"there is no slot {slot}")

    def _lane_for(self, sizes: list[_LaneSize], length: int) -> int:
        """The lane in which a sequence brings the least padding; the number of lanes if that is too much."""
        padding = [size.padding(length) for size in sizes]
        least = min(padding)
        return padding.index(least) if least <= self._max_padding else len(sizes)
