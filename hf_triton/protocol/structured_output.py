# SPDX-License-Identifier: Apache-2.0
"""Parameters that constrain the output: `response_format`, the `guided_*` ones, and other servers' forms of them.

Compiles no grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import annotated_types
from pydantic import ValidationInfo

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.validation import MAX_LEVELS, is_nested_deeply, read_json
from hf_triton.sentence import param, param_list, remedy

MAX_GRAMMAR: Final = 65_536  # characters of a schema, a regular expression or a grammar
GrammarText = Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(MAX_GRAMMAR)]

GRAMMARS: Final = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Parameters that constrain the output; a prompt may have one of them."""


@dataclass(frozen=True)
class Grammar:
    """A constraint on the completion."""

    kind: Literal["json_schema", "regex", "choice", "lark", "parts"]
    text: str
    """The source; JSON if `kind` is json_schema (an object), choice (an array of strings), or parts: `alternatives`,
    arrays of parts, which may repeat behind a `separator`, or null. A part is a string, or an object of a `kind`: one
    of the others with its `text`; `space`; `any` or `repeat` `of` parts; or `text` from `min` to `max` characters
    `without` some strings, up to its `end`."""
    parameter: str
    """The request parameter that holds it."""
    about: str = ""
    """What sentences about it begin with; by default the parameter."""

    def __post_init__(self) -> None:
        if not self.about:
            object.__setattr__(self, "about", param(self.parameter))


JSON_OBJECT: Final = {"type": "json_object"}
VLLM_GUIDES: Final[Mapping[str, str]] = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
    "json_object": "response_format",
}
"""The fields of vLLM's `structured_outputs`, formerly `guided_decoding`, and the parameters that they are."""
VLLM_BACKENDS: Final = ("backend", "backend_was_auto", "disable_fallback")
"""Its fields that do not change what the output may be."""
TENSORRT_GUIDES: Final[Mapping[str, str]] = {
    "json": "response_format",
    "json_schema": "guided_json",
    "regex": "guided_regex",
}
"""The values of TensorRT-LLM's `guided_decoding_guide_type`, and what `guided_decoding_guide` is with them."""


FORMATS: Final = (
    'an object: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
)
SCHEMA_PLACES: Final = ("schema", "value", "response_schema")
"""The fields in which other servers' forms of `response_format` have the schema."""


def read_object(value: object, info: ValidationInfo) -> object:
    """Read a JSON object, possibly as a string; the type check refuses values that are none."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")) if isinstance(value, dict) else value
    except RecursionError:
        raise ValueError(
            f"{param(str(info.field_name))} is nested too deeply: up to {MAX_LEVELS} levels are read"
        ) from None
    if not isinstance(text, str):
        return value
    if len(text) > MAX_GRAMMAR:
        raise ValueError(
            f"{param(str(info.field_name))} must be JSON of up to {MAX_GRAMMAR} characters, got {len(text)}"
        )
    if isinstance(value, dict) and text.count("{") + text.count("[") < MAX_LEVELS:
        return value
    if is_nested_deeply(text):
        raise ValueError(f"{param(str(info.field_name))} is nested too deeply: up to {MAX_LEVELS} levels are read")
    parsed = value if isinstance(value, dict) else read_json(value)
    return parsed if isinstance(parsed, dict) else value


def read_response_format(value: object, info: ValidationInfo) -> object:
    """Read as `read_object` does; the error for what is no object lists the allowed forms."""
    read = read_object(value, info)
    if not isinstance(read, dict):
        raise ValueError(f"{param('response_format')} must be {FORMATS}, got {clip(value)}")
    return read


def check_response_format(value: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` in OpenAI's form; a schema may stand where other servers' clients write it.

    huggingface_hub and TGI write `{"type": "json", "value": {...}}` or `json_object` with it; llama.cpp, Together and
    Fireworks `{"type": "json_object", "schema": {...}}`; LiteLLM `response_schema`; the Responses API and Anthropic's
    `{"type": "json_schema", "schema": {...}}`.
    """
    kind = value.get("type")
    places = [name for name in SCHEMA_PLACES if isinstance(value.get(name), dict)]
    if kind in ("json", "json_object", "json_schema") and len(places) == 1 and "json_schema" not in value:
        _check_names(value, {"type", "name", "description", "strict", *places})
        schema = value[places[0]]
        if isinstance(schema.get("schema"), dict) and schema.keys() <= {"name", "description", "strict", "schema"}:
            schema = schema["schema"]  # TGI has OpenAI's object there
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if kind not in ("text", "json_object", "json_schema"):
        found = clip(kind) if "type" in value else "none"
        raise ValueError(
            f"{param('response_format')} must be of type `text`, `json_object` or `json_schema`, got {found}"
            + remedy(f"; for other formats use {param_list(GRAMMARS[2:4])} or {param(GRAMMARS[4])}")
        )
    _check_names(value, {"type", "json_schema"} if kind == "json_schema" else {"type"})
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise ValueError(
                f'{param("response_format")} must be {{"type": "json_schema", "json_schema": {{"schema": {{...}}}}}} '
                f"to follow a schema, got {clip(inner)} as its json_schema"
            )
        _check_names(inner, {"name", "description", "schema", "strict"})
    return value


def _check_names(value: Mapping[str, object], known: set[str]) -> None:
    unknown = sorted(value.keys() - known)
    if unknown and unknown[0] in SCHEMA_PLACES and not isinstance(value[unknown[0]], dict):
        place = param(f"response_format.{unknown[0]}")
        raise ValueError(f"{place} must be a JSON schema, an object, got {clip(value[unknown[0]])}")
    if unknown:
        hint = ": put it into json_schema" if unknown[0] == "schema" and "json_schema" in known else ""
        names = ", ".join(sorted(known))
        raise ValueError(
            f"{param('response_format')} has no field of this name, got {clip(unknown[0])}{hint}; it has {names}"
        )


# --- other servers' forms --------------------------------------------------------------------------------------------


def read_guides(values: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """Read what constrains the output in the forms of vLLM and TensorRT-LLM: its spelling, our parameter, the value."""
    for form in ("structured_outputs", "guided_decoding"):
        if values.get(form) is not None:
            yield _read_vllm_guide(form, values[form])
    kind, guide = values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide")
    if kind is not None or guide is not None:
        yield _read_tensorrt_guide(kind, guide)


def _read_vllm_guide(form: str, value: object) -> tuple[str, str, object]:
    """The one field that constrains the output; None, false, and the names of vLLM's backends are ignored."""
    fields = read_json(value)
    names = ", ".join(VLLM_GUIDES)
    if not isinstance(fields, dict):
        raise RequestError(
            "invalid_parameter", f"{param(form)} must be a JSON object with one of {names}, got {clip(value)}"
        )
    given = {
        name: entry
        for name, entry in fields.items()
        if entry is not None and entry is not False and name.lstrip("_") not in VLLM_BACKENDS
    }
    if len(given) != 1 or not given.keys() <= VLLM_GUIDES.keys():
        found = ", ".join(clip(name) for name in given) or "none"
        raise RequestError("invalid_parameter", f"{param(form)} must have one of {names}, got {found}")
    [(name, entry)] = given.items()
    if name == "json_object" and entry is True:
        entry = JSON_OBJECT
    return f"{form}.{name}", VLLM_GUIDES[name], entry


def _read_tensorrt_guide(kind: object, guide: object) -> tuple[str, str, object]:
    if not isinstance(kind, str) or kind not in TENSORRT_GUIDES:
        allowed = ", ".join(TENSORRT_GUIDES)
        raise RequestError(
            "invalid_parameter", f"{param('guided_decoding_guide_type')} must be one of {allowed}, got {clip(kind)}"
        )
    if kind == "json":
        return "guided_decoding_guide_type", TENSORRT_GUIDES[kind], JSON_OBJECT
    if guide is None:
        raise RequestError("invalid_parameter", f"{param('guided_decoding_guide')} is required with the type {kind}")
    return "guided_decoding_guide", TENSORRT_GUIDES[kind], guide
