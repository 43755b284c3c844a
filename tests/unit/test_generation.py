# SPDX-License-Identifier: Apache-2.0
"""Generation parameters: names, aliases, ranges, and how layers of them become one plan."""

import inspect

import pytest

from hf_triton.errors import RequestError
from hf_triton.generation import (
    ALIASES,
    GREEDY_BELOW,
    NEUTRAL,
    GenerationParameters,
    SamplingPlan,
    parse_parameters,
    settle,
)

BORDERS: dict[str, tuple[list[object], list[object]]] = {
    "max_new_tokens": ([1, 1_048_576], [0, 1_048_577, 2**31, 1.0, "1", True]),
    "do_sample": ([True, False], [0, 1, "true"]),
    "temperature": ([0, 0.7, 1, 100], [-0.1, 100.1, float("nan"), float("inf"), "1", True]),
    "top_p": ([1e-9, 1, 1.0], [0, 1.0001, -1, float("nan"), "1"]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.5, "1", True]),
    "seed": ([0, 2**63 - 1], [-1, 2**63, 0.5, "1", True]),
    "repetition_penalty": ([0.01, 1, 100], [0, 0.009, 100.1, float("inf"), "1"]),
    "num_return_sequences": ([1, 64], [0, 65, 2.0, "2", True]),
}
TOKENS = GenerationParameters(max_new_tokens=8)


def refusal(**values: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_parameters(values)
    return caught.value


def test_every_parameter_has_its_borders_here() -> None:
    assert set(BORDERS) == set(GenerationParameters.model_fields)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _) in BORDERS.items() for value in good])
def test_a_value_in_range_is_taken_as_it_is(name: str, value: object) -> None:
    assert getattr(parse_parameters({name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in BORDERS.items() for value in bad])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert error.code == "invalid_parameter"
    assert error.sentence.startswith(f"{name} must be ")
    assert ", got " in error.sentence


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_parameter(alias: str, name: str) -> None:
    assert parse_parameters({alias: 2}) == parse_parameters({name: 2})
    assert refusal(**{alias: "2"}).sentence.startswith(f"{name} must be ")


def test_a_parameter_may_be_said_once() -> None:
    error = refusal(max_tokens=5, max_new_tokens=5)
    assert str(error) == "invalid_parameter: max_tokens and max_new_tokens mean the same: leave one out"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("topk", "did you mean 'top_k'?"),
        ("zzz", "; known are do_sample, "),
    ],
)
def test_an_unknown_name_comes_with_a_hint(name: str, hint: str) -> None:
    error = refusal(**{name: 1})
    assert error.code == "unknown_parameter"
    assert error.sentence.startswith(f"there is no parameter '{name}'")
    assert hint in error.sentence


def test_an_unknown_name_is_shown_short_and_on_one_line() -> None:
    assert "\n" not in str(refusal(**{"a\nb": 1}))
    assert len(str(refusal(**{"a" * 10_000: 1}))) < 400


def test_all_mistakes_are_told_at_once() -> None:
    assert refusal(top_p=2, seed=-1).sentence.count(" must be ") == 2


@pytest.mark.parametrize(
    "values",
    [
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": False, "top_p": 0.9},
        {"do_sample": False, "top_k": 50},
        {"do_sample": True, "temperature": 0},
    ],
    ids=str,
)
def test_contradictions_are_refused(values: dict[str, object]) -> None:
    assert refusal(**values).sentence.endswith("leave one of them out")


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {"temperature": 1.0}, {"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}], ids=str
)
def test_greedy_may_be_said_with_values_that_change_nothing(values: dict[str, object]) -> None:
    assert settle(parse_parameters({"do_sample": False, **values}), TOKENS) == SamplingPlan(8)


@pytest.mark.parametrize(
    ("values", "samples"),
    [
        ({}, None),
        ({"seed": 1}, None),
        ({"temperature": 0}, False),
        ({"temperature": GREEDY_BELOW / 2}, False),
        ({"temperature": GREEDY_BELOW}, True),
        ({"temperature": 0, "top_p": 0.5}, False),
        ({"top_p": 0.5}, True),
        ({"top_k": 5}, True),
        ({"do_sample": False}, False),
    ],
    ids=str,
)
def test_what_asks_to_sample(values: dict[str, object], samples: bool | None) -> None:
    assert parse_parameters(values).asks_to_sample is samples


def test_the_neutral_values_are_in_range() -> None:
    assert parse_parameters(dict(NEUTRAL)).temperature == 1.0


# --- settling --------------------------------------------------------------------------------------------------------


def test_the_first_layer_that_says_something_wins() -> None:
    request = GenerationParameters(temperature=0.5)
    folder = GenerationParameters(temperature=0.9, top_p=0.8, max_new_tokens=4)
    plan = settle(request, folder, TOKENS)
    assert (plan.temperature, plan.top_p, plan.max_new_tokens, plan.do_sample) == (0.5, 0.8, 4, True)


def test_zero_is_said_and_not_left_out() -> None:
    plan = settle(
        GenerationParameters(top_k=0, seed=0, temperature=1.0), GenerationParameters(top_k=50, seed=7), TOKENS
    )
    assert (plan.top_k, plan.seed) == (0, 0)


def test_a_greedy_request_takes_nothing_of_a_sampling_folder() -> None:
    folder = GenerationParameters(temperature=0.9, top_p=0.8, top_k=5, seed=3)
    assert settle(GenerationParameters(temperature=0), folder, TOKENS) == SamplingPlan(8)


def test_a_sampling_request_over_a_greedy_folder_has_temperature_one() -> None:
    plan = settle(GenerationParameters(top_p=0.5), GenerationParameters(temperature=0), TOKENS)
    assert (plan.do_sample, plan.temperature, plan.top_p) == (True, 1.0, 0.5)


def test_minus_one_for_top_k_keeps_all_tokens() -> None:
    assert settle(GenerationParameters(top_k=-1), TOKENS).top_k == 0


def test_many_texts_need_sampling() -> None:
    with pytest.raises(RequestError, match="num_return_sequences 3 would give 3 equal texts"):
        settle(GenerationParameters(num_return_sequences=3), TOKENS)
    assert settle(GenerationParameters(num_return_sequences=3, top_p=0.9), TOKENS).num_return_sequences == 3


def test_a_penalty_is_kept_without_sampling() -> None:
    assert settle(GenerationParameters(repetition_penalty=1.2), TOKENS).repetition_penalty == 1.2


def test_a_plan_has_a_place_for_every_parameter() -> None:
    assert set(inspect.signature(SamplingPlan).parameters) == set(GenerationParameters.model_fields)
