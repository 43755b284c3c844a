# SPDX-License-Identifier: Apache-2.0
"""The KV of earlier sequences: a prompt that begins like one of them need not compute that part again.

That is a system prompt, few-shot examples, or the conversation so far. Prefixes are compared token by token, so no
answer depends on another request. But a prompt with a cached prefix is answered sooner: if users must not learn what
others have sent, the cache has to be off. Knows no model.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hf_triton.runner.contents import CacheContents

MIN_PREFIX: Final = 16
"""The fewest tokens worth sharing; shorter sequences are not stored."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A sequence whose KV can be copied."""

    token_ids: npt.NDArray[np.int64]
    """`[tokens]`"""
    read: Callable[[int], CacheContents]
    """The contents of its first tokens, given their number."""


class PrefixCache:
    """Stores sequences with their KV, and finds the one that shares the longest prefix with a context.

    Sequences are in lexicographic order, so the longest common prefix of a context with any of them is that with a
    neighbour of its position. None is a prefix of another. For use by one thread.
    """

    min_tokens = MIN_PREFIX
    """The fewest tokens of a stored sequence, and of a prefix that is found."""
    slot_tokens = 0
    """What a stored sequence takes beyond its tokens, in tokens."""
    is_alone = False
    """Whether a context with a cached prefix, or with a pause, shares a prefill batch with no other."""
    stores_prompts = False
    """Whether every prompt is stored when it has been prefilled; else a sequence is stored when it finishes."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()  # by key, the least recently used first
        self._keys: list[bytes] = []  # in order
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens stored, common prefixes counted once for each sequence, `slot_tokens` included."""
        return self._num_tokens

    def add(self, token_ids: list[int], contents: CacheContents) -> None:
        """Store a sequence, in place of one that is its prefix.

        A sequence that is a prefix of a stored one, or too short, is not stored; the stored one counts as used.

        Args:
            token_ids: Each at least 0.
            contents: Of exactly these tokens; the cache's own from now on.

        Raises:
            ValueError: `contents` are of another number of tokens.
        """
        if any(tensor.shape[1] != len(token_ids) for layer in contents.layers for tensor in layer):
            raise ValueError(f"the keys and values are not those of {len(token_ids)} tokens")
        if len(token_ids) < self.min_tokens or self.touch(token_ids):
            return
        tokens = np.array(token_ids, dtype=np.int64)
        key = _key(tokens)
        self._replace(key)
        self._keys.insert(bisect.bisect_left(self._keys, key), key)
        self._prefixes[key] = Prefix(tokens, contents.first)
        self._num_tokens += len(tokens) + self.slot_tokens
        self.touch(token_ids)

    def touch(self, token_ids: list[int]) -> bool:
        """Whether a sequence is stored, or is a prefix of a stored one, which then counts as used."""
        key = _key(np.array(token_ids, dtype=np.int64))
        at = bisect.bisect_left(self._keys, key)
        is_stored = at < len(self._keys) and self._keys[at].startswith(key)
        if is_stored:
            self._prefixes.move_to_end(self._keys[at])
        return is_stored

    def find(self, context: list[int], running: Iterable[Prefix]) -> tuple[int, Prefix] | None:
        """The sequence with the longest common prefix with `context`, and the length of that.

        Args:
            context: To be prefilled. Its last token is never shared: one token must be left to compute.
            running: Further sequences to compare with.

        Returns:
            None if no sequence shares `min_tokens` tokens.
        """
        tokens = np.array(context[:-1], dtype=np.int64)
        stored = self._neighbours(tokens)
        counted = [(_num_common(prefix.token_ids, tokens), prefix) for prefix in (*stored, *running)]
        num_cached, prefix = max(counted, key=lambda pair: pair[0], default=(0, None))
        if prefix is None or num_cached < self.min_tokens:
            return None
        if prefix in stored:
            self._prefixes.move_to_end(_key(prefix.token_ids))
        return num_cached, prefix

    def pause(self, context: list[int], num_cached: int) -> int | None:
        """The token at which prefilling a context pauses for its contents to be stored; None: nowhere.

        Args:
            context: To be prefilled.
            num_cached: Its first tokens that were found.
        """
        return None

    def can_store(self, num_tokens: int, num_computed: int) -> bool:
        """Whether a finished sequence can be stored.

        Args:
            num_tokens: Of it that are to be stored.
            num_computed: Its tokens in the KV cache; a step that ran ahead of its end has computed one more.
        """
        return True

    def shrink(self, to_tokens: int) -> None:
        """Drop the least recently used sequences until at most `to_tokens`, at least 0, are stored."""
        while self._num_tokens > to_tokens:
            self._drop(next(iter(self._prefixes)))

    def clear(self) -> None:
        """Drop all sequences."""
        self.shrink(0)

    def _replace(self, key: bytes) -> None:
        """Drop the sequence that is a prefix of another one."""
        at = bisect.bisect_left(self._keys, key)
        if at > 0 and key.startswith(self._keys[at - 1]):
            self._drop(self._keys[at - 1])

    def _neighbours(self, tokens: npt.NDArray[np.int64]) -> list[Prefix]:
        """The sequences on both sides of a position, one of which shares the longest prefix."""
        at = bisect.bisect_left(self._keys, _key(tokens))
        return [self._prefixes[key] for key in self._keys[max(0, at - 1) : at + 1]]

    def _drop(self, key: bytes) -> None:
        self._num_tokens -= len(self._prefixes.pop(key).token_ids) + self.slot_tokens
        self._keys.pop(bisect.bisect_left(self._keys, key))


def _key(token_ids: npt.NDArray[np.int64]) -> bytes:
    """Tokens as big-endian numbers, whose bytes are ordered as the tokens are."""
    return token_ids.astype(">i8").tobytes()


def _num_common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Tokens of the common prefix."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length
