# SPDX-License-Identifier: Apache-2.0
"""`previous_response_id` and `/v1/responses/{id}` by the real `openai` client."""

from pathlib import Path
from typing import Any

import openai
import pytest

from hf_triton.openai.config import GatewayConfig
from hf_triton.testing import TritonServer
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


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    made = client.responses.create(input=[{"role": "user", "content": str(index)} for index in range(5)], **ASKED)
    for order, expected in {"asc": "01234", "desc": "43210"}.items():
        pages = client.responses.input_items.list(made.id, limit=2, order=order)
        assert [item.content for item in pages] == list(expected)


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
