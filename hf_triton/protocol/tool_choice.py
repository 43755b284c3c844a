# SPDX-License-Identifier: Apache-2.0
"""`tool_choice`: which tools a chat offers, and the grammar that makes the model call one. Compiles no grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.custom_tools import hosted_type
from hf_triton.protocol.structured_output import MAX_GRAMMAR, Grammar
from hf_triton.protocol.validation import read_json
from hf_triton.sentence import param

CHOICE: Final = "tool_choice"
CHOICES: Final = ("auto", "none", "required")
NAMED: Final = ("function", "custom")
"""Types of tools, which a `tool_choice` may name."""
ALLOWED: Final = "allowed_tools"
MODES: Final = ("auto", "required")
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ForcedCall:
    """A tool call that the model has to make."""

    name: str | None
    """The function, whose arguments are the completion; None: any, and the completion is an array of calls."""
    grammar: Grammar
    tool_grammars: tuple[Grammar, ...]
    """The grammars of each tool alone, to find one that is wrong."""
    is_input: bool = False
    """Whether the completion is the text of a custom tool, which `name` names."""
    input_names: frozenset[str] = frozenset()
    """Custom tools whose call, without `name`, is the name, a line end and the text, in place of the array."""


def read_tool_choice(value: object) -> str:
    """Check a `tool_choice`; an object is normalized to JSON. Another value is a `ValueError`."""
    if isinstance(value, str) and value in CHOICES:
        return value
    choice = read_json(value)
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        return _read_allowed(choice[ALLOWED] if isinstance(choice.get(ALLOWED), dict) else choice)
    name = _named(choice)
    if name is None:
        named = '{"type": "function", "function": {"name": "..."}}'
        raise ValueError(f"{param(CHOICE)} must be one of {', '.join(CHOICES)}, or {named}, got {clip(value)}")
    return json.dumps({"name": name})


def _read_allowed(allowed: Mapping[str, Any]) -> str:
    tools = allowed.get("tools")
    names = [_named(tool) for tool in tools if hosted_type(tool) is None] if isinstance(tools, list) else [None]
    if allowed.get("mode") not in MODES or None in names:
        form = '{"mode": "auto", "tools": [{"type": "function", "function": {"name": "..."}}]}'
        raise ValueError(f"{param(CHOICE)} of type {ALLOWED} must have {ALLOWED} {form}, got {clip(allowed)}")
    return json.dumps({"mode": allowed["mode"], "names": names})


def _named(choice: object) -> str | None:
    """The name in `{"type": "function", "function": {"name": "..."}}`."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    tool = choice.get(kind) if isinstance(choice, dict) and kind in NAMED else None
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) else None


def allowed_tools(tools: Tools, choice: str) -> tuple[Tools, str]:
    """The tools that a checked `tool_choice` leaves to the model, and the choice among them."""
    if choice in CHOICES or "names" not in (allowed := json.loads(choice)):
        return tools, choice
    for name in allowed["names"]:
        _check_known(name, tools)
    left = [tool for tool in tools if tool["function"]["name"] in allowed["names"]]
    if not left and allowed["mode"] == "required":
        raise RequestError("invalid_parameter", f"{param(CHOICE)} requires one of no tools: name one, or say auto")
    return left, allowed["mode"] if left else "none"


def forced_call(
    tools: Tools, choice: str, *, is_parallel: bool, formats: Mapping[str, Grammar | None] | None = None
) -> ForcedCall | None:
    """The call that a checked `tool_choice` asks for; None: the model chooses.

    `tools` has custom tools as functions; `formats` has their names, and the grammars of their texts.
    """
    if choice in ("auto", "none"):
        return None
    inputs = {name: grammar for name, grammar in (formats or {}).items() if grammar is not None}
    if not tools:
        sentence = f"{param(CHOICE)} makes the model call a tool, and there is none: add {param('tools')}"
        raise RequestError("invalid_parameter", sentence)
    if choice == "required":
        return _required_call(tools, inputs, is_parallel)
    name = json.loads(choice)["name"]
    tool = _check_known(name, tools)
    grammar = inputs.get(name) or _tool_grammar(tool["function"])
    return ForcedCall(name, grammar, (grammar,), is_input=name in inputs)


def _check_known(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    known = ", ".join(clip(tool["function"]["name"]) for tool in tools[:20])
    raise RequestError("invalid_parameter", f"{param(CHOICE)} names the function {clip(name)}; the tools have {known}")


def _required_call(tools: Tools, inputs: Mapping[str, Grammar], is_parallel: bool) -> ForcedCall:
    """Any call: an array of calls; or of a custom tool with a grammar, which JSON cannot hold, its name and text."""
    about = f"{param(CHOICE)} required"
    names = {tool["function"]["name"] for tool in tools}
    inputs = {name: grammar for name, grammar in inputs.items() if name in names}
    functions = [tool for tool in tools if tool["function"]["name"] not in inputs]
    grammars = tuple(_tool_grammar(tool["function"]) for tool in functions)
    array = json.dumps(_array_schema(functions, is_parallel)) if functions else ""
    if inputs:
        calls: list[list[Any]] = [[{"kind": "json_schema", "text": array}]] if functions else []
        calls += [[f"{name}\n", {"kind": grammar.kind, "text": grammar.text}] for name, grammar in inputs.items()]
        whole = Grammar("parts", json.dumps({"alternatives": calls, "separator": None}), CHOICE, about)
    else:
        whole = Grammar("json_schema", array, CHOICE, about)
    _check_size(whole)
    return ForcedCall(None, whole, (*grammars, *inputs.values()), input_names=frozenset(inputs))


def _tool_grammar(function: Mapping[str, Any]) -> Grammar:
    about = f"{param(CHOICE)}: the schema of the tool {clip(function['name'])}"
    grammar = Grammar("json_schema", json.dumps(arguments_schema(function)), CHOICE, about)
    _check_size(grammar)
    return grammar


def _check_size(grammar: Grammar) -> None:
    if len(grammar.text) > MAX_GRAMMAR:
        sentence = f"makes JSON of {len(grammar.text)} characters; up to {MAX_GRAMMAR} can be enforced"
        raise RequestError("invalid_parameter", f"{grammar.about} {sentence}")


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Without parameters there are none, as at OpenAI's."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def call_schemas(
    tools: Tools, key: str = "arguments", name: str = "name", *, may_have_type: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a call of one of the tools, an object of the name and the arguments, and what it refers to."""
    schemas = {str(index): arguments_schema(tool["function"]) for index, tool in enumerate(tools)}
    kind = {"type": {"const": "function"}} if may_have_type else {}
    calls = [
        {
            "type": "object",
            "properties": {**kind, name: {"const": tool["function"]["name"]}, key: {"$ref": f"#/$defs/{index}"}},
            "required": [name, key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    definitions = {
        index: moved_schema(schema, f"#/$defs/{index}", schema.get("$id", "#")) for index, schema in schemas.items()
    }
    return calls[0] if len(calls) == 1 else {"anyOf": calls}, {"$defs": definitions}


def _array_schema(tools: Tools, is_parallel: bool) -> dict[str, Any]:
    call, definitions = call_schemas(tools)
    return {"type": "array", "minItems": 1, "items": call} | ({} if is_parallel else {"maxItems": 1}) | definitions


def moved_schema(schema: Any, place: str, identity: object) -> Any:
    """A schema whose references to itself, by `#` or its own `$id`, still hold when it stands at another place."""
    if isinstance(schema, list):
        return [moved_schema(entry, place, identity) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            local = value.removeprefix(str(identity).removesuffix("#")) or "#"
            moved[name] = place + local[1:] if local.startswith("#") else value
        elif name != "$id" or value != identity:
            moved[name] = moved_schema(value, place, identity)
    return moved
