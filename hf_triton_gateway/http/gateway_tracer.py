# SPDX-License-Identifier: Apache-2.0
"""A span for each request to the gateway, and the caller's trace on its way to Triton. Knows no endpoint, no text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from starlette.types import Scope

from hf_triton.protocol.otlp import TRACEPARENT, Tracing, build_tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")
ERROR_FROM: Final = 499
"""The lowest status that is an error of the server's, or a client that left."""

CALLER: Final[ContextVar[Mapping[str, str]]] = ContextVar("hf_triton_caller")
"""`traceparent` and `tracestate` of the request that is served, as Triton is to get them; empty without."""


def caller() -> Mapping[str, str]:
    """What Triton gets of the current request's trace."""
    return CALLER.get({})


class GatewayTracer:
    """Makes spans if the environment asks for them; without, a caller's `traceparent` is passed on as it is."""

    def __init__(self) -> None:
        self._tracing: Tracing | None = None

    def open(self, environment: Mapping[str, str]) -> None:
        """Begin, in the process that serves."""
        self._tracing = build_tracing(environment, "hf_triton_gateway")

    async def close(self) -> None:
        """Send the last spans."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def begin(self, scope: Scope) -> Span | None:
        """A request arrives. Returns its span, which `end` ends; None if there is none."""
        given = _trace_context(scope)
        if self._tracing is None or scope["method"] != "POST":
            CALLER.set(given)
            return None
        from opentelemetry.trace import SpanKind

        span = self._tracing.tracer.start_span(scope["method"], self._tracing.parent(given), SpanKind.SERVER)
        CALLER.set(self._tracing.headers(span))
        return span

    @staticmethod
    def end(span: Span, endpoint: str, status: int) -> None:
        """A request is answered, with a status of HTTP."""
        from opentelemetry.trace import Status, StatusCode

        span.update_name(f"POST {endpoint}")
        span.set_attributes(
            {"http.request.method": "POST", "http.route": endpoint, "http.response.status_code": status}
        )
        if status >= ERROR_FROM:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def _trace_context(scope: Scope) -> Mapping[str, str]:
    """The request's `traceparent` and `tracestate`, if they are valid."""
    headers = dict(scope["headers"])
    traceparent = headers.get(b"traceparent", b"").decode("latin-1")
    tracestate = headers.get(b"tracestate", b"").decode("latin-1")
    if not TRACEPARENT.fullmatch(traceparent):
        return {}
    return {"traceparent": traceparent, **({"tracestate": tracestate} if TRACESTATE.fullmatch(tracestate) else {})}
