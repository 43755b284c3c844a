# SPDX-License-Identifier: Apache-2.0
"""A small HTTP client: returns status and body, and leaves no connection open."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hf_triton.testing import TritonServer


class HttpServer(Protocol):
    @property
    def http_url(self) -> str: ...


@dataclass(frozen=True)
class Reply:
    status: int
    body: str

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json()["error"])


def post(
    server: HttpServer,
    path: str,
    body: object,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    # Triton takes urllib's own content type for a web form, and dies when it is longer than its stack: server #5840.
    sent = {"Content-Type": "application/json", **(headers or {})}
    return _send(urllib.request.Request(server.http_url + path, data=data, headers=sent, method=method), timeout_s)


def get(server: HttpServer, path: str) -> Reply:
    return _send(urllib.request.Request(server.http_url + path), 10.0)


def generate(server: TritonServer, model: str, text: object, timeout_s: float = 60.0, **fields: object) -> Reply:
    """POST /generate with top-level keys."""
    return post(server, f"/v2/models/{model}/generate", {"text_input": text, **fields}, timeout_s)


def infer(
    server: TritonServer,
    model: str,
    texts: list[str],
    shape: list[int] | None = None,
    parameters: dict[str, object] | None = None,
    timeout_s: float = 60.0,
) -> Reply:
    """POST /infer with one BYTES tensor."""
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": shape or [len(texts)], "data": texts}
    body: dict[str, object] = {"inputs": [tensor]}
    if parameters is not None:
        body["parameters"] = parameters
    return post(server, f"/v2/models/{model}/infer", body, timeout_s)


@dataclass(frozen=True)
class Event:
    data: Any
    arrival_s: float


@dataclass(frozen=True)
class Events:
    status: int
    content_type: str
    events: list[Event]

    @property
    def data(self) -> list[Any]:
        return [event.data for event in self.events]

    def text(self, output: str = "text_output") -> str:
        assert self.status == 200, self.data
        return "".join(data[output] for data in self.data)


def generate_stream(
    server: TritonServer, model: str, text: object, timeout_s: float = 60.0, **fields: object
) -> Events:
    """POST /generate_stream with top-level keys, and read to the end."""
    with open_stream(server, model, text, timeout_s, **fields) as response:
        events = list(read_events(response))
        return Events(response.status, response.headers["Content-Type"], events)


@contextmanager
def open_stream(
    server: TritonServer, model: str, text: object, timeout_s: float = 60.0, **fields: object
) -> Iterator[http.client.HTTPResponse]:
    """POST /generate_stream; the connection is closed at the end, read or not."""
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=timeout_s)
    try:
        body = json.dumps({"text_input": text, **fields})
        connection.request("POST", f"/v2/models/{model}/generate_stream", body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def read_events(response: http.client.HTTPResponse) -> Iterator[Event]:
    """Server-sent events as Triton writes them: one line of data, and an empty one."""
    while line := response.readline():
        assert line.startswith(b"data: "), line
        assert line.endswith(b"\n"), line
        assert response.readline() == b"\n", line
        yield Event(json.loads(line.removeprefix(b"data: ")), time.monotonic())


def _send(request: urllib.request.Request, timeout_s: float) -> Reply:
    request.add_header("Connection", "close")  # an idle connection holds Triton's exit for 30 s
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read().decode(errors="replace"))  # Triton shows a client's own bytes
