# SPDX-License-Identifier: Apache-2.0
"""What a body may hold: every list of every endpoint is bounded, and a wrong one costs nothing."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from hf_triton_gateway.app import ROUTERS
from hf_triton_gateway.chat.fields import Fields
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import (
    LARGE_BYTES,
    MAX_CONTAINERS,
    MAX_JSON_BYTES,
    MAX_VALUES,
    JsonRequest,
    JsonRoute,
    beside,
    check_counts,
    read_body,
    write_json,
)

ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute) and route.body_field]
MODELS: dict[str, type[BaseModel]] = {}
for each in ROUTES:
    assert each.body_field is not None
    model: Any = each.body_field.field_info.annotation
    MODELS[model.__name__] = model


def all_subclasses(parent: type[Fields]) -> Iterator[type[Fields]]:
    for child in parent.__subclasses__():
        yield child
        yield from all_subclasses(child)


def schemas(schema: object, kind: str) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == kind:
            yield schema
        for part in schema.values():
            yield from schemas(part, kind)
    elif isinstance(schema, list):
        for part in schema:
            yield from schemas(part, kind)


def list_fields(model: type[BaseModel]) -> list[str]:
    fields = model.model_fields
    return [name for name, field in fields.items() if "list[" in str(field.annotation)]


def refusal(model: type[BaseModel], values: dict[str, object]) -> ApiError | None:
    try:
        model.model_validate(values)
    except ApiError as error:
        return error
    return None


def test_every_endpoint_reads_json_as_bodies_does() -> None:
    assert len(MODELS) >= 10
    assert all(isinstance(route, JsonRoute) for route in ROUTES)
    assert all(issubclass(model, Fields) for model in MODELS.values())


@pytest.mark.parametrize("model", [*all_subclasses(Fields)], ids=lambda model: f"{model.__module__}.{model.__name__}")
def test_every_list_ends_at_its_first_wrong_item_and_has_a_bound(model: type[Fields]) -> None:
    for schema in schemas(model.__pydantic_core_schema__, "list"):
        assert schema["fail_fast"] is True
        assert 1 <= schema["max_length"] <= MAX_VALUES
    nested = {schema["cls"] for schema in schemas(model.__pydantic_core_schema__, "model")}
    assert all(issubclass(each, Fields) for each in nested), "another model words an error for each unknown key"


MAX_ERRORS = 10
"""One or two of each alternative of a field's type; pydantic's own way is one of each wrong item."""
CASES = [(model, name) for model in MODELS.values() for name in list_fields(model)]


@pytest.mark.parametrize("item", [1, {}, [], "", None, [[]], {"a": 1}], ids=repr)
@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_list_of_wrong_items_is_refused_at_once(model: type[BaseModel], name: str, item: object) -> None:
    given = {"model": "a", "query": "a", "text_1": "a", "text_2": "a", "max_tokens": 1, "messages": [{}], "input": "a"}
    values = {key: value for key, value in given.items() if key in model.model_fields}
    values[name] = [item] * MAX_VALUES
    error = refusal(model, values)
    if error is None:
        assert item == 1, "token ids are the only items that there may be so many of"
        assert name in ("prompt", "input", "tokens")
    else:
        assert error.param == name
        assert len(error.message) < 300
        assert isinstance(error.__context__, ValidationError)
        assert error.__context__.error_count() < MAX_ERRORS


def test_too_many_items_are_refused_by_their_number() -> None:
    chat, rerank = MODELS["ChatRequest"], MODELS["RerankRequest"]
    with pytest.raises(ApiError, match="messages has 1025 items, more than the 1024 that are accepted"):
        chat.model_validate({"model": "a", "messages": [{}] * 1025})
    with pytest.raises(ApiError, match="documents has 10001 items, more than the 10000 that are accepted"):
        rerank.model_validate({"model": "a", "query": "a", "documents": ["a"] * 10_001})
    chat.model_validate({"model": "a", "messages": [{}] * 1024, "tools": [{}] * 128, "stop": ["a"] * 16})


@pytest.mark.parametrize(
    "value",
    [
        [1] * (MAX_VALUES - 1),
        [[1]] * (MAX_CONTAINERS // 2),
        "1,2,[3],{4}" * 300_000,
        ['a,"[', "\\", '\\"', "[{,"] * 100_000,
        {"a": ["é,,,,[[[[" * 100_000]},
    ],
    ids=["numbers", "arrays", "punctuation in a string", "quotes and backslashes", "letters"],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_body_within_the_limits_is_read(value: object, ascii_only: bool) -> None:
    check_counts(json.dumps(value, ensure_ascii=ascii_only).encode())


@pytest.mark.parametrize("item", ["1", "{}", "[]", '""', '"a"', '{"a":1}', "0.5", "null", r'"\\"', r'"\""'])
def test_body_of_too_many_values_is_refused_by_their_count(item: str) -> None:
    body = f"[{','.join([item] * (MAX_JSON_BYTES // (len(item) + 1)))}]".encode()
    with pytest.raises(ApiError, match="the body holds more than 524288 values") as refused:
        check_counts(body)
    assert refused.value.status_code == 413


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize("num_bytes", [LARGE_BYTES, LARGE_BYTES + 1])
def test_large_work_leaves_the_loop_to_others(num_bytes: int) -> None:
    async def run() -> tuple[int, int]:
        ended, num_turns = threading.Event(), 0

        def work(thread: int) -> int:
            if threading.get_ident() != thread:
                assert ended.wait(30)
            return threading.get_ident() - thread

        task = asyncio.ensure_future(beside(num_bytes, work, threading.get_ident()))
        for _ in range(100):
            await asyncio.sleep(0)
            num_turns += not task.done()
        ended.set()
        return await task, num_turns

    difference, num_turns = asyncio.run(run())
    assert bool(difference) == (num_bytes > LARGE_BYTES)
    assert num_turns == (100 if difference else 0)


def test_large_work_is_done_by_one_thread_in_every_loop() -> None:
    most = []

    async def run() -> None:
        running: list[int] = []

        def work() -> None:
            running.append(1)
            most.append(len(running))
            time.sleep(0.001)
            running.pop()

        await asyncio.gather(*(beside(LARGE_BYTES + 1, work) for _ in range(10)))

    for _ in range(2):
        asyncio.run(run())
    assert most == [1] * 20


@pytest.mark.parametrize("kind", [Request, JsonRequest])
def test_a_client_that_leaves_within_its_body_is_no_failure(kind: Any) -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    scope = {"type": "http", "headers": []}
    reading = (
        read_body(Request(scope, receive)) if kind is Request else JsonRequest(scope, receive, JsonRoute, None).body()
    )
    with pytest.raises(ApiError) as raised:
        asyncio.run(reading)
    assert (raised.value.status_code, raised.value.code) == (499, "cancelled")


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], (), "", None, True, 5, 0.1, 'ä\u2028"\\', [[]], [{}], {"a": {}}, {"a": []}),
        {"a": [{"b": [{"c": [{"d": [{"e": [1, {"f": 2}]}]}]}]}]},
        [[1.5, 2], [3], "mixed", {"a": None}],
        [1, {"a": [2]}],
        *(10**30, {"schema": nested(900)}),
        {"id": "x", "choices": [{"logprobs": {"content": [{"token": "a", "top_logprobs": [{"token": "b"}]}]}}] * 3},
    ],
)
def test_json_in_pieces_is_json(value: object) -> None:
    assert write_json(value).decode() == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_json_has_no_nan_and_no_half_of_a_surrogate_pair() -> None:
    assert write_json({"a": [float("nan")], "b": float("-inf")}) == b'{"a":[null],"b":null}'
    for value in ("\ud800", ["\ud800"], {"\ud800": 1}):
        with pytest.raises(ValueError, match="surrogate"):
            write_json(value)
