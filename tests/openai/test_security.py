# SPDX-License-Identifier: Apache-2.0
"""API keys, origins, limits, and what the log says."""

import codecs
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from hf_triton.errors import SettingsError
from hf_triton.testing import TritonServer
from hf_triton_gateway.app import build_app
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.keys.security import ApiKeys
from tests.support.gateway import GatewayThread, num_running, wait_until
from tests.support.marks import full

KEY, OTHER_KEY = "sk-first-4711", "sk-second-0815"
ORIGIN = "https://chat.example.com"


def status(gateway: GatewayThread, path: str = "/v1/models", **headers: str) -> int:
    return httpx.get(gateway.url + path, headers=headers).status_code


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# for tests\n\n{KEY}\n  {OTHER_KEY}  \n")
    return path


@pytest.fixture
def alone(keys: Path) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton="127.0.0.1:1", port=0, api_key_file=keys)) as gateway:
        yield gateway


def is_accepted(gateway: GatewayThread, key: str = KEY) -> bool:
    return status(gateway, "/version", authorization=f"Bearer {key}") == 200


def test_keys_of_a_file_are_required(triton: TritonServer, keys: Path) -> None:
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=keys)) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY) as client:
            assert len(list(client.models.list())) > 1
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-wrong") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.models.list()
            assert refused.value.code == "invalid_api_key"
        assert status(gateway, **{"x-api-key": OTHER_KEY}) == 200
        assert status(gateway, authorization=f"bearer {OTHER_KEY}") == 200
        for wrong in ("", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer # for tests"):
            assert status(gateway, authorization=wrong) == 401
        assert status(gateway, f"/v1/models?api_key={KEY}&key={KEY}&access_token={KEY}") == 401
        assert status(gateway, "/metrics") == 401
        assert status(gateway, "/health") == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer sk-of-another")],
        [("authorization", "Bearer sk-of-another"), ("Authorization", f"Bearer {KEY}")],
        [("x-api-key", KEY), ("x-api-key", OTHER_KEY)],
        [("authorization", f"Bearer {KEY}, Bearer sk-of-another")],
        [("authorization", f"Bearer {KEY}"), ("x-api-key", OTHER_KEY)],
        [("authorization", "Bearer sk-of-another"), ("x-api-key", KEY)],
    ],
)
def test_two_keys_are_none(alone: GatewayThread, headers: list[tuple[str, str]]) -> None:
    """A proxy in front may have checked, or counted, the other."""
    assert httpx.get(f"{alone.url}/version", headers=headers).status_code == 401


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", "Bearer", "Basic dXNlcjpwYXNz"])
def test_one_key_may_have_company(alone: GatewayThread, authorization: str) -> None:
    """It itself, nothing, or what a proxy asks for."""
    headers = {"authorization": authorization, "x-api-key": KEY}
    assert httpx.get(f"{alone.url}/version", headers=headers).status_code == 200


SMUGGLED = {
    "two lengths": "Content-Length: 0\r\nContent-Length: 44",
    "length and chunks": "Content-Length: 44\r\nTransfer-Encoding: chunked",
    "chunks by another name": "Transfer-Encoding: xchunked",
    "chunks not last": "Transfer-Encoding: chunked, identity",
    "a space before the colon": "Content-Length : 44",
    "a signed length": "Content-Length: +44",
}


@pytest.mark.parametrize("headers", SMUGGLED.values(), ids=SMUGGLED)
def test_a_request_of_two_readings_is_refused(alone: GatewayThread, headers: str) -> None:
    hidden = f"GET /version HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n{headers}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", alone.port), 10) as connection:
        connection.sendall(f"{head}0\r\n\r\n{hidden}".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1, "what hides in the body is answered"


def test_the_page_needs_no_key_and_a_request_to_its_address_does(alone: GatewayThread) -> None:
    assert status(alone, "/") == 200
    assert httpx.head(f"{alone.url}/").status_code == 200
    for path in ("/", "/embed", "/v2/embed"):
        refused = httpx.post(f"{alone.url}{path}", json={"inputs": "a"})
        assert refused.status_code == 401
        assert KEY not in refused.text


def test_keys_are_replaced_with_their_file(alone: GatewayThread, keys: Path) -> None:
    assert is_accepted(alone)
    new = keys.with_name("new")
    new.write_text("sk-third  # of the third client\nsk#fourth\n")
    new.rename(keys)
    wait_until(lambda: is_accepted(alone, "sk-third"))
    assert is_accepted(alone, "sk#fourth")
    assert not is_accepted(alone)
    assert not is_accepted(alone, "sk-third  # of the third client")


@pytest.mark.parametrize(
    "change",
    [
        "removed",
        "emptied",
        *full("comments", "folder", "pipe", "locked"),
    ],
)
def test_file_without_a_key_revokes_all(alone: GatewayThread, keys: Path, change: str) -> None:
    assert is_accepted(alone)
    if change in ("emptied", "comments"):
        keys.write_text("" if change == "emptied" else f"# {KEY}\n")
    elif change == "locked":
        keys.write_text("\n")
        keys.chmod(0)
    else:
        keys.unlink()
        if change == "folder":
            keys.mkdir()
        elif change == "pipe":
            os.mkfifo(keys)
    wait_until(lambda: not is_accepted(alone))
    assert status(alone, "/health/live") == 200
    if change == "removed":
        keys.write_text(KEY)
        wait_until(lambda: is_accepted(alone))


def test_key_file_that_hangs_holds_nothing_up(
    alone: GatewayThread, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, may_go_on = threading.Event(), threading.Event()

    def hang(path: Path) -> bytes:
        hangs.set()
        assert may_go_on.wait(60)
        return b"sk-late\n"

    monkeypatch.setattr(Path, "read_bytes", hang)
    keys.write_text("sk-late\n")
    assert hangs.wait(30)
    assert is_accepted(alone), "what the file says is not known: the keys stay"
    may_go_on.set()
    wait_until(lambda: is_accepted(alone, "sk-late"))


def test_key_file_of_another_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(codecs.BOM_UTF8 + f"{KEY}\r\n{OTHER_KEY}\t# of another\r\n".encode())
    keys = ApiKeys(path, Metrics())
    assert keys.find(KEY.encode()) is not None
    assert keys.find(OTHER_KEY.encode()) is not None


@pytest.mark.parametrize("text", [None, "", "# no key\n", "pipe"])
def test_file_without_a_key_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys"
    if text == "pipe":
        os.mkfifo(path)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match="api_key_file"):
        build_app(GatewayConfig(api_key_file=path))


def test_other_origins_are_refused(triton: TritonServer, gateway: GatewayThread) -> None:
    assert "access-control-allow-origin" not in httpx.get(f"{gateway.url}/health", headers={"origin": ORIGIN}).headers
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, allowed_origins=(ORIGIN,))) as open_gateway:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        url = f"{open_gateway.url}/v1/chat/completions"
        allowed = httpx.options(url, headers={"origin": ORIGIN, **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        refused = httpx.options(url, headers={"origin": "https://evil.example.com", **asked})
        assert refused.status_code == 400


def test_requests_beyond_the_limit_are_told_to_come_again(triton: TritonServer) -> None:
    config = GatewayConfig(triton=triton.grpc_url, port=0, max_concurrent_requests=1)
    body = {"model": "slow", "prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
    with GatewayThread(config) as gateway:
        answers: list[int] = []

        def complete() -> None:
            answers.append(httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).status_code)

        first = threading.Thread(target=complete)
        wait_until(lambda: num_running(triton) == 0)
        first.start()
        wait_until(lambda: num_running(triton) > 0)
        second = httpx.post(f"{gateway.url}/v1/completions", json=body)
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert status(gateway, "/health") == 200
        first.join()
        assert answers == [200]


def test_request_that_takes_too_long_ends_with_504(triton: TritonServer) -> None:
    body = {"model": "slow", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, timeout_s=0.7)) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 504
        stream = httpx.post(f"{gateway.url}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert '"code": "deadline_exceeded"' in stream.text.rstrip().splitlines()[-1]
    wait_until(lambda: num_running(triton) == 0)


def test_log_has_no_prompt_no_key_and_no_query(gateway: GatewayThread, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": "demo", "prompt": "canary-prompt", "max_tokens": 1}
    with caplog.at_level(logging.INFO, "hf_triton_gateway"):
        httpx.post(
            f"{gateway.url}/v1/completions?q=canary-query", json=body, headers={"authorization": "Bearer canary-key"}
        )
        httpx.post(f"{gateway.url}/v1/completions", json={**body, "unknown": "canary-value"})
        wait_until(lambda: sum("/v1/completions" in line for line in _log(caplog)) == 2)
    assert "canary" not in "".join(_log(caplog))  # beside them stands that a field was passed over, once in a process


@pytest.mark.parametrize(
    ("forwarded", "logged"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("203.0.113.7, 198.51.100.9", "198.51.100.9"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("2001:db8::1%eth0 GET /v1/models 200", "2001:db8::1"),
        ("127.0.0.1 GET /v1/models 200 0.1 ms forged", "-"),
        ("someone", "-"),
    ],
)
def test_the_address_in_a_log_line_is_an_address(caplog: pytest.LogCaptureFixture, forwarded: str, logged: str) -> None:
    with (
        GatewayThread(GatewayConfig(triton="localhost:1", port=0)) as gateway,
        caplog.at_level(logging.INFO, "hf_triton_gateway"),
    ):
        httpx.get(f"{gateway.url}/page/none", headers={"x-forwarded-for": forwarded})
        wait_until(lambda: any("/page/none" in line for line in _log(caplog)))
    assert [line.startswith(f"{logged} GET '/page/none' ") for line in _log(caplog) if "/page/none" in line] == [True]


def _log(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hf_triton_gateway"]
