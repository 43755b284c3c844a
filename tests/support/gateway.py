# SPDX-License-Identifier: Apache-2.0
"""A gateway in a thread, on a free port, and what its tests need of the server behind it."""

import re
import shutil
import socket
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.uvicorn_server import uvicorn_config
from tests.support.paths import ROOT
from tests.support.waiting import wait_until as wait_until

RUNNING = ("hf_triton_rows_running", "hf_triton_requests_in_flight")


class GatewayThread:
    """A running gateway as a context manager; `url` is its address."""

    def __init__(self, config: GatewayConfig) -> None:
        self._server = uvicorn.Server(uvicorn_config(config))
        self._socket = socket.create_server((config.host, config.port))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self.port = int(self._socket.getsockname()[1])
        self.url = f"{config.scheme}://{config.host}:{self.port}"

    def __enter__(self) -> "GatewayThread":
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway did not start"
            self._thread.join(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(40)
        self._socket.close()


def add_demo(repository: Path) -> None:
    """Add the demo model and its stream door to a model repository."""
    folder = repository / "demo"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("from hf_triton import TritonPythonModel as TritonPythonModel\n")
    parameters = {"huggingface_model": ROOT / "hf_triton" / "demo", "max_output_length": 64}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "python"', *lines]) + "\n")
    shutil.copytree(ROOT / "stream_door", repository / "demo_stream")


def has_field(body: Any, path: str) -> bool:
    """Whether a request's body has the field that an error's `param` names: `messages[2].content`."""
    for position, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path):
        try:
            body = body[int(position)] if position else body[name]
        except (LookupError, TypeError):
            return False
    return True


def num_running(server: TritonServer) -> float:
    """Sequences in the engines of all models."""
    with urllib.request.urlopen(server.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RUNNING))
