# SPDX-License-Identifier: Apache-2.0
"""Hostile bodies against a gateway's process: others are served meanwhile, and its memory stays. Without a Triton."""

import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from hf_triton.server import free_ports
from hf_triton_gateway.http.bodies import MAX_CONTAINERS, MAX_JSON_BYTES, MAX_VALUES
from hf_triton_gateway.http.limits import MAX_BYTES_IN_FLIGHT
from tests.support.serving import COMMAND
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.serial]
MAX_WAIT_S = 10.0
"""Of `/health/live`; a tenth of a second on a quiet machine, and minutes with one error object for each wrong item."""
MAX_CPU_S = 10.0
"""Of what takes half a second on a quiet machine."""
MAX_GROWTH = 200 << 20
FIELDS = [
    ("/v1/chat/completions", "messages"),
    ("/v1/chat/completions", "stop"),
    ("/v1/completions", "prompt"),
    ("/v1/responses", "input"),
    ("/v1/messages", "messages"),
    ("/v1/messages/count_tokens", "system"),
    ("/v1/embeddings", "input"),
    ("/v1/rerank", "documents"),
    ("/v1/score", "text_1"),
    ("/v1/classify", "input"),
    ("/tokenize", "messages"),
    ("/detokenize", "tokens"),
]
HELLO = [{"role": "user", "content": "Hello!"}]
REST = {"messages": HELLO, "max_tokens": 1, "prompt": "a", "input": "a", "query": "a", "text_1": "a", "text_2": "a"}
TAKES = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/v1/rerank": ("query",),
    "/v1/score": ("text_1", "text_2"),
}
PART = '{"type":"text","text":"a"}'


class Gateway(NamedTuple):
    url: str
    port: int
    pid: int

    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    [port] = free_ports(1)
    process = subprocess.Popen([COMMAND, "openai", "--triton=127.0.0.1:1", f"--port={port}"])
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, "the gateway has ended"
        try:
            return httpx.get(f"{url}/health/live", timeout=30).status_code == 200
        except httpx.ConnectError:
            return False

    try:
        wait_until(is_up, 120)
        yield Gateway(url, port, process.pid)
    finally:
        process.terminate()
        process.wait(60)


class Watch:
    """The longest time that `/health/live` took, as a context manager."""

    def __init__(self, gateway: Gateway) -> None:
        self._url = f"{gateway.url}/health/live"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.longest_s = 0.0

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._ended.wait(0.02):
                start_s = time.monotonic()
                assert client.get(self._url).status_code == 200
                self.longest_s = max(self.longest_s, time.monotonic() - start_s)


def filled(path: str, field: str, item: str, count: int) -> bytes:
    """A body with a list of items, which has the other required fields."""
    rest = {"model": "m", **{name: REST[name] for name in TAKES.get(path, ()) if name != field}}
    return f'{json.dumps(rest)[:-1]}, "{field}": [{",".join([item] * count)}]}}'.encode()


def check(gateway: Gateway, path: str, body: bytes) -> httpx.Response:
    """Send a body; the gateway serves others meanwhile, and takes little time and memory for both."""
    before, start_s = gateway.memory_bytes(), gateway.cpu_s()
    with Watch(gateway) as watch:
        headers = {"content-type": "application/json"}
        answer = httpx.post(gateway.url + path, content=body, headers=headers, timeout=60)
    assert watch.longest_s < MAX_WAIT_S
    assert gateway.cpu_s() - start_s < MAX_CPU_S
    assert gateway.memory_bytes() - before < MAX_GROWTH
    assert len(answer.content) < 1000
    return answer


@pytest.mark.parametrize("item", ["1", "{}"])
@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_list_of_four_megabytes_holds_nothing_up(gateway: Gateway, path: str, field: str, item: str) -> None:
    fills = (MAX_JSON_BYTES - 200) // (len(item) + 1)
    assert check(gateway, path, filled(path, field, item, fills)).status_code == 413
    most = MAX_VALUES - 100 if item == "1" else MAX_CONTAINERS - 100
    status = check(gateway, path, filled(path, field, item, most)).status_code
    takes_ids = item == "1" and field in ("prompt", "input", "tokens") and path != "/v1/responses"
    assert status == (503 if takes_ids else 400)  # 503: there is no Triton


@pytest.mark.parametrize(
    ("path", "field", "item", "count"),
    [
        ("/v1/messages", "messages", f'{{"role":"user","content":[{",".join([PART] * 30)}]}}', 1000),
        ("/v1/chat/completions", "messages", f'{{"role":"user","content":[{",".join([PART] * 30)}]}}', 1000),
        ("/v1/embeddings", "input", f"[{','.join(['12345'] * 340)}]", 1500),
        ("/v1/embeddings", "input", f'"{"Hello, " * 55}"', 10_000),
        ("/v1/rerank", "documents", f'{{"text": "{"Hello, " * 50}"}}', 10_000),
    ],
)
def test_body_within_all_limits_holds_nothing_up(
    gateway: Gateway, path: str, field: str, item: str, count: int
) -> None:
    body = filled(path, field, item, count)
    assert check(gateway, path, body).status_code == 503  # its parts are read in a thread


def test_object_of_many_names_holds_nothing_up(gateway: Gateway) -> None:
    names = ",".join(f'"a{number}":1' for number in range(MAX_CONTAINERS - 10))
    for field in ("chat_template_kwargs", "logit_bias", "metadata", "a"):
        body = f'{{"model":"m","messages":{json.dumps(HELLO)},"{field}":{{{names}}}}}'
        check(gateway, "/v1/chat/completions", body.encode())
    body = f'{{"model":"m","query":"a","documents":[{{{names}}}]}}'
    assert check(gateway, "/v1/rerank", body.encode()).status_code == 400
    body = f'{{"model":"m","messages":{json.dumps(HELLO)},{names}}}'
    assert check(gateway, "/v1/chat/completions", body.encode()).status_code == 400


def test_tools_in_namespaces_hold_nothing_up(gateway: Gateway) -> None:
    functions = ",".join(['{"type":"function","name":"f"}'] * 300)
    namespace = f'{{"type":"namespace","name":"n","tools":[{functions}]}}'
    body = filled("/v1/responses", "tools", namespace, 100)
    assert check(gateway, "/v1/responses", body).status_code == 400


def test_half_sent_bodies_hold_no_more_than_the_limit(gateway: Gateway) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % MAX_JSON_BYTES
    half = b" " * (MAX_JSON_BYTES - 1)
    num_connections = MAX_BYTES_IN_FLIGHT // len(half) + 16
    before, connections = gateway.memory_bytes(), []
    with ExitStack() as stack:
        for _ in range(num_connections):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            connection.settimeout(30)
            connection.sendall(head + half)
            connections.append(connection)
        small = httpx.post(f"{gateway.url}/v1/completions", json={"model": "m", "prompt": "a"}, timeout=60)
        assert small.status_code == 503, "a small body is taken"
        refused, _, _ = select.select(connections, [], [], 30)
        assert refused
        for connection in refused:
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"the requests in flight hold 256 MB" in answer
        assert gateway.memory_bytes() - before < MAX_BYTES_IN_FLIGHT + MAX_GROWTH
    body = filled("/v1/completions", "prompt", "1", MAX_VALUES - 100)
    wait_until(lambda: check(gateway, "/v1/completions", body).status_code == 503, 60)  # they are gone
