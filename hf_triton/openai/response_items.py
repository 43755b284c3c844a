# SPDX-License-Identifier: Apache-2.0
"""Items of OpenAI's Responses API: input items as messages of a chat, blocks of the answer as output items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from hf_triton.errors import clip
from hf_triton.openai.agents import ANY
from hf_triton.openai.blocks import REASONING, TEXT, Block
from hf_triton.openai.conversation import Conversation, parse_at, parse_past
from hf_triton.openai.errors import ApiError
from hf_triton.openai.fields import Fields, Ignored
from hf_triton.openai.hints import pass_over
from hf_triton.protocol.chat import ASSISTANT

TEXT_PARTS: Final = ("input_text", "output_text", "text")
FROM_OUTPUT: Final = dict.fromkeys(("id", "status", "type", "phase", "namespace", "caller", "async", "name"), ANY)
"""Fields that clients send back with an item of an earlier answer, and that say nothing to the model."""
ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles, and what chat templates call them."""


class _Message(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = FROM_OUTPUT
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class _Call(Fields):
    call_id: str
    name: str
    arguments: str


class _CallOutput(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = FROM_OUTPUT
    call_id: str
    output: str | list[Any]


class _Reasoning(Fields):
    content: list[Any] | None = None


def read_input(value: str | list[Any], instructions: str | None) -> Conversation:
    """The conversation of `instructions` and `input`.

    Raises:
        ApiError: An item is invalid, or is of a type that is not served.
    """
    conversation = Conversation()
    if instructions:
        conversation.add_text("system", instructions, "instructions")
    for index, item in enumerate([{"role": "user", "content": value}] if isinstance(value, str) else value):
        _read_item(conversation, "input" if isinstance(value, str) else f"input[{index}]", item)
    return conversation


def _read_item(conversation: Conversation, place: str, item: object) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message" and isinstance(item, dict) and item.get("role") == ASSISTANT:
        for text in _past_texts(parse_past(_Message, place, item).content):
            conversation.add_text(ASSISTANT, text, place)
    elif kind == "message":
        message = parse_at(_Message, place, item)
        for text in _texts(f"{place}.content", message.content):
            conversation.add_text(ROLES[message.role], text, place)
    elif kind == "function_call":
        call = parse_past(_Call, place, item)
        conversation.add_call(call.call_id, call.name, call.arguments, place)
    elif kind == "function_call_output":
        answer = parse_at(_CallOutput, place, item)
        conversation.add_result(answer.call_id, "\n".join(_texts(f"{place}.output", answer.output)), place)
    elif kind == "reasoning":
        for part in parse_past(_Reasoning, place, item).content or ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                conversation.add_reasoning(part["text"], place)
    elif isinstance(kind, str) and kind.endswith("_call"):  # of a tool that another server has run
        pass_over(f"{place}.{kind}")
    else:
        known = "'message', 'function_call', 'function_call_output' and 'reasoning'"
        sentence = f"{place} is of type {clip(kind)}; this server takes items of type {known}"
        raise ApiError(400, sentence, param=place, code="unsupported_parameter")


def _past_texts(content: str | list[Any]) -> list[str]:
    """The texts of an assistant's content; parts that hold none are left out."""
    if isinstance(content, str):
        return [content]
    parts = [part for part in content if isinstance(part, dict)]
    texts = [part.get("refusal" if part.get("type") == "refusal" else "text") for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _texts(place: str, content: str | list[Any]) -> list[str]:
    """The texts of a content: a string, or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not content:
        raise ApiError(400, f"{place} is an empty array: give a string", param=place, code="invalid_parameter")
    return [_part_text(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _part_text(place: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in (*TEXT_PARTS, "refusal"):
        message = f"{place} is of type {clip(kind)}; this server takes parts of type 'input_text' and 'output_text'"
        raise ApiError(400, message, param=place, code="unsupported_parameter")
    if kind is None or not isinstance(text, str):
        message = f'{place} must be {{"type": "input_text", "text": "..."}}, got {clip(part)}'
        raise ApiError(400, message, param=place, code="invalid_parameter")
    return text


def output_item(request_id: str, block: Block, status: str, text: str | None = None) -> dict[str, Any]:
    """A block as an output item.

    Args:
        request_id: The request's id, of which the item's is made.
        block: The block.
        status: `in_progress`, `completed` or `incomplete`.
        text: Its text; by default the block's. Empty content has no part if the item is in progress.
    """
    text = block.text if text is None else text
    if block.kind == REASONING:
        content = [{"type": "reasoning_text", "text": text}] if text or status != "in_progress" else []
        item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": content}
    elif block.kind == TEXT:
        parts = [text_part(text)] if text or status != "in_progress" else []
        item = {"type": "message", "role": "assistant", "content": parts}
    else:
        item = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
    return {"id": item_id(request_id, block), "status": status, **item}


def item_id(request_id: str, block: Block) -> str:
    prefix = {REASONING: "rs", TEXT: "msg"}.get(block.kind, "fc")
    return f"{prefix}_{request_id}_{block.index}"


def text_part(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
