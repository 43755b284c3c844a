# SPDX-License-Identifier: Apache-2.0
"""Requests as coding agents send them, from the first turn on: recorded, with their long texts cut."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anthropic.types as anthropic
import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.gateway import GatewayThread

BODIES: Final = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "bodies").glob("*.json")}
EVENTS: Final[dict[str, TypeAdapter[Any]]] = {
    "responses": TypeAdapter(ResponseStreamEvent),
    "completions": TypeAdapter(ChatCompletionChunk),
    "messages": TypeAdapter(anthropic.RawMessageStreamEvent),
}
PASSED_OVER: Final = {
    "codex": {"tools.web_search", "input.output.input_image", "client_metadata", "prompt_cache_key"},
    "codex_patch": {"tools.web_search", "tools.tool_search", "text.verbosity"},
    "codex_lite": {"text.verbosity", "reasoning.context"},
    "claude_code": {"thinking", "context_management", "output_config.effort", "metadata"},
}


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for piece in answer.text.split("\n\n")[:-1]:
        data = piece.split("data: ", 1)[1]
        if data != "[DONE]":
            yield json.loads(data)


def text_of(events: list[dict[str, Any]]) -> str:
    """The text that the deltas of any of the three APIs hold."""
    pieces = []
    for event in events:
        if event.get("type") == "response.output_text.delta":
            pieces.append(event["delta"])
        elif event.get("type") == "content_block_delta":
            pieces.append(event["delta"].get("text", ""))
        elif "choices" in event:
            pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(pieces)


@pytest.mark.full
@pytest.mark.parametrize("turn", ["first", "last"])
@pytest.mark.parametrize("name", BODIES)
def test_body_of_an_agent_is_answered(agents: GatewayThread, name: str, turn: str) -> None:
    """The first turn holds the task, the last one also the calls of tools and what they answered."""
    recorded = BODIES[name]
    body, path = dict(recorded["body"]), recorded["path"]
    field = "input" if "input" in body else "messages"
    if turn == "first":
        body[field] = body[field][: recorded["length_of_first"]]
    answer = httpx.post(agents.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    events = list(events_of(answer))
    adapter = EVENTS[path.partition("?")[0].rsplit("/", 1)[1]]
    for event in events:
        adapter.validate_python(event)
    assert text_of(events).startswith("Hello.")
    if field == "input":
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    if turn == "last":
        passed_over = set(answer.headers.get("x-hf-triton-ignored", "").split(", "))
        assert passed_over >= PASSED_OVER.get(name, set())
