# SPDX-License-Identifier: Apache-2.0
"""Answers of other servers, as the clients' own objects hold them, sent back as the past of a conversation.

The answers are the examples of OpenAI's and Anthropic's documents; `test_chat.py` has those of the chat.
"""

import json
from typing import Any

import anthropic.types
import pytest
from openai.types.responses import Response

from hf_triton.protocol.chat_request import parse_chat
from hf_triton_gateway.agents.message_blocks import read_messages
from hf_triton_gateway.agents.response_input import read_input
from hf_triton_gateway.agents.response_tools import ResponseTools

HELLO = {"role": "user", "content": "Hello!"}
MESSAGE = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
TEXT = {"type": "output_text", "annotations": []}
CITATION = {"type": "url_citation", "start_index": 0, "end_index": 2, "url": "https://example.org", "title": "a"}
CALL = {"id": "fc_1", "call_id": "call_1"}


def answer(**fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def called(call_id: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


ITEMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "OpenAI: a text": (
        [{**MESSAGE, "phase": "final_answer", "content": [{**TEXT, "text": "In a peaceful grove", "logprobs": []}]}],
        {"role": "assistant", "content": "In a peaceful grove"},
    ),
    "OpenAI: a search": (
        [
            {"type": "web_search_call", "id": "1", "status": "completed", "action": {"type": "search", "query": "a"}},
            {**MESSAGE, "content": [{**TEXT, "text": "It is sunny.", "annotations": [CITATION]}]},
        ],
        {"role": "assistant", "content": "It is sunny."},
    ),
    "OpenAI: a call that was cut": (
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {**CALL, "type": "function_call", "name": "get_weather", "arguments": "{bad", "status": "incomplete"},
        ],
        answer(reasoning_content="hm", tool_calls=[called("call_1", {"INVALID_JSON": "{bad"})]),
    ),
    "OpenAI: a refusal": (
        [{**MESSAGE, "content": [{"type": "refusal", "refusal": "I cannot."}]}],
        {"role": "assistant", "content": "I cannot."},
    ),
}
"""Items of a response, and the message of the chat."""

BLOCKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "Anthropic: a text": (
        [{"type": "text", "text": "Hi! My name is Claude.", "citations": None}],
        {"role": "assistant", "content": "Hi! My name is Claude."},
    ),
    "Anthropic: a call": (
        [
            {"type": "thinking", "thinking": "hm", "signature": "EqQBCgIYAhIM"},
            {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"},
            {"type": "tool_use", "id": "toolu_01D7", "name": "get_weather", "input": {"city": "Boston"}},
        ],
        answer(reasoning_content="hm", tool_calls=[called("toolu_01D7", {"city": "Boston"})]),
    ),
    "Anthropic: a search": (
        [
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
            {"type": "text", "text": "It is sunny."},
        ],
        {"role": "assistant", "content": "It is sunny."},
    ),
}
"""Blocks of a message, and the message of the chat."""


def read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the chat template gets them."""
    return list(parse_chat(json.dumps(messages), {}, 100_000).messages)


def response(*items: dict[str, Any]) -> list[Any]:
    """The output items that OpenAI's client makes of a response, as it dumps them."""
    made = Response.model_validate(
        {
            "id": "resp_1",
            "object": "response",
            "created_at": 1741476777,
            "model": "gpt-5.4",
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
    )
    return [item.model_dump() for item in made.output]


def message(*blocks: dict[str, Any]) -> dict[str, Any]:
    """The message that Anthropic's client makes of an answer, all of its fields dumped."""
    made = anthropic.types.Message.model_validate(
        {
            "id": "msg_013Zva2CMHLNnXjNJJKqJ2EF",
            "type": "message",
            "role": "assistant",
            "model": "claude-opus-4-6",
            "content": blocks,
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 2095, "output_tokens": 503},
        }
    )
    return made.model_dump()


@pytest.mark.parametrize("case", ITEMS)
def test_items_of_a_response_are_taken_back(case: str) -> None:
    items, expected = ITEMS[case]
    sent = [HELLO, *response(*items), HELLO]
    assert read(read_input(sent, None, ResponseTools()).messages())[1:-1] == [expected]


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("is_whole", [False, True], ids=["content", "message"])
def test_a_message_of_anthropic_is_taken_back(case: str, is_whole: bool) -> None:
    blocks, expected = BLOCKS[case]
    whole = message(*blocks)
    sent = whole if is_whole else {"role": "assistant", "content": whole["content"]}
    assert read(read_messages([HELLO, sent, HELLO], None).messages())[1] == expected


def test_an_empty_answer_of_anthropic_is_taken_back() -> None:
    turns = read_messages([HELLO, {"role": "assistant", "content": []}, HELLO], None).messages()
    assert [turn["role"] for turn in turns] == ["user"]


def test_null_of_anthropic_is_a_field_left_out() -> None:
    blocks = [
        {"type": "thinking", "thinking": None, "signature": None},
        {"type": "text", "text": None},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": None},
    ]
    sent = [HELLO, {"role": "assistant", "content": blocks}, HELLO, {"role": "assistant", "content": None}]
    [_, turn, _] = read(read_messages(sent, None).messages())
    assert (turn["content"], turn["tool_calls"][0]["function"]) == ("", {"name": "f", "arguments": {}})


def test_null_of_openai_is_a_field_left_out() -> None:
    items: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": None},
        {"type": "reasoning", "content": None, "summary": None},
        {"type": "message", "role": "assistant", "content": None},
    ]
    [_, turn] = read(read_input([HELLO, *items], None, ResponseTools()).messages())
    assert (turn["content"], turn["tool_calls"][0]["function"]) == ("", {"name": "f", "arguments": {}})


@pytest.mark.parametrize("arguments", ['{"city": "Bos', "", 5], ids=str)
def test_an_input_that_is_no_object_is_taken_back(arguments: object) -> None:
    block = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": arguments}
    [_, turn] = read(read_messages([HELLO, {"role": "assistant", "content": [block]}], None).messages())
    expected = {} if arguments == "" else {"INVALID_JSON": str(arguments)}
    assert turn["tool_calls"][0]["function"]["arguments"] == expected
