# SPDX-License-Identifier: Apache-2.0
"""/v1/messages by Anthropic's own client: whole answers, events, counts of tokens; the types are Anthropic's."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
CHAT: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}, {"type": "text", "text": "Yes?"}]},
        {"role": "user", "content": [{"type": "text", "text": "Go on.", **CACHED}]},
    ],
}
SAME_CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go on."},
]


@pytest.fixture(scope="module")
def agent(gateway: GatewayThread) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def test_answer_is_of_anthropics_type(gateway: GatewayThread) -> None:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 8}
    answer = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60).json()
    message = Message.model_validate(answer, strict=True)
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert message.usage.output_tokens == 8


def test_answer_and_count_are_those_of_the_chat(agent: anthropic.Anthropic, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="demo", messages=SAME_CHAT, max_tokens=20, seed=5, temperature=1)
    message = agent.messages.create(model="demo", **CHAT, max_tokens=20, extra_body={"seed": 5, "temperature": 1})
    count = agent.messages.count_tokens(model="demo", **CHAT)
    assert message.content[0].type == "text"
    assert message.content[0].text == chat.choices[0].message.content
    assert chat.usage is not None
    assert count.input_tokens == message.usage.input_tokens == chat.usage.prompt_tokens


def test_events_are_typed_and_in_order(gateway: GatewayThread) -> None:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 8, "stream": True}
    answer = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60)
    pairs = [piece.split("\ndata: ") for piece in answer.text.split("\n\n")[:-1]]
    events = [json.loads(data) for _, data in pairs]
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    assert [name for name, _ in pairs] == [f"event: {kind}" for kind in kinds]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


def test_stream_gives_the_answer_in_pieces(agent: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 20, "extra_body": {"seed": 3}}
    whole = agent.messages.create(**asked)
    with agent.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert whole.content[0].type == "text"
    assert "".join(pieces) == whole.content[0].text
    assert final.content[0].type == "text"
    assert final.content[0].text == whole.content[0].text
    assert (final.usage, final.stop_reason) == (whole.usage, whole.stop_reason)


def test_assistants_last_message_is_continued(agent: anthropic.Anthropic, client: openai.OpenAI) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "I am"}]
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 8}
    greedy = {"temperature": 0}
    chat = client.chat.completions.create(**asked, **greedy, extra_body={"continue_final_message": True})
    message = agent.messages.create(**asked, extra_body=greedy)
    assert message.content[0].type == "text"
    assert message.content[0].text == chat.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_error_is_anthropics(agent: anthropic.Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        agent.messages.create(model="nobody", messages=HELLO, max_tokens=3, stream=stream)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["error"]["message"].startswith("the model 'nobody' does not exist; known are ")


def test_key_may_come_in_anthropics_header(triton: TritonServer, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("right\n")
    config = GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=tmp_path / "keys")
    with GatewayThread(config) as gateway:
        for key in ("right", "wrong"):
            with anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=60) as connected:
                if key == "right":
                    assert connected.messages.count_tokens(model="demo", messages=HELLO).input_tokens > 1
                    continue
                with pytest.raises(anthropic.AuthenticationError):
                    connected.messages.create(model="demo", messages=HELLO, max_tokens=3)
