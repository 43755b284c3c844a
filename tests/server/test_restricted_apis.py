# SPDX-License-Identifier: Apache-2.0
"""Restricted APIs, explicit mode, Triton's tracing and no metrics together: folders, stream door and gateway."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hf_triton.errors import SettingsError
from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.triton.triton_headers import read_headers
from tests.support.client import Reply, post
from tests.support.gateway import GatewayThread, add_demo

pytestmark = pytest.mark.full

KEY = "a-key-that-must-not-be-logged"
FLAGS = [
    "--model-control-mode=explicit",
    f"--http-restricted-api=inference,model-repository:x-api-key={KEY}",
    f"--grpc-restricted-protocol=inference,model-repository,model-config,health:x-api-key={KEY}",
    *("--trace-config", "mode=opentelemetry", "--trace-config", "rate=1", "--trace-config", "level=TIMESTAMPS"),
    *("--trace-config", "opentelemetry,url=http://127.0.0.1:9/v1/traces"),
    "--allow-metrics=false",
]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("restricted")
    add_demo(repository)
    with TritonServer(repository, arguments=FLAGS) as running:
        yield running


def send(server: TritonServer, path: str, body: object, key: str = KEY) -> Reply:
    return post(server, path, body, headers={"x-api-key": key})


@pytest.fixture(scope="module")
def loaded(server: TritonServer) -> TritonServer:
    for name in ("demo", "demo_stream"):
        assert send(server, f"/v2/repository/models/{name}/load", {}).status == 200, server.log_tail()
    return server


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    path = tmp_path / "headers"
    path.write_text(f"# Triton's\n\ntriton-grpc-protocol-x-api-key: {KEY}\n")
    return path


def test_the_key_opens_loading_and_inference(loaded: TritonServer) -> None:
    body = {"text_input": "Hello", "max_tokens": 3}
    for path in ("demo/generate", "demo_stream/generate_stream"):
        assert send(loaded, f"/v2/models/{path}", body).status == 200
        assert send(loaded, f"/v2/models/{path}", body, key="wrong").status == 403
    assert send(loaded, "/v2/repository/models/demo/load", {}, key="wrong").status == 403


def test_the_gateway_sends_the_header_and_never_logs_it(
    loaded: TritonServer, headers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    config = GatewayConfig(triton=loaded.grpc_url, port=0, triton_headers_file=headers)
    with GatewayThread(config) as gateway, httpx.Client(trust_env=False, timeout=60) as client:
        assert [model["id"] for model in client.get(f"{gateway.url}/v1/models").json()["data"]] == ["demo"]
        answer = client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        streamed = client.post(f"{gateway.url}/v1/chat/completions", json=CHAT | {"stream": True})
        assert client.get(f"{gateway.url}/health").status_code == 200
    assert (answer.status_code, streamed.text[-14:].strip()) == (200, "data: [DONE]"), answer.text
    assert KEY not in caplog.text
    assert KEY not in answer.text + streamed.text


def test_without_the_header_the_gateway_says_what_is_missing(loaded: TritonServer) -> None:
    with (
        GatewayThread(GatewayConfig(triton=loaded.grpc_url, port=0)) as gateway,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        answer = client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 403
    assert "expecting header 'triton-grpc-protocol-x-api-key'" in answer.json()["error"]["message"]


def test_unload_and_load_while_the_gateway_runs(loaded: TritonServer, headers: Path) -> None:
    config = GatewayConfig(triton=loaded.grpc_url, port=0, triton_headers_file=headers)
    with GatewayThread(config) as gateway, httpx.Client(trust_env=False, timeout=60) as client:
        for name in ("demo_stream", "demo"):
            assert send(loaded, f"/v2/repository/models/{name}/unload", {}).status == 200
        gone = client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        assert gone.status_code in (404, 503), gone.text
        for name in ("demo", "demo_stream"):
            assert send(loaded, f"/v2/repository/models/{name}/load", {}).status == 200
        again = client.post(f"{gateway.url}/v1/chat/completions", json=CHAT | {"stream": True})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"x-api-key {KEY}", "line 1: must be NAME: VALUE"),
        (f"x: y\ngrpc-timeout: {KEY}", "line 2: must be NAME: VALUE"),
        (f"k\N{LATIN SMALL LETTER E WITH ACUTE}y: {KEY}", "line 1: must be NAME: VALUE"),
        (f"x-bin: {KEY}", "line 1: must be NAME: VALUE"),
    ],
)
def test_a_wrong_file_is_refused_without_quoting_it(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "headers").write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_headers(tmp_path / "headers")
    assert KEY not in str(caught.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_headers(tmp_path / "none")
