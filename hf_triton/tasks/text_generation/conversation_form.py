# SPDX-License-Identifier: Apache-2.0
"""The forms that one conversation may take, and marks that show which of them a chat template writes in full.

Templates read what their model was trained on: one drops a role, another all calls of a message but the first. Knows no
template.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, TypeAlias

from hf_triton.protocol.chat_request import ASSISTANT, TOOL
from hf_triton.protocol.past import REASONING

Message: TypeAlias = dict[str, Any]
SYSTEM: Final = "system"
USER: Final = "user"
DEVELOPER: Final = "developer"
FUNCTION: Final = "function"
RENAMED: Final[Mapping[str, str]] = {DEVELOPER: SYSTEM, FUNCTION: TOOL}
"""Roles of OpenAI's API that few templates write, and what they are to the others."""


class Systems(Enum):
    """The place of system messages in a conversation."""

    ANYWHERE = 1
    """They stay where the client has them."""
    FIRST = 2
    """One at the beginning, made of all there; a later one is the user's."""
    NOWHERE = 3
    """All are the user's."""


@dataclass(frozen=True)
class Form:
    """How a conversation is handed to a template."""

    renames: tuple[str, ...] = ()
    """Roles that get their name of RENAMED."""
    systems: Systems = Systems.ANYWHERE
    texts_apart: bool = False
    """Whether an assistant's text beside its calls is a message of its own."""
    calls_apart: bool = False
    """Whether each call is a message of its own, its result behind it."""
    calls_as_text: bool = False
    json_arguments: bool = False
    """Whether the arguments of calls are JSON text."""
    fills_tools: bool = False
    """Whether tools get the optional fields that they lack."""

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        made = [_renamed(message) if message["role"] in self.renames else message for message in messages]
        if self.systems is not Systems.ANYWHERE:
            made = _with_moved_systems(made, self.systems)
        if self.texts_apart or self.calls_apart:
            made = _with_parts_apart(made, texts=self.texts_apart, calls=self.calls_apart)
        if self.calls_as_text:
            return [_with_calls_as_text(message) for message in made]
        return [_with_json_arguments(message) for message in made] if self.json_arguments else made

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [_filled(tool) for tool in tools] if self.fills_tools else list(tools)


AS_IT_IS: Final = Form()
AS_TEXT: Final = Form(calls_as_text=True)
CALL_FORMS: Final = (
    *(
        Form(texts_apart=texts_apart, calls_apart=calls_apart, json_arguments=json_arguments)
        for json_arguments in (False, True)
        for calls_apart in (False, True)
        for texts_apart in (False, True)
    ),
    AS_TEXT,
)
"""The forms of an assistant's calls, the most usual first."""


def forms_of_roles(call_forms: Sequence[Form], *, names_developer: bool, may_fill: bool) -> Iterator[Form]:
    """The forms that a conversation may take, the most faithful first."""
    own = () if names_developer else (DEVELOPER,)
    for fills_tools in (False, True) if may_fill else (False,):
        for form in call_forms:
            yield replace(form, renames=own, fills_tools=fills_tools)
            for systems in Systems:
                yield replace(form, renames=tuple(RENAMED), systems=systems, fills_tools=fills_tools)


def lacking_fields(tools: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The fields that a tool lacks: optional in OpenAI's API, and some templates insist on them."""
    functions = [tool["function"] for tool in tools]
    lacking = {name for function in functions for name in ("description", "parameters") if name not in function}
    if any("properties" not in function.get("parameters", ()) for function in functions):
        lacking.add("properties")
    return frozenset(lacking)


def _filled(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _renamed(message: Message) -> Message:
    return message | {"role": RENAMED[message["role"]]}


def _with_moved_systems(messages: Sequence[Message], systems: Systems) -> list[Message]:
    """What becomes the user's goes together with the user's own messages beside it."""
    moved: list[Message] = []
    joins: tuple[str, ...] = (SYSTEM,)
    for message in messages:
        last_role = moved[-1]["role"] if moved else SYSTEM
        if message["role"] == SYSTEM and (last_role != SYSTEM or systems is Systems.NOWHERE):
            message, joins = message | {"role": USER}, (SYSTEM, USER)
        if moved and message["role"] == last_role and last_role in joins:
            moved[-1] = moved[-1] | {"content": _joined(moved[-1]["content"], message["content"])}
        else:
            moved.append(message)
    return moved


def _joined(first: Any, second: Any) -> Any:
    """Two messages' contents as one, strings or parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*parts_of(first), {"type": "text", "text": "\n\n"}, *parts_of(second)]


def parts_of(content: Any) -> list[Mapping[str, Any]]:
    """A message's content as OpenAI's array of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def text_of(content: Any, image: str = "") -> str:
    """A message's content as a string; `image` stands for each image, on a line of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else image for part in content)


def _with_parts_apart(messages: Sequence[Message], *, texts: bool, calls: bool) -> list[Message]:
    made: list[Message] = []
    rest = list(reversed(messages))
    while rest:
        message = rest.pop()
        own = message.get("tool_calls")
        if not own:
            made.append(message)
            continue
        if texts and text_of(message["content"]).strip():
            made.append({name: value for name, value in message.items() if name not in ("tool_calls", REASONING)})
            message = message | {"content": ""}
        if not calls or len(own) == 1:
            made.append(message)
            continue
        results = defaultdict(list)
        while rest and rest[-1]["role"] == TOOL:
            result = rest.pop()
            results[result.get("tool_call_id")].append(result)
        for call in own:
            made += [message | {"tool_calls": [call]}, *results.pop(call.get("id"), ())]
            message = {name: value for name, value in message.items() if name != REASONING} | {"content": ""}
        made += [result for others in results.values() for result in others]
    return made


def _with_calls_as_text(message: Message) -> Message:
    """A message whose calls are lines of JSON behind its text."""
    if not message.get("tool_calls"):
        return message
    functions = [(call["function"]["name"], _arguments(call)) for call in message["tool_calls"]]
    calls = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in functions]
    texts = [text_of(message["content"])] if text_of(message["content"]).strip() else []
    made = message | {"content": "\n".join([*texts, *calls])}
    del made["tool_calls"]
    return made


def _with_json_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    return message | {
        "tool_calls": [_with_arguments(call, json.dumps(_arguments(call), ensure_ascii=False)) for call in calls]
    }


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"].get("arguments", {})


def _with_arguments(call: Mapping[str, Any], arguments: object) -> Message:
    return {**call, "function": {**call["function"], "arguments": arguments}}


# --- marks -----------------------------------------------------------------------------------------------------------

MARK: Final = re.compile(r"Zq(\d+)([cp]\d+)?qZ")
CALL: Final = {
    "id": "call00001",  # Mistral's templates take nine letters and digits alone
    "type": "function",
    "function": {"name": "first", "arguments": {}},
}
OTHER_CALL: Final = CALL | {"id": "call00002"}
CALLS: Final[Sequence[Message]] = (
    {"role": USER, "content": "-"},
    {"role": ASSISTANT, REASONING: "-", "content": "-", "tool_calls": [CALL, OTHER_CALL]},
    {"role": TOOL, "tool_call_id": CALL["id"], "name": "first", "content": "-"},
    {"role": TOOL, "tool_call_id": OTHER_CALL["id"], "name": "first", "content": "-"},
    {"role": ASSISTANT, "content": "-"},
    {"role": USER, "content": "-"},
)
"""A conversation that shows how a template takes calls."""
CALLS_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "first",
        "description": "-",
        "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "-"}}},
    },
}


@dataclass(frozen=True, order=True)
class Part:
    """A part of a conversation that a template must write."""

    index: int
    is_call: bool


def marked(messages: Sequence[Message]) -> list[Message]:
    """The conversation with a mark in place of each text that is not blank, and of each call's arguments."""
    return [_marked(index, message) for index, message in enumerate(messages)]


def _marked(index: int, message: Message) -> Message:
    made = dict(message)
    if not isinstance(message["content"], str):
        made["content"] = [
            part | {"text": f"Zq{index}p{number}qZ"} if part.get("text", "").strip() else part
            for number, part in enumerate(message["content"])
        ]
    elif message["content"].strip():
        made["content"] = f"Zq{index}qZ"
    if REASONING in message:
        made[REASONING] = "reasoning"  # templates leave out what belongs to earlier turns
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            _with_arguments(call, {"value": f"Zq{index}c{number}qZ"}) for number, call in enumerate(calls)
        ]
    return made


def lost_parts(marks: Sequence[Message], text: str) -> list[Part]:
    """The parts of a marked conversation that a text lacks, or has as Python writes them, in order."""
    written = {match[0] for match in MARK.finditer(text)}
    lost = set()
    for index, message in enumerate(marks):
        texts = [part["text"] for part in parts_of(message["content"]) if part["type"] == "text"]
        if any(text.strip() and text not in written for text in texts):
            lost.add(Part(index, is_call=False))
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if arguments["value"] not in written or str(arguments) in text:
                lost.add(Part(index, is_call=True))
    return sorted(lost)


def shape(messages: Sequence[Message]) -> int:
    """The hash of what templates tell messages apart by: their kinds, each beside its neighbours, and at both ends.

    A conversation that goes on as before keeps its shape.
    """
    kinds: list[tuple[object, ...]] = []
    call_ids: set[object] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        call_ids.update(call.get("id") for call in calls)
        content = message["content"]
        types = () if isinstance(content, str) else tuple(part["type"] for part in content)
        has = (bool(text_of(content).strip()), types, REASONING in message, "name" in message)
        kinds.append((message["role"], *has, min(len(calls), 2), message.get("tool_call_id") in call_ids))
    inner = frozenset(zip(kinds, kinds[1:], kinds[2:], strict=False))
    return hash((*kinds[:2], inner, *kinds[-2:], len(kinds) % 2))
