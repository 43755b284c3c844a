# SPDX-License-Identifier: Apache-2.0
"""Ends the work for a client that has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from hf_triton_gateway.http.api_errors import ApiError

Result = TypeVar("Result")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, and cancel it when the client disconnects.

    Args:
        receive: ASGI's, of a request whose body has been read.
        work: What to do for the client.

    Raises:
        ApiError: The client disconnected; status 499, which is never read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client disconnected", code="cancelled")
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
