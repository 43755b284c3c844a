# SPDX-License-Identifier: Apache-2.0
"""The gateway as an ASGI application."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from hf_triton_gateway.agents import anthropic_messages, responses, stored_responses
from hf_triton_gateway.agents.response_store import ResponseStore
from hf_triton_gateway.app_state import Gateway
from hf_triton_gateway.chat import chat_completions, completions, model_list, sleeping, tokenize
from hf_triton_gateway.encoders import (
    classify,
    cohere,
    embeddings,
    pipelines,
    reranking,
    tei,
    token_tasks,
    transcriptions,
)
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http import health, hints
from hf_triton_gateway.http.api_errors import RESPONSES, install_handlers
from hf_triton_gateway.http.api_page import mount_api_page
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.http.gateway_tracer import GatewayTracer
from hf_triton_gateway.http.http_rules import HttpRules
from hf_triton_gateway.http.limits import Limits
from hf_triton_gateway.http.observe import Observe
from hf_triton_gateway.http.page import mount_page
from hf_triton_gateway.keys.accounts import HEADERS, QuotaCheck
from hf_triton_gateway.keys.security import ApiKeys, KeyCheck
from hf_triton_gateway.triton.endpoint import Endpoint
from hf_triton_gateway.triton.on_demand import OnDemand
from hf_triton_gateway.triton.repository import TritonRepository
from hf_triton_gateway.triton.triton_models import TritonModels

ROUTERS: Final[tuple[APIRouter, ...]] = (
    model_list.router,
    sleeping.router,
    chat_completions.router,
    completions.router,
    responses.router,
    stored_responses.router,
    anthropic_messages.router,
    tokenize.router,
    embeddings.router,
    reranking.router,
    classify.router,
    token_tasks.router,
    tei.router,
    pipelines.router,
    cohere.router,
    transcriptions.router,
    health.router,
)
"""One for each module of endpoints."""


def build_app(config: GatewayConfig) -> FastAPI:
    """Build the gateway's application; it connects to Triton when it starts."""
    endpoint = Endpoint.read(config)
    metrics, tracer = Metrics(), GatewayTracer()
    keys = None if config.api_key_file is None else ApiKeys(config.api_key_file, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, GatewayConfig]]:
        async with contextlib.AsyncExitStack() as stack:
            tracer.open(os.environ)
            stack.push_async_callback(tracer.close)
            if keys is not None:
                stack.enter_context(keys.watched())
            on_demand = (
                await stack.enter_async_context(_on_demand(config, endpoint, metrics)) if config.on_demand else None
            )
            models = TritonModels(endpoint, config.timeout_s, on_demand)
            stack.push_async_callback(models.close)
            stored = ResponseStore(config.num_stored_responses, config.max_stored_bytes, config.store_for_s)
            stack.push_async_callback(stored.close)
            app.state.gateway = Gateway(config, models, metrics, stored)
            yield {"config": config}  # for the protocol of `uvicorn_server.py`

    app = FastAPI(title="hf_triton", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router, responses=RESPONSES)
    mount_page(app)
    mount_api_page(app)
    install_handlers(app)
    app.add_middleware(QuotaCheck)  # the innermost: what others refuse uses nothing
    app.add_middleware(Limits, config=config)
    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", hints.HEADER, "retry-after", *HEADERS],
        )
    app.add_middleware(HttpRules)
    routes = [*(route for router in ROUTERS for route in router.routes), *app.routes]
    app.add_middleware(Observe, metrics=metrics, tracer=tracer, routes=routes)  # the outermost
    return app


@contextlib.asynccontextmanager
async def _on_demand(config: GatewayConfig, endpoint: Endpoint, metrics: Metrics) -> AsyncIterator[OnDemand]:
    """Loading on demand while the gateway runs."""
    repository = TritonRepository(endpoint, config.triton_metrics, sleeps=config.sleep)
    on_demand = OnDemand(repository, metrics, config.idle_limit_s, config.max_loaded)
    try:
        async with on_demand.running():
            yield on_demand
    finally:
        await repository.close()
