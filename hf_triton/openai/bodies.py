# SPDX-License-Identifier: Apache-2.0
"""Bodies of JSON: how large they may be, and how they are read without holding up other requests.

A byte of JSON may become thirty bytes of objects, and costs time while other requests wait. So a body is counted before
it is parsed, and a large one is read in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Final, ParamSpec, TypeVar

from anyio import to_thread
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from hf_triton.openai.errors import ApiError, too_large
from hf_triton.openai.gateway import gateway_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_JSON_BYTES: Final = 4 << 20
"""Of a chat, or of texts."""
MAX_VALUES: Final = 1 << 19
"""Values in a body, such as token ids: parsing them takes 50 ms."""
MAX_CONTAINERS: Final = 1 << 16
"""Arrays and objects in a body, and names in its objects."""
LARGE_BYTES: Final = 64 << 10
"""Bodies beyond this are read in a thread."""


class JsonRoute(APIRoute):
    """A route whose body is an object of JSON; a subclass may have another limit."""

    max_body_bytes: ClassVar[int] = MAX_JSON_BYTES

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with a request that reads its body as this module does."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive, self.max_body_bytes, model))

        return handle_json


class JsonRequest(Request):
    """A request with a body of JSON.

    Args:
        scope: ASGI's.
        receive: ASGI's.
        max_body_bytes: Limit of the body.
        model: The fields of the body.
    """

    def __init__(self, scope: Scope, receive: Receive, max_body_bytes: int, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._max_body_bytes = max_body_bytes
        self._model = model

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            ApiError: It is too large.
        """
        if not hasattr(self, "_body"):
            if int(self.headers.get("content-length", "0")) > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
            pieces, num_bytes = [], 0
            async for piece in self.stream():
                num_bytes += len(piece)
                if num_bytes > self._max_body_bytes:
                    raise too_large(self._max_body_bytes)
                pieces.append(piece)
            self._body = b"".join(pieces)
        return self._body

    async def json(self) -> Any:
        """The body as an instance of the model, or as a value of another kind, which FastAPI refuses."""
        return await beside_loop(self, self._read, await self.body())

    def _read(self, body: bytes) -> Any:
        check_counts(body)
        value = json.loads(body.decode("utf-8-sig"))  # in UTF-16, which json would take, they are not counted right
        return self._model.model_validate(value) if self._model is not None and isinstance(value, dict) else value


async def beside_loop(
    request: Request, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """What `work` returns; for a request with a large body it runs in a thread, so that others are served meanwhile."""
    if len(await request.body()) > LARGE_BYTES:
        return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=gateway_of(request).readers)
    return work(*args, **kwargs)


def check_counts(body: bytes) -> None:
    """Refuse a body of JSON that holds more values than are read.

    The commas, colons, brackets and braces outside strings bound their number. The whole body is looked at first: it
    nearly always has few of them.

    Raises:
        ApiError: It does.
    """
    if _has_few(body):
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2]) if unescaped.count(b'"') <= 2 * MAX_VALUES else unescaped
    if not _has_few(outside):
        limits = f"{MAX_VALUES} values, or than {MAX_CONTAINERS} arrays, objects or names"
        raise ApiError(413, f"the body holds more than {limits}: send several requests", code="request_too_large")


def _has_few(text: bytes) -> bool:
    num_containers, num_names = text.count(b"[") + text.count(b"{"), text.count(b":")
    return max(num_containers, num_names) <= MAX_CONTAINERS and text.count(b",") + num_containers <= MAX_VALUES
