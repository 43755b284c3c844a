# SPDX-License-Identifier: Apache-2.0
"""The forms in which models write tool calls, and the grammar of a request's tools in a form. Compiles no grammar.

A form is data of a response template: the pattern that opens a call in free text, and what follows it, with these
places: `{space}` (up to 8 characters of white space, or none), `{name}`, `{arguments}` (JSON, or one `argument` after
the other), `{call}` (a JSON object of name and arguments), `{calls}` (an array of them), `{id}` (9 letters and digits),
`{number}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.structured_output import MAX_GRAMMAR, Grammar
from hf_triton.protocol.tool_choice import Tools, arguments_schema, call_schemas, moved_schema
from hf_triton.sentence import param

PLACE: Final = re.compile(r"\{(space|name|arguments|call|calls|id|number|key|value)\}")
NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
"""Names that every parser reads where no JSON quotes them."""
KEY: Final = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
VALUE: Final = re.compile(r".+\{key\}.*\{value\}[^{].*", re.DOTALL)
PATTERNS: Final[Mapping[str, str]] = {"id": "[A-Za-z0-9]{9}", "number": "[0-9]{1,3}"}
ANYTHING: Final[Mapping[str, Any]] = {"type": "object"}
"""The schema of arguments that are not held by their tool's."""
SCALARS: Final[Mapping[type, str]] = {str: "string", bool: "boolean", int: "integer", float: "number"}
ANNOTATIONS: Final = ("title", "description", "default", "examples", "deprecated", "$comment")
TEXT_KEYWORDS: Final = ("minLength", "maxLength")
UNIONS: Final = ("anyOf", "oneOf")
MAX_UNIONS: Final = 2
"""A union within a union counts; what is deeper has no type."""
LOCAL: Final = ("#/$defs/", "#/definitions/")
Part = str | dict[str, Any]
"""A literal; or a place of it, as `Grammar` of the kind `parts` has them."""
Value = tuple[bool, Callable[[str], list[Part]]]
"""Whether it is a text as it is, and its parts with what ends it."""


@dataclass(frozen=True)
class CallForm:
    """One way in which a model writes calls."""

    opening: str
    """A pattern without a beginning that only looks behind; its last letter, brackets aside, is the last it needs."""
    calls: tuple[str, ...]
    """What may follow, with its places."""
    argument: tuple[str, str] | None = None
    """One argument, a text and another value, with the places `{key}` and `{value}`; None: arguments are JSON."""
    key: str = "arguments"
    """The name of the arguments in `{call}`."""
    name: str = "name"
    """The name of the name there."""
    is_free_behind: bool = True
    """Whether any text may follow a call; if not, it is `separator` and a call, or the end."""
    separator: str | None = None


def read_call_forms(value: object) -> tuple[CallForm, ...]:
    """A response template's `calls`.

    Raises:
        ValueError: It is something else.
    """
    return tuple(map(_read_form, value if isinstance(value, list) else [value]))


def _read_form(value: object) -> CallForm:
    fields: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
    free = "separator" not in fields
    opening, call, separator = fields.pop("opening", None), fields.pop("call", None), fields.pop("separator", None)
    argument, key, name = fields.pop("argument", None), fields.pop("key", "arguments"), fields.pop("name", "name")
    calls = [call] if isinstance(call, str) else call
    arguments = [argument, argument] if isinstance(argument, str) else argument
    texts = [opening, key, name, *(calls if isinstance(calls, list) else [None])]
    texts += [] if argument is None else arguments if isinstance(arguments, list) and len(arguments) == 2 else [None]
    texts += [] if separator is None else [separator]
    if fields or not calls or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            "calls must be objects of opening and call, and perhaps argument, key, name and separator, all strings"
        )
    last_letter(opening)
    whole = [{"call"}, {"calls"}, {"name", "arguments"}]
    if not all({*PLACE.findall(text)} - {"space", *PATTERNS} in whole for text in calls):
        raise ValueError("a call must have the place {call}, {calls}, or {name} and {arguments}")
    if argument is not None and not all(VALUE.fullmatch(way) for way in arguments):
        raise ValueError("an argument must have the places {key} and {value}, and what ends the value")
    ways = None if argument is None else (arguments[0], arguments[1])
    return CallForm(opening, tuple(calls), ways, key, name, free, separator)


def last_letter(opening: str) -> str:
    """The last letter of what an opening matches."""
    letter = opening.rstrip(")")[-1:]
    if not letter or letter in "*+?}|.^$\\":
        raise ValueError(f"the opening {clip(opening)} must end with a letter of its own")
    return letter


def call_grammar(form: CallForm, tools: Tools, held: Collection[str], *, is_parallel: bool) -> Grammar:
    """The grammar of what follows a form's opening; arguments follow the schemas of the tools that are `held`.

    Raises:
        RequestError: A tool has a name or a schema that the form has no writing for, or the schemas are too large.
    """
    functions = [_bare(tool["function"], is_held=tool["function"]["name"] in held) for tool in tools]
    alternatives = [parts for call in form.calls for parts in _alternatives(form, call, functions)]
    separator = None
    if form.separator is not None and is_parallel:
        separator = list(_parts(form.separator, {}))
    text = json.dumps({"alternatives": alternatives, "separator": separator}, ensure_ascii=False)
    about = param("tools")
    distinct = {json.dumps(part, ensure_ascii=False) for parts in alternatives for part in parts}  # compiled once
    if (size := sum(map(len, distinct))) > MAX_GRAMMAR:
        sentence = f"{about} have strict schemas of {size} characters; up to {MAX_GRAMMAR} can be enforced"
        raise RequestError("invalid_parameter", sentence)
    if len(functions) == 1:
        about = f"{param('tools')}: the schema of the tool {clip(functions[0]['name'])}"
    return Grammar("parts", text, "tools", about)


def _bare(function: Mapping[str, Any], *, is_held: bool) -> dict[str, Any]:
    parameters = without_annotations(arguments_schema(function)) if is_held else ANYTHING
    return {"name": function["name"], "parameters": parameters}


def without_annotations(schema: Any) -> Any:
    """A schema without the texts that describe it."""
    if isinstance(schema, list):
        return [without_annotations(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties", *(place[2:-1] for place in LOCAL)) and isinstance(value, dict):
            bare[name] = {key: without_annotations(inner) for key, inner in value.items()}
        elif name in ("enum", "const"):
            bare[name] = value
        elif name not in ANNOTATIONS:
            bare[name] = without_annotations(value)
    return bare


def _alternatives(form: CallForm, call: str, functions: Sequence[dict[str, Any]]) -> Iterator[list[Part]]:
    """The calls of all tools as one, where JSON tells them apart; else those of each tool."""
    tools = [{"function": function} for function in functions]
    if "{name}" not in call:
        one, definitions = call_schemas(tools, form.key, form.name, may_have_type=True)
        array = {"type": "array", "minItems": 1, "items": one}
        places = {name: schema_part(schema | definitions) for name, schema in (("call", one), ("calls", array))}
        yield list(_parts(call, {name: [part] for name, part in places.items()}))
        return
    for function in functions:
        name = function["name"]
        if not NAME.fullmatch(name):
            sentence = f"{param('tools')}: the strict tool {clip(name)} must have a name of letters, digits and _.-"
            raise RequestError("invalid_parameter", sentence)
        arguments = [schema_part(function["parameters"])] if form.argument is None else _tagged(form.argument, function)
        yield list(_parts(call, {"name": [name], "arguments": arguments}))


def schema_part(schema: Any) -> Part:
    return {"kind": "json_schema", "text": json.dumps(schema, ensure_ascii=False)}


def _parts(text: str, places: Mapping[str, list[Part]]) -> Iterator[Part]:
    """A text of a form with its places filled."""
    own: dict[str, list[Part]] = {"space": [{"kind": "space"}]}
    own |= {name: [{"kind": "regex", "text": pattern}] for name, pattern in PATTERNS.items()}
    for index, piece in enumerate(PLACE.split(text)):
        if index % 2:
            yield from (own | dict(places))[piece]
        elif piece:
            yield piece


# --- arguments in tags -----------------------------------------------------------------------------------------------


def _tagged(argument: tuple[str, str], function: Mapping[str, Any]) -> list[Part]:
    """The arguments of a function, each in its tags: required ones, and any of the others, in the schema's order."""
    split = [way.partition("{value}") for way in argument]
    tails = [end.partition("{") for _, _, end in split]
    limits = [split[0][0].partition("{key}")[0].strip(), tails[0][0].strip()]

    def write(key: list[Part], values: Iterable[Value]) -> list[Part]:
        ways: list[Any] = []
        for is_text, value in values:
            (head, _, _), (tail, brace, rest) = split[not is_text], tails[not is_text]
            ways.append([*_parts(head, {"key": key}), *value(tail), *_parts(brace + rest, {})])
        return ways[0] if len(ways) == 1 else [{"kind": "any", "of": ways}]

    schema = function["parameters"]
    if schema is ANYTHING:
        name: Part = {"kind": "regex", "text": r"[\w.-]{1,64}"}
        return [{"kind": "repeat", "of": write([name], [_text(limits)])}]
    try:
        required = _check_object(schema)
        parts: list[Part] = []
        for key, given in schema.get("properties", {}).items():
            if not KEY.fullmatch(key):
                raise ValueError(f"the name {clip(key)}")
            typed = typed_schema(given, schema)
            written = write([key], _values(typed, schema, limits))
            parts += written if key in required else [{"kind": "any", "of": [written, []]}]
    except ValueError as error:
        sentence = (
            f"{param('tools')}: the schema of the strict tool {clip(function['name'])} has {error}, which cannot be "
            "enforced in the tags in which this model writes arguments: leave it out, or say strict false"
        )
        raise RequestError("invalid_parameter", sentence) from None
    return parts


def _check_object(schema: Mapping[str, Any]) -> set[str]:
    """The required arguments. A `ValueError` names what tags cannot hold."""
    known = {"type", "properties", "required", "additionalProperties", "$schema", "$id", "$defs", "definitions"}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if unknown := sorted(schema.keys() - known):
        raise ValueError(clip(unknown[0]))
    if not isinstance(properties, dict) or not isinstance(required, list) or set(required) - properties.keys():
        raise ValueError("required names that are no properties")
    return set(required)


def typed_schema(schema: Any, root: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """An argument's schema with its types, which references, also of a union, a value or a list of values may tell."""
    seen = 0
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and seen < 8:
        place, _, name = reference.removeprefix("#/").partition("/")
        targets = root.get(place) if f"#/{place}/" in LOCAL else None
        target = root if reference == "#" else targets.get(name) if isinstance(targets, dict) else None
        if not isinstance(target, dict):
            break
        schema, seen = {key: value for key, value in schema.items() if key != "$ref"} | target, seen + 1
    if not isinstance(schema, dict):
        return {}
    typed: dict[str, Any] = dict(schema)
    for name in UNIONS:
        if isinstance(choices := typed.get(name), list) and depth < MAX_UNIONS:
            typed[name] = [typed_schema(choice, root, depth + 1) for choice in choices]
    values = [typed["const"]] if "const" in typed else typed.get("enum")
    if "type" not in typed and isinstance(values, list):
        types = [SCALARS.get(type(value), "null" if value is None else "object") for value in values]
        typed["type"] = types[0] if len(set(types)) == 1 else list(dict.fromkeys(types))
    return typed


def _text(limits: Sequence[str], minimum: int = 0, maximum: int | None = None) -> Value:
    """A text between tags, none of which it holds."""
    part = {"kind": "text", "without": list(limits), "min": minimum, "max": maximum}
    return True, lambda tail: [{**part, "end": tail}]


def _literal(text: str) -> Value:
    return True, lambda tail: [text + tail]


def _other(part: Part) -> Value:
    return False, lambda tail: [part, tail]


def _values(schema: Mapping[str, Any], root: Mapping[str, Any], limits: Sequence[str]) -> Iterator[Value]:
    """The ways to write a value: text as it is, anything else as JSON. A `ValueError` names what tags cannot hold."""
    union = next((schema[name] for name in UNIONS if name in schema), None)
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if union is not None:
        choices = union if isinstance(union, list) else []
    else:
        choices = [{**schema, "type": kind} for kind in types]
    texts = [choice for choice in choices if choice.get("type") == "string"]
    others = [choice for choice in choices if choice.get("type") != "string"]
    if not choices:
        if schema.keys() - {"type"}:
            raise ValueError("an argument without a type")
        yield _text(limits)
    is_told = all(choice.keys() == {"type"} or choice["type"] == "null" for choice in others) if texts else True
    if not is_told or any(not isinstance(choice.get("type"), str) for choice in choices):
        raise ValueError("a union that its text does not tell apart")
    for choice in texts:
        yield from _text_values(choice, limits)
    for choice in others:
        values = [choice["const"]] if "const" in choice else choice.get("enum")
        if isinstance(values, list):
            values = [value for value in values if SCALARS.get(type(value), "null") == choice["type"]]
            choice = {name: value for name, value in choice.items() if name != "const"} | {"enum": values}
            if not values:
                continue
        if choice == {"type": "number"}:  # of a size that a float has
            yield _other({"kind": "regex", "text": r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?"})
            continue
        yield _other(schema_part(_alone(choice, root)))


def _alone(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema by itself, with what its references lead to."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    own, whole = (moved_schema(part, "#/$defs/0", root.get("$id", "#")) for part in (schema, root))
    return {**own, "$defs": {"0": whole}}


def _text_values(schema: Mapping[str, Any], limits: Sequence[str]) -> Iterator[Value]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str)]
        if any(limit in text for limit in limits for text in texts):
            raise ValueError("a value that holds a tag")
        yield from map(_literal, texts)
        return
    if unknown := sorted(schema.keys() - {"type", *TEXT_KEYWORDS}):
        raise ValueError(clip(unknown[0]))
    yield _text(limits, *(schema.get(name, default) for name, default in zip(TEXT_KEYWORDS, (0, None), strict=True)))
