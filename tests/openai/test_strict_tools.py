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


def choices(gateway: GatewayThread, model: str, *, stream: bool, **more: Any) -> list[dict[str, Any]]:
    """The choices of a chat with a strict tool: content, name and arguments of calls, tokens, and how it ended."""
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}
    body = {"model": model, "messages": [{"role": "user", "content": SAYS[model]}], "tools": [tool], **more}
    body |= {"max_tokens": 400, "stream": stream}
    answer = httpx.post(gateway.url + CHAT, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    made: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        own = made.setdefault(choice["index"], {"content": "", "calls": {}, "tokens": ""})
        said = choice["delta" if stream else "message"]
        own["content"] += said.get("content") or ""
        for number, call in enumerate(said.get("tool_calls") or ()):
            written = own["calls"].setdefault(call.get("index", number), ["", ""])
            written[0] += call["function"].get("name") or ""
            written[1] += call["function"]["arguments"]
        own["tokens"] += "".join(token["token"] for token in (choice.get("logprobs") or {}).get("content") or ())
        own["ended"] = choice["finish_reason"] or own.get("ended")
    return [made[index] for index in sorted(made)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", SAYS)
def test_other_parameters_go_with_strict_tools(agents: GatewayThread, model: str, stream: bool) -> None:
    several = choices(agents, model, stream=stream, n=2, logprobs=True, stop=["no such text"])
    assert [choice["ended"] for choice in several] == ["tool_calls"] * 2
    for choice in several:
        [(name, arguments)] = choice["calls"].values()
        assert name == "weather"
        jsonschema.validate(json.loads(arguments), SCHEMA)
        assert "".join(arguments.split()) in "".join(choice["tokens"].split())
    [cut] = choices(agents, model, stream=stream, stop=['"city"'])
    assert (cut["calls"], cut["ended"]) == ({}, "stop")
    assert '"city"' not in cut["content"]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    [formed] = choices(agents, model, stream=stream, response_format=form)
    assert (formed["calls"], formed["ended"]) == ({}, "stop")
    jsonschema.validate(json.loads(formed["content"]), SCHEMA)
