# SPDX-License-Identifier: Apache-2.0
"""Parameters that constrain the output: `response_format` and the `guided_*` ones. Compiles no grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import annotated_types
from pydantic import ValidationInfo

from hf_triton.errors import clip

MAX_GRAMMAR: Final = 65_536  # characters of a schema, a regular expression or a grammar
GrammarText = Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(MAX_GRAMMAR)]

GRAMMARS: Final = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""What says which form the text has; a prompt has one of them at most."""


@dataclass(frozen=True)
class Grammar:
    """What a text must follow."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    """As JSON where `kind` is json_schema (an object) or choice (an array of texts)."""
    parameter: str
    """By which it was asked for."""


def read_object(value: object, info: ValidationInfo) -> object:
    """Read a JSON object that may come as a text; what cannot be read is left for the type check to refuse."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")) if isinstance(value, dict) else value
    except RecursionError:
        raise ValueError(f"{info.field_name} is nested too deep") from None
    if not isinstance(text, str):
        return value
    if len(text) > MAX_GRAMMAR:
        raise ValueError(f"{info.field_name} must be JSON of up to {MAX_GRAMMAR} characters, got {len(text)}")
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):  # no JSON, or thousands of brackets
        return value
    return read if isinstance(read, dict) else value


def check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is not one of OpenAI's forms."""
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(
            f"response_format must be of type `text`, `json_object` or `json_schema`, got {clip(kind)}; there are also "
            "guided_regex, guided_choice and guided_grammar"
        )
    _check_names(value, {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise ValueError(
                'response_format must be {"type": "json_schema", "json_schema": {"schema": {...}}} to follow a schema, '
                f"got {clip(inner)} as its json_schema"
            )
        _check_names(inner, {"name", "description", "schema", "strict"})
    return value


def _check_names(value: Mapping[str, object], known: set[str]) -> None:
    unknown = sorted(value.keys() - known)
    if unknown:
        into = ": it goes into json_schema" if unknown[0] == "schema" and "json_schema" in known else ""
        raise ValueError(f"response_format must be made of {', '.join(sorted(known))}, got {clip(unknown[0])}{into}")
