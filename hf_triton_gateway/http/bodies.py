# SPDX-License-Identifier: Apache-2.0
"""Bodies of JSON: how large they may be, and how they are read and written without holding up other requests.

A byte of JSON may become thirty bytes of objects, and costs time while other requests wait. So a body is counted before
it is parsed. What is done with a large body, a long conversation or a large output runs in a thread, in pieces: one
call of C holds up the event loop from a thread too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, Final, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from hf_triton_gateway.http.api_errors import ApiError, too_large
from hf_triton_gateway.http.keep_alive import take_keep_alive

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_JSON_BYTES: Final = 4 << 20
"""A chat's body, or one of texts, has no more, unless it holds images."""
MAX_IMAGE_BYTES: Final = 64 << 20
"""A body with images has no more."""
MAX_VALUES: Final = 1 << 19
"""Values in a body, such as token ids: parsing them takes 50 ms."""
MAX_CONTAINERS: Final = 1 << 16
"""Arrays and objects in a body, and names in its objects."""
LARGE_BYTES: Final = 64 << 10
"""What is larger is worked on in a thread."""
JSON_DEPTH: Final = 5
"""Levels of an answer that are written one by one, down to a token's log probabilities or a vector."""
UNNAMED: Final = (None, "", "dummy", "tgi")
"""Names of no model: absent, and what huggingface_hub and TGI's clients send to a server of one model."""
ANY_TASK: Final = ""
"""Stands for a task that any model does."""
_THREADS: Final = RunVar[CapacityLimiter]("hf_triton_threads")
"""An event loop has one thread: with more, it would wait for each of them in turn."""


class JsonRoute(APIRoute):
    """A route whose body is an object of JSON; a subclass may have another limit."""

    max_body_bytes: ClassVar[int] = MAX_JSON_BYTES

    @classmethod
    def check(cls, body: bytes) -> None:
        """Refuse a body for what it holds."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with a request that reads its body as this module does."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive, type(self), model))

        return handle_json


class ChatRoute(JsonRoute):
    """A route of chats, whose body may be larger if it holds images."""

    max_body_bytes: ClassVar[int] = MAX_IMAGE_BYTES

    @classmethod
    def check(cls, body: bytes) -> None:
        """Refuse a body that is large without a word of images."""
        if len(body) > json_limit(body):
            raise too_large(MAX_JSON_BYTES)


def json_limit(body: bytes) -> int:
    """The bytes that a chat's JSON may have."""
    return MAX_IMAGE_BYTES if b"image" in body else MAX_JSON_BYTES


class JsonRequest(Request):
    """A request with a body of JSON, as large as its route takes, and the fields of `model`."""

    def __init__(self, scope: Scope, receive: Receive, route: type[JsonRoute], model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._route = route
        self._model = model

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            if int(self.headers.get("content-length", "0")) > self._route.max_body_bytes:
                raise too_large(self._route.max_body_bytes)
            body = await read_body(self, self._route.max_body_bytes)
            self._route.check(body)
            self._body = body
        return self._body

    async def json(self) -> Any:
        """The body as an instance of the model, or as a value of another kind, which FastAPI refuses."""
        value = await beside_loop(self, _parse, await self.body())
        if self._model is None or not isinstance(value, dict):
            return value
        if getattr(self._model, "is_open", False) and self.app.state.gateway.config.on_demand:
            take_keep_alive(value)
        task = getattr(self._model, "task_of_model", None)
        if task is not None:
            value["model"] = await named_model(self, value.get("model"), task)
        return await beside_loop(self, self._model.model_validate, value)


async def read_body(request: Request, max_body_bytes: int | None = None) -> bytes:
    """The whole body of a request, `max_body_bytes` at most; None: as many as the gateway takes."""
    pieces, num_bytes = [], 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
            if max_body_bytes is not None and num_bytes > max_body_bytes:
                raise too_large(max_body_bytes)
            pieces.append(piece)
    except ClientDisconnect:
        raise ApiError(499, "the client disconnected", code="cancelled") from None
    return b"".join(pieces)


async def named_model(request: Request, name: Any, task: str) -> Any:
    """The model that a body names, else the query; the default for none, and for a placeholder that is no model."""
    gateway = request.app.state.gateway
    for given in (name, request.query_params.get("model")):
        if given not in UNNAMED or (given and any(model.name == given for model in await gateway.models.models())):
            return given
    return str((await gateway.models.only(task or None, gateway.config.default_model)).name)


def _parse(body: bytes) -> Any:
    check_counts(body)
    return json.loads(body.decode("utf-8-sig"))  # in UTF-16, which json would take, they are not counted right


async def beside_loop(
    request: Request, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """What `work` returns, which depends on the request's body alone."""
    return await beside(len(await request.body()), work, *args, **kwargs)


async def beside(
    num_bytes: int, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """What `work` returns; if it works on many bytes, it runs in a thread, so that others are served meanwhile."""
    if num_bytes <= LARGE_BYTES:
        return work(*args, **kwargs)
    try:
        limiter = _THREADS.get()
    except LookupError:
        limiter = CapacityLimiter(1)
        _THREADS.set(limiter)
    return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=limiter)


async def json_response(
    num_bytes: int, build: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Response:
    """The response of what `build` returns, as JSON; arguments as `beside` has them."""

    def write() -> bytes:
        return write_json(build(*args, **kwargs))

    return Response(await beside(num_bytes, write), media_type="application/json")


def write_json(value: object) -> bytes:
    """A value as JSON, written in pieces. Infinity and NaN are null; half of a surrogate pair is a `ValueError`."""
    return b"".join(_pieces(value, JSON_DEPTH))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if depth and value and isinstance(value, dict):
        for mark, (name, each) in zip(chain((b"{",), repeat(b",")), value.items(), strict=False):
            yield b"%b%b:" % (mark, to_json(str(name)))
            yield from _pieces(each, depth - 1)
        yield b"}"
    elif depth and value and isinstance(value, list | tuple) and isinstance(value[0], dict | list | tuple):
        for mark, each in zip(chain((b"[",), repeat(b",")), value, strict=False):
            yield mark
            yield from _pieces(each, depth - 1)
        yield b"]"
    else:
        try:
            yield to_json(value, inf_nan_mode="null")
        except ValueError:  # it goes 255 levels deep
            yield json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def check_counts(body: bytes) -> None:
    """Refuse a body of JSON that holds more values than are read.

    The commas, colons, brackets and braces outside strings bound their number. The whole body is looked at first: it
    nearly always has few of them.
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
