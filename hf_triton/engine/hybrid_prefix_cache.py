# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of a model with states: a state cannot go back, so only whole sequences are reused."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hf_triton.engine.prefix_cache import Prefix, PrefixCache, _key, _num_common


class HybridPrefixCache(PrefixCache):
    """Stores sequences with their states, at the end of which alone a context can continue.

    Sequences are stored at the end of a prompt, at the end of a completion, and where a prompt parts from a stored
    one, so that the next with the same beginning finds it. One may be a prefix of another.

    Args:
        min_tokens: The fewest tokens worth it: a context with a cached prefix is prefilled alone.
        slot_tokens: How many tokens take as much memory as the states of a sequence.
        stores_completions: Whether the states of a completion, decoded token by token, are those of prefilling it.
    """

    is_alone = True
    stores_prompts = True

    def __init__(self, min_tokens: int, slot_tokens: int, *, stores_completions: bool = True) -> None:
        super().__init__()
        self.min_tokens = min_tokens
        self.slot_tokens = slot_tokens
        self._stores_completions = stores_completions

    def touch(self, token_ids: list[int]) -> bool:
        """Whether a sequence is stored. Its stored prefixes count as used too, the shortest last.

        So what prompts have in common outlives what is their own.
        """
        key = _key(np.array(token_ids, dtype=np.int64))
        for prefix in sorted(self._prefixes_of(key), key=len, reverse=True):
            self._prefixes.move_to_end(prefix)
        return key in self._prefixes

    def find(self, context: list[int], running: Iterable[Prefix]) -> tuple[int, Prefix] | None:
        """The longest stored sequence that is a prefix of `context`, and its length.

        Two tokens are left to compute: a single one would be a decoding step.
        """
        key = _key(np.array(context[:-2], dtype=np.int64))
        longest = max(self._prefixes_of(key), key=len, default=None)
        if longest is None:
            return None
        self._prefixes.move_to_end(longest)
        prefix = self._prefixes[longest]
        return len(prefix.token_ids), prefix

    def pause(self, context: list[int], num_cached: int) -> int | None:
        """The token at which it parts from a stored sequence, if that is far enough behind the cached prefix."""
        tokens = np.array(context[:-2], dtype=np.int64)
        num_common = max((_num_common(prefix.token_ids, tokens) for prefix in self._neighbours(tokens)), default=0)
        return num_common if num_common - num_cached >= self.min_tokens else None

    def can_store(self, num_tokens: int, num_computed: int) -> bool:
        """Only if its states are those behind its last token."""
        return self._stores_completions and num_tokens == num_computed

    def _replace(self, key: bytes) -> None:
        """All sequences stay: each has states of its own."""

    def _prefixes_of(self, key: bytes) -> list[bytes]:
        """The stored prefixes of a sequence, itself included."""
        return [prefix for prefix in self._keys if key.startswith(prefix)]
