# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept, so that a later request goes on behind one: in memory, by number, bytes and time.

Those that run in the background are there from the beginning. They make no room for others, and take half of it at
most, so that each is there when it has ended; the time counts from then on.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import clip
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import beside, write_json

if TYPE_CHECKING:
    from hf_triton_gateway.agents.background import BackgroundResponse
    from hf_triton_gateway.agents.event_log import EventLog

Item = Mapping[str, Any]


IN_BACKGROUND: Final = "background"
RUNNING: Final = ("queued", "in_progress")
"""States of a response that has not ended."""
TOO_LARGE: Final = {
    "status": "failed",
    "error": {"code": "server_error", "message": "the response has more bytes than are kept (--max-stored-bytes)"},
    "output": [],
}
"""What changes in a response of the background that cannot be kept."""


@dataclass(frozen=True)
class StoredResponse:
    """A response as it ended, or as it runs in the background."""

    response: Mapping[str, Any]
    past: tuple[Item, ...]
    """The items of the responses that it goes on behind."""
    input: tuple[Item, ...]
    """Its own."""
    events: EventLog | None = None
    """For clients that follow it."""

    @cached_property
    def num_bytes(self) -> int:
        """Its size as JSON, with the conversation that it ends."""
        num_bytes = len(write_json([self.response, self.past, self.input]))
        return num_bytes + (0 if self.events is None else self.events.num_bytes)

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
    running: BackgroundResponse | None = None

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
        self.max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # that have ended, the oldest first
        self._running: dict[str, _Entry] = {}
        self._num_bytes = 0  # of both

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0

    def check_room(self, stored: StoredResponse) -> None:
        """Refuse a response that would run in the background if as many do as may, or if its request is too large."""
        if stored.num_bytes > self.max_bytes // 2:
            limit = f"{self.max_bytes // 2} bytes of JSON may wait for a response in the background, half of"
            message = f"the request has {stored.num_bytes} with its conversation, and {limit} --max-stored-bytes"
            raise ApiError(413, message, param=IN_BACKGROUND, code="request_too_large")
        num_bytes = stored.num_bytes + sum(entry.num_bytes for entry in self._running.values())
        if len(self._running) >= max(1, self._max_responses // 2) or num_bytes > self.max_bytes // 2:
            message = f"{len(self._running)} responses run in the background, as many as may: send it again later"
            raise ApiError(429, message, param=IN_BACKGROUND, code="too_many_requests")

    def begin(self, stored: StoredResponse, running: BackgroundResponse, key: bytes) -> None:
        """Have a response that runs in the background, for which there is room."""
        self._running[stored.response["id"]] = _Entry(stored, _digest(key), math.inf, running)
        self._num_bytes += stored.num_bytes
        self._drop_old()

    def put(self, stored: StoredResponse, key: bytes) -> bool:
        """Keep a response that has ended for the clients with a key.

        Returns:
            False: it is larger than all may be, its id is another's, or it was deleted while it ran.
        """
        name, owner = stored.response["id"], _digest(key)
        is_others = name in self._entries and self._entries[name].owner != owner
        is_deleted = stored.response.get(IN_BACKGROUND) and name not in self._running
        if not self.keeps_any or is_others or is_deleted or stored.num_bytes > self.max_bytes:
            return False
        self._drop(name)
        self._entries[name] = _Entry(stored, owner, self._clock() + self._keep_s)
        self._num_bytes += stored.num_bytes
        self._drop_old()
        return name in self._entries

    def get(self, name: str, key: bytes, param: str = "response_id") -> StoredResponse:
        """A response that a client with this key has made."""
        return self._find(name, key, param).stored

    async def cancel(self, name: str, key: bytes) -> StoredResponse:
        """A response that ran in the background, at its end; raises as `get`."""
        if (running := self._find(name, key).running) is not None:
            await running.stop()
        return self.get(name, key)

    async def delete(self, name: str, key: bytes) -> None:
        """Forget a response, and cancel it if it runs; raises as `get`."""
        running = self._find(name, key).running
        self._drop(name)
        if running is not None:
            await running.stop()

    async def close(self) -> None:
        """Cancel what runs."""
        await asyncio.gather(*(entry.running.stop() for entry in self._running.values() if entry.running is not None))

    def _find(self, name: str, key: bytes, param: str = "response_id") -> _Entry:
        self._drop_old()
        entry = self._running.get(name) or self._entries.get(name)
        if entry is None or entry.owner != _digest(key):
            raise self._missing(name, param)
        return entry

    def _drop(self, name: str) -> None:
        for entries in (self._entries, self._running):
            if (entry := entries.pop(name, None)) is not None:
                self._num_bytes -= entry.num_bytes

    def _drop_old(self) -> None:
        now_s = self._clock()
        while self._entries and (oldest := next(iter(self._entries))) and self._entries[oldest].until_s <= now_s:
            self._drop(oldest)
        self._make_room(lambda: len(self._entries) + len(self._running) > self._max_responses, lambda entry: 1)
        self._make_room(lambda: self._num_bytes > self.max_bytes, lambda entry: entry.num_bytes)

    def _make_room(self, is_full: Callable[[], bool], weigh: Callable[[_Entry], int]) -> None:
        """Drop the oldest response of the key whose responses weigh most together, until there is room."""
        if not is_full():
            return
        names: dict[bytes, deque[str]] = {}
        weights: Counter[bytes] = Counter()
        for name, entry in self._entries.items():
            names.setdefault(entry.owner, deque()).append(name)
            weights[entry.owner] += weigh(entry)
        while self._entries and is_full():
            owner = max(weights, key=weights.__getitem__)
            name = names[owner].popleft()
            weights[owner] -= weigh(self._entries[name])
            self._drop(name)

    def _missing(self, name: str, param: str) -> ApiError:
        code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
        message = (
            f"there is no response {clip(name)}: one process of the gateway keeps the last {self._max_responses} "
            f"responses for {self._keep_s:g} s, in memory, and {self.max_bytes} bytes of all of them "
            "(--max-stored-bytes), conversations included; store in a response says whether it was kept: send the "
            "whole conversation as input"
        )
        return ApiError(404, message, param=param, code=code)


@dataclass(frozen=True)
class Keeper:
    """Keeps the response of one request, if it is to be kept."""

    store: ResponseStore | None
    key: bytes
    past: tuple[Item, ...]
    input: tuple[Item, ...]
    events: EventLog | None = None

    def stored(self, response: Mapping[str, Any]) -> StoredResponse:
        return StoredResponse(response, self.past, self.input, self.events)

    async def keep(self, response: dict[str, Any], num_bytes: int) -> None:
        """Keep a response that has ended, of about so many bytes with its conversation, or say in it that it is not."""
        if self.store is None:
            return
        stored = self.stored(response)
        await beside(num_bytes, stored.count_bytes)
        response["store"] = self.store.put(stored, self.key)
        if response.get(IN_BACKGROUND) and stored.num_bytes > self.store.max_bytes:
            response |= TOO_LARGE
            without_events = StoredResponse(response, self.past, self.input)  # its events may be too large alone
            response["store"] = any(self.store.put(each, self.key) for each in (self.stored(response), without_events))
        if self.events is not None:
            self.events.end(response, num_bytes)


def _digest(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()
