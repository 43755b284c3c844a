# SPDX-License-Identifier: Apache-2.0
"""Limits of requests: bytes of a body, requests in flight."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_triton.openai.config import GatewayConfig
from hf_triton.openai.errors import ApiError

UNLIMITED: Final = ("/health", "/metrics")
"""What is answered however many requests are in flight."""


class Limits:
    """ASGI middleware that refuses bodies that are too large, and requests beyond those that may be in flight."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._max_body_bytes = config.max_body_bytes
        self._max_requests = config.max_concurrent_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in UNLIMITED:
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            message = f"{self._num_requests} requests are in flight, as many as are accepted: send it again later"
            await ApiError(429, message, code="too_many_requests").response(scope["path"])(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            await self._too_large().response(scope["path"])(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, self._counted(receive), send)
        finally:
            self._num_requests -= 1

    def _counted(self, receive: Receive) -> Receive:
        """`receive` that refuses a body whose length was not announced."""
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return receive_counted

    def _too_large(self) -> ApiError:
        message = f"the body has more bytes than the {self._max_body_bytes} that are accepted"
        return ApiError(413, message, code="request_too_large")
