# SPDX-License-Identifier: Apache-2.0
"""A client that leaves, and one that reads nothing: their requests are cancelled."""

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread, num_running, wait_until

LONG = {"max_tokens": 200, "ignore_eos": True}
"""20 seconds of the model `slow`."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], **LONG}),
    "completion": ("/v1/completions", {"prompt": "Hello", **LONG}),
    "response": ("/v1/responses", {"input": "Hello!", "max_output_tokens": 200}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 200}),
    "several completions": ("/v1/completions", {"prompt": ["Hello", "Today", "The"], **LONG}),
}


@pytest.mark.parametrize(
    ("name", "is_stream"),
    [
        *(("chat", False), ("chat", True), ("completion", True), ("response", False)),
        *(("message", True), ("several completions", False)),
    ],
)
def test_request_of_a_client_that_left_is_cancelled(
    gateway: GatewayThread, triton: TritonServer, name: str, is_stream: bool
) -> None:
    path, body = BODIES[name]
    with httpx.Client(timeout=60) as client:
        request = client.build_request("POST", gateway.url + path, json={"model": "slow", "stream": is_stream, **body})
        if is_stream:
            answer = client.send(request, stream=True)
            lines = answer.iter_lines()
            next(lines)
            wait_until(lambda: num_running(triton) > 0)
            answer.close()
        else:
            request.extensions["timeout"]["read"] = 0.7
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
    wait_until(lambda: num_running(triton) == 0)


def test_a_client_that_leaves_ends_no_other_request_of_its_id(gateway: GatewayThread) -> None:
    """Clients name their requests, and may name two alike."""
    body, headers = {"model": "slow", "prompt": "Hello", "max_tokens": 30, "ignore_eos": True}, {"x-request-id": "a"}
    url = f"{gateway.url}/v1/completions"
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60, headers=headers) as client:
        stays = pool.submit(client.post, url, json=body)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=0.7)
        answer = stays.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 30


@pytest.fixture(scope="module")
def hasty(triton: TritonServer) -> Iterator[GatewayThread]:
    """A gateway whose clients must be quick."""
    config = GatewayConfig(triton=triton.grpc_url, port=0, write_timeout_s=1, read_timeout_s=1, max_header_bytes=4096)
    with GatewayThread(config) as running:
        yield running


def send(gateway: GatewayThread, content: bytes, receive_bytes: int = 65536) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", gateway.port))
    connection.sendall(content)
    return connection


def http_request(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    return f"{head}\r\n\r\n".encode() + content


@pytest.mark.full
def test_client_that_takes_nothing_is_disconnected(hasty: GatewayThread, triton: TritonServer) -> None:
    body = {"model": "decoupled", "prompt": ["a"] * 64, "n": 32, "stream": True, "max_tokens": 200}
    with send(hasty, http_request(body), receive_bytes=4096):
        wait_until(lambda: num_running(triton) > 0)
        wait_until(lambda: num_running(triton) == 0)


@pytest.mark.parametrize("start", [b"", b"POST /v1/comp", http_request({"model": "tiny"})[:-5]])
def test_request_that_does_not_arrive_ends_its_connection(hasty: GatewayThread, start: bytes) -> None:
    with send(hasty, start) as connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(1000) == b""


def test_head_that_is_too_large_is_refused(hasty: GatewayThread) -> None:
    with send(hasty, b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 5000 + b"\r\n\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{hasty.url}/v1/models").status_code == 200
