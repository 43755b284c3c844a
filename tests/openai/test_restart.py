# SPDX-License-Identifier: Apache-2.0
"""Triton is killed behind a running gateway, and comes back."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hf_triton.server import free_ports
from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.chat import build_chat_checkpoint
from tests.support.gateway import GatewayThread, wait_until
from tests.support.slow_model import DECOUPLED, SLOW_MODEL

PATIENCE_S = 30.0
BODY = {"model": "slow", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/responses": {"model": "slow", "input": "Hello", "max_output_tokens": 200},
    "/v1/messages": {"model": "slow", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200},
}


@contextlib.contextmanager
def events(gateway: GatewayThread, path: str) -> Iterator[Iterator[str]]:
    """The lines of a stream, after the first that has a piece of text."""
    body = {**STREAMS[path], "stream": True}
    with httpx.stream("POST", gateway.url + path, json=body, timeout=PATIENCE_S) as stream:
        lines = stream.iter_lines()
        while "delta" not in (line := next(lines)) and '"text"' not in line:
            pass
        yield lines


def status(gateway: GatewayThread, path: str, body: Any = None) -> int:
    method = "GET" if body is None else "POST"
    return httpx.request(method, gateway.url + path, json=body, timeout=PATIENCE_S).status_code


@pytest.mark.full
def test_killed_triton_is_an_error_at_once_and_is_found_again(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint, repository = build_chat_checkpoint(tmp_path / "chat"), tmp_path / "repository"
    folder = make_folder(repository, "slow", huggingface_model=checkpoint, config=DECOUPLED)
    (folder / "1" / "model.py").write_text(SLOW_MODEL)
    http, grpc, metrics = free_ports(3)
    ports = (http, grpc, metrics)
    with GatewayThread(GatewayConfig(triton=f"127.0.0.1:{grpc}", port=0)) as gateway:
        assert status(gateway, "/health") == 503  # not there yet
        assert status(gateway, "/v1/models") == 503
        with TritonServer(repository, ports=ports) as server:
            wait_until(lambda: status(gateway, "/v1/models") == 200)
            answers: list[int] = []
            waiting = threading.Thread(target=lambda: answers.append(status(gateway, "/v1/completions", BODY)))
            waiting.start()
            with contextlib.ExitStack() as stack:
                streams = [stack.enter_context(events(gateway, path)) for path in STREAMS]
                killed_s = time.monotonic()
                assert server.process is not None
                os.killpg(server.process.pid, signal.SIGKILL)
                lasts = [[line for line in lines if line][-1] for lines in streams]
            waiting.join(PATIENCE_S)
            assert time.monotonic() - killed_s < PATIENCE_S
            completion, response, message = (json.loads(last.removeprefix("data: ")) for last in lasts)
            assert completion["error"]["type"] == "server_error"
            assert (response["type"], response["response"]["status"]) == ("response.failed", "failed")
            assert response["response"]["error"]["code"] == "server_error"
            assert response["response"]["output"][0]["status"] == "incomplete"
            assert (message["type"], message["error"]["type"]) == ("error", "overloaded_error")
            assert answers == [503]
            assert status(gateway, "/v1/completions", BODY) == 503
            assert status(gateway, "/health") == 503
        with TritonServer(repository, ports=ports):
            wait_until(lambda: status(gateway, "/v1/completions", {**BODY, "max_tokens": 2}) == 200)
            assert status(gateway, "/health") == 200
