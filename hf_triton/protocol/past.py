# SPDX-License-Identifier: Apache-2.0
"""Assistant messages of earlier turns, as any server has returned them: no client can repair what a model has said.

Fields that say nothing to a chat template are left out; the others get the names and forms that templates read. Null is
as good as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_triton.protocol.custom_tools import hosted_type
from hf_triton.protocol.image_files import is_read
from hf_triton.protocol.validation import parse_json

INVALID_JSON: Final = "INVALID_JSON"
"""The argument that holds a call's arguments which are no JSON object, as Anthropic's documents name it."""
MAX_DEPTH: Final = 32  # templates indent tools: each level lengthens every line
REASONING: Final = "reasoning_content"
REASONING_NAMES: Final = (REASONING, "reasoning")
"""What servers call an assistant's reasoning, the first that is text counts."""
THOUGHT_PARTS: Final = ("thinking", "reasoning")
"""Types of parts of a content that hold reasoning, in a field of this name or in `text`."""
FIELDS: Final = ("role", "content", REASONING, "tool_calls", "name")
READ: Final = (*FIELDS, *REASONING_NAMES, "refusal", "function_call")
"""The fields that are read; those beside `FIELDS` become one of them."""


def read_assistant_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message, without null, in the form that templates read; its calls are still to be checked."""
    content, thoughts = _read_content(message.get("content"))
    refusal, calls = message.get("refusal"), message.get("tool_calls")
    if isinstance(refusal, str) and not content:
        content = refusal
    if calls is None and isinstance(message.get("function_call"), dict):  # the former name of a single call
        calls = [{"type": "function", "function": message["function_call"]}]
    calls = _read_calls(calls)
    reasoning = next((message[name] for name in REASONING_NAMES if name in message), thoughts or None)
    if content is None and not calls and reasoning is None:
        content = ""  # nothing was said
    read = {"content": content, REASONING: reasoning, "tool_calls": calls, "name": message.get("name")}
    order = dict.fromkeys([*(name for name in message if name in FIELDS), *read])
    values = {"role": message["role"], **read}
    return {name: values[name] for name in order if values[name] is not None}


def _read_content(content: object) -> tuple[Any, str]:
    """The text of a content, or its parts if there are images, and the reasoning among them.

    What is no list of parts is left for the checks.
    """
    if not isinstance(content, list):
        return content, ""
    texts, thoughts = [], []
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in THOUGHT_PARTS:
            thoughts.append(_part_text(part, kind))
        elif is_read(part):
            parts.append(part)
        elif kind is not None and (text := _part_text(part, "refusal" if kind == "refusal" else "text")):
            texts.append(text)
            parts.append({"type": "text", "text": text})
    said = parts if len(parts) > len(texts) else "\n".join(texts) or None
    return said, "\n".join(filter(None, thoughts))


def _part_text(part: Mapping[str, Any], name: str) -> str:
    """A part's text, or the texts of its own parts; empty if it has none."""
    value = part.get(name, part.get("text"))
    if isinstance(value, list):
        return "".join(_part_text(inner, "text") for inner in value if isinstance(inner, dict))
    return value if isinstance(value, str) else ""


def _read_calls(calls: object) -> object:
    if not isinstance(calls, list):
        return calls
    return [_read_call(call) for call in calls if hosted_type(call) is None or "function" in call] or None


def _read_call(call: object) -> object:
    """A tool call whose arguments are an object; what is no call is left for the checks."""
    if not isinstance(call, dict):
        return call
    call = {name: value for name, value in call.items() if value is not None}
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    read = {name: function[name] for name in function if name in ("name", "arguments")}
    call.setdefault("type", "function")
    return call | {"function": read | {"arguments": read_arguments(function.get("arguments"))}}


def read_arguments(arguments: object) -> Any:
    """A call's arguments as an object, which templates expect; OpenAI's API has a JSON string."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            read = parse_json(arguments)
        except ValueError:
            return {INVALID_JSON: arguments}
        if read is None:
            return {}
        return read if isinstance(read, dict) and not is_deep(read) else {INVALID_JSON: arguments}
    return arguments


def is_deep(value: object) -> bool:
    """Whether a value is nested more than `MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    return any(isinstance(entry, dict | list) for entry in level)


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
