# SPDX-License-Identifier: Apache-2.0
"""`GET /health` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from hf_triton.openai.gateway import gateway_of

router = APIRouter()


@router.get("/health", response_class=Response, responses={503: {"description": "Triton is not ready."}})
async def health(request: Request) -> Response:
    """Status 200 if Triton is ready, otherwise 503."""
    return Response(status_code=200 if await gateway_of(request).models.is_ready() else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """The gateway's metrics, for Prometheus."""
    return Response(generate_latest(gateway_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)
