# SPDX-License-Identifier: Apache-2.0
"""What HTTP asks of a server beside its endpoints: HEAD, and an answer that a client can read while it still sends."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HttpRules:
    """ASGI middleware, around all answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and _is_last(scope):
            receive, send = _draining(receive, send)
        if scope["type"] != "http" or scope["method"] != "HEAD":
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

    To close a connection with unread bytes resets it, and the client may lose the answer. A client that sends for ever
    is cut off by `--read-timeout-s`.
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
            while not has_arrived:
                await receive_noted()
            message = {"type": "http.response.body"}
        await send(message)

    return receive_noted, send_drained
