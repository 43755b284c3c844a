# SPDX-License-Identifier: Apache-2.0
"""What is kept of a conversation: what a model reads, and nothing else."""

import json
from typing import Any

import pytest

from hf_triton_gateway.agents.response_input import read_input, read_part, served_items
from hf_triton_gateway.agents.response_tools import ResponseTools

JUNK: dict[str, Any] = {"id": "x" * 1000, "status": "completed", "phase": [1] * 1000}
SERVED: list[dict[str, Any]] = [
    {"role": "user", "content": "one", **JUNK},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "two"}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "three", "annotations": [JUNK], "logprobs": [JUNK]},
            {"type": "refusal", "refusal": "no"},
        ],
        **JUNK,
    },
    {"type": "reasoning", "summary": [JUNK], "content": [{"type": "reasoning_text", "text": "four"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": "{}", **JUNK},
    {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "five"},
    {"type": "function_call_output", "call_id": "c1", "output": "six"},
    {
        "type": "custom_tool_call_output",
        "call_id": "c2",
        "output": [
            {"type": "input_image", "image_url": "data:,x", "detail": "x" * 1000},
            {"type": "input_text", "text": "seven"},
        ],
    },
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
]
PASSED_OVER: list[dict[str, Any]] = [
    {"type": "reasoning", "summary": [], "encrypted_content": "x" * 1000},
    {"type": "reasoning", "summary": [], "content": None},
    {"type": "web_search_call", "id": "ws", "action": JUNK},
    {"type": "mcp_list_tools", "tools": [JUNK]},
]


def test_what_is_kept_reads_as_the_whole() -> None:
    mixed = [item for pair in zip(SERVED, PASSED_OVER * 3, strict=False) for item in pair]
    kept = [read_part(item) for item in served_items(mixed)]
    assert len(kept) == len(SERVED)
    assert len(json.dumps(kept)) < 1500
    tools, own = ResponseTools(), ResponseTools()
    whole = read_input(mixed, None, tools)
    assert read_input("end", None, own, kept).messages()[:-1] == whole.messages()
    assert own.tools == tools.tools
    assert [read_part(item) for item in served_items(kept)] == kept


@pytest.mark.parametrize("item", PASSED_OVER, ids=lambda item: str(item["type"]))
def test_what_is_passed_over_is_not_kept(item: dict[str, Any]) -> None:
    assert served_items([item, SERVED[0]]) == (SERVED[0],)


def test_reasoning_of_many_parts_is_one_text() -> None:
    parts = [{"type": "reasoning_text", "text": f"{number} "} for number in range(1000)]
    items = [{"type": "reasoning", "content": parts}, {"type": "reasoning", "content": parts}]
    [message] = read_input(items, None, ResponseTools()).messages()
    assert message == {"role": "assistant", "reasoning_content": "".join(part["text"] for part in parts * 2)}
