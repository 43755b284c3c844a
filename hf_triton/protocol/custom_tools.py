# SPDX-License-Identifier: Apache-2.0
"""Custom tools: tools of one text. Chat templates see them as functions of one string. Compiles no grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import annotated_types
from pydantic import BaseModel, ConfigDict

from hf_triton.errors import clip
from hf_triton.protocol.structured_output import Grammar, GrammarText
from hf_triton.sentence import param

CUSTOM: Final = "custom"
INPUT: Final = "input"
"""The only parameter of the function that a custom tool is shown as."""
EXAMPLE: Final = '{"type": "grammar", "grammar": {"syntax": "lark", "definition": "..."}}'


class NamedTool(BaseModel):
    """The fields that all tools have, in every API."""

    model_config = ConfigDict(frozen=True, strict=True)

    name: Annotated[str, annotated_types.MinLen(1)]
    description: str | None = None


class FunctionTool(NamedTool):
    """The `function` of a tool of that type."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether calls follow the schema also where the model chooses; None: as the folder says."""


class CustomTool(NamedTool):
    """The `custom` of a tool of that type."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, or a grammar that the text follows."""


class Definition(BaseModel):
    """A grammar in a custom tool's format."""

    model_config = ConfigDict(frozen=True, strict=True)

    syntax: Literal["lark", "regex"]
    definition: GrammarText


def hosted_type(tool: object) -> str | None:
    """The type of a tool that a server is expected to have; None: a function, a custom tool, or no tool."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind not in ("function", CUSTOM) else None


def custom_of(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """What makes a checked tool a custom one; None: it is a function."""
    custom: dict[str, Any] | None = tool[CUSTOM] if tool.get("type") == CUSTOM else None
    return custom


def format_of(tool: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a tool's `custom`; None: any text. Another format is a `ValueError`."""
    form = tool.get("format") or {"type": "text"}
    if form.get("type") == "text":
        return None
    try:
        grammar = Definition.model_validate(form.get("grammar") if form.get("type") == "grammar" else None)
    except ValueError:
        name = clip(tool["name"])
        raise ValueError(f'the format of {name} must be {{"type": "text"}} or {EXAMPLE}, got {clip(form)}') from None
    about = f"{param('tools')}: the custom tool {clip(tool['name'])} has a format which"
    return Grammar(grammar.syntax, grammar.definition, "tools", about)


def as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that a tool's `custom` is for a chat template."""
    grammar = format_of(tool)
    kind = {None: "Any text.", "lark": "A text that this Lark grammar allows:\n"}
    about = kind.get(None if grammar is None else grammar.kind, "A text that this regular expression matches:\n")
    text = {"type": "string", "description": about + ("" if grammar is None else grammar.text)}
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def input_of(arguments: str) -> str:
    """The text in a call's arguments; the arguments themselves if the model wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments


def as_function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier call of a custom tool as the function call that chat templates know, or a `ValueError`."""
    custom = call.get(CUSTOM)
    name, text = (custom.get("name"), custom.get(INPUT)) if isinstance(custom, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise ValueError(f'must be {{"type": "custom", "custom": {{"name": "...", "input": "..."}}}}, got {clip(call)}')
    rest = {field: value for field, value in call.items() if field != CUSTOM}
    return {**rest, "type": "function", "function": {"name": name, "arguments": {INPUT: text}}}
