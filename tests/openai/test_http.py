# SPDX-License-Identifier: Apache-2.0
"""What HTTP and balancers ask of the gateway beside its endpoints; without a Triton."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import httpx
import pytest

from hf_triton import __version__
from hf_triton_gateway import uvicorn_server
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http import http_rules
from hf_triton_gateway.http.health import CHECK_PATHS, LIVE_PATHS
from tests.support.gateway import GatewayThread

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def alone() -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton="127.0.0.1:1", port=0)) as gateway:
        yield gateway


def raw(gateway: GatewayThread, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to a request on a connection of its own."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/metrics", "/version", "/v1/models", "/openapi.json", "/no"])
def test_head_is_answered_as_get_without_a_body(alone: GatewayThread, path: str) -> None:
    got, head = httpx.get(alone.url + path), httpx.head(alone.url + path)
    assert head.status_code == got.status_code
    assert head.headers["content-type"] == got.headers["content-type"]
    assert not head.content
    request = f"HEAD {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()
    assert raw(alone, request)[1] == b""


def test_head_of_a_post_endpoint_is_refused(alone: GatewayThread) -> None:
    assert httpx.head(alone.url + CHAT).status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, {"POST"}), ("TRACE", "/health", {"GET", "HEAD"}), ("DELETE", "/openapi.json", {"GET", "HEAD"})],
)
def test_a_method_that_is_refused_is_told_those_that_are_not(
    alone: GatewayThread, method: str, path: str, allowed: set[str]
) -> None:
    answer = httpx.request(method, alone.url + path)
    assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, allowed)


def test_head_counts_for_its_endpoint(alone: GatewayThread) -> None:
    httpx.head(f"{alone.url}/version")
    assert 'hf_triton_openai_requests_total{endpoint="/version"' in httpx.get(f"{alone.url}/metrics").text


@pytest.mark.parametrize("path", CHECK_PATHS)
def test_health_has_the_names_of_other_servers(alone: GatewayThread, path: str) -> None:
    assert httpx.get(alone.url + path).status_code == (200 if path in LIVE_PATHS else 503)


def test_version_is_the_librarys(alone: GatewayThread) -> None:
    assert httpx.get(f"{alone.url}/version").json() == {"version": __version__}


@pytest.mark.parametrize("length", ["announced", "chunked"])
def test_refusal_of_a_large_body_reaches_a_client_that_closes(alone: GatewayThread, length: str) -> None:
    pieces = [b" " * 65536] * 320  # 20 MB
    body = b"".join(pieces) if length == "announced" else iter(pieces)
    headers = {"content-type": "application/json"}  # and urllib's own `Connection: close`
    request = urllib.request.Request(alone.url + CHAT, body, headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as answer:
        assert answer.code == 413
        assert json.load(answer)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("closes", [b"", b"connection: close\r\n"])
def test_the_rest_of_a_refused_request_is_not_waited_for(
    alone: GatewayThread, monkeypatch: pytest.MonkeyPatch, closes: bytes
) -> None:
    """It holds a place at a proxy, and its sender needs no key; `raw` reads until the gateway closes."""
    for module in (http_rules, uvicorn_server):
        monkeypatch.setattr(module, "LINGER_S", 0.1)
    answer, body = raw(alone, b"POST /v1/nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n" + closes + b"\r\n{")
    assert b" 404 " in answer
    assert json.loads(body)["error"]["code"] == "not_found"


@pytest.mark.parametrize("is_announced", [True, False])
def test_the_operators_limit_is_the_lower_one(is_announced: bool) -> None:
    body = b'{"model": "a", "prompt": "%b"}' % (b"a" * 1000)
    headers = {"content-type": "application/json"}
    with GatewayThread(GatewayConfig(triton="127.0.0.1:1", port=0, max_body_bytes=1000)) as gateway:
        content = body if is_announced else iter([body[:500], body[500:]])
        answer = httpx.post(f"{gateway.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert "more bytes than the 1000 that are accepted (--max-body-bytes): send less" in answer.text


def test_client_that_waits_to_be_asked_for_its_body_is_refused_at_once(alone: GatewayThread) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n" % CHAT.encode()
    answer, body = raw(alone, head + b"content-length: 90000000\r\nexpect: 100-continue\r\n\r\n")
    assert b" 413 " in answer
    assert json.loads(body)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET / HTTP/9.1\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"],
    ids=["version", "nonsense", "large head"],
)
def test_head_that_is_refused_gets_an_error_object(alone: GatewayThread, request_bytes: bytes) -> None:
    head, body = raw(alone, request_bytes)
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"content-type: application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("encoding", "status"), [("utf-8", 503), ("utf-8-sig", 503), ("utf-16", 400), ("utf-32", 400)])
def test_body_is_utf_8(alone: GatewayThread, encoding: str, status: int) -> None:
    body = json.dumps({"model": "a", "prompt": "caf\u00e9"}, ensure_ascii=False).encode(encoding)
    answer = httpx.post(f"{alone.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status  # 503: there is no Triton
    assert ("UTF-8" in answer.text) == (status == 400)


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/no", b"", "not_found"),
        ("GET", CHAT, b"", "method_not_allowed"),
        ("POST", CHAT, b"a=b", "unsupported_media_type"),
        ("POST", "/v1/embeddings", b'{"model": "a", "input": ""}', "invalid_parameter"),
        ("POST", "/tokenize", b'{"model": "a"}', "invalid_parameter"),
    ],
)
def test_every_error_has_a_code(alone: GatewayThread, method: str, path: str, body: bytes, code: str) -> None:
    kind = "application/json" if body.startswith(b"{") else "application/x-www-form-urlencoded"
    answer = httpx.request(method, alone.url + path, content=body, headers={"content-type": kind})
    assert answer.json()["error"]["code"] == code
