# SPDX-License-Identifier: Apache-2.0
"""Agents that call two tools, by the real clients of OpenAI's Responses API and Anthropic's Messages API."""

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.gateway import GatewayThread
from tests.support.writing_model import call as call_of

pytestmark = pytest.mark.full

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]}
NAMES = ("locate", "weather")
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": f"To {name}.", "parameters": PARAMETERS, "strict": True}
    for name in NAMES
]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": name, "description": f"To {name}.", "input_schema": PARAMETERS} for name in NAMES
]


def call(name: str, city: str) -> str:
    return call_of(name, city=city)


TASK = f"say:Where is it?\n</think>\n\nI look.\n{call('locate', 'Köln')}"
OUTPUTS = {"locate": f"say:</think>{call('weather', 'Bonn')}", "weather": "say:I know.</think>Sunny."}
"""What the tools answer, and so what the model writes next."""
CALLS = [("locate", {"city": "Köln"}), ("weather", {"city": "Bonn"})]
TWO_CALLS = f"say:</think>{call('locate', 'Köln')}\n{call('weather', 'Bonn')}"


def respond(responses: Any, is_stream: bool, **fields: Any) -> Any:
    if not is_stream:
        return responses.create(**fields)
    with responses.stream(**fields) as stream:
        stream.until_done()
        return stream.get_final_response()


def send(api: Any, is_stream: bool, **fields: Any) -> Any:
    if not is_stream:
        return api.create(max_tokens=400, **fields)
    with api.stream(max_tokens=400, **fields) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_agent_of_responses_calls_two_tools(responses: Any, is_stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": TASK}]
    calls = []
    for _ in range(4):
        answer = respond(responses, is_stream, model="writes", input=items, tools=OPENAI_TOOLS, store=False)
        assert answer.status == "completed"
        items += [item.model_dump() for item in answer.output]
        made = [item for item in answer.output if item.type == "function_call"]
        for one in made:
            calls.append((one.name, json.loads(one.arguments)))
            items.append({"type": "function_call_output", "call_id": one.call_id, "output": OUTPUTS[one.name]})
        if not made:
            break
    assert calls == CALLS
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert (answer.output[0].content[0].text, answer.output_text) == ("I know.", "Sunny.")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_agent_of_messages_calls_two_tools(messages: Any, is_stream: bool) -> None:
    chat: list[Any] = [{"role": "user", "content": TASK}]
    calls, reasons = [], []
    for _ in range(4):
        answer = send(messages, is_stream, model="writes", messages=chat, tools=ANTHROPIC_TOOLS)
        reasons.append(answer.stop_reason)
        made = [block for block in answer.content if block.type == "tool_use"]
        chat.append({"role": "assistant", "content": answer.content})
        chat.append({"role": "user", "content": [result_of(block) for block in made]})
        calls += [(block.name, block.input) for block in made]
        if not made:
            break
    assert calls == CALLS
    assert reasons == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("I know.", "Sunny.")


def result_of(block: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": OUTPUTS[block.name]}]
    return {"type": "tool_result", "tool_use_id": block.id, "content": content}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_one_answer_makes_two_calls(responses: Any, messages: Any, is_stream: bool) -> None:
    answer = respond(responses, is_stream, model="writes", input=TWO_CALLS, tools=OPENAI_TOOLS)
    assert [(item.name, json.loads(item.arguments)) for item in answer.output] == CALLS
    chat = [{"role": "user", "content": TWO_CALLS}]
    message = send(messages, is_stream, model="writes", messages=chat, tools=ANTHROPIC_TOOLS)
    assert [(block.name, block.input) for block in message.content] == CALLS
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = send(messages, is_stream, model="writes", messages=chat, tools=ANTHROPIC_TOOLS, tool_choice=one)
    assert [(block.name, block.input) for block in message.content] == CALLS[:1]


def test_events_of_reasoning_text_and_call(agents: GatewayThread) -> None:
    body = {"model": "writes", "input": TASK, "tools": OPENAI_TOOLS, "stream": True}
    answer = httpx.post(f"{agents.url}/v1/responses", json=body, timeout=60)
    events = [json.loads(piece.split("\ndata: ")[1]) for piece in answer.text.split("\n\n")[:-1]]
    kinds = []
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
        if event["type"] not in kinds[-1:]:
            kinds.append(event["type"])
    item, part = "response.output_item", "response.content_part"
    reasoning, text, arguments = (
        [f"response.{name}.{step}" for step in ("delta", "done")]
        for name in ("reasoning_text", "output_text", "function_call_arguments")
    )
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(f"{item}.added", f"{part}.added", *reasoning, f"{part}.done", f"{item}.done"),
        *(f"{item}.added", f"{part}.added", *text, f"{part}.done", f"{item}.done"),
        *(f"{item}.added", *arguments, f"{item}.done"),
        "response.completed",
    ]
    done = [event["item"] for event in events if event["type"] == f"{item}.done"]
    assert events[-1]["response"]["output"] == done


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", [None, "weather"])
def test_call_is_forced(responses: Any, messages: Any, name: str | None, is_stream: bool) -> None:
    named: Any = "required" if name is None else {"type": "function", "name": name}
    answer = respond(responses, is_stream, model="free", input="Hi", tools=OPENAI_TOOLS, tool_choice=named)
    assert {item.type for item in answer.output} == {"function_call"}
    assert {item.name for item in answer.output} <= ({name} if name else set(NAMES))
    choice: Any = {"type": "any"} if name is None else {"type": "tool", "name": name}
    chat = [{"role": "user", "content": "Hi"}]
    message = send(messages, is_stream, model="free", messages=chat, tools=ANTHROPIC_TOOLS, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    assert {block.type for block in message.content} == {"tool_use"}
    for block in message.content:
        assert block.name in ({name} if name else NAMES)
        assert set(block.input) >= {"city"}


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_call_that_is_not_wanted_is_text(messages: Any, choice: str) -> None:
    chat = [{"role": "user", "content": TWO_CALLS}]
    tools = ANTHROPIC_TOOLS if choice == "none" else []
    message = send(messages, False, model="writes", messages=chat, tools=tools, tool_choice={"type": choice})
    assert [block.type for block in message.content] == ["text"]


def test_tools_count_as_tokens(messages: Any) -> None:
    chat = [{"role": "user", "content": TASK}]
    counted = messages.count_tokens(model="writes", messages=chat, tools=ANTHROPIC_TOOLS, system="Be brief.")
    answer = send(messages, False, model="writes", messages=chat, tools=ANTHROPIC_TOOLS, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens
