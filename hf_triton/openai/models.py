# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hf_triton.openai.errors import model_not_found
from hf_triton.openai.gateway import gateway_of
from hf_triton.openai.triton import Model

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are served."""
    models = await gateway_of(request).models.models()
    return {"object": "list", "data": [_describe(model) for model in models]}


@router.get("/v1/models/{model}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One of the models that are served."""
    for served in await gateway_of(request).models.models():
        if served.name == model:
            return _describe(served)
    raise model_not_found(model)


def _describe(model: Model) -> dict[str, Any]:
    described = {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "hf_triton"}
    return described if model.is_loaded is None else described | {"loaded": model.is_loaded}
