# SPDX-License-Identifier: Apache-2.0
"""Refuses keywords of JSON schemas that llguidance reads and does not enforce, which would silently break the schema.

All hold for llguidance 1.9; a check can go when `tests/unit/test_schema_checks.py` passes without it. And it refuses
references without an end, which make a completion that cannot go on, or one that ends with its last token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

from hf_triton.errors import clip

SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas under names of their own."""
VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""
FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of strings that llguidance enforces; all others are annotations."""
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_INTEGER: Final = 2**53
"""llguidance rounds larger bounds."""
DEFINITIONS: Final = ("$defs", "definitions")
MAX_PASSES: Final = 50
"""Passes over a schema that look for what ends; one that needs more is taken."""


def check_schema(schema: Any) -> None:
    """Refuse what llguidance does not enforce.

    Raises:
        ValueError: A bound of a number that is ignored; a `minProperties` that repeated names would satisfy; or a
            `$ref` to what no finite text satisfies.
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
    if isinstance(schema, dict):
        _References(schema).check()


def drop_annotations(schema: Any) -> bool:
    """Take formats that are no constraint here (`password`, `int32`) out of a schema; whether there was one."""
    annotated = [part for part in subschemas(schema) if part.get("format", "date") not in FORMATS]
    for part in annotated:
        del part["format"]
    return bool(annotated)


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
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


class _References:
    """The references of a schema, and which of the schemas that they lead to can end.

    A schema ends if some finite text satisfies it: a tree's nodes do, as their children may be none. Which ones do is
    the least fixed point of `_ends`. What is not understood is taken to end.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._anchors = {f"#{part['$anchor']}": part for part in subschemas(root) if "$anchor" in part}
        self._ending: set[int] = set()  # by `id`

    def check(self) -> None:
        """Refuse references that do not end; the ValueError names one."""
        parts = self._reachable()
        if not any("$ref" in part for part in parts):
            return
        for _ in range(MAX_PASSES):
            ending = [part for part in reversed(parts) if id(part) not in self._ending and self._ends(part)]
            if not ending:
                break
        else:
            return
        for part in parts:
            target = self._target(part)
            if target is not False and not self._is_ending(target):
                raise ValueError(
                    f"$ref {clip(part['$ref'])} leads to what no finite text satisfies: let a part of it be left out, "
                    "empty or null"
                )

    def _reachable(self) -> list[Mapping[str, Any]]:
        """The schemas that a text may have to satisfy: the root, those within, and those that references lead to."""
        parts: list[Mapping[str, Any]] = []
        pending: list[Any] = [self._root]
        seen: set[int] = set()
        while pending:
            part = pending.pop()
            if isinstance(part, list):
                pending += part
            elif isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                parts.append(part)
                pending.append(self._target(part))
                for name, value in part.items():
                    if name in SCHEMAS_BY_NAME and isinstance(value, dict):
                        pending += () if name in DEFINITIONS else value.values()
                    elif name not in VALUES:
                        pending.append(value)
        return parts

    def _target(self, part: Mapping[str, Any]) -> Any:
        """What a schema's reference leads to; True, the schema of any text, if there is none that is understood."""
        reference, name = part.get("$ref"), self._root.get("$id")
        if not isinstance(reference, str):
            return True
        if isinstance(name, str):
            reference = reference.removeprefix(name.removesuffix("#")) or "#"
        if reference in self._anchors:
            return self._anchors[reference]
        if reference != "#" and not reference.startswith("#/"):
            return True
        target: Any = self._root
        for key in unquote(reference).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                return True
        return target

    def _is_ending(self, schema: Any) -> bool:
        return id(schema) in self._ending if isinstance(schema, dict) else schema is not False

    def _ends(self, part: Mapping[str, Any]) -> bool:
        """Whether a schema ends, by what is known to; it is then known."""
        needed = [self._target(part), *_listed(part, "allOf")]
        choices = [each for name in ("anyOf", "oneOf") if (each := _listed(part, name))]
        if not all(map(self._is_ending, needed)) or not all(any(map(self._is_ending, each)) for each in choices):
            return False
        types = part.get("type")
        types = types if isinstance(types, list) else [types]
        if (
            "const" in part
            or "enum" in part
            or not {"object", "array"}.issuperset(map(str, types))
            or ("object" in types and self._object_ends(part))
            or ("array" in types and self._array_ends(part))
        ):
            self._ending.add(id(part))
            return True
        return False

    def _object_ends(self, part: Mapping[str, Any]) -> bool:
        properties, patterns = (_mapping(part, name) for name in ("properties", "patternProperties"))
        others = [*patterns.values(), part.get("additionalProperties", True)]
        may_hold_others = any(map(self._is_ending, others))
        required = _listed(part, "required")
        if not required and part.get("minProperties") in (1, 1.0):
            return may_hold_others or any(map(self._is_ending, properties.values()))
        return all(
            self._is_ending(properties[name]) if name in properties else may_hold_others
            for name in required
            if isinstance(name, str)
        )

    def _array_ends(self, part: Mapping[str, Any]) -> bool:
        minimum, first = part.get("minItems"), _listed(part, "prefixItems")
        num_needed = int(minimum) if isinstance(minimum, int | float) else 0
        rest = part.get("items", True)
        return all(map(self._is_ending, first[:num_needed])) and (num_needed <= len(first) or self._is_ending(rest))


def _listed(part: Mapping[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []


def _mapping(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = part.get(name)
    return value if isinstance(value, dict) else {}
