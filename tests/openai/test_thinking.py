# SPDX-License-Identifier: Apache-2.0
"""Thinking and answers of a schema on the three chat APIs, by the real clients, and the spellings of a budget."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 200, "response_format": FORMAT},
    RESPONSES: {
        "input": "Hi",
        "max_output_tokens": 200,
        "text": {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}},
    },
    MESSAGES: {
        "messages": HELLO,
        "max_tokens": 200,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
Parts = tuple[str, str]
"""Reasoning and content."""


def check(parts: Parts, *, thinks: bool = True) -> None:
    reasoning, content = parts
    assert bool(reasoning) == thinks
    assert "</think>" not in reasoning
    assert json.loads(content).keys() == {"city", "days"}


def test_chat_completions(openai_agent: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "free", **BODIES[CHAT], "extra_body": {"thinking_budget": 7}}
    [choice] = openai_agent.chat.completions.create(**asked).choices
    assert choice.finish_reason == "stop"
    whole = (choice.message.model_extra or {})["reasoning_content"], choice.message.content or ""
    check(whole)
    deltas = [
        chunk.choices[0].delta.model_dump() for chunk in openai_agent.chat.completions.create(**asked, stream=True)
    ]
    streamed = tuple("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    assert streamed == whole
    cut = openai_agent.chat.completions.create(**asked | {"max_tokens": 3}).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", None)
    assert whole[0].startswith((cut.message.model_extra or {})["reasoning_content"].rstrip("\ufffd"))
    check_usage = openai_agent.chat.completions.create(**asked | {"logprobs": True, "n": 2, "temperature": 1.0})
    for other in check_usage.choices:
        assert other.logprobs
        assert other.logprobs.content
        assert "</think>" in "".join(token.token for token in other.logprobs.content)
        assert other.message.content
        json.loads(other.message.content)


TRIP = '{"city": "Köln", "days": 2}'
THOUGHT = "<|channel|>analysis<|message|>They ask, {so}.<|end|>"
LEAD = "<|start|>assistant<|channel|>final<|message|>"
ANSWER, CALLS = LEAD + TRIP, f'[{{"name": "trip", "arguments": {TRIP}}}]'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "trip"}}}
UNCUT = ("They ask, {so}.", TRIP)


@pytest.mark.parametrize(
    ("says", "fields", "expected"),
    [
        (THOUGHT + ANSWER, {"response_format": FORMAT}, UNCUT),
        (THOUGHT + ANSWER, FORCED, UNCUT),
        (THOUGHT + LEAD + CALLS, FORCED | {"tool_choice": "required"}, UNCUT),
        (THOUGHT + ANSWER, {"extra_body": {"structured_outputs": {"choice": ["no", TRIP]}}}, UNCUT),
        (THOUGHT + ANSWER, {}, UNCUT),
        # It goes on within the thought that was ended for it: text of no channel is content.
        (THOUGHT + ANSWER, {"reasoning_effort": "none"}, ("", "y ask, {so}.<|end|>" + TRIP)),
        ("<|channel|>final<|message|>" + TRIP, {"response_format": FORMAT}, ("", TRIP)),
        (THOUGHT + ANSWER, {"response_format": FORMAT, "max_tokens": 300, "extra_body": {"thinking_budget": 4}}, None),
        (THOUGHT + ANSWER, {"response_format": FORMAT, "max_tokens": 300, "reasoning_effort": "none"}, None),
    ],
)
def test_channels_of_gpt_oss(
    openai_agent: openai.OpenAI, says: str, fields: dict[str, Any], expected: Parts | None
) -> None:
    """A constraint holds in the final channel, streamed as whole; the model writes as it does unless it must not."""
    asked: dict[str, Any] = {"model": "harmony", "messages": [{"role": "user", "content": f"say:{says}"}], **fields}
    [choice] = openai_agent.chat.completions.create(**asked).choices
    message = choice.message
    calls = [call.function.arguments for call in message.tool_calls or () if call.type == "function"]
    reasoning = (message.model_extra or {}).get("reasoning_content", "")
    content = calls[0] if calls else message.content or ""
    assert bool(calls) == ("tools" in fields)
    chunks = openai_agent.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == reasoning
    pieces = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
    texts = [piece.arguments for piece in pieces] if calls else [delta.content for delta in deltas]
    assert "".join(text or "" for text in texts) == content
    if expected is None:
        check((reasoning, content), thinks="reasoning_effort" not in fields)
        assert "<|" not in reasoning
    else:
        assert (reasoning, content) == expected


def test_thinking_uses_up_the_tokens(openai_agent: openai.OpenAI) -> None:
    says: list[Any] = [{"role": "user", "content": "say:<|channel|>analysis<|message|>" + "so " * 200}]
    [cut] = openai_agent.chat.completions.create(model="harmony", messages=says, response_format=FORMAT).choices
    assert (cut.finish_reason, cut.message.content) == ("length", None)
    assert (cut.message.model_extra or {})["reasoning_content"].startswith("so so so")


def test_tokens_of_reasoning_are_counted(openai_agent: openai.OpenAI, responses: Any) -> None:
    said = f"say:{THOUGHT}{ANSWER}"
    url = f"{str(openai_agent.base_url).removesuffix('v1/')}tokenize"
    body = {"model": "harmony", "prompt": UNCUT[0], "add_special_tokens": False}
    num_tokens = httpx.post(url, json=body).json()["count"]
    asked: dict[str, Any] = {"model": "harmony", "messages": [{"role": "user", "content": said}]}
    whole = openai_agent.chat.completions.create(**asked, n=2)
    *_, last = openai_agent.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for usage, num_choices in ((whole.usage, 2), (last.usage, 1)):
        assert usage
        assert usage.completion_tokens_details
        assert usage.completion_tokens_details.reasoning_tokens == num_choices * num_tokens < usage.completion_tokens
    quick = openai_agent.chat.completions.create(**asked, reasoning_effort="none")
    assert quick.usage
    assert quick.usage.completion_tokens_details is None
    details = responses.create(model="harmony", input=said).usage.output_tokens_details
    assert details.reasoning_tokens == num_tokens


def test_responses(responses: Any) -> None:
    asked = {"model": "free", **BODIES[RESPONSES], "extra_body": {"thinking_budget": 7}}
    answer = responses.create(**asked)
    with responses.stream(**asked) as stream:
        stream.until_done()
        streamed = stream.get_final_response()
    for made in (answer, streamed):
        [thought, item] = made.output
        check((thought.content[0].text, item.content[0].text))
        assert thought.content[0].text == answer.output[0].content[0].text
        assert made.output_text == answer.output_text
    [item] = responses.create(**asked | {"reasoning": {"effort": "none"}}).output
    check(("", item.content[0].text), thinks=False)


def test_messages(messages: Any) -> None:
    asked = {"model": "free", **BODIES[MESSAGES], "thinking": {"type": "enabled", "budget_tokens": 7}}
    answer = messages.create(**asked)
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for made in (answer, streamed):
        [thought, text] = made.content
        check((thought.thinking, text.text))
        assert (thought.thinking, text.text) == (answer.content[0].thinking, answer.content[1].text)
    [text] = messages.create(**asked | {"thinking": {"type": "disabled"}}).content
    check(("", text.text), thinks=False)


def post(agents: GatewayThread, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(agents.url + path, json={"model": "free", **BODIES[path], **fields}, timeout=60)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"thinking_budget": 2}),
        (CHAT, {"thinking_token_budget": 2}),
        (CHAT, {"nvext": {"max_thinking_tokens": 2}}),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 2}}),
        (RESPONSES, {"thinking_budget": 2}),
        (MESSAGES, {"thinking_budget": 2}),
    ],
)
def test_spellings_of_a_budget(agents: GatewayThread, path: str, fields: dict[str, Any]) -> None:
    answer, plain = post(agents, path, **fields), post(agents, path)
    assert answer.status_code == plain.status_code == 200, answer.text
    assert "x-hf-triton-ignored" not in answer.headers
    counts = [reply.json()["usage"] for reply in (answer, plain)]
    assert counts[0] != counts[1] or answer.json() != plain.json()
    assert "reasoning" in answer.text or '"thinking"' in answer.text


@pytest.mark.parametrize("fields", [{"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}])
def test_no_thinking_on_the_chat(agents: GatewayThread, fields: dict[str, Any]) -> None:
    answer = post(agents, CHAT, thinking_budget=9, **fields)
    assert "x-hf-triton-ignored" not in answer.headers
    message = answer.json()["choices"][0]["message"]
    check((message.get("reasoning_content", ""), message["content"]), thinks=False)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHAT,
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        "thinking.budget_tokens",
        "thinking.budget_tokens must be an integer >= 0 and <= 1048576, got -1",
    ),
    (MESSAGES, {"thinking": {"type": "on"}}, "thinking.type", "thinking.type must be"),
    (MESSAGES, {"thinking": {}}, "thinking.type", "thinking.type is required"),
    (MESSAGES, {"thinking": "on"}, "thinking", "thinking must be a JSON object"),
    (
        CHAT,
        {"nvext": {"max_thinking_tokens": "many"}},
        "nvext.max_thinking_tokens",
        "nvext.max_thinking_tokens must be an integer >= 0 and <= 1048576, got 'many'",
    ),
    (CHAT, {"nvext": {"top_k": 1}}, "nvext.top_k", "nvext: there is no field 'top_k'"),
]


@pytest.mark.parametrize(("path", "fields", "param", "sentence"), WRONG)
def test_wrong_fields(agents: GatewayThread, path: str, fields: dict[str, Any], param: str, sentence: str) -> None:
    answer = post(agents, path, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert path == MESSAGES or error["param"] == param
