# SPDX-License-Identifier: Apache-2.0
"""`tool_choice`: which tools a chat offers, and the grammar that makes the model call one. Compiles no grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.structured_output import MAX_GRAMMAR, Grammar
from hf_triton.protocol.validation import read_json

CHOICES: Final = ("auto", "none", "required")
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ForcedCall:
    """A tool call that the model has to make."""

    name: str | None
    """The function, whose arguments are the completion; None: any, and the completion is an array of calls."""
    grammar: Grammar
    """What the completion follows."""
    tool_grammars: tuple[Grammar, ...]
    """The grammars of each tool alone, to find one that is wrong."""


def read_tool_choice(value: object) -> str:
    """Check a `tool_choice`; a function's is normalized to JSON.

    Raises:
        ValueError: Says what is allowed.
    """
    if isinstance(value, str) and value in CHOICES:
        return value
    choice = read_json(value)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        named = '{"type": "function", "function": {"name": "..."}}'
        raise ValueError(f"tool_choice must be one of {', '.join(CHOICES)}, or {named}, got {clip(value)}")
    return json.dumps({"type": "function", "function": {"name": name}})


def forced_call(tools: Tools, choice: str, *, is_parallel: bool) -> ForcedCall | None:
    """The call that a checked `tool_choice` asks for; None: the model chooses.

    Args:
        tools: The request's.
        choice: The choice, as `read_tool_choice` returns it.
        is_parallel: Whether there may be several calls.

    Raises:
        RequestError: There is no such function, or the tools' schemas are too large.
    """
    if choice in ("auto", "none"):
        return None
    if choice == "required":
        grammars = tuple(_tool_grammar(tool["function"]) for tool in tools)
        grammar = Grammar("json_schema", json.dumps(_array_schema(tools, is_parallel)), "tool_choice required")
        _check_size(grammar)
        return ForcedCall(None, grammar, grammars)
    name = json.loads(choice)["function"]["name"]
    for tool in tools:
        if tool["function"]["name"] == name:
            grammar = _tool_grammar(tool["function"])
            return ForcedCall(name, grammar, (grammar,))
    known = ", ".join(clip(tool["function"]["name"]) for tool in tools[:20])
    raise RequestError("invalid_parameter", f"tool_choice names the function {clip(name)}; the tools have {known}")


def _tool_grammar(function: Mapping[str, Any]) -> Grammar:
    about = f"tool_choice: the tool {clip(function['name'])} has parameters, a schema which"
    grammar = Grammar("json_schema", json.dumps(_arguments_schema(function)), about)
    _check_size(grammar)
    return grammar


def _check_size(grammar: Grammar) -> None:
    if len(grammar.text) > MAX_GRAMMAR:
        sentence = f"makes JSON of {len(grammar.text)} characters; up to {MAX_GRAMMAR} can be enforced"
        raise RequestError("invalid_parameter", f"{grammar.parameter} {sentence}")


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Without parameters there are none, as at OpenAI's."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _array_schema(tools: Tools, is_parallel: bool) -> dict[str, Any]:
    schemas = {str(index): _arguments_schema(tool["function"]) for index, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    array = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    definitions = {index: _moved(schema, f"#/$defs/{index}") for index, schema in schemas.items()}
    return array | ({} if is_parallel else {"maxItems": 1}) | {"$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself still hold when it stands at another place."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for name, value in schema.items()
    }
