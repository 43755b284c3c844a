# SPDX-License-Identifier: Apache-2.0
"""Keywords of schemas that llguidance does not enforce are refused, and only those."""

import json
import random

import jsonschema
import pytest

from hf_triton.grammar.schema_checks import check_schema
from tests.support.grammars import constraint_of, decode, draw, json_schema, rejection


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, '["uniqueItems"] would not be kept: leave it out'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 would not be"),
        ({"items": {"type": "number", "minimum": -0.001, "exclusiveMaximum": 0}}, "exclusiveMaximum 0"),
        ({"properties": {"default": {"type": "integer", "minimum": 2**60}}}, "minimum of integers must"),
        ({"type": "object", "minProperties": 2}, "minProperties 2 would not be kept"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum of integers must be within -2**53 and 2**53"),
        ({"type": ["integer", "null"], "exclusiveMaximum": 10**400}, "exclusiveMaximum of integers must"),
    ],
)
def test_schema_that_is_not_enforced_is_refused(schema: dict[str, object], words: str) -> None:
    assert words in rejection(json_schema(schema))


OBJECT = {"type": "object", "additionalProperties": False}
A = {"$ref": "#/$defs/a"}
NULL = {"type": "null"}


def of_a(schema: object) -> dict[str, object]:
    """An object with a field that has a schema, which may name itself as `A`."""
    return {**OBJECT, "properties": {"x": A}, "required": ["x"], "$defs": {"a": schema}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$id": "https://example.com/x", "$ref": "https://example.com/x"},
        {"$anchor": "me", "type": "array", "minItems": 1, "items": {"$ref": "#me"}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {"a/b c": {"$ref": "#/properties/a~1b%20c"}}},
        of_a(A),
        of_a({"allOf": [A]}),
        of_a({"anyOf": [A, {"allOf": [A, {"type": "object"}]}]}),
        of_a({"oneOf": [A]}),
        of_a({"$ref": "#/$defs/b"}) | {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [A]}}},
        of_a({**OBJECT, "properties": {"next": A}, "required": ["next"]}),
        of_a({"type": ["object", "array"], "minItems": 1, "items": A, "properties": {"x": A}, "required": ["x"]}),
        of_a({"type": "object", "additionalProperties": A, "required": ["name"]}),
        of_a({"type": "object", "additionalProperties": A, "minProperties": 1}),
        of_a({**OBJECT, "patternProperties": {"^x": A}, "required": ["xy"]}),
        of_a({"type": "array", "items": A, "minItems": 1}),
        of_a({"type": "array", "prefixItems": [NULL, A], "minItems": 2}),
        of_a({"anyOf": [{"type": "array", "items": A, "minItems": 1}, {"$ref": "#"}]}),
    ],
    ids=str,
)
def test_a_reference_without_an_end_is_refused(schema: dict[str, object]) -> None:
    assert "leads to what no finite text satisfies" in rejection(json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "minimum": -(2**53), "exclusiveMaximum": 2**53},
        {"type": "object", "minProperties": 1},
        {"type": "object", "minProperties": 2, "required": ["a", "b"]},
        {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"const": {"minProperties": 5}},
        {"type": "object", "properties": {"minProperties": {"type": "integer"}}, "required": ["minProperties"]},
        {"type": "array", "items": {"$ref": "#"}},
        {**OBJECT, "properties": {"a": {"$ref": "#"}}},
        {**OBJECT, "properties": {"a": NULL}, "$defs": {"unused": {"$ref": "#/$defs/unused"}}},
        of_a({**OBJECT, "properties": {"next": {"anyOf": [A, NULL]}}, "required": ["next"]}),
        of_a({**OBJECT, "properties": {"children": {"type": "array", "items": A}}, "required": ["children"]}),
        of_a({"type": "array", "prefixItems": [NULL], "items": A, "minItems": 1}),
        of_a({"type": ["array", "null"], "items": A, "minItems": 1}),
        of_a({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": A, "maxItems": 2}]}),
        of_a({"const": {"$ref": "#"}}),
        {**OBJECT, "properties": {"$ref": NULL}},
    ],
    ids=str,
)
def test_a_schema_that_is_enforced_or_recursive_with_an_end_is_followed(schema: dict[str, object]) -> None:
    drawn = [draw(constraint_of(json_schema(schema)), 200, random.Random(seed)) for seed in range(10)]
    whole = [token_ids for token_ids in drawn if token_ids is not None]
    assert whole
    for token_ids in whole:
        jsonschema.validate(json.loads(decode(token_ids)), schema)


def test_a_choice_between_itself_and_another_is_the_other() -> None:
    grammar = json_schema({"anyOf": [{"$ref": "#"}, NULL]})
    assert {decode(draw(constraint_of(grammar), 9, random.Random(seed)) or []) for seed in range(5)} == {"null"}


def test_a_long_chain_of_references_is_read() -> None:
    definitions: dict[str, object] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(1000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d1000": NULL}}
    check_schema(schema)
    with pytest.raises(ValueError, match="no finite text"):
        check_schema(schema | {"$defs": {**definitions, "d1000": {"$ref": "#/$defs/d0"}}})
