# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept, so that a later request goes on behind one: in memory, by number, bytes and time."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_triton.errors import clip
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import write_json

Item = Mapping[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response as it ended."""

    response: Mapping[str, Any]
    past: tuple[Item, ...]
    """The items of the responses that it goes on behind."""
    input: tuple[Item, ...]
    """Its own."""

    @cached_property
    def num_bytes(self) -> int:
        """Its size as JSON, with the conversation that it ends."""
        return len(write_json([self.response, self.past, self.input]))

    def count_bytes(self) -> int:
        """The same; takes a while, the first time."""
        return self.num_bytes

    @property
    def items(self) -> tuple[Item, ...]:
        """The conversation up to its end."""
        return (*self.past, *self.input, *self.response["output"])


@dataclass(frozen=True)
class _Entry:
    stored: StoredResponse
    owner: bytes
    until_s: float

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes


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
        return self._max_responses > 0

    def put(self, stored: StoredResponse, key: bytes) -> bool:
        """Keep a response for the clients with a key; false: it is larger than all may be, or its id is another's."""
        name, owner = stored.response["id"], _digest(key)
        is_others = name in self._entries and self._entries[name].owner != owner
        if not self.keeps_any or is_others or stored.num_bytes > self._max_bytes:
            return False
        self._drop(name)
        self._entries[name] = _Entry(stored, owner, self._clock() + self._keep_s)
        self._num_bytes += stored.num_bytes
        self._drop_old()
        return name in self._entries

    def get(self, name: str, key: bytes, param: str = "response_id") -> StoredResponse:
        """A response that a client with this key has made."""
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
        while self._entries and (oldest := next(iter(self._entries))) and self._entries[oldest].until_s <= now_s:
            self._drop(oldest)
        self._make_room(lambda: len(self._entries) > self._max_responses, lambda entry: 1)
        self._make_room(lambda: self._num_bytes > self._max_bytes, lambda entry: entry.num_bytes)

    def _make_room(self, is_full: Callable[[], bool], weigh: Callable[[_Entry], int]) -> None:
        """Drop the oldest response of the key whose responses weigh most together, until there is room."""
        if not is_full():
            return
        names: dict[bytes, deque[str]] = {}
        weights: Counter[bytes] = Counter()
        for name, entry in self._entries.items():
            names.setdefault(entry.owner, deque()).append(name)
            weights[entry.owner] += weigh(entry)
        while is_full():
            owner = max(weights, key=weights.__getitem__)
            name = names[owner].popleft()
            weights[owner] -= weigh(self._entries[name])
            self._drop(name)

    def _missing(self, name: str, param: str) -> ApiError:
        code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
        message = (
            f"there is no response {clip(name)}: one process of the gateway keeps the last {self._max_responses} "
            f"responses for {self._keep_s:g} s, in memory, and {self._max_bytes} bytes of all of them "
            "(--max-stored-bytes), conversations included; store in a response says whether it was kept: send the "
            "whole conversation as input"
        )
        return ApiError(404, message, param=param, code=code)


def _digest(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()
