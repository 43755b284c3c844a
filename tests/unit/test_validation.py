# SPDX-License-Identifier: Apache-2.0
"""Declared fields become sentences and tables."""

import time
from typing import Annotated, Any, Literal

import annotated_types
import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from hf_triton.protocol.chat_request import ChatOptions
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.validation import (
    MAX_ENTRIES,
    allowed,
    meanings,
    parse_boolean,
    problems,
    read_integer_keys,
    read_one_or_many,
    read_strings,
    suggest,
    table,
)
from hf_triton.settings import ModelSettings


class Declared(BaseModel):
    model_config = ConfigDict(strict=True)

    name: Annotated[str, annotated_types.MinLen(1)]
    """What it is called."""
    count: Annotated[int, annotated_types.Ge(1), annotated_types.Le(9)] = 3
    """How many,
    over two lines."""
    share: Annotated[float, annotated_types.Gt(0)] | None = None
    """How much."""
    color: Literal["red", "blue"] = "red"
    """Which."""
    flag: bool = False
    """Whether."""
    more: dict[str, Any] = {}
    """The rest."""
    places: Annotated[
        tuple[Annotated[int, annotated_types.Ge(0)], ...],
        annotated_types.MinLen(1),
        annotated_types.MaxLen(3),
        BeforeValidator(read_one_or_many),
    ] = (0,)
    """Where."""
    words: (
        Annotated[
            tuple[Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(5)], ...],
            annotated_types.MaxLen(2),
            BeforeValidator(read_strings),
        ]
        | None
    ) = None
    """What is said."""
    weights: (
        Annotated[
            dict[int, Annotated[float, annotated_types.Le(1)]],
            annotated_types.MaxLen(2),
            BeforeValidator(read_integer_keys),
        ]
        | None
    ) = None
    """How heavy."""

    @model_validator(mode="after")
    def _check(self) -> "Declared":
        if self.flag and self.count == 9:
            raise ValueError("flag and 9 do not go together")
        return self


ALLOWED = {
    "name": "a non-empty string",
    "count": "an integer >= 1 and <= 9",
    "share": "a number > 0",
    "color": "one of `red`, `blue`",
    "flag": "true or false",
    "more": "a JSON object",
    "places": "an integer >= 0 or a JSON array of 1 to 3 of them",
    "words": "a string of 1 to 5 characters or a JSON array of up to 2 of them",
    "weights": "a JSON object of up to 2 entries, each name an integer, each value a number <= 1",
}


def sentences(**values: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Declared.model_validate(values)
    return [problem.sentence for problem in problems(Declared, caught.value)]


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_says_type_and_range(name: str) -> None:
    assert allowed(Declared.model_fields[name]) == ALLOWED[name]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "x", "count": 0}, ["count must be an integer >= 1 and <= 9, got 0"]),
        ({"name": "x", "count": "3"}, ["count must be an integer >= 1 and <= 9, got '3'"]),
        ({"name": "x", "share": 0}, ["share must be a number > 0, got 0"]),
        ({"name": ""}, ["name must be a non-empty string, got ''"]),
        ({"name": "x", "color": "green"}, ["color must be one of `red`, `blue`, got 'green'"]),
        ({"name": "x", "color": "bleu"}, ["color must be one of `red`, `blue`, got 'bleu', did you mean 'blue'?"]),
        ({}, ["name is required"]),
        ({"name": "x", "flag": True, "count": 9}, ["flag and 9 do not go together"]),
        ({"name": 5, "more": []}, ["name must be a non-empty string, got 5", "more must be a JSON object, got []"]),
        (
            {"name": "x", "places": [-1, "a", 2.5], "words": ["a"] * (MAX_ENTRIES + 1)},
            [
                f"places must be {ALLOWED['places']}, got -1",
                f"words must be {ALLOWED['words']}, got {str(['a'] * 99)[:57]}...",
            ],
        ),
        ({"name": "x", "weights": {"x": 2}}, [f"weights must be {ALLOWED['weights']}, got 'x'"]),
    ],
    ids=[
        "range",
        "type",
        "open range",
        "empty",
        "choice",
        "near choice",
        "missing",
        "together",
        "two",
        "entries",
        "entry",
    ],
)
def test_each_problem_is_one_sentence(values: dict[str, object], expected: list[str]) -> None:
    assert sentences(**values) == expected


def test_a_long_value_is_cut() -> None:
    (sentence,) = sentences(name="x", count="9" * 1000)
    assert len(sentence) < 120


def test_suggest_names_the_closest_name() -> None:
    assert suggest("temprature", ["temperature", "top_p"]) == ", did you mean 'temperature'?"
    assert suggest("zzz", ["temperature", "top_p"], "the page") == "; known are temperature, top_p"


def test_suggest_names_three_of_many_and_the_page_that_has_all() -> None:
    names = [f"{kind}_{number}" for kind in ("beam", "seed") for number in range(20)]
    assert suggest("sue", names, "the page") == "; the nearest are seed_9, seed_8 and seed_7, and the page lists all"
    assert suggest("", names, "the page").endswith("the page lists all")
    assert suggest("sue", names) == f"; known are {', '.join(sorted(names))}"


def test_suggest_is_quick_on_a_name_of_megabytes() -> None:
    started = time.thread_time()
    assert suggest("temperature" * 1_000_000, ["temperature"]).startswith("; known are")
    assert time.thread_time() - started < 20, "it takes no time, and minutes if names of any length are compared"


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), (" TRUE ", True), ("1", True), ("yes", True), ("false", False), ("No", False), ("0", False)],
)
def test_booleans_have_many_spellings(text: str, value: bool) -> None:
    assert parse_boolean(text) is value


@pytest.mark.parametrize("text", ["", "on", "tru", "2"])
def test_other_strings_are_left_for_validation(text: str) -> None:
    assert parse_boolean(text) == text


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (read_one_or_many, 5, (5,)),
        (read_one_or_many, "[5, 6]", (5, 6)),
        (read_one_or_many, "x", ("x",)),
        (read_one_or_many, [5], (5,)),
        (read_strings, "5", ("5",)),
        (read_strings, '["5"]', ("5",)),
        (read_strings, "[5", ("[5",)),
        (read_strings, "", ()),
        (read_integer_keys, '{"5": 6}', {5: 6}),
        (read_integer_keys, {"5": 6, 7: 8}, {5: 6, 7: 8}),
        (
            read_integer_keys,
            {"05": 6, "-1": 2, "\u0665": 3, "9" * 5000: 1},
            {"05": 6, "-1": 2, "\u0665": 3, "9" * 5000: 1},
        ),
        (read_integer_keys, "5", 5),
        (read_integer_keys, "{", "{"),
    ],
)
def test_arrays_and_objects_are_read_from_json_too(read: Any, value: object, expected: object) -> None:
    assert read(value) == expected


def test_the_table_has_a_row_for_each_field() -> None:
    rows = table(Declared, {"count": " (or `n`)"}).splitlines()
    assert rows[0] == "| name | values | default | meaning |"
    assert rows[2] == "| `name` | a non-empty string | (required) | What it is called. |"
    assert rows[3] == "| `count` (or `n`) | an integer >= 1 and <= 9 | `3` | How many, over two lines. |"
    assert rows[4] == "| `share` | a number > 0 | - | How much. |"
    assert rows[6] == "| `flag` | true or false | `false` | Whether. |"
    assert len(rows) == 2 + len(Declared.model_fields)


@pytest.mark.parametrize("model", [ChatOptions, GenerationParameters, RequestOptions, ModelSettings])
def test_every_field_has_a_description_and_a_range(model: type[BaseModel]) -> None:
    found = meanings(model)
    for name, field in model.model_fields.items():
        assert len(found.get(name, "")) > 20, name
        assert allowed(field), name
