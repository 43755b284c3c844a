# SPDX-License-Identifier: Apache-2.0
"""Memory of past texts' keys and values: a prompt that begins as one of them did need not compute that part again.

That is a system prompt, few-shot examples, or the conversation so far. What is shared is compared token by token, so
nobody is answered from another one's text. But a prompt whose beginning is known is answered sooner: where users must
not learn what others have sent, sharing has to be off. Knows no model.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

MIN_SHARED: Final = 16
"""The fewest tokens worth sharing; texts shorter than that are not kept."""

LayerContents: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"
"""Keys and values of each layer, `[heads, tokens, head_dim]`."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text whose keys and values are at hand."""

    token_ids: npt.NDArray[np.int64]
    """`[tokens]`"""
    read: Callable[[int], LayerContents]
    """The keys and values of its first so many tokens."""


class PrefixStore:
    """Keeps texts with their keys and values, and finds the one that a new text begins like.

    The texts are in lexicographic order, where the longest common prefix of a text with any of them is the one with a
    neighbour of its place. None of them is a prefix of another. For use by one thread.
    """

    def __init__(self) -> None:
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()  # by key, the least recently used first
        self._keys: list[bytes] = []  # in order
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens held, those that several texts have in common counted for each."""
        return self._num_tokens

    def add(self, token_ids: list[int], contents: LayerContents) -> None:
        """Keep a text, in place of one that it goes on from.

        One that another goes on from, or that is too short to be shared, is not kept; the other counts as used.

        Args:
            token_ids: Each at least 0.
            contents: The keys and values of exactly these tokens, the store's own from now on.

        Raises:
            ValueError: `contents` are of another number of tokens.
        """
        if any(each.shape[1] != len(token_ids) for layer in contents for each in layer):
            raise ValueError(f"keys and values are not of the {len(token_ids)} tokens that they are said to be of")
        if len(token_ids) < MIN_SHARED:
            return
        tokens = np.array(token_ids, dtype=np.int64)
        key = _key(tokens)
        place = bisect.bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place].startswith(key):
            self._prefixes.move_to_end(self._keys[place])
            return
        if place > 0 and key.startswith(self._keys[place - 1]):
            place -= 1
            self._drop(self._keys[place])
        self._keys.insert(place, key)
        self._prefixes[key] = Prefix(
            tokens,
            lambda length: [(keys[:, :length], values[:, :length]) for keys, values in contents],
        )
        self._num_tokens += len(token_ids)

    def find(self, context: list[int], running: Iterable[Prefix]) -> tuple[int, Prefix] | None:
        """The text that has the most first tokens in common with `context`, and how many.

        Args:
            context: A text that is to be computed. Its last token is never shared: something must be left to compute.
            running: More texts to look at, beside those that are kept.

        Returns:
            None where no text shares `MIN_SHARED` tokens.
        """
        tokens = np.array(context[:-1], dtype=np.int64)
        place = bisect.bisect_left(self._keys, _key(tokens))
        stored = [self._prefixes[each] for each in self._keys[max(0, place - 1) : place + 1]]
        counted = [(_num_common(prefix.token_ids, tokens), prefix) for prefix in (*stored, *running)]
        num_shared, prefix = max(counted, key=lambda each: each[0], default=(0, None))
        if prefix is None or num_shared < MIN_SHARED:
            return None
        if prefix in stored:
            self._prefixes.move_to_end(_key(prefix.token_ids))
        return num_shared, prefix

    def shrink(self, to_tokens: int) -> None:
        """Drop the least recently used texts until no more than `to_tokens`, at least 0, are held."""
        while self._num_tokens > to_tokens:
            self._drop(next(iter(self._prefixes)))

    def clear(self) -> None:
        """Drop all texts."""
        self.shrink(0)

    def _drop(self, key: bytes) -> None:
        self._num_tokens -= len(self._prefixes.pop(key).token_ids)
        self._keys.pop(bisect.bisect_left(self._keys, key))


def _key(token_ids: npt.NDArray[np.int64]) -> bytes:
    """Tokens as big-endian numbers, whose bytes are ordered as the tokens are."""
    return token_ids.astype(">i8").tobytes()


def _num_common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """How many first tokens are the same."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length
