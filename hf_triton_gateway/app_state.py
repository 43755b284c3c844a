# SPDX-License-Identifier: Apache-2.0
"""What the endpoints of one gateway share."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from hf_triton_gateway.agents.response_store import ResponseStore
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.triton.triton_models import TritonModels


@dataclass(frozen=True)
class Gateway:
    """One gateway, in one event loop."""

    config: GatewayConfig
    models: TritonModels
    metrics: Metrics
    stored: ResponseStore


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def request_id_of(request: Request) -> str:
    """The request's id: the header `x-request-id`, or one made up."""
    return str(request.scope["state"]["request_id"])
