# SPDX-License-Identifier: Apache-2.0
"""Limits of requests: bytes of a body, bytes of all bodies, requests in flight. A route may have lower ones."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.api_errors import ApiError, too_large
from hf_triton_gateway.http.health import CHECK_PATHS

UNLIMITED: Final = (*CHECK_PATHS, "/metrics")
"""What is answered however many requests are in flight."""
MAX_BYTES_IN_FLIGHT: Final = 256 << 20
"""Bytes of all bodies that one worker holds."""
FREE_BYTES: Final = 64 << 10
"""Bytes of each body that are always taken: large bodies do not keep small ones out."""


class Limits:
    """ASGI middleware that refuses bodies that are too large, and requests and bytes beyond those in flight."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._max_body_bytes = config.max_body_bytes
        self._max_requests = config.max_concurrent_requests
        self._num_requests = 0
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNLIMITED:
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            message = f"{self._num_requests} requests are in flight, as many as are accepted: send it again later"
            await ApiError(429, message, code="too_many_requests").response(scope["path"])(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            await too_large(self._max_body_bytes, "--max-body-bytes").response(scope["path"])(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            """Receive; refuse a body whose length was not announced, or one too many."""
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            self._num_bytes += size
            if num_bytes > self._max_body_bytes:
                raise too_large(self._max_body_bytes, "--max-body-bytes")
            if num_bytes > FREE_BYTES and self._num_bytes > MAX_BYTES_IN_FLIGHT:
                sentence = f"the requests in flight hold {MAX_BYTES_IN_FLIGHT >> 20} MB, as much as is accepted"
                raise ApiError(429, f"{sentence}: send it again later", code="too_many_requests")
            return message

        self._num_requests += 1
        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._num_requests -= 1
            self._num_bytes -= num_bytes
