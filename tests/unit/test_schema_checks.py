# SPDX-License-Identifier: Apache-2.0
"""Keywords of schemas that llguidance does not enforce are refused, and only those."""

import json
import random

import jsonschema
import pytest

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
    ],
    ids=str,
)
def test_enforced_schema_is_not_refused(schema: dict[str, object]) -> None:
    drawn = [draw(constraint_of(json_schema(schema)), 100, random.Random(seed)) for seed in range(10)]
    whole = [token_ids for token_ids in drawn if token_ids is not None]
    assert whole
    for token_ids in whole:
        jsonschema.validate(json.loads(decode(token_ids)), schema)
