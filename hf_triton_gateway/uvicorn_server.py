# SPDX-License-Identifier: Apache-2.0
"""Runs the gateway: uvicorn in the foreground, with limits of time and size on connections."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
import sys
from functools import partial
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from hf_triton.errors import OneLineFormatter
from hf_triton.scratch import ScratchFolder
from hf_triton_gateway.app import build_app
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.gateway_metrics import SHARED
from hf_triton_gateway.http.http_rules import LINGER_S
from hf_triton_gateway.http.tls import ServerCertificate

KEEP_ALIVE_S: Final = 75
"""How long an idle connection is kept."""


class LimitedProtocol(HttpToolsProtocol):
    """HTTP with limits: a request arrives in time, its head is small, and its client takes the response."""

    limits: GatewayConfig

    _num_header_bytes = 0
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Give a new connection's first request its time."""
        super().connection_made(transport)
        self.limits = self.app_state["config"]
        self._start_read_timer(self.limits.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_read_timer(self.limits.read_timeout_s)
        super().data_received(data)
        if self._num_header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or a head, with an error object."""
        body = ApiError(400, msg).response()
        headers = [*body.raw_headers, (b"connection", b"close")]
        lines = [b"HTTP/1.1 400 Bad Request", *(b"%b: %b" % header for header in headers)]
        self.transport.write(b"\r\n".join((*lines, b"", bytes(body.body))))
        self.transport.close()

    def on_message_begin(self) -> None:
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes <= self.limits.max_header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request unless its head is refused."""
        if self._num_header_bytes <= self.limits.max_header_bytes:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_read_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give a request that is answered before it has arrived little time for the rest."""
        if self._read_timer is not None:
            self._stop_read_timer()
            self._start_read_timer(min(LINGER_S, self.limits.read_timeout_s))
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to: watch whether it reads at all."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stop_write_timer()
        super().resume_writing()

    def _start_read_timer(self, time_s: float) -> None:
        self._read_timer = self.loop.call_later(time_s, self.transport.abort)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _watch_writing(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self._check_writing)

    def _check_writing(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_writing()
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _build_worker_app(config: GatewayConfig) -> FastAPI:
    """The application, in the process that serves it; each of several workers sets up its own log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return build_app(config)


def _ssl_context(config: GatewayConfig, *unused: object) -> ssl.SSLContext:
    return ServerCertificate(config).context


def uvicorn_config(config: GatewayConfig) -> uvicorn.Config:
    """Uvicorn's settings for a gateway."""
    return uvicorn.Config(
        partial(_build_worker_app, config),
        factory=True,
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        workers=config.workers,
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_context_factory=None if config.ssl_certfile is None else partial(_ssl_context, config),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout_s),
    )


def run(config: GatewayConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    _build_worker_app(config)  # its errors are raised here, not in a worker
    if config.ssl_certfile is not None:
        ServerCertificate(config)
    settings = uvicorn_config(config)
    if config.workers > 1:
        with ScratchFolder("metrics") as folder:
            os.environ[SHARED] = folder  # workers are processes of their own, which inherit it
            Multiprocess(settings, sockets=[settings.bind_socket()]).run()
    else:
        uvicorn.Server(settings).run()
