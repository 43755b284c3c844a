# SPDX-License-Identifier: Apache-2.0
"""A client that costs next to nothing, for measurements in which it shares a few cores with the server.

Requests are written before the clock starts; responses are read as they come and checked after the clock has stopped.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import select
import socket
import time
import urllib.parse
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import cast

EVENT = b"data: {"
LAST_CHUNK = b"\r\n0\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
TIMEOUT_S = 600


class LostAnswerError(Exception):
    """A response is missing or wrong."""


class LeanClient:
    """Kept-alive connections to one server."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._sockets: list[socket.socket] = []
        self.first_s: list[float] = []
        """Seconds from the request to the first event of each stream that was read last; 0 of what is no stream."""

    def close(self) -> None:
        """Close the connections: an open one delays the server's exit."""
        for each in self._sockets:
            each.close()

    def connect(self, count: int) -> None:
        """Open `count` new connections: a server closes those that were idle for long."""
        self.close()
        self._sockets.clear()
        self._connected(count)

    def post(self, path: str, bodies: Iterable[object], width: int) -> tuple[float, list[str]]:
        """Send requests, `width` of them in flight.

        Returns:
            The seconds from the first request to the end of the last answer, and the answers in the requests' order.

        Raises:
            LostAnswerError: One was not answered with status 200.
        """
        requests = [self._request(path, json.dumps(body).encode()) for body in bodies]
        answers = [b""] * len(requests)
        waiting = iter(range(len(requests)))
        poll, numbers = select.epoll(), dict[int, int]()
        sent_s, self.first_s = [0.0] * len(requests), [0.0] * len(requests)
        started_s = time.perf_counter()
        for connection, number in zip(self._connected(min(width, len(requests))), waiting, strict=False):
            poll.register(connection, select.EPOLLIN)
            numbers[connection.fileno()] = number
            sent_s[number] = time.perf_counter()
            connection.sendall(requests[number])
        connections = {each.fileno(): each for each in self._sockets}
        while numbers:
            ready = poll.poll(TIMEOUT_S)
            if not ready:
                raise LostAnswerError(f"{len(numbers)} without an answer in {TIMEOUT_S} s")
            for place, _ in ready:
                number = numbers[place]
                received = connections[place].recv(1 << 16)
                answers[number] += received
                if not received:
                    raise LostAnswerError(f"cut off: {answers[number]!r}")
                if not self.first_s[number] and EVENT in answers[number]:
                    self.first_s[number] = time.perf_counter() - sent_s[number]
                if not _is_whole(answers[number]):
                    continue
                successor = next(waiting, None)
                if successor is None:
                    del numbers[place]
                    poll.unregister(place)  # the server may close it before the others have their answers
                else:
                    numbers[place] = successor
                    sent_s[successor] = time.perf_counter()
                    connections[place].sendall(requests[successor])
        wall_s = time.perf_counter() - started_s
        poll.close()
        return wall_s, [_content(answer) for answer in answers]

    def _connected(self, count: int) -> Sequence[socket.socket]:
        while len(self._sockets) < count:
            connection = socket.create_connection(self._address, TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(connection)
        return self._sockets[:count]

    def _request(self, path: str, body: bytes) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self._address[0]}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "",
            "",
        ]
        return "\r\n".join(lines).encode() + body


def _is_whole(answer: bytes) -> bool:
    """Whether a response has ended: Triton and all streams send chunks, others say how long they are."""
    if answer.endswith(LAST_CHUNK):
        return True
    head, _, body = answer.partition(b"\r\n\r\n")
    length = LENGTH.search(head)
    return length is not None and len(body) >= int(length[1])


class _Received(io.BytesIO):
    """Bytes as `http.client` reads them from a socket."""

    def makefile(self, *_: object) -> _Received:
        return self


def _content(answer: bytes) -> str:
    response = http.client.HTTPResponse(cast(socket.socket, _Received(answer)))
    response.begin()
    content = response.read().decode()
    if response.status != HTTPStatus.OK:
        raise LostAnswerError(f"status {response.status}: {content[:200]}")
    return content
