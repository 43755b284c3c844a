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
from hf_triton.protocol.validation import read_json

MAX_GRAMMAR: Final = 65_536  # characters of a schema, a regular expression or a grammar
GrammarText = Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(MAX_GRAMMAR)]

GRAMMARS: Final = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Parameters that constrain the output; a prompt may have one of them."""


@dataclass(frozen=True)
class Grammar:
    """A constraint on the completion."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    """The source; JSON if `kind` is json_schema (an object) or choice (an array of strings)."""
    parameter: str
    """The request parameter that holds it, for error messages."""


def read_object(value: object, info: ValidationInfo) -> object:
    """Read a JSON object, possibly as a string; the type check refuses values that are none."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")) if isinstance(value, dict) else value
    except RecursionError:
        raise ValueError(f"{info.field_name} is nested too deeply") from None
    if not isinstance(text, str):
        return value
    if len(text) > MAX_GRAMMAR:
        raise ValueError(f"{info.field_name} must be JSON of up to {MAX_GRAMMAR} characters, got {len(text)}")
    if not isinstance(value, str):
        return value
    parsed = read_json(value)
    return parsed if isinstance(parsed, dict) else value


def check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a `response_format` that OpenAI's API does not define."""
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(
            f"response_format must be of type `text`, `json_object` or `json_schema`, got {clip(kind)}; for other "
            "formats use guided_regex, guided_choice or guided_grammar"
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
        hint = ": put it into json_schema" if unknown[0] == "schema" and "json_schema" in known else ""
        raise ValueError(f"response_format must be made of {', '.join(sorted(known))}, got {clip(unknown[0])}{hint}")
