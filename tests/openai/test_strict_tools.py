# SPDX-License-Identifier: Apache-2.0
"""Strict tools that the model chooses to call, on the three chat APIs: one that insists on a wrong call makes none."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WRONG = '<tool_call>\n{"name": "nope", "arguments": {"city": 5}}\n</tool_call>'
SAYS = {
    "writes": f"say:I may {WRONG}.</think>I look.\n{WRONG}",
    "harmony": "say:<|channel|>analysis<|message|>So to=nope.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.nope <|constrain|>json<|message|>{"city": 5}<|call|>',
}
Call = tuple[str, str]


def ask(gateway: GatewayThread, path: str, model: str, text: str, num: int, **strict: bool) -> tuple[list[Call], str]:
    """The calls of an answer, and how it ended."""
    tool: dict[str, Any] = {"name": "weather", **strict}
    function = {"type": "function", **tool, "parameters": SCHEMA}
    hello = {"messages": [{"role": "user", "content": text}]}
    body: dict[str, Any] = {
        CHAT: {**hello, "max_tokens": num, "tools": [{"type": "function", "function": {**tool, "parameters": SCHEMA}}]},
        RESPONSES: {"input": text, "max_output_tokens": num, "tools": [function], "store": False},
        MESSAGES: {**hello, "max_tokens": num, "tools": [{**tool, "input_schema": SCHEMA}]},
    }[path]
    answer = httpx.post(gateway.url + path, json={"model": model, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "strict" not in answer.headers.get("x-hf-triton-ignored", "")
    made = answer.json()
    if path == CHAT:
        [choice] = made["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        return [(call["name"], call["arguments"]) for call in calls], choice["finish_reason"]
    if path == RESPONSES:
        calls = [item for item in made["output"] if item["type"] == "function_call"]
        return [(call["name"], call["arguments"]) for call in calls], made["status"]
    calls = [block for block in made["content"] if block["type"] == "tool_use"]
    return [(call["name"], json.dumps(call["input"])) for call in calls], made["stop_reason"]


@pytest.mark.parametrize("model", SAYS)
@pytest.mark.parametrize(
    ("path", "called", "cut"),
    [(CHAT, "tool_calls", "length"), (RESPONSES, "completed", "incomplete"), (MESSAGES, "tool_use", "max_tokens")],
)
def test_a_wrong_call_is_not_made(agents: GatewayThread, path: str, called: str, cut: str, model: str) -> None:
    calls, ended = ask(agents, path, model, SAYS[model], 400, strict=True)
    [(name, arguments)] = calls
    assert (name, ended) == ("weather", called)
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert ask(agents, path, model, SAYS[model], 60, strict=True) == ([], cut)
    calls, _ = ask(agents, path, model, SAYS[model], 400)
    assert [name for name, _ in calls] == ["nope"]
