# SPDX-License-Identifier: Apache-2.0
"""Triton is killed behind a running gateway, and comes back."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from hf_triton.openai.config import GatewayConfig
from hf_triton.server import free_ports
from hf_triton.testing import TritonServer
from tests.support.chat import build_chat_checkpoint
from tests.support.gateway import GatewayThread, wait_until
from tests.support.slow_model import DECOUPLED, SLOW_MODEL

PATIENCE_S = 10.0
BODY = {"model": "slow", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True}


def status(gateway: GatewayThread, path: str, body: Any = None) -> int:
    method = "GET" if body is None else "POST"
    return httpx.request(method, gateway.url + path, json=body, timeout=PATIENCE_S).status_code


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
            with httpx.stream(
                "POST", f"{gateway.url}/v1/completions", json={**BODY, "stream": True}, timeout=PATIENCE_S
            ) as stream:
                lines = stream.iter_lines()
                next(lines)
                killed_s = time.monotonic()
                assert server.process is not None
                os.killpg(server.process.pid, signal.SIGKILL)
                *_, last = [line for line in lines if line]
            waiting.join(PATIENCE_S)
            assert time.monotonic() - killed_s < PATIENCE_S
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
            assert answers == [503]
            assert status(gateway, "/v1/completions", BODY) == 503
            assert status(gateway, "/health") == 503
        with TritonServer(repository, ports=ports):
            wait_until(lambda: status(gateway, "/v1/completions", {**BODY, "max_tokens": 2}) == 200)
            assert status(gateway, "/health") == 200
