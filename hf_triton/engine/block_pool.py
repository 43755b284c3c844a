# SPDX-License-Identifier: Apache-2.0
"""The blocks of a KV cache by number: who holds them, and which prefix each keeps. Knows no tensors, and no torch.

A sequence's keys and values lie in blocks of a fixed number of tokens; its block table names them in order. Sequences
that begin alike share full blocks. A full block without a holder keeps its contents until it is taken again: that is
the prefix cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from hf_triton.engine.state_pool import StatePool


class BlockPool:
    """Allocates blocks, counts who holds them, and finds full blocks by the digest of their tokens.

    A block is *fresh* (its memory is untouched, or given back), *held*, *kept* (released, its contents are known by a
    digest) or *empty* (released without one). Allocation takes empty blocks first, then fresh ones while fewer than
    `max_kept` blocks are kept, then the least recently used of the kept ones.

    Args:
        max_kept: Kept blocks from which on they are taken before fresh ones, so that memory does not grow.
        states: Kept states, which go with the blocks that end where they are; None: none are kept.
    """

    def __init__(self, num_blocks: int, max_kept: int, states: StatePool | None = None) -> None:
        self.num_blocks = num_blocks
        self.max_touched = num_blocks
        """The most blocks whose memory may be touched now; less than `num_blocks` if others use the device."""
        self.max_kept = max_kept
        self.states = states or StatePool()
        self._references: dict[int, int] = {}  # of held blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._empty: list[int] = []
        self._returned: list[int] = []  # fresh again
        self._next_fresh = 0
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold, shared ones counted once."""
        return len(self._references)

    @property
    def num_kept(self) -> int:
        """Released blocks that the prefix cache keeps."""
        return len(self._kept)

    @property
    def num_touched(self) -> int:
        """Blocks whose memory has been touched and not been given back."""
        return self._next_fresh - len(self._returned)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return max(0, min(self.num_blocks, self.max_touched) - self.num_held)

    def allocate(self) -> int:
        """Take a block, for one holder; raises IndexError if none is free."""
        if not self.num_free:
            raise IndexError("no block is free")
        if self._empty:
            block = self._empty.pop()
        elif self.num_touched < min(self.num_blocks, self.max_touched) and len(self._kept) < self.max_kept:
            block = self._take_fresh()
        elif self._kept:
            block = next(iter(self._kept))
            self._evict(block)
        else:
            block = self._take_fresh()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a held or kept block."""
        self._kept.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block of a table; the last blocks of a sequence are taken again first."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                if block in self._digest_of:
                    self._kept[block] = None
                else:
                    self._empty.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full, held block known; of two with equal tokens only the first is."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def is_held(self, block: int) -> bool:
        return block in self._references

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def trim(self, max_touched: int) -> list[int]:
        """Give back released blocks until at most `max_touched` are touched, empty ones first.

        Returns:
            The blocks given back, whose memory the caller may free.
        """
        given_back: list[int] = []
        while self.num_touched > max_touched and (self._empty or self._kept):
            block = self._empty.pop() if self._empty else next(iter(self._kept))
            self._evict(block)
            self._returned.append(block)
            given_back.append(block)
        return given_back

    def clear(self) -> None:
        self._empty.extend(self._kept)
        self._kept.clear()
        self._digest_of.clear()
        self._block_of.clear()
        self.states.clear()

    def _take_fresh(self) -> int:
        if self._returned:
            return self._returned.pop()
        self._next_fresh += 1
        return self._next_fresh - 1

    def _evict(self, block: int) -> None:
        if block in self._kept:
            del self._kept[block]
            digest = self._digest_of.pop(block)
            del self._block_of[digest]
            self.states.drop(digest)


def next_digest(parent: bytes, token_ids: list[int], images: bytes = b"") -> bytes:
    """The digest of a full block behind the block with the digest `parent`, or behind a salt.

    `images` tells the content of images that its tokens stand for.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + images).digest()
