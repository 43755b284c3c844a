# SPDX-License-Identifier: Apache-2.0
"""Finds the blocks that a context begins with by their tokens; one sequence at a time computes a prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable

from hf_triton.engine.block_pool import BlockPool, next_digest
from hf_triton.engine.sequence import Sequence
from hf_triton.runner.step import TokenRange


class PrefixCache:
    """Finds and publishes full blocks of sequences by the digests of their tokens."""

    def __init__(self, pool: BlockPool, block_size: int, *, is_enabled: bool, recompute_length: float) -> None:
        self._pool = pool
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._recompute_length = recompute_length
        self._computing: dict[bytes, int] = {}  # digests that a running sequence is going to publish, by its id

    def find(self, sequence: Sequence) -> list[int] | None:
        """The blocks that a waiting sequence begins with; None: a running one is computing the next of them."""
        if not self._is_enabled:
            return []
        self._add_digests(sequence, sequence.num_tokens)
        if sequence.wants_scores:
            return []  # every token's logits are wanted
        cached: list[int] = []
        for digest in sequence.digests[: (sequence.num_tokens - 1) // self._block_size]:  # one token is left to compute
            block = self._pool.find(digest)
            if block is None:
                return None if digest in self._computing else cached
            cached.append(block)
        return cached

    def begin(self, sequence: Sequence) -> None:
        """A sequence is going to compute the blocks of its context behind those that it has."""
        for digest in sequence.digests[len(sequence.blocks) :]:
            self._computing.setdefault(digest, sequence.id)

    def full_blocks(self, ranges: Iterable[TokenRange]) -> list[int]:
        size = self._block_size
        if not self._is_enabled:
            return []
        return [block for tokens in ranges for block in tokens.block_table[tokens.start // size : tokens.end // size]]

    def publish(self, sequence: Sequence, token_range: TokenRange, finite_blocks: Container[int]) -> None:
        """Make the blocks known that a range has filled with tokens that are certain.

        Not those with NaN or infinity: attention multiplies what a mask hides by zero, which makes NaN of them, so a
        token may spoil those before it.
        """
        if not self._is_enabled:
            return
        first, end = token_range.start // self._block_size, token_range.end // self._block_size
        if first < end:
            self._add_digests(sequence, token_range.end)
        for at in range(first, end):
            if sequence.blocks[at] in finite_blocks:
                self._pool.publish(sequence.blocks[at], sequence.digests[at])
            self._computing.pop(sequence.digests[at], None)

    def end(self, sequence: Sequence) -> None:
        """A sequence gives its blocks back."""
        for digest in sequence.digests:
            if self._computing.get(digest) == sequence.id:
                del self._computing[digest]

    def _add_digests(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute the digests of a context's full blocks within its first tokens."""
        size, digests = self._block_size, sequence.digests
        for start in range(len(digests) * size, num_tokens - size + 1, size):
            parent = digests[-1] if digests else self._salt(sequence)
            digests.append(next_digest(parent, sequence.tokens(start, start + size)))

    def _salt(self, sequence: Sequence) -> bytes:
        """What keys and values depend on beside the tokens, and who may share them."""
        is_long = sequence.num_tokens >= self._recompute_length
        salt = f"{sequence.adapter_key} {is_long} {sequence.group.cache_salt}"
        return hashlib.sha256(salt.encode(errors="surrogatepass")).digest()  # of one length, whatever a client sends
