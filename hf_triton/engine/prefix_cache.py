# SPDX-License-Identifier: Apache-2.0
"""Finds the blocks that a context begins with by their tokens; one sequence at a time computes a prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable

from hf_triton.engine.block_pool import BlockPool, next_digest
from hf_triton.engine.engine_config import ModelTraits
from hf_triton.engine.sequence import Sequence
from hf_triton.engine.state_pool import NOT_KEPT
from hf_triton.runner.step import TokenRange


class PrefixCache:
    """Finds and publishes full blocks of sequences by the digests of their tokens, and the states where some end.

    A model with states begins at the longest prefix that has both. They are kept at these tokens of a context, where a
    chunk ends for their sake: the last multiple of a block; every `kept_state_tokens`; and where what others have
    computed of it ends, as it parts from them there. A decoding sequence keeps its states whenever a block is full, in
    place of those that it kept before, so that those at its end remain.

    Args:
        kept_state_tokens: How far states are kept from each other, in long contexts.
    """

    def __init__(self, pool: BlockPool, block_size: int, traits: ModelTraits, kept_state_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._traits = traits
        self._interval = max(1, kept_state_tokens // block_size) * block_size
        # One token is left to compute, but of a model with states one alone would be taken for a decoding step.
        self._num_left = 2 if traits.has_states else 1
        self._computing: dict[bytes, int] = {}  # digests that a running sequence is going to publish, by its id

    def find(self, sequence: Sequence) -> list[int] | None:
        """The blocks that a waiting sequence begins with; None: a running one is computing the next of them."""
        if not self._traits.caches_prefixes:
            return []
        self._add_digests(sequence, sequence.num_tokens)
        if sequence.wants_scores:
            return []  # every token's logits are wanted
        cached: list[int] = []
        num_usable = 0  # blocks in front of kept states, and of no token that the last one must see with its image
        digests = sequence.digests[: self._num_cacheable(sequence)]
        for digest in digests:
            block = self._pool.find(digest)
            if block is None:
                break
            cached.append(block)
            has_states = not self._traits.has_states or self._pool.states.find(digest) is not None
            if has_states and not self._is_in_image(sequence, len(cached) * self._block_size):
                num_usable = len(cached)
        coming = digests[num_usable:] if self._traits.has_states else digests[num_usable : len(cached) + 1]
        if self._computing and any(digest in self._computing for digest in coming):
            return None
        return cached[:num_usable]

    def begin(self, sequence: Sequence) -> None:
        """A sequence is going to compute the blocks of its context behind those that it has."""
        if not self._traits.has_states:
            for digest in sequence.digests[len(sequence.blocks) :]:
                self._computing.setdefault(digest, sequence.id)
        elif self._traits.keeps_states:
            sequence.cuts = self._cuts(sequence)
            for end in sequence.cuts:
                self._computing.setdefault(sequence.digests[end // self._block_size - 1], sequence.id)

    def full_blocks(self, ranges: Iterable[TokenRange]) -> list[int]:
        size = self._block_size
        if not self._traits.caches_prefixes:
            return []
        return [block for tokens in ranges for block in tokens.block_table[tokens.start // size : tokens.end // size]]

    def reserve(self, sequence: Sequence, num_tokens: int, num_running: int) -> int:
        """The slot that the states behind a sequence's next tokens are to be copied to; `NOT_KEPT`: to none.

        For models with states. Decoding sequences take none from others while they are more than half as many as there
        are slots.
        """
        states, end = self._pool.states, sequence.num_computed + num_tokens
        if end % self._block_size:
            return NOT_KEPT
        if num_tokens > 1:
            is_kept = end not in sequence.cuts or states.find(sequence.digests[end // self._block_size - 1]) is not None
            return NOT_KEPT if is_kept else states.reserve()
        if not self._traits.recomputes:
            return NOT_KEPT
        slot = states.reserve_again(sequence.kept)
        return states.reserve() if slot == NOT_KEPT and 2 * num_running <= states.num_slots else slot

    def lose(self, ranges: Iterable[TokenRange]) -> None:
        """Keep no states of ranges whose output is lost, or that nothing computes."""
        for tokens in ranges:
            self._pool.states.free(tokens.kept_slot)

    def publish(self, sequence: Sequence, token_range: TokenRange, finite_blocks: Container[int]) -> None:
        """Make the blocks known that a range has filled with tokens that are certain, and the states behind it.

        Not those with NaN or infinity: attention multiplies what a mask hides by zero, which makes NaN of them, so a
        token may spoil those before it. Of a model that cannot recompute what it decoded, the prompt's alone.
        """
        if not self._traits.caches_prefixes:
            return
        num_tokens = token_range.end
        if not self._traits.recomputes:
            num_tokens = min(num_tokens, len(sequence.group.prompt_ids))
        first, end = token_range.start // self._block_size, num_tokens // self._block_size
        if first < end:
            self._add_digests(sequence, num_tokens)
        for at in range(first, end):
            if sequence.blocks[at] in finite_blocks:
                self._pool.publish(sequence.blocks[at], sequence.digests[at])
            self._computing.pop(sequence.digests[at], None)
        if token_range.kept_slot != NOT_KEPT:
            self._publish_states(sequence, token_range)

    def _publish_states(self, sequence: Sequence, token_range: TokenRange) -> None:
        states, end = self._pool.states, token_range.end
        digest = sequence.digests[end // self._block_size - 1]
        if self._pool.find(digest) is None:
            states.free(token_range.kept_slot)
            return
        is_passing = token_range.is_decode and end % self._interval != 0
        if states.keep(digest, token_range.kept_slot, is_passing=is_passing) and is_passing:
            sequence.kept = digest

    def end(self, sequence: Sequence) -> None:
        """A sequence gives its blocks back."""
        for digest in sequence.digests:
            if self._computing.get(digest) == sequence.id:
                del self._computing[digest]
        self._pool.states.settle(sequence.kept)
        sequence.cuts, sequence.kept = [], None

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Blocks of a context that need not be computed."""
        return max(0, sequence.num_tokens - self._num_left) // self._block_size

    def _cuts(self, sequence: Sequence) -> list[int]:
        """The tokens of a context at which its states are kept, behind those that it begins with."""
        size, last = self._block_size, self._num_cacheable(sequence)
        begun = known = len(sequence.blocks)
        while known < last and self._pool.find(sequence.digests[known]) is not None:
            known += 1
        ends = {known * size, last * size, *range(self._interval, last * size, self._interval)}
        return sorted(end for end in ends if end > begun * size)

    def _add_digests(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute the digests of a context's full blocks within its first tokens."""
        size, digests = self._block_size, sequence.digests
        for start in range(len(digests) * size, num_tokens - size + 1, size):
            parent = digests[-1] if digests else self._salt(sequence)
            digests.append(next_digest(parent, sequence.tokens(start, start + size), self._images(sequence, start)))

    def _images(self, sequence: Sequence, start: int) -> bytes:
        """What tells the images of a block's tokens, and where they begin."""
        images = sequence.group.images
        if images is None:
            return b""
        some = images.among(start, start + self._block_size)
        return b"".join(image.digest + image.start.to_bytes(8) for image in some)

    def _is_in_image(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a prefix cuts an image whose tokens attend to each other: those behind it are computed with all."""
        images = sequence.group.images
        if images is None or not self._traits.joins_images:
            return False
        return any(image.start < num_tokens < image.end for image in images.images)

    def _salt(self, sequence: Sequence) -> bytes:
        """What keys and values depend on beside the tokens, and who may share them."""
        is_long = sequence.num_tokens >= self._traits.recompute_length
        salt = f"{sequence.adapter_key} {is_long} {sequence.group.cache_salt}"
        return hashlib.sha256(salt.encode(errors="surrogatepass")).digest()  # of one length, whatever a client sends
