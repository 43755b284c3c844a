# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/models` and `/v1/models/{id}`, and `POST /load_model`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton_gateway.app_state import gateway_of
from hf_triton_gateway.chat.fields import Fields
from hf_triton_gateway.http.bodies import JsonRoute
from hf_triton_gateway.http.sse import RESPONSES, event
from hf_triton_gateway.keys.accounts import check_model
from hf_triton_gateway.triton.triton_messages import ADAPTER_MARK
from hf_triton_gateway.triton.triton_models import Model

router = APIRouter(route_class=JsonRoute)


class LoadRequest(Fields):
    """The body of `/load_model`."""

    is_open: ClassVar[bool] = True

    model: str
    """One of `/v1/models`."""


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are served."""
    models = gateway_of(request).models
    served, asleep = await models.models(), await models.asleep()
    return {"object": "list", "data": [described for model in served for described in _describe(model, asleep)]}


@router.get("/v1/models/{model}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One of the models that are served."""
    check_model(model)
    models = gateway_of(request).models
    served, asleep = await models.models(), await models.asleep()
    for each in served:
        for described in _describe(each, asleep):
            if described["id"] == model:
                return described
    raise await models.missing(model)


@router.post("/load_model", responses=RESPONSES)
async def load_model(body: LoadRequest, request: Request) -> Response:
    """Say whether a model is served, as `transformers chat` asks before it begins; it is loaded when it is asked."""
    check_model(body.model)
    models = gateway_of(request).models
    if any(body.model == served.name for served in await models.models()):
        told = {"status": "ready", "model": body.model, "cached": True}
    else:
        missing = await models.missing(body.model)
        told = {"status": "error", "model": body.model, "message": missing.message}
    return Response(event(told), media_type="text/event-stream")


def _describe(model: Model, asleep: Collection[str]) -> list[dict[str, Any]]:
    """A model, and each of its LoRA adapters as a model whose parent it is."""
    described = {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "hf_triton"}
    if model.folder.task is not None:  # that of a model which was never loaded is not known
        described["task"] = model.folder.task
    if model.folder.info is not None:  # in vLLM's names
        described["root"] = model.folder.info.model
        if model.folder.info.context_length:
            described["max_model_len"] = model.folder.info.context_length
        if model.folder.info.defaults is not None:  # in OpenAI's
            described["defaults"] = model.folder.info.defaults
        if model.folder.info.images:
            described["images"] = model.folder.info.images
        if model.folder.info.mask_token:
            described["mask_token"] = model.folder.info.mask_token
    if model.is_loaded is not None:
        described["loaded"] = model.is_loaded or model.name in asleep
    if model.name in asleep:
        described["sleeping"] = True
    adapters = (f"{model.name}{ADAPTER_MARK}{name}" for name in model.folder.adapters)
    return [described, *({**described, "id": name, "parent": model.name} for name in adapters)]
