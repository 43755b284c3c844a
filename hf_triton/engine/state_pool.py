# SPDX-License-Identifier: Apache-2.0
"""The slots of states that the prefix cache keeps, by number. Knows no tensors, and no torch.

A state is that of a sequence's last token and cannot go back, so a sequence can begin behind a prefix only where a copy
was made when the prefix was computed. A copy is known by the digest of the block that ends there, as that block is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

NOT_KEPT: Final = -1
"""The slot of states that are not kept."""


class StatePool:
    """Gives slots to copies of states; without a free one, the least recently used copy makes room.

    A slot is *free*, *reserved* (a step in flight copies to it), or *kept*. Within a step copies from slots come before
    the forward, and copies to reserved ones behind it: a slot that is taken while a copy from it is due is still read.

    Args:
        first: The first slot's number.
    """

    def __init__(self, first: int = 0, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.num_touched = 0
        """Slots whose memory has been touched."""
        self.max_touched = num_slots
        """The most slots whose memory may be touched now."""
        self._first = first
        self._free: list[int] = []  # of the touched ones
        self._reserved: set[int] = set()
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._passing: set[bytes] = set()  # a running sequence replaces them by its next ones

    def find(self, digest: bytes) -> int | None:
        return self._kept.get(digest)

    def use(self, digest: bytes) -> int:
        """The slot of a kept state, with which a sequence begins."""
        self._kept.move_to_end(digest)
        self._passing.discard(digest)
        return self._kept[digest]

    def reserve(self) -> int:
        """Take a slot for a copy; `NOT_KEPT` if all are reserved."""
        if self._free:
            slot = self._free.pop()
        elif self.num_touched < min(self.num_slots, self.max_touched):
            slot = self._first + self.num_touched
            self.num_touched += 1
        elif self._kept:
            slot = self._take(next(iter(self._kept)))
        else:
            return NOT_KEPT
        self._reserved.add(slot)
        return slot

    def reserve_again(self, digest: bytes | None) -> int:
        """Take the slot of a sequence's former state, which no other sequence has used; `NOT_KEPT` if there is none."""
        if digest is None or digest not in self._passing:
            return NOT_KEPT
        slot = self._take(digest)
        self._reserved.add(slot)
        return slot

    def keep(self, digest: bytes, slot: int, *, is_passing: bool = False) -> bool:
        """Make a copy known; false if there is one already, and the slot is free again."""
        if digest in self._kept or slot not in self._reserved:
            self.free(slot)
            return False
        self._reserved.remove(slot)
        self._kept[digest] = slot
        if is_passing:
            self._passing.add(digest)
        return True

    def free(self, slot: int) -> None:
        """Release a reserved slot: its copy was lost, or is not needed."""
        if slot in self._reserved:
            self._reserved.remove(slot)
            self._free.append(slot)

    def settle(self, digest: bytes | None) -> None:
        """A sequence that leaves lets others have its last state."""
        self._passing.discard(digest or b"")

    def drop(self, digest: bytes) -> None:
        """Forget a state whose block is taken."""
        if digest in self._kept:
            self._free.append(self._take(digest))

    def clear(self) -> None:
        self._free += [*self._kept.values(), *self._reserved]
        self._kept.clear()
        self._reserved.clear()
        self._passing.clear()

    def give_back(self) -> bool:
        """Forget all states and their memory, unless some are reserved; whether there was any."""
        if self._reserved or not self.num_touched:
            return False
        self.clear()
        self._free, self.num_touched = [], 0
        return True

    def _take(self, digest: bytes) -> int:
        self._passing.discard(digest)
        return self._kept.pop(digest)
