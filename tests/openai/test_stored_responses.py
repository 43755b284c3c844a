# SPDX-License-Identifier: Apache-2.0
"""`previous_response_id` and `/v1/responses/{id}` by the real `openai` client."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hf_triton.testing import TritonServer
from hf_triton_gateway.agents.responses import MAX_INPUT_ITEMS, _check_length
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import MAX_JSON_BYTES
from tests.support.gateway import GatewayThread

ASKED = {"model": "demo", "max_output_tokens": 12, "temperature": 0}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def as_items(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


def text_of(events: Any) -> Any:
    return next(event.response for event in events if event.type in ("response.completed", "response.incomplete"))


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_goes_on_as_the_whole_conversation_does(client: openai.OpenAI, streams: bool) -> None:
    first = client.responses.create(input="How can you be", instructions="Be brief.", stream=streams, **ASKED)
    first = text_of(first) if streams else first
    assert first.store is True
    second = client.responses.create(input="And then?", previous_response_id=first.id, **ASKED)
    third = client.responses.create(
        input=[{"role": "user", "content": "Why?"}], previous_response_id=second.id, instructions="Be long.", **ASKED
    )
    said = [{"role": "user", "content": "How can you be"}, *as_items(first), {"role": "user", "content": "And then?"}]
    whole = client.responses.create(input=said, store=False, **ASKED)
    assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    assert second.previous_response_id == first.id
    more = [*said, *as_items(second), {"role": "user", "content": "Why?"}]
    whole = client.responses.create(input=more, instructions="Be long.", **ASKED)
    assert (third.output_text, third.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)


def test_a_response_is_fetched_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(input=[{"role": "user", "content": "one"}], **ASKED)
    found = client.responses.retrieve(made.id)
    assert found == made
    items = client.responses.input_items.list(made.id)
    assert [item.content for item in items.data] == ["one"]
    after = client.responses.create(input="two", previous_response_id=made.id, **ASKED)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(made.id)
    again = client.responses.create(input="three", previous_response_id=after.id, **ASKED)  # has the conversation
    assert again.usage.input_tokens > after.usage.input_tokens


def test_requests_of_one_request_id_are_told_apart(client: openai.OpenAI) -> None:
    same = client.with_options(default_headers={"x-request-id": "constant"})
    first, second = (same.responses.create(input=text, **ASKED) for text in ("How can you be", "Why"))
    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(second.id) == second


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    made = client.responses.create(input=[{"role": "user", "content": str(index)} for index in range(5)], **ASKED)
    for order, expected in {"asc": "01234", "desc": "43210"}.items():
        pages = client.responses.input_items.list(made.id, limit=2, order=order)
        assert [item.content for item in pages] == list(expected)


def test_pages_end_whatever_ids_a_client_gives(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"type": "message", "role": "user", "content": str(index), "id": name}
        for index, name in enumerate(["msg_1", "msg_1", None, "msg_1"])
    ]
    made = client.responses.create(input=items, **ASKED)
    pages = client.responses.input_items.list(made.id, limit=1, order="asc")
    assert [item.content for item in pages] == list("0123")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"limit": 0}, "limit should be greater than or equal to 1, got '0'"),
        ({"limit": "many"}, "limit should be a valid integer, unable to parse string as an integer, got 'many'"),
        ({"order": "up"}, "order should be 'asc' or 'desc', got 'up'"),
    ],
)
def test_a_wrong_page_is_refused(client: openai.OpenAI, query: dict[str, Any], sentence: str) -> None:
    made = client.responses.create(input="one", **ASKED)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.input_items.list(made.id, extra_query=query)
    assert error.value.param == next(iter(query))
    assert error.value.body["message"] == sentence  # type: ignore[index]


@pytest.mark.full
def test_a_call_of_a_tool_is_answered_by_its_output_alone(openai_agent: openai.OpenAI) -> None:
    call = openai_agent.responses.create(
        input="Rain?", tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, **{**ASKED, "model": "free"}
    )
    [item] = call.output
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
    answer = openai_agent.responses.create(input=[output], previous_response_id=call.id, **{**ASKED, "model": "free"})
    said = [{"role": "user", "content": "Rain?"}, *as_items(call), output]
    whole = openai_agent.responses.create(input=said, **{**ASKED, "model": "free"})
    assert (answer.output_text, answer.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    made = client.responses.create(input="one", store=False, **ASKED)
    assert made.store is False
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(input="two", previous_response_id=made.id, **ASKED)
    assert error.value.param == "previous_response_id"
    assert error.value.code == "previous_response_not_found"
    assert "one process of the gateway keeps the last 1000 responses for 86400 s" in error.value.message


@pytest.mark.parametrize("changes", [{"max_stored_responses": 0}, {"workers": 2}])
def test_a_gateway_that_keeps_none_says_so(triton: TritonServer, changes: dict[str, Any]) -> None:
    config = GatewayConfig(triton=triton.grpc_url, port=0, **changes)
    with GatewayThread(config) as gateway, openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        assert client.responses.create(input="one", **ASKED).store is False
        for asked in ({"store": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="this server keeps none: it runs with --max-stored"):
                client.responses.create(input="one", **asked, **ASKED)
        with pytest.raises(openai.BadRequestError, match="this server keeps none"):
            client.responses.retrieve("resp_1")


def test_a_response_is_its_keys_own(triton: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    config = GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=tmp_path / "keys")
    with GatewayThread(config) as gateway:
        one, two = (openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key) for key in ("one", "two"))
        made = one.responses.create(input="one", **ASKED)
        for ask in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                ask(made.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            two.responses.create(input="two", previous_response_id=made.id, **ASKED)
        assert one.responses.retrieve(made.id).id == made.id


def ask(gateway: GatewayThread, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/responses", json={**ASKED, "max_output_tokens": 1, **fields}, timeout=60)


def test_items_that_no_model_reads_are_not_kept(gateway: GatewayThread) -> None:
    """However many and large they are: a request goes on behind them as behind none."""
    unread = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 500}
    items: list[Any] = [unread] * 4000
    made = ask(gateway, input=[*items, {"role": "user", "content": "one"}]).json()
    for _ in range(3):
        again = ask(gateway, input=[*items, {"role": "user", "content": "two"}], previous_response_id=made["id"])
        assert again.status_code == 200, again.text
        made = again.json()
        assert made["store"] is True
    listed = httpx.get(f"{gateway.url}/v1/responses/{made['id']}/input_items").json()
    assert [item["content"] for item in listed["data"]] == ["two"]


@pytest.mark.parametrize(
    ("past", "sentence"),
    [
        ([{"role": "user", "content": ""}] * MAX_INPUT_ITEMS, "4096 items, and 1 with the request: 4096 at most"),
        ([{"role": "user", "content": "x" * MAX_JSON_BYTES}], "bytes of JSON with the request: 4194304 at most"),
    ],
    ids=["items", "bytes"],
)
def test_a_conversation_is_as_long_as_a_request_may_be(past: list[Any], sentence: str) -> None:
    own = [{"role": "user", "content": "a"}]
    _check_length(past[:-1], own, 2 * MAX_JSON_BYTES)
    with pytest.raises(ApiError, match=f"previous_response_id ends a conversation of .*{sentence}") as error:
        _check_length(past, own, 2 * MAX_JSON_BYTES)
    assert (error.value.status_code, error.value.param) == (400, "previous_response_id")


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_that_was_not_kept_says_so(triton: TritonServer, streams: bool) -> None:
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, max_stored_bytes=3000)) as gateway:
        for num_letters, is_kept in ((0, True), (3000, False)):
            items = [{"role": "user", "content": "one", "id": "x" * num_letters}]
            answer = ask(gateway, input=items, stream=streams)
            assert answer.status_code == 200, answer.text
            lines = answer.text.splitlines() if streams else []
            last = (
                [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]["response"] if lines else {}
            )
            response = last or answer.json()
            assert response["store"] is is_kept
            found = httpx.get(f"{gateway.url}/v1/responses/{response['id']}")
            assert found.status_code == (200 if is_kept else 404)
            if is_kept:
                assert found.json() == response
            else:
                assert "3000 bytes of all of them (--max-stored-bytes)" in found.json()["error"]["message"]
