# SPDX-License-Identifier: Apache-2.0
"""Memory of past texts' keys, values and states: a prompt that begins as one of them did need not compute that again.

That is a system prompt, few-shot examples, or the conversation so far. What is shared is compared token by token, so
nobody is answered from another one's text. But a prompt whose beginning is known is answered sooner: where users must
not learn what others have sent, sharing has to be off. Knows no model.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from hf_triton.runner.states import TextStates

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
    states: Sequence[TextStates] = ()
    """Of each layer that keeps some, as they are at its end."""


class PrefixCache:
    """Keeps texts with their keys and values, and finds the one that a new text begins like.

    The texts are in lexicographic order, where the longest common prefix of a text with any of them is the one with a
    neighbour of its place. None of them is a prefix of another. For use by one thread.
    """

    least = MIN_SHARED
    """The fewest tokens of a text that is kept, or of a beginning that is found."""
    tokens_of_states = 0
    """How many tokens weigh as much as the states of a text."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()  # by key, the least recently used first
        self._keys: list[bytes] = []  # in order
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens held, those that several texts have in common counted for each, and states."""
        return self._num_tokens

    def add(self, token_ids: list[int], contents: LayerContents, states: Sequence[TextStates] = ()) -> None:
        """Keep a text, in place of one that it goes on from.

        One that another goes on from, or that is too short to be shared, is not kept; the other counts as used.

        Args:
            token_ids: Each at least 0.
            contents: The keys and values of exactly these tokens, the store's own from now on.
            states: What layers keep behind the last of them, likewise.

        Raises:
            ValueError: `contents` are of another number of tokens.
        """
        if any(each.shape[1] != len(token_ids) for layer in contents for each in layer):
            raise ValueError(f"keys and values are not of the {len(token_ids)} tokens that they are said to be of")
        if len(token_ids) < self.least or self.touch(token_ids):
            return
        tokens = np.array(token_ids, dtype=np.int64)
        key = _key(tokens)
        self._replace(key)
        self._keys.insert(bisect.bisect_left(self._keys, key), key)
        self._prefixes[key] = Prefix(
            tokens, lambda length: [(keys[:, :length], values[:, :length]) for keys, values in contents], states
        )
        self._num_tokens += len(tokens) + self.tokens_of_states
        self.touch(token_ids)

    def touch(self, token_ids: list[int]) -> bool:
        """Whether nothing has to be kept for a text, because one that is kept does for it too; that counts as a use."""
        key = _key(np.array(token_ids, dtype=np.int64))
        place = bisect.bisect_left(self._keys, key)
        is_held = place < len(self._keys) and self._keys[place].startswith(key)
        if is_held:
            self._prefixes.move_to_end(self._keys[place])
        return is_held

    def find(self, context: list[int], running: Iterable[Prefix]) -> tuple[int, Prefix] | None:
        """The text that has the most first tokens in common with `context`, and how many.

        Args:
            context: A text that is to be computed. Its last token is never shared: something must be left to compute.
            running: More texts to look at, beside those that are kept.

        Returns:
            None where no text shares `least` tokens.
        """
        tokens = np.array(context[:-1], dtype=np.int64)
        stored = self._neighbours(tokens)
        counted = [(_num_common(prefix.token_ids, tokens), prefix) for prefix in (*stored, *running)]
        num_cached, prefix = max(counted, key=lambda each: each[0], default=(0, None))
        if prefix is None or num_cached < self.least:
            return None
        if prefix in stored:
            self._prefixes.move_to_end(_key(prefix.token_ids))
        return num_cached, prefix

    def branch(self, context: list[int], num_cached: int) -> int | None:
        """Where reading a context pauses for what is computed up to there to be kept; None: nowhere.

        Args:
            context: A text that is to be computed.
            num_cached: How many of its first tokens are found.
        """
        return None

    def shrink(self, to_tokens: int) -> None:
        """Drop the least recently used texts until no more than `to_tokens`, at least 0, are held."""
        while self._num_tokens > to_tokens:
            self._drop(next(iter(self._prefixes)))

    def clear(self) -> None:
        """Drop all texts."""
        self.shrink(0)

    def _replace(self, key: bytes) -> None:
        """Drop the text that another one goes on from."""
        place = bisect.bisect_left(self._keys, key)
        if place > 0 and key.startswith(self._keys[place - 1]):
            self._drop(self._keys[place - 1])

    def _neighbours(self, tokens: npt.NDArray[np.int64]) -> list[Prefix]:
        """The texts on both sides of a place; the longest common prefix with any is that with one of them."""
        place = bisect.bisect_left(self._keys, _key(tokens))
        return [self._prefixes[each] for each in self._keys[max(0, place - 1) : place + 1]]

    def _drop(self, key: bytes) -> None:
        self._num_tokens -= len(self._prefixes.pop(key).token_ids) + self.tokens_of_states
        self._keys.pop(bisect.bisect_left(self._keys, key))


class HybridPrefixCache(PrefixCache):
    """The same for a model with states, which cannot go back: a text is gone on from at its end alone.

    So texts are kept at the end of a prompt, at the end of what was written, and where one parts from another that is
    kept: the next that begins so is found. A text may be a prefix of another here.

    Args:
        least: The fewest tokens worth it: what is gone on from is read by itself.
        tokens_of_states: How many tokens weigh as much as the states of a text.
    """

    def __init__(self, least: int, tokens_of_states: int) -> None:
        super().__init__()
        self.least = least
        self.tokens_of_states = tokens_of_states

    def touch(self, token_ids: list[int]) -> bool:
        """Whether a text is kept. It counts as used, and so do those that it goes on from, the shortest as the last.

        What a prompt shares with others so outlives what is its own.
        """
        key = _key(np.array(token_ids, dtype=np.int64))
        for each in sorted(self._begun(key), key=len, reverse=True):
            self._prefixes.move_to_end(each)
        return key in self._prefixes

    def find(self, context: list[int], running: Iterable[Prefix]) -> tuple[int, Prefix] | None:
        """The longest text with which `context` goes on, and its length; of those that are kept alone.

        Two tokens are left to compute: a single one would be a step, not a part of a prompt.
        """
        key = _key(np.array(context[:-2], dtype=np.int64))
        whole = max(self._begun(key), key=len, default=None)
        if whole is None:
            return None
        self._prefixes.move_to_end(whole)
        prefix = self._prefixes[whole]
        return len(prefix.token_ids), prefix

    def branch(self, context: list[int], num_cached: int) -> int | None:
        """Where it parts from another text, if that is far enough behind what is found."""
        tokens = np.array(context[:-2], dtype=np.int64)
        num_common = max((_num_common(each.token_ids, tokens) for each in self._neighbours(tokens)), default=0)
        return num_common if num_common - num_cached >= self.least else None

    def _replace(self, key: bytes) -> None:
        """All texts stay: each has states of its own."""

    def _begun(self, key: bytes) -> list[bytes]:
        """The texts that one goes on from, itself included."""
        return [each for each in self._keys if key.startswith(each)]


def _key(token_ids: npt.NDArray[np.int64]) -> bytes:
    """Tokens as big-endian numbers, whose bytes are ordered as the tokens are."""
    return token_ids.astype(">i8").tobytes()


def _num_common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """How many first tokens are the same."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length
