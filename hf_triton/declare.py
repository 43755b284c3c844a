# SPDX-License-Identifier: Apache-2.0
"""Read declared fields: turn pydantic's errors into our sentences and its fields into documentation.

Settings and request parameters are pydantic models whose attribute docstrings say what each field means. This module
is the one place that knows how to show a field's type, range and default, so that messages and tables agree.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hf_triton.errors import clip

MAX_NAME = 60  # characters of an unknown name to compare: a client's may have megabytes, and comparing takes seconds
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
    """Say each of pydantic's findings in one sentence that names the field, the allowed values and the value."""
    return [_problem(model, details) for details in error.errors(include_url=False, include_context=False)]


def _problem(model: type[BaseModel], details: Any) -> Problem:
    name = str(details["loc"][0]) if details["loc"] else ""
    if details["type"] == "missing":
        return Problem(name, f"{name} is required")
    if details["type"] == "value_error":  # raised by a validator of ours: the sentence is its own
        return Problem(name, details["msg"].removeprefix("Value error, "))
    return Problem(name, f"{name} must be {allowed(model.model_fields[name])}, got {clip(details['input'])}")


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
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    limits = [text for constraint in constraints if (text := _limit_words(constraint))]
    return " ".join([TYPE_NAMES[origin or annotation], " and ".join(limits)]).strip()


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
