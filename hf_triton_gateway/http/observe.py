# SPDX-License-Identifier: Apache-2.0
"""Every request's id, log line and metrics; no query, no body, no header is logged."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_triton.errors import clip, where
from hf_triton_gateway.http import hints
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.http.gateway_tracer import GatewayTracer

LOG: Final = logging.getLogger("hf_triton_gateway")
REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
OTHER: Final = "other"
"""The endpoint of requests to no endpoint, in metrics."""
CLIENT_LEFT: Final = 499


class Observe:
    """ASGI middleware, the outermost: whatever happens inside, the request is answered, counted and logged."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: GatewayTracer, routes: Sequence[BaseRoute] = ()) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_s = time.monotonic()
        request_id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=request_id, arrival_s=arrival_s)
        names, status = hints.begin(), 0
        span = self._tracer.begin(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), *hints.header(names)]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # a bug: its message may quote a prompt
            LOG.error("request %s failed: %s", request_id, where(error))
            if status:
                raise ConnectionAbortedError from None  # the response is cut off
            await ApiError(500, "the gateway failed on this request").response(scope["path"])(
                scope, receive, send_with_id
            )
        finally:
            self._metrics.in_flight.dec()
            self._record(scope, status or CLIENT_LEFT, time.monotonic() - arrival_s)
            if span is not None:
                self._tracer.end(span, self._endpoint(scope), status or CLIENT_LEFT)

    def _endpoint(self, scope: Scope) -> str:
        """The path of the request's route, also if it was refused before it was routed."""
        route = scope.get("route")
        if route is None:
            matches = [(each.matches(scope)[0].value, each) for each in self._routes]
            level, best = max(matches, key=lambda match: match[0], default=(0, None))
            route = best if level else None  # of a path that has other methods, the first
        return str(getattr(route, "path", OTHER))

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        endpoint = self._endpoint(scope)
        self._metrics.requests.labels(endpoint, status).inc()
        self._metrics.duration.labels(endpoint).observe(duration_s)
        client = _address(scope)
        place, request_id = clip(scope["path"]), scope["state"]["request_id"]
        LOG.info("%s %s %s %d %.1f ms %s", client, scope["method"], place, status, duration_s * 1e3, request_id)


def _address(scope: Scope) -> str:
    """The client's address; `-` for none, and for what a header `x-forwarded-for` has in its place."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))  # without a zone, which may be any text
    except ValueError:
        return "-"


def _request_id(scope: Scope) -> str:
    """The header `x-request-id`, or a new id if there is none or Triton would not take it."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
