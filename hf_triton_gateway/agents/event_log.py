# SPDX-License-Identifier: Apache-2.0
"""EventLog: the events of one response that runs in the background, for clients that follow it and come back."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from hf_triton_gateway.agents.response_events import last_event
from hf_triton_gateway.http.bodies import beside

NUM_PACKED: Final = 128
"""Events that are packed together: they repeat each other, and take a tenth of their bytes."""
END: Final = b"\n\n"
"""The end of an event, which JSON does not hold."""


class EventLog:
    """Belongs to one event loop. The last event is made of the response: it is kept anyway."""

    def __init__(self) -> None:
        self._packs: list[bytes] = []
        self._events: list[bytes] = []  # that are not packed yet
        self._response: Mapping[str, Any] | None = None
        self._num_bytes = 0  # of the response
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return NUM_PACKED * len(self._packs) + len(self._events)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._packs)) + sum(map(len, self._events))

    def append(self, data: bytes) -> None:
        """Add events, numbered as they come."""
        for event in data.split(END)[:-1]:
            self._events.append(event + END)
            if len(self._events) == NUM_PACKED:
                self._packs.append(zlib.compress(b"".join(self._events), 1))
                self._events = []
        self._note_change()

    def end(self, response: Mapping[str, Any], num_bytes: int) -> None:
        """Note the response as it ended, of about so many bytes."""
        self._response, self._num_bytes = response, num_bytes
        self._note_change()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The events behind the one of a number, those that are yet to come included."""
        number = after + 1
        while self._response is None or number < len(self):
            if number < len(self):
                events = self._since(number)
                number += len(events)
                yield b"".join(events)
            else:
                await self._changed.wait()
        yield await beside(self._num_bytes, last_event, self._response, number) if number == len(self) else b""

    def _since(self, number: int) -> list[bytes]:
        """Events from a number on, one at least."""
        index, skipped = divmod(number, NUM_PACKED)
        if index == len(self._packs):
            return self._events[skipped:]
        return [event + END for event in zlib.decompress(self._packs[index]).split(END)[skipped:-1]]

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
