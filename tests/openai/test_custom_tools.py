# SPDX-License-Identifier: Apache-2.0
"""Custom tools, namespaces, allowed tools and log probabilities of /v1/responses, by the real client."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATCH = '*** Begin Patch\n+say "hi"\n*** End Patch\n'
LETTERS = {"syntax": "lark", "definition": 'start: "<" /[a-c]{3}/ ">"'}
CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "custom", "name": "letters", "format": {"type": "grammar", **LETTERS}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files."},
    {
        "type": "namespace",
        "name": "mcp__map__",
        "description": "A map.",
        "tools": [{"type": "function", "name": "locate", "parameters": CITY}, {"type": "custom", "name": "draw"}],
    },
    {"type": "web_search"},
    {"type": "function", "name": "weather", "parameters": CITY},
]
CHAT_TOOLS: list[Any] = [
    {"type": "custom", "custom": {"name": "letters", "format": {"type": "grammar", "grammar": LETTERS}}},
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
]
WHOLE_OR_STREAM = pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])


def written(name: str, arguments: dict[str, str]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"say:</think><tool_call>\n{call}\n</tool_call>"


def respond(responses: Any, is_stream: bool, **fields: Any) -> Any:
    if not is_stream:
        return responses.create(**fields)
    with responses.stream(**fields) as stream:
        stream.until_done()
        return stream.get_final_response()


@WHOLE_OR_STREAM
@pytest.mark.parametrize("output", ["say:</think>Done.", [{"type": "input_text", "text": "say:</think>Done."}]])
def test_loop_of_a_custom_tool(responses: Any, is_stream: bool, output: Any) -> None:
    items: list[Any] = [{"role": "user", "content": written("apply_patch", {"input": PATCH})}]
    answer = respond(responses, is_stream, model="writes", input=items, tools=TOOLS)
    [call] = answer.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    items.append(call.model_dump())
    items.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": output})
    answer = respond(responses, is_stream, model="writes", input=items, tools=TOOLS)
    assert answer.output_text == "Done."


@WHOLE_OR_STREAM
@pytest.mark.parametrize("called", ["mcp__map__locate", "locate"])
def test_loop_of_a_namespace(responses: Any, is_stream: bool, called: str) -> None:
    items: list[Any] = [{"role": "user", "content": written(called, {"city": "Bonn"})}]
    answer = respond(responses, is_stream, model="writes", input=items, tools=TOOLS)
    [call] = answer.output
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__map__", "locate")
    items.append(call.model_dump(exclude={"parsed_arguments"}))
    output = [{"type": "input_image", "image_url": "data:,"}, {"type": "input_text", "text": "say:</think>There."}]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    answer = respond(responses, is_stream, model="writes", input=items, tools=TOOLS)
    assert answer.output_text == "There."


@WHOLE_OR_STREAM
def test_custom_tool_of_a_namespace(responses: Any, is_stream: bool) -> None:
    asked = written("mcp__map__draw", {"input": "a line"})
    [call] = respond(responses, is_stream, model="writes", input=asked, tools=TOOLS).output
    assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "mcp__map__", "draw", "a line")


def test_events_of_a_forced_custom_call(agents: GatewayThread) -> None:
    choice = {"type": "custom", "name": "letters"}
    body = {"model": "free", "input": "Hi", "tools": TOOLS, "tool_choice": choice, "stream": True}
    answer = httpx.post(f"{agents.url}/v1/responses", json=body, timeout=60)
    assert answer.headers["x-hf-triton-ignored"] == "tools.web_search"
    events = [json.loads(piece.split("\ndata: ")[1]) for piece in answer.text.split("\n\n")[:-1]]
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    delta = "custom_tool_call_input.delta"
    assert [kind for kind in kinds if kind != delta] == [
        *("created", "in_progress", "output_item.added", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    text = "".join(event["delta"] for event in events if event["type"] == f"response.{delta}")
    assert re.fullmatch("<[a-c]{3}>", text)
    item = events[-2]["item"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "letters", text)
    assert events[-3]["input"] == text
    assert events[-1]["response"]["output"] == [item]


@WHOLE_OR_STREAM
@pytest.mark.parametrize(
    "choice", ["required", {"type": "custom", "custom": {"name": "letters"}}], ids=["any", "named"]
)
def test_forced_custom_call_of_the_chat(openai_agent: openai.OpenAI, choice: Any, is_stream: bool) -> None:
    hello: list[Any] = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"model": "free", "messages": hello, "tools": CHAT_TOOLS, "tool_choice": choice, "seed": 1}
    asked |= {"parallel_tool_calls": False}
    if is_stream:
        calls: dict[int, Any] = {}
        for chunk in openai_agent.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                made = delta.model_dump(exclude_none=True)
                kept = calls.setdefault(delta.index, made)
                if kept is not made:
                    kept["custom"]["input"] += made["custom"]["input"]
        [call] = calls.values()
    else:
        message = openai_agent.chat.completions.create(**asked).choices[0].message
        [call] = [made.model_dump() for made in message.tool_calls or ()]
        sent_back = [*hello, message.model_dump(exclude_none=True)]
        sent_back.append({"role": "tool", "tool_call_id": call["id"], "content": "fine"})
        assert openai_agent.chat.completions.create(**{**asked, "messages": sent_back, "tool_choice": "none"}).choices
    if choice == "required" and call["type"] == "function":
        assert call["function"]["name"] == "weather"
    else:
        assert call["custom"]["name"] == "letters"
        assert re.fullmatch("<[a-c]{3}>", call["custom"]["input"])


@WHOLE_OR_STREAM
def test_allowed_tools_are_required(responses: Any, is_stream: bool) -> None:
    named = [{"type": "function", "name": "weather"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}
    answer = respond(responses, is_stream, model="free", input="Hi", tools=TOOLS, tool_choice=choice)
    assert {(item.type, item.name) for item in answer.output} == {("function_call", "weather")}


LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_log_probabilities_are_those_of_the_text(responses: Any) -> None:
    asked = {"model": "writes", "input": "say:I think.</think>Well then.", **LOGPROBS}
    whole, stream = (respond(responses, is_stream, **asked) for is_stream in (False, True))
    tokens = whole.output[1].content[0].logprobs
    assert "".join(token.token for token in tokens).strip() == "Well then."
    assert all(len(token.top_logprobs) == 2 and token.bytes is not None for token in tokens)
    streamed = stream.output[1].content[0].logprobs
    assert [token.token for token in streamed] == [token.token for token in tokens]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], abs=1e-4)


def test_streamed_log_probabilities_are_the_whole_ones(agents: GatewayThread) -> None:
    no_thought = {"chat_template_kwargs": {"enable_thinking": False}}
    body = {"model": "free", "input": "Hi", "max_output_tokens": 12, "stream": True, **LOGPROBS, **no_thought}
    answer = httpx.post(f"{agents.url}/v1/responses", json=body, timeout=60)
    events = [json.loads(piece.split("\ndata: ")[1]) for piece in answer.text.split("\n\n")[:-1]]
    for event in events:
        EVENT.validate_python(event)
    told = [event for event in events if event["type"] == "response.output_text.delta"]
    deltas = [token for event in told for token in event["logprobs"]]
    [done] = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert deltas == done
    assert done == events[-1]["response"]["output"][-1]["content"][0]["logprobs"]
    assert len(done) > 0


def test_no_log_probabilities_unless_asked_for(responses: Any) -> None:
    answer = responses.create(model="writes", input="say:</think>Well.")
    assert answer.output_text == "Well."
    assert all(not part.logprobs for item in answer.output if item.type == "message" for part in item.content)
