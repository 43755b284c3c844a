# SPDX-License-Identifier: Apache-2.0
"""Content blocks of Anthropic's Messages API: as messages of a chat, and blocks of the answer as content blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import annotated_types

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import ASSISTANT
from hf_triton.protocol.past import INVALID_JSON
from hf_triton_gateway.agents.agents import ANY
from hf_triton_gateway.agents.answer_blocks import REASONING, TEXT, Block
from hf_triton_gateway.chat.conversation import Conversation, only_image, parse_at, parse_past, read_image, unseen
from hf_triton_gateway.chat.fields import HINT, Fields, Ignored
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.hints import pass_over

PASSED_OVER: Final = {"cache_control": HINT, **dict.fromkeys(("type", "citations", "caller", "toolset_name"), ANY)}
"""Fields of blocks that say nothing to the model."""
IMAGE_FORM: Final = '{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}'
SERVED: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    ASSISTANT: ("text", "tool_use", "thinking"),
}
"""Types of block by the role of their message."""


class _Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class _Text(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = PASSED_OVER
    text: str


class _Image(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = PASSED_OVER
    source: Any


class _ToolUse(Fields):
    id: Annotated[str, annotated_types.MinLen(1)]
    name: Annotated[str, annotated_types.MinLen(1)]
    input: Any = None


class _ToolResult(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {**PASSED_OVER, "is_error": ANY}
    tool_use_id: Annotated[str, annotated_types.MinLen(1)]
    content: str | list[Any] | None = None


class _Thinking(Fields):
    thinking: str = ""


class _PastMessage(_Message):
    content: str | list[Any] = []


class _PastText(_Text):
    text: str = ""


def read_messages(messages: list[Any], system: str | list[Any] | None) -> Conversation:
    conversation = Conversation()
    if system:
        _read_content(conversation, "system", "system", system)
    for index, value in enumerate(messages):
        place = f"messages[{index}]"
        is_past = isinstance(value, dict) and value.get("role") == ASSISTANT
        message = parse_past(_PastMessage, place, value) if is_past else parse_at(_Message, place, value)
        if message.content == [] and not is_past:
            raise ApiError(400, f"{place}.content is empty", param=f"{place}.content", code="invalid_parameter")
        _read_content(conversation, message.role, place, message.content)
    return conversation


def _read_content(conversation: Conversation, role: str, place: str, content: str | list[Any]) -> None:
    if isinstance(content, str):
        conversation.add_text(role, content, place)
        return
    inner = place if place == "system" else f"{place}.content"
    for index, block in enumerate(content):
        _read_block(conversation, role, f"{inner}[{index}]", block, place)


def _read_block(conversation: Conversation, role: str, place: str, block: object, message: str) -> None:
    if role == ASSISTANT and isinstance(block, dict) and isinstance(block.get("type"), str):
        _read_past(conversation, place, block, message)
        return
    kind = _kind(place, block, SERVED[role], f" in a message of role '{role}'")
    if kind == "text":
        conversation.add_text(role, parse_at(_Text, place, block).text, message)
    elif kind == "image":
        image = {"type": kind, "source": parse_at(_Image, place, block).source}
        conversation.add_image(role, read_image(place, image, IMAGE_FORM), message, place)
    elif kind == "tool_result":
        result = parse_at(_ToolResult, place, block)
        conversation.add_result(result.tool_use_id, _result(f"{place}.content", result.content), message)


def _read_past(conversation: Conversation, place: str, block: dict[str, Any], message: str) -> None:
    """A block of the assistant, of whatever server; those that this server has not are passed over."""
    kind = block["type"]
    if kind == "text":
        conversation.add_text(ASSISTANT, parse_past(_PastText, place, block).text, message)
    elif kind == "tool_use":
        use = parse_past(_ToolUse, place, block)
        arguments = use.input if isinstance(use.input, str) else json.dumps(use.input, ensure_ascii=False)
        conversation.add_call(use.id, use.name, arguments, message)
    elif kind == "thinking":
        conversation.add_reasoning(parse_past(_Thinking, place, block).thinking, message)
    elif kind != "redacted_thinking":
        pass_over(f"{place}.{kind}")


def _kind(place: str, block: object, served: tuple[str, ...], where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        message = f'{place} must be like {{"type": "text", "text": "..."}}, got {clip(block)}'
        raise ApiError(400, message, param=place, code="invalid_parameter")
    if kind not in served:
        known = " or ".join(map(clip, served))
        message = f"{place} is of type {clip(kind)}; this server takes blocks of type {known}{where}"
        raise ApiError(400, message, param=place, code="unsupported_parameter")
    return kind


def _result(place: str, content: str | list[Any] | None) -> str | dict[str, dict[str, Any]]:
    """A tool's result, or its parts by place."""
    if not isinstance(content, list):
        return content or ""
    places = [f"{place}[{index}]" for index in range(len(content))]
    return {inner: _result_part(inner, block) for inner, block in zip(places, content, strict=True)}


def _result_part(place: str, block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "image":
        return only_image(block)
    if isinstance(kind, str) and kind != "text":
        return {"type": "text", "text": unseen(place, kind)}
    _kind(place, block, ("text",), " in a tool's result")
    return {"type": "text", "text": parse_at(_Text, place, block).text}


def content_block(block: Block, text: str | None = None) -> dict[str, Any]:
    """A block of an answer; its text is empty where a stream starts it, and by default the block's."""
    text = block.text if text is None else text
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == TEXT:
        return {"type": "text", "text": text, "citations": None}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {INVALID_JSON: text}


def block_delta(block: Block, piece: str) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "thinking_delta", "thinking": piece}
    if block.kind == TEXT:
        return {"type": "text_delta", "text": piece}
    return {"type": "input_json_delta", "partial_json": piece}
