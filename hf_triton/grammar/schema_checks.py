# SPDX-License-Identifier: Apache-2.0
"""Refuses keywords of JSON schemas that llguidance reads and does not enforce, which would silently break the schema.

All hold for llguidance 1.9; a check can go when `tests/unit/test_schema_checks.py` passes without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from hf_triton.errors import clip

SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas under names of their own."""
VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_INTEGER: Final = 2**53
"""llguidance rounds larger bounds."""


def check_schema(schema: Any) -> None:
    """Refuse what llguidance does not enforce.

    Args:
        schema: A JSON schema, read from JSON.

    Raises:
        ValueError: A bound of a number that is ignored; or a `minProperties` that repeated names would satisfy.
    """
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError("x-guidance is not taken: leave it out")
    for part in subschemas(schema):
        _check_bounds(part)
        minimum, required = part.get("minProperties"), part.get("required", ())
        if type(minimum) is int and isinstance(required, list | tuple) and minimum > max(1, len(required)):
            raise ValueError(
                f"minProperties {minimum} would not be kept, as a name may come twice: name them in required"
            )


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and the schemas within it, without the values that they name."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name in SCHEMAS_BY_NAME and isinstance(value, dict):
                    pending += value.values()
                elif name not in VALUES:
                    pending.append(value)


def _check_bounds(schema: Mapping[str, Any]) -> None:
    types = schema.get("type", "number")
    types = types if isinstance(types, list) else [types]
    bounds = {name: schema[name] for name in BOUNDS if type(schema.get(name)) in (int, float)}
    if "integer" in types:
        for name, bound in bounds.items():
            if abs(bound) > MAX_INTEGER:
                raise ValueError(f"{name} of integers must be within -2**53 and 2**53, got {clip(bound)}: leave it out")
    elif "number" in types:
        for name in bounds.keys() & {"exclusiveMinimum", "exclusiveMaximum"}:
            if any(_violates(bounds, number) for number in (json.dumps(bounds[name]), "0", "-0")):
                inclusive = name.replace("exclusiveM", "m")
                raise ValueError(f"{name} {bounds[name]} would not be kept here: give {inclusive}, a little off it")


def _violates(bounds: Mapping[str, float], text: str) -> bool:
    """Whether llguidance accepts a number that is out of bounds."""
    number = float(text)
    is_above = number >= bounds.get("minimum", -math.inf) and number > bounds.get("exclusiveMinimum", -math.inf)
    is_below = number <= bounds.get("maximum", math.inf) and number < bounds.get("exclusiveMaximum", math.inf)
    if is_above and is_below:
        return False
    source = LLMatcher.grammar_from_json_schema(json.dumps({"type": "number", **bounds}))
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()
