# SPDX-License-Identifier: Apache-2.0
"""/v1/responses by the real client: whole answers, typed events, schemas; the types are OpenAI's."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.support.gateway import GatewayThread

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": None}],
    },
    {"role": "user", "content": "Go on."},
]


class Answer(BaseModel):
    yes: bool


def events(gateway: GatewayThread, **body: Any) -> list[Any]:
    answer = httpx.post(f"{gateway.url}/v1/responses", json={**body, "stream": True}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    pairs = [piece.split("\ndata: ") for piece in answer.text.split("\n\n")[:-1]]
    decoded = [json.loads(data) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in decoded]
    return decoded


def test_answer_is_of_openais_type(gateway: GatewayThread) -> None:
    body = {"model": "demo", "input": "Hello!", "max_output_tokens": 8, "instructions": "Be brief."}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=60).json()
    response = Response.model_validate(answer, strict=True)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    assert (response.instructions, response.temperature, response.error) == ("Be brief.", None, None)


def test_answer_is_that_of_the_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go on."},
        ],
        max_tokens=20,
        seed=5,
        temperature=1,
    )
    response = client.responses.create(
        model="demo", input=ITEMS, max_output_tokens=20, temperature=1, store=False, extra_body={"seed": 5}
    )
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_events_are_typed_and_in_order(gateway: GatewayThread) -> None:
    body: dict[str, Any] = {"model": "demo", "input": "Hello!", "max_output_tokens": 8}
    decoded = events(gateway, **body)
    for event in decoded:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in decoded]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
    text = "".join(event["delta"] for event in decoded if event["type"].endswith("text.delta"))
    assert text == decoded[-4]["text"] == decoded[-1]["response"]["output"][0]["content"][0]["text"]
    assert decoded[-1]["response"]["output"][0] == decoded[-2]["item"]


def test_stream_gives_the_answer_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "Hello!", "extra_body": {"seed": 3}, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text


def test_schema_of_a_class_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny", input="Hello!", max_output_tokens=60, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)


@pytest.mark.parametrize("stream", [False, True])
def test_error_is_openais(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="decoupled", input="Hello!", max_output_tokens=100_000, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "max_output_tokens <= " in caught.value.message
