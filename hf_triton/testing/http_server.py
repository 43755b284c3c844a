# SPDX-License-Identifier: Apache-2.0
"""An HTTP/1.1 server on 127.0.0.1 with injected faults, which always stops promptly.

It gets its responses from a function and knows nothing about the Hub. Some faults replace a response (`fail`, `page`,
`drop`, `hang`), others damage the body of one (`truncate`, `corrupt`, `slow`).
"""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

_CHUNK_BYTES = 1 << 16
_SLOW_STEP_S = 0.05
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")

FaultKind = Literal["fail", "page", "drop", "hang", "truncate", "corrupt", "slow"]
_REPLACING: frozenset[FaultKind] = frozenset({"fail", "page", "drop", "hang"})
_DAMAGING: frozenset[FaultKind] = frozenset({"truncate", "corrupt", "slow"})


@dataclass(frozen=True)
class Response:
    """A response: `body` in memory, or the file at `body_path`, which may be requested in ranges."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    body_path: Path | None = None


@dataclass(frozen=True)
class Fault:
    """A fault and the requests that it applies to."""

    kind: FaultKind
    path: str | None = None
    """Matches requests whose unquoted path contains this; None matches every request."""
    times: int | None = None
    """Number of requests that it applies to, at least 1; None means all."""
    response: Response | None = None
    """The response that `fail` and `page` send instead."""
    amount: int | None = None
    """Bytes that `truncate` sends, bytes a second of `slow`, or the offset of the byte that `corrupt` flips (None: the
    middle)."""


class FaultBoard:
    """The pending faults; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def arm(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def take(self, kinds: frozenset[FaultKind], target: str) -> Fault | None:
        """Return the oldest matching fault and decrement its count."""
        path = unquote(urlsplit(target).path)
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.kind in kinds and (fault.path is None or fault.path in path):
                    self._decrement(index, fault)
                    return fault
        return None

    def _decrement(self, index: int, fault: Fault) -> None:
        if fault.times == 1:
            del self._faults[index]
        elif fault.times is not None:
            self._faults[index] = replace(fault, times=fault.times - 1)


Application = Callable[[str, str, str | None], Response]
"""Maps method, target (path and query as sent) and `Authorization` header to a response."""


class LoopbackServer(ThreadingHTTPServer):
    """Serves an application, one thread per connection, from construction until `stop`."""

    daemon_threads = False  # `stop` waits for all handlers, so that no thread or socket outlives a test
    request_queue_size = 64

    def __init__(self, application: Application, faults: FaultBoard) -> None:
        self.application = application
        self.faults = faults
        self.is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="loopback-server")
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, answered or not, and wait for their threads."""
        self.is_stopping.set()
        self.shutdown()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client disconnected
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        response = self.server.application(self.command, self.path, self.headers.get("Authorization"))
        fault = self.server.faults.take(_REPLACING, self.path)
        if fault is None:
            self._send(response)
        elif fault.response is not None:
            self._send(fault.response)
        else:
            if fault.kind == "hang":
                self.server.is_stopping.wait()
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - the base class looks for this name

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: `LoopbackHub.requests` has the requests."""

    def _send(self, response: Response) -> None:
        size_bytes = len(response.body) if response.body_path is None else response.body_path.stat().st_size
        status, headers, start, stop = response.status, dict(response.headers), 0, size_bytes
        if response.body_path is not None and "Range" in self.headers:
            status, start, stop = _parse_range(self.headers["Range"], size_bytes)
            if status != HTTPStatus.OK:
                shown = f"{start}-{stop - 1}" if stop > start else "*"
                headers["Content-Range"] = f"bytes {shown}/{size_bytes}"
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(stop - start)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD" or stop == start:
            return
        fault = self.server.faults.take(_DAMAGING, self.path) if status < 300 else None
        self._send_body(_read_chunks(response, start, stop), size_bytes, fault)

    def _send_body(self, chunks: Iterator[tuple[int, bytes]], size_bytes: int, fault: Fault | None) -> None:
        num_sent = 0
        for offset, chunk in chunks:
            if fault is None:
                self.wfile.write(chunk)
            elif fault.kind == "corrupt":
                flipped = size_bytes // 2 if fault.amount is None else fault.amount
                self.wfile.write(_flip_byte(chunk, flipped - offset))
            elif fault.kind == "slow":
                self._write_slowly(chunk, fault.amount or 1)
            else:
                limit_bytes = fault.amount or 0
                self.wfile.write(chunk[: limit_bytes - num_sent])
                num_sent += len(chunk)
                if num_sent >= limit_bytes:
                    self.close_connection = True
                    return

    def _write_slowly(self, chunk: bytes, bytes_per_s: int) -> None:
        step_bytes = max(1, int(bytes_per_s * _SLOW_STEP_S))
        for begin in range(0, len(chunk), step_bytes):
            step = chunk[begin : begin + step_bytes]
            self.wfile.write(step)
            if self.server.is_stopping.wait(len(step) / bytes_per_s):
                raise ConnectionAbortedError("the server is stopping")


def _parse_range(header: str, size_bytes: int) -> tuple[int, int, int]:
    """Status, first byte and byte after the last; other forms of the header are ignored, as RFC 9110 allows."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or not any(match.groups()):
        return HTTPStatus.OK, 0, size_bytes
    first, last = match.groups()
    if not first:
        return HTTPStatus.PARTIAL_CONTENT, max(0, size_bytes - int(last)), size_bytes
    start, stop = int(first), min(size_bytes, int(last) + 1 if last else size_bytes)
    if start >= stop:
        return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0
    return HTTPStatus.PARTIAL_CONTENT, start, stop


def _read_chunks(response: Response, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """The body in chunks, each with its offset in bytes."""
    if response.body_path is None:
        yield start, response.body[start:stop]
        return
    with response.body_path.open("rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(_CHUNK_BYTES, stop - start))):
            yield start, chunk
            start += len(chunk)


def _flip_byte(chunk: bytes, index: int) -> bytes:
    if not 0 <= index < len(chunk):
        return chunk
    return chunk[:index] + bytes([chunk[index] ^ 0xFF]) + chunk[index + 1 :]
