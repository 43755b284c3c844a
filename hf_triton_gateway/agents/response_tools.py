# SPDX-License-Identifier: Apache-2.0
"""Tools of OpenAI's Responses API: as the chat has them, and as answers name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import annotated_types

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import MAX_TOOLS
from hf_triton.protocol.custom_tools import CUSTOM, CustomTool, Definition, FunctionTool, hosted_type
from hf_triton.protocol.tool_choice import ALLOWED, NAMED
from hf_triton_gateway.agents.agents import ANY, ToolFields, read_tool
from hf_triton_gateway.chat.conversation import parse_at
from hf_triton_gateway.chat.fields import HINT, Fields, Ignored
from hf_triton_gateway.http.api_errors import ApiError

Tools = Annotated[list[Any], annotated_types.MaxLen(MAX_TOOLS)]
OFFERED: Final[Mapping[str, Ignored]] = {
    "type": ANY,
    **dict.fromkeys(("defer_loading", "async"), Ignored((False,), is_hint=True)),
    "allowed_callers": Ignored((["direct"],), is_hint=True),
    "output_schema": HINT,
}
"""Fields of tools that say nothing to the model."""
STRICT: Final[Mapping[str, Ignored]] = {"strict": Ignored((False,), is_hint=True)}
"""One that functions alone have."""
MAX_READ: Final = 8 * MAX_TOOLS
"""Tools of one request, those that are defined again or passed over included."""
CHOICE: Final = '{"type": "function", "name": "..."}'


class _Function(ToolFields, FunctionTool):
    ignored: ClassVar[Mapping[str, Ignored]] = OFFERED


class _Custom(ToolFields, CustomTool):
    ignored: ClassVar[Mapping[str, Ignored]] = {**OFFERED, **STRICT}
    kind: ClassVar[str] = CUSTOM


class _Grammar(Fields, Definition):
    ignored: ClassVar[Mapping[str, Ignored]] = {"type": ANY}


class _Namespace(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {**OFFERED, **STRICT, "description": ANY}
    name: Annotated[str, annotated_types.MinLen(1)]
    tools: Tools


INNER_FORMS: Final[Mapping[str, type[Fields]]] = {"function": _Function, CUSTOM: _Custom}
FORMS: Final[Mapping[str, type[Fields]]] = {**INNER_FORMS, "namespace": _Namespace}


class _Choice(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"type": ANY}
    name: Annotated[str, annotated_types.MinLen(1)]
    namespace: str | None = None


class _Allowed(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"type": ANY}
    mode: Literal["auto", "required"]
    tools: Tools


def flat_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class ResponseTools:
    """The tools of one request."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        """The chat's tools, those of namespaces under their flat names."""
        self.places: list[str] = []
        """The places of the tools in the request."""
        self._names: dict[str, tuple[str, str | None]] = {}
        """Name and namespace by flat name."""
        self._num_read = 0
        self._indices: dict[tuple[str, str], int] = {}  # by type and flat name

    def add(self, place: str, tool: object, namespace: str | None = None) -> None:
        self._num_read += 1
        if self._num_read > MAX_READ:
            message = (
                f"{place} is one tool too many: up to {MAX_READ} are read, and up to {MAX_TOOLS} offered to the model"
            )
            raise ApiError(400, message, param=place, code="invalid_parameter")
        nested = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and isinstance(nested, dict) and tool.get("type") in (None, "function"):
            tool = {**nested, "type": "function"}  # as chats have it
        read = read_tool(FORMS if namespace is None else INNER_FORMS, place, tool)
        if isinstance(read, _Namespace):
            for index, inner in enumerate(read.tools):
                self.add(f"{place}.tools[{index}]", inner, read.name)
        elif isinstance(read, ToolFields):
            chat_tool = read.chat_tool()
            if (form := chat_tool[read.kind].pop("format", None)) is not None:
                chat_tool[CUSTOM] |= _read_format(f"{place}.format", form)
            self._add(place, chat_tool, namespace)

    def _add(self, place: str, tool: dict[str, Any], namespace: str | None) -> None:
        inner = tool[tool["type"]]
        name = flat_name(inner["name"], namespace)
        if self._names.setdefault(name, (inner["name"], namespace)) != (inner["name"], namespace):
            message = f"{place} is {clip(name)} to the model, as another tool is: give it another name"
            raise ApiError(400, message, param=place, code="invalid_parameter")
        inner["name"] = name
        index = self._indices.setdefault((tool["type"], name), len(self.tools))
        # The last definition counts: clients repeat them in the input.
        self.tools[index : index + 1], self.places[index : index + 1] = [tool], [place]

    def name_of(self, called: str) -> tuple[str, str | None]:
        """The name and namespace of a tool that the model calls, also if it leaves the namespace out."""
        if called in self._names:
            return self._names[called]
        alike = [names for names in self._names.values() if names[0] == called]
        return alike[0] if len(alike) == 1 else (called, None)

    def choice(self, choice: str | dict[str, Any] | None) -> object:
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == ALLOWED:
            allowed = parse_at(_Allowed, "tool_choice", choice)
            named = [
                self._named(f"tool_choice.tools[{index}]", tool)
                for index, tool in enumerate(allowed.tools)
                if hosted_type(tool) is None
            ]
            return {"type": ALLOWED, ALLOWED: {"mode": allowed.mode, "tools": named}}
        if choice.get("type") not in NAMED:
            message = f"tool_choice must be {CHOICE}, or of type 'custom' or '{ALLOWED}', got {clip(choice)}"
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        return self._named("tool_choice", choice)

    def _named(self, place: str, choice: object) -> dict[str, Any]:
        named = parse_at(_Choice, place, choice)
        flat = flat_name(named.name, named.namespace)
        known = [name for name, names in self._names.items() if names[0] == named.name]
        if flat not in self._names and named.namespace is None and len(known) == 1:
            flat = known[0]
        return {"type": "function", "function": {"name": flat}}


def _read_format(place: str, form: dict[str, Any]) -> dict[str, Any]:
    """The chat's `format`, which has the grammar one level deeper; text has none."""
    if form.get("type") == "text":
        return {}
    if form.get("type") != "grammar":
        message = f'{place} must be of type "text" or "grammar", got {clip(json.dumps(form))}'
        raise ApiError(400, message, param=place, code="invalid_parameter")
    grammar = parse_at(_Grammar, place, form)
    grammar_fields = {"syntax": grammar.syntax, "definition": grammar.definition}
    return {"format": {"type": "grammar", "grammar": grammar_fields}}
