# SPDX-License-Identifier: Apache-2.0
"""A gateway in a thread, on a free port."""

import socket
import threading
from types import TracebackType

import uvicorn

from hf_triton.openai.config import GatewayConfig
from hf_triton.openai.server import uvicorn_config


class GatewayThread:
    """A running gateway as a context manager; `url` is its address."""

    def __init__(self, config: GatewayConfig) -> None:
        self._server = uvicorn.Server(uvicorn_config(config))
        self._socket = socket.create_server((config.host, config.port))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://{config.host}:{self.port}"

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
