# SPDX-License-Identifier: Apache-2.0
"""Tool calls by the real client: forced by grammar, so that a random model makes them too."""

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OTHER_SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": OTHER_SCHEMA}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASKED: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "max_tokens": 80, "temperature": 1, "seed": 3}


def arguments_are_valid(name: str, arguments: str) -> bool:
    jsonschema.validate(json.loads(arguments), {"weather": SCHEMA, "clock": OTHER_SCHEMA}[name])
    return True


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_call_is_valid(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(model="tiny", tool_choice=choice, parallel_tool_calls=False, **ASKED)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert arguments_are_valid(call.function.name, call.function.arguments)
    assert choice == "required" or call.function.name == "weather"
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_streamed_call_is_the_whole_one(client: openai.OpenAI, choice: Any) -> None:
    asked = {**ASKED, "model": "decoupled", "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked)
    (expected,) = whole.choices[0].message.tool_calls or []
    name, arguments, ids = "", "", set()
    chunks: list[ChatCompletionChunk] = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            if call.id:
                ids.add(call.id)
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, arguments) == (expected.function.name, expected.function.arguments)
    assert len(ids) == 1
    assert chunks[-1].choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_small_limit_cuts_a_forced_call(client: openai.OpenAI, stream: bool) -> None:
    def ask(choice: Any, max_tokens: int) -> tuple[str, str, str | None]:
        asked = {**ASKED, "model": "decoupled", "max_tokens": max_tokens, "tool_choice": choice}
        if not stream:
            whole = client.chat.completions.create(**asked).choices[0]
            calls = whole.message.tool_calls or []
            arguments = "".join(call.function.arguments for call in calls if call.type == "function")
            return whole.message.content or "", arguments, whole.finish_reason
        content = arguments = ""
        reason: str | None = None
        for chunk in client.chat.completions.create(**asked, stream=True):
            delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
            content += delta.content or ""
            arguments += "".join((call.function and call.function.arguments) or "" for call in delta.tool_calls or [])
        return content, arguments, reason

    content, arguments, reason = ask("required", 6)
    assert (arguments, reason) == ("", "length")
    assert json.dumps({"name": "weather"}).startswith("".join(content.split())[:5])
    content, arguments, reason = ask(NAMED, 6)
    assert (content, reason) == ("", "length")
    assert json.dumps({"city": "Rome"}).startswith("".join(arguments.split())[:5])
    assert ask("required", 1)[2] == "length"


def test_parse_gives_the_object_or_says_that_it_was_cut(client: openai.OpenAI) -> None:
    class Trip(BaseModel):
        city: Literal["Paris", "Rome"]
        days: bool

    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "response_format": Trip}
    answer = client.chat.completions.parse(**asked, max_tokens=80)
    assert isinstance(answer.choices[0].message.parsed, Trip)
    length = answer.usage.completion_tokens if answer.usage else 0
    assert client.chat.completions.parse(**asked, max_tokens=length).choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked, max_tokens=length - 1)
