# SPDX-License-Identifier: Apache-2.0
"""Answers of other servers, as the clients' own objects hold them, sent back as the past of a conversation.

The answers are the examples of OpenAI's and Anthropic's documents, and what vLLM and OpenRouter add to them.
"""

import json
from typing import Any

import anthropic.types
import httpx
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from hf_triton.protocol.chat_request import parse_chat
from hf_triton_gateway.agents.message_blocks import read_messages
from hf_triton_gateway.agents.response_input import read_input
from hf_triton_gateway.agents.response_tools import ResponseTools
from tests.support.gateway import GatewayThread

HELLO = {"role": "user", "content": "Hello!"}
CALL = {"id": "call_abc123", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Boston"}'}}
CUT = {"id": "call_cut", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bos'}}
RAN: dict[str, Any] = {"id": "call_abc123", "type": "function", "function": {"name": "get_weather"}}


def chat_answer(**message: Any) -> dict[str, Any]:
    """What OpenAI's client makes of an answer with this message."""
    answer = ChatCompletion.model_validate(
        {
            "id": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT",
            "object": "chat.completion",
            "created": 1741569952,
            "model": "gpt-5.4",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "refusal": None, "annotations": [], **message},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
        }
    )
    return answer.choices[0].message.model_dump()


CHATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OpenAI: a text": (
        chat_answer(content="Hello! How can I assist you today?"),
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
    ),
    "OpenAI: a call": (
        chat_answer(content=None, tool_calls=[CALL]),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**RAN, "function": {"name": "get_weather", "arguments": {"city": "Boston"}}}],
        },
    ),
    "a call that was cut": (
        chat_answer(content=None, tool_calls=[CUT]),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**CUT, "function": {"name": "get_weather", "arguments": {"INVALID_JSON": '{"city": "Bos'}}},
            ],
        },
    ),
    "OpenAI: a refusal": (
        chat_answer(content=None, refusal="I'm sorry, I cannot assist with that request."),
        {"role": "assistant", "content": "I'm sorry, I cannot assist with that request."},
    ),
    "OpenAI: a search": (
        chat_answer(
            content="It is sunny.",
            annotations=[
                {
                    "type": "url_citation",
                    "url_citation": {"start_index": 0, "end_index": 2, "title": "a", "url": "https://example.org"},
                }
            ],
        ),
        {"role": "assistant", "content": "It is sunny."},
    ),
    "vLLM: reasoning": (
        chat_answer(content="9.8", reasoning="Compare them.", tool_calls=[], function_call=None),
        {"role": "assistant", "content": "9.8", "reasoning_content": "Compare them."},
    ),
    "OpenRouter: reasoning": (
        chat_answer(
            content="9.8", reasoning="Compare.", reasoning_details=[{"type": "reasoning.text", "text": "Compare."}]
        ),
        {"role": "assistant", "content": "9.8", "reasoning_content": "Compare."},
    ),
}
"""The client's message, and what the chat template gets."""

ITEMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "OpenAI: a text": (
        [
            {
                "type": "message",
                "id": "msg_67ccd2bf17f0819081ff3bb2cf6508e6",
                "status": "completed",
                "role": "assistant",
                "phase": "final_answer",
                "content": [{"type": "output_text", "text": "In a peaceful grove", "annotations": [], "logprobs": []}],
            }
        ],
        [{"role": "assistant", "content": "In a peaceful grove"}],
    ),
    "OpenAI: a search": (
        [
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "a"},
            },
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {
                        "type": "output_text",
                        "text": "It is sunny.",
                        "annotations": [
                            {
                                "type": "url_citation",
                                "start_index": 0,
                                "end_index": 2,
                                "url": "https://example.org",
                                "title": "a",
                            }
                        ],
                    }
                ],
            },
        ],
        [{"role": "assistant", "content": "It is sunny."}],
    ),
    "OpenAI: a call that was cut": (
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": "{bad",
                "status": "incomplete",
            },
        ],
        [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": {"INVALID_JSON": "{bad"}},
                    }
                ],
            }
        ],
    ),
    "OpenAI: a refusal": (
        [
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "I cannot."}],
            }
        ],
        [{"role": "assistant", "content": "I cannot."}],
    ),
}
"""Items of a response, and the messages of the chat."""

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
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "toolu_01D7",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Boston"}},
                }
            ],
        },
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


@pytest.mark.parametrize("case", CHATS)
def test_a_message_of_a_chat_is_taken_back(gateway: GatewayThread, case: str) -> None:
    sent, expected = CHATS[case]
    assert read([HELLO, sent, HELLO])[1] == expected
    body = {"model": "tiny", "messages": [HELLO, sent, HELLO], "max_tokens": 3}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("case", ITEMS)
def test_items_of_a_response_are_taken_back(gateway: GatewayThread, case: str) -> None:
    items, expected = ITEMS[case]
    sent = [HELLO, *response(*items), HELLO]
    assert read(read_input(sent, None, ResponseTools()).messages())[1:-1] == expected
    body = {"model": "tiny", "input": sent, "max_output_tokens": 3}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("is_whole", [False, True], ids=["content", "message"])
def test_a_message_of_anthropic_is_taken_back(gateway: GatewayThread, case: str, is_whole: bool) -> None:
    blocks, expected = BLOCKS[case]
    whole = message(*blocks)
    sent = whole if is_whole else {"role": "assistant", "content": whole["content"]}
    assert read(read_messages([HELLO, sent, HELLO], None).messages())[1] == expected
    body = {"model": "tiny", "messages": [HELLO, sent, HELLO], "max_tokens": 3}
    answer = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


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


def test_history_means_the_same_in_all_its_forms(agents: GatewayThread) -> None:
    """The template of `writes` needs a content in each message, drops developers, and writes no calls."""

    def num_tokens(*messages: dict[str, Any]) -> int:
        body = {"model": "writes", "messages": messages, "max_tokens": 1}
        answer = httpx.post(f"{agents.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"}
    last = {"role": "user", "content": "say:</think>x"}
    called = [{"content": None}, {}, {"content": ""}]
    counts = {num_tokens(last, {"role": "assistant", "tool_calls": [CALL], **given}, result, last) for given in called}
    assert len(counts) == 1
    assert counts.pop() > num_tokens(last, {"role": "assistant", "content": None}, result, last)
    assert num_tokens(last, {"role": "assistant", "content": None, "reasoning_content": "hm"}, last) > 0
    developers = [{"role": role, "content": "Be brief."} for role in ("system", "developer")]
    assert len({num_tokens(developer, last) for developer in developers}) == 1


@pytest.mark.parametrize("arguments", ['{"city": "Bos', "", 5], ids=str)
def test_an_input_that_is_no_object_is_taken_back(arguments: object) -> None:
    block = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": arguments}
    [_, turn] = read(read_messages([HELLO, {"role": "assistant", "content": [block]}], None).messages())
    expected = {} if arguments == "" else {"INVALID_JSON": str(arguments)}
    assert turn["tool_calls"][0]["function"]["arguments"] == expected
