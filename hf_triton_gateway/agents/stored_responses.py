# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses/{id}`: responses that are kept, see `response_store`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from hf_triton.errors import clip
from hf_triton_gateway.agents.response_store import ResponseStore, StoredResponse
from hf_triton_gateway.app_state import Gateway, gateway_of
from hf_triton_gateway.http.api_errors import RESPONSES, ApiError
from hf_triton_gateway.http.bodies import json_response
from hf_triton_gateway.http.sse import EventStream
from hf_triton_gateway.keys.security import key_of

router = APIRouter()
MAX_ITEMS = 100


@router.get("/v1/responses/{response_id}", responses=RESPONSES, response_model=dict[str, Any])
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """A response as it ended, or as it runs in the background; with `stream` its events, behind one of a number."""
    stored = _store(request).get(response_id, key_of(request.scope))
    if not stream:
        return await json_response(stored.num_bytes, dict, stored.response)
    if stored.events is None:
        message = (
            "stream is for responses that were made with background and stream true, and whose events are not more "
            "than are kept (--max-stored-bytes): leave it out"
        )
        raise ApiError(400, message, param="stream", code="invalid_parameter")
    return EventStream(request, stored.events.follow(starting_after))


@router.post("/v1/responses/{response_id}/cancel", responses=RESPONSES, response_model=dict[str, Any])
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that runs in the background; one that has ended stays as it is."""
    store, key = _store(request), key_of(request.scope)
    if not store.get(response_id, key).response["background"]:
        message = f"the response {clip(response_id)} was not made with background true: there is nothing to cancel"
        raise ApiError(400, message, param="response_id", code="invalid_parameter")
    stored = await store.cancel(response_id, key)
    return await json_response(stored.num_bytes, dict, stored.response)


@router.delete("/v1/responses/{response_id}", responses=RESPONSES)
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a response, and cancel it if it runs; those that go on behind it stay."""
    await _store(request).delete(response_id, key_of(request.scope))
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items", responses=RESPONSES, response_model=dict[str, Any])
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items of a response's own input."""
    stored = _store(request).get(response_id, key_of(request.scope))
    return await json_response(stored.num_bytes, _page, stored, limit, order, after)


def _page(stored: StoredResponse, limit: int, order: str, after: str | None) -> dict[str, Any]:
    # A client's own ids may be null, or be there twice: its pages would never end.
    items = [{"type": "message", **item, "id": f"item_{index}"} for index, item in enumerate(stored.input)]
    if order == "desc":
        items.reverse()
    if after is not None:
        names = [item["id"] for item in items]
        items = items[names.index(after) + 1 :] if after in names else []
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > len(page)}


def _store(request: Request) -> ResponseStore:
    return store_of(gateway_of(request))


def store_of(gateway: Gateway, param: str = "response_id") -> ResponseStore:
    """What keeps responses; a request for it is refused if nothing does."""
    if not gateway.stored.keeps_any:
        raise ApiError(
            400,
            f"{param} is for stored responses, and this server keeps none: it runs with --max-stored-responses 0, or "
            "with several workers",
            param=param,
            code="unsupported_parameter",
        )
    return gateway.stored
