# SPDX-License-Identifier: Apache-2.0
"""Read declared fields: turn pydantic's errors into our sentences and its fields into documentation.

Settings and request parameters are pydantic models whose attribute docstrings say what each field means. This module
is the one place that knows how to show a field's type, range and default, so that messages and tables agree.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from hf_triton.errors import RequestError, clip

MAX_NAME = 60  # characters of an unknown name to compare: a client's may have megabytes, and comparing takes seconds
MAX_ENTRIES = 1024  # of an array or object: pydantic words an error for each, which takes minutes for millions
MAX_JSON = 2**21  # characters of a JSON text, more than any may need; other requests wait while one is read
TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    dict: "a JSON object",
    list: "a JSON array",
}


@dataclass(frozen=True)
class Problem:
    """What is wrong with one field."""

    name: str
    sentence: str


def problems(model: type[BaseModel], error: ValidationError) -> list[Problem]:
    """Say in one sentence for each field what is wrong: the field, the allowed values and the value, or part of it."""
    found: dict[str, Problem] = {}
    for details in error.errors(include_url=False, include_context=False):
        problem = _problem(model, details)
        found.setdefault(problem.name, problem)
    return list(found.values())


def _problem(model: type[BaseModel], details: Any) -> Problem:
    name = str(details["loc"][0]) if details["loc"] else ""
    if details["type"] == "missing":
        return Problem(name, f"{name} is required")
    if details["type"] == "value_error":  # raised by a validator of ours: the sentence is its own
        return Problem(name, details["msg"].removeprefix("Value error, "))
    got, wanted = details["input"], allowed(model.model_fields[name])
    if details["type"] == "string_too_long":
        why = f", which has {len(got)}"
    else:
        why = json_error(got) if "JSON" in wanted else ""
    return Problem(name, f"{name} must be {wanted}, got {clip(got)}{why}")


def json_error(value: object) -> str:
    """What is wrong with a text that looks like JSON, to end a sentence with; empty where nothing is."""
    if not (isinstance(value, str) and value.lstrip().startswith(("{", "[")) and len(value) <= MAX_JSON):
        return ""
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        return f", which is no JSON: {error.msg}, at character {error.pos + 1}"
    except ValueError:
        return ", which holds a number of too many digits"
    except RecursionError:
        return ", which is nested too deeply"
    return ""


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: `a number >= 0 and <= 100`."""
    return _words(field.annotation, tuple(field.metadata))


def _words(annotation: Any, constraints: tuple[object, ...] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(member) for member in arguments if member is not type(None))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:  # declared with `read_one_or_many` or `read_strings`
        return f"{_words(arguments[0])} or a JSON array of {_length_words(constraints)} of them"
    if origin is dict and arguments[1] is not Any:
        name, value = map(_words, arguments)
        return f"a JSON object of {_length_words(constraints)} entries, each name {name}, each value {value}"
    if annotation is str and _lengths(constraints)[1] is not None:
        return f"a text of {_length_words(constraints)} characters"
    limits = [text for constraint in constraints if (text := _limit_words(constraint))]
    return " ".join([TYPE_NAMES[origin or annotation], " and ".join(limits)]).strip()


def _lengths(constraints: tuple[object, ...]) -> tuple[int, int | None]:
    """The least and the most that a text or an array may hold; None: no bound."""
    least = [each.min_length for each in constraints if isinstance(each, annotated_types.MinLen)]
    most = [each.max_length for each in constraints if isinstance(each, annotated_types.MaxLen)]
    return max(least, default=0), min(most, default=None)


def _length_words(constraints: tuple[object, ...]) -> str:
    least, most = _lengths(constraints)
    return f"{least} to {most}" if least else f"up to {most}"


def _limit_words(constraint: object) -> str:
    match constraint:
        case annotated_types.Ge(ge=bound):
            return f">= {bound}"
        case annotated_types.Gt(gt=bound):
            return f"> {bound}"
        case annotated_types.Le(le=bound):
            return f"<= {bound}"
        case annotated_types.MinLen(min_length=1):
            return "that is not empty"
    return ""


def suggest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'top_p'?` where a known name is close, else the whole list."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:MAX_NAME], names, n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else f"; known are {', '.join(names)}"


def parse_boolean(text: str) -> bool | str:
    """Read the spellings of true and false; anything else is left for the type check to refuse."""
    spellings: Mapping[str, bool] = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return spellings.get(text.strip().lower(), text)


def read_one_or_many(value: object) -> object:
    """Read one value, or an array of them, as a tuple; either may be a JSON text.

    What cannot be read is left for the type check to refuse, here as below.
    """
    return _tuple(_read_json(value) if isinstance(value, str) else value)


def read_strings(value: object) -> object:
    """Read one text, or an array of them, as a tuple; a text that reads as a JSON array is one, an empty one none."""
    if value == "":
        return ()
    return _tuple(_read_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else value)


def read_integer_keys(value: object) -> object:
    """Read an object whose names are whole numbers, which JSON writes as texts."""
    value = _read_json(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        return value
    _check_size(value)
    return {_read_number(name): each for name, each in value.items()}


def _read_number(name: object) -> object:
    """A number as JSON writes it: of "01" beside "1", one would be lost."""
    return int(name) if isinstance(name, str) and re.fullmatch("0|[1-9][0-9]{0,18}", name) else name


def _tuple(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        return (value,)
    _check_size(value)
    return tuple(value)


def _check_size(value: Sized) -> None:
    if len(value) > MAX_ENTRIES:
        raise PydanticCustomError("too_long", "too many entries")


def _read_json(text: str) -> object:
    if len(text) > MAX_JSON:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, thousands of brackets
        return text


def reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The `object_pairs_hook` of parameters as JSON.

    Raises:
        RequestError: A name is there twice, and a dict would keep the last.
    """
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise RequestError("invalid_parameter", f"{clip(name)} is given twice: give it once")
        found[name] = value
    return found


def table(model: type[BaseModel], extra: Mapping[str, str] | None = None) -> str:
    """The fields of a model as a Markdown table of name, values, default and meaning.

    Args:
        model: The declarations.
        extra: Words to put behind a field's name, by field.
    """
    lines = ["| name | values | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split())
        values = allowed(field)
        lines.append(f"| `{name}`{(extra or {}).get(name, '')} | {values} | {_default_words(field)} | {meaning} |")
    return "\n".join(lines)


def _default_words(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    default = field.get_default(call_default_factory=True)
    if default is None or default == {} or default == "":
        return "-"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
