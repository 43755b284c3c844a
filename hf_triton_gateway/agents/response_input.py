# SPDX-License-Identifier: Apache-2.0
"""Input items of OpenAI's Responses API as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import ASSISTANT
from hf_triton.protocol.custom_tools import INPUT
from hf_triton_gateway.agents.agents import ANY
from hf_triton_gateway.agents.response_tools import ResponseTools, Tools, flat_name
from hf_triton_gateway.chat.conversation import Conversation, only_image, parse_at, parse_past, read_image, unseen
from hf_triton_gateway.chat.fields import Fields, Ignored
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.hints import pass_over

TEXT_PARTS: Final = ("input_text", "output_text", "text")
FROM_OUTPUT: Final = dict.fromkeys(("id", "status", "type", "phase", "namespace", "caller", "async", "name"), ANY)
"""Fields that clients send back with an item of an earlier answer, and that say nothing to the model."""
ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles, and what chat templates call them."""
HOSTED: Final = ("tool_search_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
"""Items of tools that another server has run, beside those whose type ends with `_call`; passed over."""

CALLS: Final = ("function_call", "custom_tool_call")
READ: Final = (*("type", "role", "content", "call_id", "name", "namespace", "arguments", "input", "output", "tools"),)
"""The fields of items that say something to the model."""
IMAGE: Final = "input_image"
IMAGE_FORM: Final = '{"type": "input_image", "image_url": "data:image/png;base64,..."}'
PART: Final = ("type", "text", "refusal", "image_url")
"""The fields of their parts that do."""


class _Message(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = FROM_OUTPUT
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class _PastMessage(_Message):
    content: str | list[Any] = []


class _Call(Fields):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""


class _CustomCall(Fields):
    call_id: str
    name: str
    namespace: str | None = None
    input: str = ""


class _CallOutput(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = FROM_OUTPUT
    call_id: str
    output: str | list[Any]


class _Reasoning(Fields):
    content: list[Any] | None = None


class _AdditionalTools(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {**FROM_OUTPUT, "role": ANY}
    tools: Tools


def items_of(value: str | list[Any]) -> tuple[Any, ...]:
    """The items of an input; a text, or a list of parts, is a user's message."""
    is_parts = isinstance(value, list) and value and all(_kind(item) in ("input_text", IMAGE) for item in value)
    return ({"role": "user", "content": value},) if isinstance(value, str) or is_parts else tuple(value)


def served_items(items: Sequence[Any]) -> tuple[Any, ...]:
    """The items without those that are passed over."""
    return tuple(item for item in items if not _is_passed_over(item))


def _is_passed_over(item: object) -> bool:
    kind = _kind(item)
    if kind == "reasoning" and isinstance(item, dict):
        return not item.get("content")
    return isinstance(kind, str) and kind not in CALLS and (kind.endswith("_call") or kind in HOSTED)


def read_part(item: dict[str, Any]) -> dict[str, Any]:
    """What is read of an item that was read before: neither log probabilities, nor what no model sees."""
    kept: dict[str, Any] = {name: item[name] for name in READ if name in item}
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [_read_fields(part) for part in content]
    if isinstance(output := kept.get("output"), list):
        kept["output"] = [_read_fields(part) for part in output]
    return kept


def _read_fields(part: Any) -> Any:
    return {name: part[name] for name in PART if name in part} if isinstance(part, dict) else part


def _kind(item: object) -> object:
    return item.get("type", "message") if isinstance(item, dict) else "message"


def read_input(
    value: str | list[Any], instructions: str | None, tools: ResponseTools, past: Sequence[Any] = ()
) -> Conversation:
    """The conversation of `instructions`, an earlier response and `input`.

    Args:
        value: The input.
        past: The items up to the end of the response that it goes on behind.
        instructions: The system message in front of it.
        tools: Takes the tools that are in the input.
    """
    conversation = Conversation()
    if instructions:
        conversation.add_text("system", instructions, "instructions")
    for item in past:
        _read_item(conversation, tools, "previous_response_id", item)
    for index, item in enumerate(items_of(value)):
        _read_item(conversation, tools, "input" if isinstance(value, str) else f"input[{index}]", item)
    return conversation


def _read_item(conversation: Conversation, tools: ResponseTools, place: str, item: object) -> None:
    kind = _kind(item)
    if kind == "message" and isinstance(item, dict) and item.get("role") == ASSISTANT:
        for text in _past_texts(parse_past(_PastMessage, place, item).content):
            conversation.add_text(ASSISTANT, text, place)
    elif kind == "message":
        message = parse_at(_Message, place, item)
        _read_content(conversation, ROLES[message.role], place, message.content)
    elif kind == "function_call":
        call = parse_past(_Call, place, item)
        conversation.add_call(call.call_id, flat_name(call.name, call.namespace), call.arguments, place)
    elif kind == "custom_tool_call":
        custom = parse_past(_CustomCall, place, item)
        arguments = json.dumps({INPUT: custom.input}, ensure_ascii=False)
        conversation.add_call(custom.call_id, flat_name(custom.name, custom.namespace), arguments, place)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        answer = parse_at(_CallOutput, place, item)
        conversation.add_result(answer.call_id, _output(f"{place}.output", answer.output), place)
    elif kind == "reasoning":
        for part in parse_past(_Reasoning, place, item).content or ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                conversation.add_reasoning(part["text"], place)
    elif kind == "additional_tools":
        for index, tool in enumerate(parse_at(_AdditionalTools, place, item).tools):
            tools.add(f"{place}.tools[{index}]", tool)
    elif isinstance(kind, str) and _is_passed_over(item):
        pass_over(f"{place}.{kind}")
    else:
        known = "'message', 'function_call', 'custom_tool_call', their outputs and 'reasoning'"
        sentence = f"{place} is of type {clip(kind)}; this server takes items of type {known}"
        raise ApiError(400, sentence, param=place, code="unsupported_parameter")


def _past_texts(content: str | list[Any]) -> list[str]:
    """The texts of an assistant's content; parts that hold none are left out."""
    if isinstance(content, str):
        return [content]
    parts = [part for part in content if isinstance(part, dict)]
    texts = [part.get("refusal" if part.get("type") == "refusal" else "text") for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _read_content(conversation: Conversation, role: str, place: str, content: str | list[Any]) -> None:
    """Add a content: a string, or a list of parts."""
    if isinstance(content, str):
        conversation.add_text(role, content, place)
        return
    inner = f"{place}.content"
    if not content:
        raise ApiError(400, f"{inner} is an empty array: give a string", param=inner, code="invalid_parameter")
    for part_place, part in ((f"{inner}[{index}]", part) for index, part in enumerate(content)):
        if isinstance(part, dict) and part.get("type") == IMAGE:
            conversation.add_image(role, read_image(part_place, part, IMAGE_FORM), place, part_place)
        else:
            conversation.add_text(role, _part_text(part_place, part), place)


def _output(place: str, output: str | list[Any]) -> str | dict[str, dict[str, Any]]:
    """A tool's output, or its parts by place."""
    if isinstance(output, str):
        return output
    places = [f"{place}[{index}]" for index in range(len(output))]
    return {inner: _output_part(inner, part) for inner, part in zip(places, output, strict=True)}


def _output_part(place: str, part: Any) -> dict[str, Any]:
    """A client cannot change what a tool answered, so a part that is neither text nor image becomes a note."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == IMAGE:
        return only_image(part)
    if isinstance(kind, str) and kind not in (*TEXT_PARTS, "refusal"):
        return {"type": "text", "text": unseen(place, kind)}
    return {"type": "text", "text": _part_text(place, part)}


def _part_text(place: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in (*TEXT_PARTS, "refusal"):
        message = f"{place} is of type {clip(kind)}; this server takes parts of type 'input_text' and 'input_image'"
        raise ApiError(400, message, param=place, code="unsupported_parameter")
    if kind is None or not isinstance(text, str):
        message = f'{place} must be {{"type": "input_text", "text": "..."}}, got {clip(part)}'
        raise ApiError(400, message, param=place, code="invalid_parameter")
    return text
