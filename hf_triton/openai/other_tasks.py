# SPDX-License-Identifier: Apache-2.0
"""Endpoints of tasks that no model folder has yet: embeddings, rerank, score, classify."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request

from hf_triton.openai.errors import ApiError
from hf_triton.openai.fields import Fields
from hf_triton.openai.gateway import gateway_of

router = APIRouter()
TASKS: Final = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/v1/classify": "classification",
}
"""Endpoints and what their models do."""


class TaskRequest(Fields):
    """A body that names a model."""

    model_config = {"extra": "allow"}

    model: str
    """One of `/v1/models`."""


async def _refuse(request: Request) -> dict[str, Any]:
    task = TASKS[request.scope["route"].path]
    body = await request.json() if await request.body() else None
    name = body.get("model") if isinstance(body, dict) else None
    if isinstance(name, str):
        await gateway_of(request).models.model(name)  # the error of an unknown model comes first
    raise ApiError(404, f"no model with the task {task} is served here", param="model", code="task_not_served")


for _path in TASKS:
    router.add_api_route(_path, _refuse, methods=["POST"], include_in_schema=False)
