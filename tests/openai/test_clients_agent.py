# SPDX-License-Identifier: Apache-2.0
"""An agent's loop with OpenAI's client: a call of one of two tools, its result, an answer."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest


def add(a: int, b: int) -> str:
    return str(a + b)


def look_up(word: str) -> str:
    return f"{word} means nothing"


FUNCTIONS: dict[str, Callable[..., str]] = {"add": add, "look_up": look_up}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PROPERTIES: dict[str, dict[str, object]] = {
    "add": {"a": DIGIT, "b": DIGIT},
    "look_up": {"word": {"type": "string", "maxLength": 8}},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }
    for name, properties in PROPERTIES.items()
]


def answer(client: openai.OpenAI, messages: list[Any], choice: Any, is_streamed: bool) -> Any:
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "tools": TOOLS, "tool_choice": choice}
    asked |= {"max_tokens": 150, "temperature": 1, "seed": len(messages), "parallel_tool_calls": False}
    if not is_streamed:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        stream.until_done()
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "choice", ["required", *({"type": "function", "function": {"name": name}} for name in FUNCTIONS)]
)
def test_agent(client: openai.OpenAI, choice: Any, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 3 and 4?"}]
    called = answer(client, messages, choice, is_streamed)
    assert called.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert called.message.tool_calls
    messages.append(called.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    for call in called.message.tool_calls:
        if choice != "required":
            assert call.function.name == choice["function"]["name"]
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = answer(client, messages, "none", is_streamed)
    assert not last.message.tool_calls
    assert last.message.content
