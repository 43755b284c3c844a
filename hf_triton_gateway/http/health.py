# SPDX-License-Identifier: Apache-2.0
"""`GET /health` and the names that other servers have for it, `/version` and `/metrics`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hf_triton_gateway.app_state import gateway_of

router = APIRouter()
HEALTH: Final = "/health"
READY_PATHS: Final = ("/health/ready", "/v1/health/ready", "/ping")
"""Other names of HEALTH."""
LIVE_PATHS: Final = ("/health/live", "/v1/health/live")
CHECK_PATHS: Final = (HEALTH, *READY_PATHS, *LIVE_PATHS)
"""What balancers ask: it needs no key, and is answered however many requests are in flight."""


@router.get(HEALTH, response_class=Response, responses={503: {"description": "Triton is not ready."}})
async def health(request: Request) -> Response:
    """Status 200 if Triton is ready, otherwise 503."""
    return Response(status_code=200 if await gateway_of(request).models.is_ready() else 503)


async def live() -> Response:
    """Status 200: the gateway answers."""
    return Response()


for path in READY_PATHS:
    router.add_api_route(path, health, response_class=Response, include_in_schema=False)
for path in LIVE_PATHS:
    router.add_api_route(path, live, response_class=Response, include_in_schema=False)


@router.get("/version")
async def get_version() -> dict[str, str]:
    """The version of hf_triton."""
    return {"version": version("hf_triton")}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """The gateway's metrics, for Prometheus."""
    return Response(gateway_of(request).metrics.exported(), media_type=CONTENT_TYPE_LATEST)
