# SPDX-License-Identifier: Apache-2.0
"""What HTTP asks of a server beside its endpoints: HEAD, and an answer that a client can read while it still sends.

And an answer for each request that is still in flight when the gateway has waited long enough for its end.
"""

from __future__ import annotations

import asyncio
from typing import Final

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_triton_gateway.http.api_errors import gateway_stops

WITHOUT_V1: Final = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
"""What llama.cpp and infinity serve with and without /v1: a client's base URL may lack it."""
KSERVE: Final = "/openai/v1"
"""What KServe's servers have in place of /v1."""
LINGER_S: Final = 5.0
"""How long the rest of a request is taken that is answered before it has arrived: it holds a place at a proxy."""


class HttpRules:
    """ASGI middleware, around all answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (path := scope["path"].removeprefix(KSERVE)) != scope["path"] or path.startswith(WITHOUT_V1):
            path = f"/v1{path}"
            scope.update(path=path, raw_path=path.encode())
        if _is_last(scope):
            receive, send = _draining(receive, send)
        await self._serve_to_the_end(scope, receive, send)

    async def _serve_to_the_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and answer it if the gateway stops before its response starts: uvicorn cancels it then."""
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._serve(scope, receive, send_noted)
        except asyncio.CancelledError:
            if has_started:
                raise
            await gateway_stops().response(scope["path"])(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}  # uvicorn keeps HEAD, and sends no body
        try:
            await self._app(as_get, receive, send)
        finally:
            scope.update({key: as_get[key] for key in ("route",) if key in as_get})  # for metrics


def _is_last(scope: Scope) -> bool:
    """Whether the connection is closed after the response."""
    headers = dict(scope["headers"])
    closes = scope["http_version"] == "1.0" or b"close" in headers.get(b"connection", b"").lower()
    return closes and b"expect" not in headers  # such a client sends no body before it is asked to


def _draining(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """`receive` and `send` that take the rest of a body that is refused before the connection is closed.

    To close a connection with unread bytes resets it, and the client may lose the answer. One that sends on is cut off.
    """
    has_arrived = False

    async def receive_noted() -> Message:
        nonlocal has_arrived
        message = await receive()
        has_arrived = has_arrived or not message.get("more_body", False)
        return message

    async def send_drained(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not has_arrived:
            await send({**message, "more_body": True})
            with anyio.move_on_after(LINGER_S):
                while not has_arrived:
                    await receive_noted()
            message = {"type": "http.response.body"}
        await send(message)

    return receive_noted, send_drained
