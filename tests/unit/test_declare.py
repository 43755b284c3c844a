# SPDX-License-Identifier: Apache-2.0
"""Declared fields become sentences and tables."""

import time
from typing import Annotated, Any, Literal

import annotated_types
import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hf_triton.declare import allowed, parse_boolean, problems, suggest, table
from hf_triton.generation import GenerationParameters
from hf_triton.settings import ModelSettings
from hf_triton.wire import RequestOptions


class Declared(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, strict=True)

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

    @model_validator(mode="after")
    def _check(self) -> "Declared":
        if self.flag and self.count == 9:
            raise ValueError("flag and 9 do not go together")
        return self


ALLOWED = {
    "name": "a text that is not empty",
    "count": "an integer >= 1 and <= 9",
    "share": "a number > 0",
    "color": "one of `red`, `blue`",
    "flag": "true or false",
    "more": "a JSON object",
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
        ({"name": ""}, ["name must be a text that is not empty, got ''"]),
        ({"name": "x", "color": "green"}, ["color must be one of `red`, `blue`, got 'green'"]),
        ({}, ["name is required"]),
        ({"name": "x", "flag": True, "count": 9}, ["flag and 9 do not go together"]),
        (
            {"name": 5, "more": []},
            ["name must be a text that is not empty, got 5", "more must be a JSON object, got []"],
        ),
    ],
    ids=["range", "type", "open range", "empty", "choice", "missing", "together", "two"],
)
def test_each_problem_is_one_sentence(values: dict[str, object], expected: list[str]) -> None:
    assert sentences(**values) == expected


def test_a_long_value_is_cut() -> None:
    (sentence,) = sentences(name="x", count="9" * 1000)
    assert len(sentence) < 120


def test_suggest_names_what_is_close() -> None:
    assert suggest("temprature", ["temperature", "top_p"]) == ", did you mean 'temperature'?"
    assert suggest("zzz", ["temperature", "top_p"]) == "; known are temperature, top_p"


def test_suggest_is_quick_on_a_name_of_megabytes() -> None:
    started = time.monotonic()
    assert suggest("temperature" * 1_000_000, ["temperature"]).startswith("; known are")
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), (" TRUE ", True), ("1", True), ("yes", True), ("false", False), ("No", False), ("0", False)],
)
def test_booleans_have_many_spellings(text: str, value: bool) -> None:
    assert parse_boolean(text) is value


@pytest.mark.parametrize("text", ["", "on", "tru", "2"])
def test_what_is_no_boolean_is_left_to_be_refused(text: str) -> None:
    assert parse_boolean(text) == text


def test_the_table_has_a_row_for_each_field() -> None:
    rows = table(Declared, {"count": " (or `n`)"}).splitlines()
    assert rows[0] == "| name | values | default | meaning |"
    assert rows[2] == "| `name` | a text that is not empty | (required) | What it is called. |"
    assert rows[3] == "| `count` (or `n`) | an integer >= 1 and <= 9 | `3` | How many, over two lines. |"
    assert rows[4] == "| `share` | a number > 0 | - | How much. |"
    assert rows[6] == "| `flag` | true or false | `false` | Whether. |"
    assert len(rows) == 2 + len(Declared.model_fields)


@pytest.mark.parametrize("model", [GenerationParameters, RequestOptions, ModelSettings])
def test_every_declared_field_says_what_it_means_and_takes(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert len(field.description or "") > 20, name
        assert allowed(field), name
