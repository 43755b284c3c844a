# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: a stream that ends when its client leaves or the gateway stops, and tells what went wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hf_triton_gateway.app_state import gateway_of
from hf_triton_gateway.http.api_errors import ApiError, gateway_stops
from hf_triton_gateway.http.bodies import write_json
from hf_triton_gateway.http.disconnect import run_while_connected

DONE: Final = b"data: [DONE]\n\n"
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The whole response, or its events.", "content": {"text/event-stream": {"schema": {}}}}
}
"""A response that may be a stream, for the OpenAPI document."""
HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: object, *, is_small: bool = True) -> bytes:
    """One event of JSON; one that may be large is written in pieces."""
    text = json.dumps(data, ensure_ascii=False).encode() if is_small else write_json(data)
    return b"data: %b\n\n" % text


def chunk_start(head: dict[str, Any]) -> bytes:
    """The start of each event of a stream, up to the first choice: no JSON encoder on every token's way."""
    return b'data: %b, "choices": [{"index": ' % json.dumps(head, ensure_ascii=False).encode()[:-1]


def chunk(start: bytes, index: int, field: bytes, value: str, rest: str = '"logprobs": null') -> bytes:
    """An event of one choice without a finish reason.

    Args:
        start: Of `chunk_start`.
        index: The choice's.
        field: Where OpenAI's API has the new text: `delta` or `text`.
        value: JSON.
        rest: More fields of the choice, as JSON without the braces.
    """
    return b'%b%d, "%b": %b, %b, "finish_reason": null}]}\n\n' % (start, index, field, value.encode(), rest.encode())


class EventStream(Response):
    """A response of events.

    Its status is that of the first event: an error before that is an error response. A later one is the last event.

    Args:
        request: The request that it answers.
        events: The events as bytes; closed when the client leaves.
        name_errors: Whether an error event has a line `event: error`, as Anthropic's API writes it.
    """

    media_type = "text/event-stream"

    def __init__(self, request: Request, events: AsyncGenerator[bytes], *, name_errors: bool = False) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._request = request
        self._has_started = False
        self._events = events
        self._error_prefix = b"event: error\n" if name_errors else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_all(scope, send))
        except ApiError:
            if not self._has_started:
                raise  # otherwise the client has left
        except asyncio.CancelledError:
            if not self._has_started:
                raise
            await self._send_error(scope, send, gateway_stops())

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not self._has_started:
                        self._has_started = True
                        self._observe_first()
                        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        await send(start)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                if not self._has_started:
                    raise
                await self._send_error(scope, send, error)
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, scope: Scope, send: Send, error: ApiError) -> None:
        data = self._error_prefix + event(error.body(scope["path"]))
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _observe_first(self) -> None:
        seconds = time.monotonic() - self._request.scope["state"]["arrival_s"]
        gateway_of(self._request).metrics.first_token.labels(self._request.scope["route"].path).observe(seconds)
