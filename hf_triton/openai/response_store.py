# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept, so that a later request goes on behind one: in memory, by number, bytes and time."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_triton.errors import clip
from hf_triton.openai.errors import ApiError

Item = Mapping[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response as it ended."""

    response: Mapping[str, Any]
    past: tuple[Item, ...]
    """The items of the responses that it goes on behind."""
    input: tuple[Item, ...]
    """Its own."""

    @property
    def items(self) -> tuple[Item, ...]:
        """The conversation up to its end."""
        return (*self.past, *self.input, *self.response["output"])


@dataclass(frozen=True)
class _Entry:
    stored: StoredResponse
    owner: bytes
    num_bytes: int
    until_s: float


class ResponseStore:
    """Belongs to one event loop. The oldest response of the key that has most makes room for a new one.

    Args:
        max_responses: How many are kept; 0: none.
        max_bytes: Of all, as JSON; each counts with the conversation that it ends.
        keep_s: How long one is kept.
        clock: Seconds.
    """

    def __init__(
        self, max_responses: int, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether responses are kept."""
        return self._max_responses > 0

    def put(self, stored: StoredResponse, key: bytes) -> None:
        """Keep a response for the clients with a key; not if it is larger than all may be, or its id is another's."""
        name = stored.response["id"]
        num_bytes = len(json.dumps([stored.response, stored.past, stored.input]))
        if num_bytes > self._max_bytes or (name in self._entries and self._entries[name].owner != _digest(key)):
            return
        self._drop(name)
        self._entries[name] = _Entry(stored, _digest(key), num_bytes, self._clock() + self._keep_s)
        self._num_bytes += num_bytes
        self._drop_old()

    def get(self, name: str, key: bytes, param: str = "response_id") -> StoredResponse:
        """A response that a client with this key has made.

        Raises:
            ApiError: There is none.
        """
        self._drop_old()
        entry = self._entries.get(name)
        if entry is None or entry.owner != _digest(key):
            raise self._missing(name, param)
        return entry.stored

    def delete(self, name: str, key: bytes) -> None:
        """Forget a response; raises as `get`."""
        self.get(name, key)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            self._num_bytes -= entry.num_bytes

    def _drop_old(self) -> None:
        now_s = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.until_s <= now_s]:
            self._drop(name)
        while len(self._entries) > self._max_responses:
            self._drop(self._oldest_of_most(lambda entry: 1))
        while self._num_bytes > self._max_bytes:
            self._drop(self._oldest_of_most(lambda entry: entry.num_bytes))

    def _oldest_of_most(self, weigh: Callable[[_Entry], int]) -> str:
        """The oldest response of the key whose responses weigh most together."""
        weights: Counter[bytes] = Counter()
        for entry in self._entries.values():
            weights[entry.owner] += weigh(entry)
        [(owner, _)] = weights.most_common(1)
        return next(name for name, entry in self._entries.items() if entry.owner == owner)

    def _missing(self, name: str, param: str) -> ApiError:
        code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
        message = (
            f"there is no response {clip(name)}: one process of the gateway keeps the last {self._max_responses} "
            f"responses for {self._keep_s:g} s, in memory: send the whole conversation as input"
        )
        return ApiError(404, message, param=param, code=code)


def _digest(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()
