# SPDX-License-Identifier: Apache-2.0
"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, as vLLM calls them, for the keys of admins."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

from fastapi import APIRouter, Request

from hf_triton_gateway.app_state import gateway_of
from hf_triton_gateway.chat.fields import Fields
from hf_triton_gateway.http.bodies import ANY_TASK, JsonRoute, named_model
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.keys.accounts import check_admin

router = APIRouter(route_class=JsonRoute)


class SleepRequest(Fields):
    """The body of `/sleep` and `/wake_up`."""

    is_open: ClassVar[bool] = True

    model: str | None = None
    """One of `/v1/models`; it may stand in the query instead. By default the only one, or `--default-model`."""


NO_BODY: Final = SleepRequest()


@router.post("/sleep")
async def sleep(request: Request, body: SleepRequest = NO_BODY) -> dict[str, Any]:
    """Have a model give its memory back until the next request, once none is in flight."""
    return await _set_sleeping(request, body, is_sleeping=True)


@router.post("/wake_up")
async def wake_up(request: Request, body: SleepRequest = NO_BODY) -> dict[str, Any]:
    """Have a model wake before a request comes."""
    return await _set_sleeping(request, body, is_sleeping=False)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether a model sleeps; asking does not wake it."""
    check_admin()
    name = await named_model(request, None, ANY_TASK)
    return {"is_sleeping": await gateway_of(request).models.is_sleeping(name)}


async def _set_sleeping(request: Request, body: SleepRequest, *, is_sleeping: bool) -> dict[str, Any]:
    check_admin()
    name = await named_model(request, body.model, ANY_TASK)
    work = gateway_of(request).models.set_sleeping(name, is_sleeping=is_sleeping)
    return dataclasses.asdict(await run_while_connected(request.receive, work))
