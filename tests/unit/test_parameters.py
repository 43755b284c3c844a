# SPDX-License-Identifier: Apache-2.0
"""Generation parameters: names, aliases, ranges, and how layers of them become one plan."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from hf_triton.errors import RequestError
from hf_triton.protocol.dialects import ALIASES, GUIDES, NO_EFFECT
from hf_triton.protocol.parameters import (
    GREEDY_BELOW,
    MAX_NEW_TOKENS,
    NEUTRAL_VALUES,
    GenerationParameters,
    parse_parameters,
    unknown_parameter,
)
from hf_triton.protocol.structured_output import GRAMMARS, Grammar
from hf_triton.protocol.validation import MAX_JSON
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.text_generation.resolve import (
    TaskParams,
    check_token_ids,
    resolve_sampling_params,
    resolve_task_params,
)

BORDERS: dict[str, tuple[list[object], list[object]]] = {
    "max_new_tokens": ([1, 1_048_576], [0, 1_048_577, 2**31, 1.0, "1", True]),
    "do_sample": ([True, False], [0, 1, "true"]),
    "temperature": ([0, 0.7, 1, 100], [-0.1, 100.1, float("nan"), float("inf"), "1", True]),
    "top_p": ([1e-9, 1, 1.0], [0, 1.0001, -1, float("nan"), "1"]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.5, "1", True]),
    "seed": ([0, 2**63 - 1], [-2, 2**63, 0.5, "1", True]),
    "repetition_penalty": ([0.01, 1, 100], [0, 0.009, 100.1, float("inf"), "1"]),
    "num_return_sequences": ([1, 64], [0, 65, 2.0, "2", True]),
    "num_beams": ([1, 32], [0, 33, 2.0, "2", True]),
    "length_penalty": ([-10, 0.5, 10], [-10.1, 10.1, float("nan"), "1"]),
    "early_stopping": ([False, True], [0, 1, "never"]),
    "src_lang": (["en", "eng_Latn"], ["", 5, ["en"]]),
    "tgt_lang": (["de"], ["", True]),
    "min_new_tokens": ([0, 1, 1_048_576], [-1, 1_048_577, 1.0, "1", True]),
    "min_p": ([0, 0.5, 1, 1.0], [-0.1, 1.01, float("nan"), "1"]),
    "typical_p": ([1e-9, 1.0], [0, 1.01, float("nan"), "1"]),
    "presence_penalty": ([-2, 0, 2.0], [-2.01, 2.01, float("nan"), "1"]),
    "frequency_penalty": ([-2, 0, 2.0], [-2.01, 2.01, float("inf"), "1"]),
    "thinking_budget": ([0, 1, MAX_NEW_TOKENS], [-1, MAX_NEW_TOKENS + 1, 1.0, "1", True]),
    "no_repeat_ngram_size": ([0, 1, 128], [-1, 129, 1.0, "1", True]),
    "response_format": (
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}},
        ],
        [
            1,
            "json",
            [],
            {},
            {"type": "xml"},
            {"type": ["json_object"]},
            {"type": "json_object", "schema": True},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": True}},
            {"type": "json_schema", "json_schema": {"schema": {}, "shema": {}}},
        ],
    ),
    "guided_json": ([{}, {"type": "string"}], [1, True, "{", "[1]", "{" * 100_000]),
    "guided_regex": (["a", "(", "x" * 65_536], [1, "", "x" * 65_537]),
    "guided_choice": ([("a",), ("a", "b")], [1, "", (), ("",), "[]", ("a",) * 1025]),
    "guided_grammar": (["start: /a/"], [1, ""]),
    "bad_words": ([("a",), ("x" * 1000, "[b"), (), ("a",) * 1024], [5, ("a", 5), "x" * 1001, {}, ("a",) * 1025]),
    "logit_bias": (
        [{}, {0: 100}, {50256: -100.0, 2**31 - 1: 0.5}],
        [
            {-1: 1},
            {1: 100.1},
            {1: "1"},
            {1: float("nan")},
            {"a": 1},
            {"01": 1},
            {2**31: 1},
            dict.fromkeys(range(1025), 1),
            5,
        ],
    ),
    "stop_strings": ([("a",), ("x" * 1000, " "), (), ("a",) * 16], [5, ("a", None), ("a",) * 17, True]),
    "include_stop_str_in_output": ([False, True], [0, 1, "true"]),
    "stop_token_ids": ([(), (0,), (1, 2**31 - 1)], [-1, 2**31, 1.0, "a", True, [1, "1"], {}, (1,) * 65]),
    "allowed_token_ids": (
        [(0,), (1, 2**31 - 1), tuple(range(2**18))],
        [(), -1, 2**31, 1.0, "a", True, [1, "1"], {}, ("a",) * 2**18, (1,) * (2**18 + 1)],
    ),
    "suffix": (["", "}", "x" * 2**20], [5, True, ["}"], "x" * (2**20 + 1)]),
    "truncate_prompt_tokens": ([-1, 1, 2**31 - 1], [-2, 0, 2**31, 1.0, "1", True]),
    "ignore_eos": ([True, False], [0, 1, "true"]),
    "eos_token_id": ([(0,), (1, 2**31 - 1)], [-1, 2**31, 1.0, "a", True, (), [1, "1"], {}, (1,) * 65]),
    "best_of": ([1, 64], [0, 65, 2.0, "2", True]),
    "logprobs": ([0, 20], [-1, 21, 1.0, "1", True]),
    "prompt_logprobs": ([0, 20], [-1, 21, 1.0, "1", True]),
    "max_time": ([0.001, 1, 86_400], [0, -1, 86_400.1, float("nan"), float("inf"), "1", True]),
    "lora_name": (["", "sql"], [5, True, ["sql"]]),
    "cache_salt": (["a", "x" * 1024], ["", "x" * 1025, 5, True, ["a"]]),
    "queue_priority": ([-100, 0, 100], [-101, 101, 1.0, "1", True]),
}
TOKENS = GenerationParameters(max_new_tokens=8)


def rejection(**values: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_parameters(values)
    return caught.value


def test_every_parameter_has_its_borders_here() -> None:
    assert set(BORDERS) == set(GenerationParameters.model_fields)


@pytest.mark.parametrize("name", BORDERS)
def test_a_value_in_range_is_kept_and_another_rejected_by_name(name: str) -> None:
    good, bad = BORDERS[name]
    for value in good:
        assert getattr(parse_parameters({name: value}), name) == value
    for value in bad:
        error = rejection(**{name: value})
        assert error.code == "invalid_parameter"
        assert error.sentence.startswith((f"{name} must be ", f"{name}.schema must be ", f"{name} has no field "))
        assert ", got " in error.sentence


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_the_parameter(alias: str, name: str) -> None:
    value = BORDERS[name][0][0]
    assert parse_parameters({alias: value}) == parse_parameters({name: value})
    assert rejection(**{alias: object()}).sentence.startswith(f"{alias} must be ")


def test_a_parameter_may_be_given_once() -> None:
    error = rejection(max_tokens=5, max_new_tokens=5)
    assert str(error) == "invalid_parameter: max_tokens and max_new_tokens mean the same: leave one out"


def test_the_newer_of_openais_two_names_wins() -> None:
    """Its clients send `max_completion_tokens`, and proxies in front of us add a `max_tokens` of their own."""
    assert parse_parameters({"max_completion_tokens": 5, "max_tokens": 2000}).max_new_tokens == 5
    error = rejection(max_completion_tokens=5, max_new_tokens=6)
    assert error.sentence == "max_completion_tokens and max_new_tokens mean the same: leave one out"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("topk", "did you mean 'top_k'?"),
        ("max_length", ", did you mean 'max_new_tokens'?"),
        ("num_beam", ", did you mean 'num_beams'?"),
        ("model", " (the URL names the model): leave it out"),
        ("timeout", ", did you mean 'max_time'?"),
        ("runtime_top_k", ", did you mean 'top_k'?"),
        ("zzz", ", and docs/requests.md lists all"),
    ],
)
def test_an_unknown_name_comes_with_a_hint(name: str, hint: str) -> None:
    error = rejection(**{name: 2})
    assert error.code == "unknown_parameter"
    assert error.sentence.startswith(f"there is no parameter '{name}'")
    assert hint in error.sentence


def test_the_prompt_input_is_suggested_if_the_request_takes_one() -> None:
    assert "did you mean 'text_input'?" in unknown_parameter("prompt", ("text_input",)).sentence
    assert "text_input" not in rejection(prompt="x").sentence


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("stop_strings", ["a", "b"], ("a", "b")),
        ("stop_strings", '["a", "\\u00e9"]', ("a", "é")),
        ("stop_strings", "[]", ()),
        ("stop_strings", "[INST]", ("[INST]",)),
        ("bad_words", '["a"]', ("a",)),
        ("logit_bias", '{"50256": -100, "0": 0.5}', {50256: -100.0, 0: 0.5}),
        ("eos_token_id", 5, (5,)),
        ("eos_token_id", [5, 6], (5, 6)),
        ("eos_token_id", "5", (5,)),
        ("eos_token_id", "[5, 6]", (5, 6)),
    ],
    ids=str,
)
def test_arrays_and_objects_may_be_json_strings(name: str, value: object, expected: object) -> None:
    assert getattr(parse_parameters({name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("stop_strings", "[1]", "1"),
        ("stop_strings", '["a", null]', "null"),
        ("stop_strings", "[[]]", "[]"),
        ("logit_bias", "[]", "[]"),
        ("logit_bias", '{"1": 101}', "101"),
        ("logit_bias", '{"1": NaN}', "'{\"1\": NaN}', which is not JSON: "),
        ("logit_bias", '{"+1": 1}', "'+1'"),
        ("logit_bias", '{"\u0661": 1}', "'\u0661'"),
        ("logit_bias", "{" * 100_000, "'{{{"),
        ("eos_token_id", "[1.5]", "1.5"),
        ("eos_token_id", "[true]", "true"),
    ],
)
def test_an_unusable_json_string_is_rejected_with_the_wrong_part(name: str, value: object, shown: str) -> None:
    sentence = rejection(**{name: value}).sentence
    assert sentence.startswith(f"{name} must be ")
    assert f", got {shown}" in sentence
    assert sentence.count(f"{name} must be ") == 1


@pytest.mark.parametrize("name", ["stop_strings", "bad_words"])
@pytest.mark.parametrize("given", ["", [""], '[""]', ["", ""], ("",)], ids=str)
def test_empty_strings_ask_for_nothing(name: str, given: object) -> None:
    assert getattr(parse_parameters({name: given}), name) == ()
    assert getattr(parse_parameters({name: ["a", ""]}), name) == ("a",)


def test_too_many_entries_are_refused_as_a_whole_and_not_each() -> None:
    """Pydantic would word millions of errors, for half a minute."""
    assert ", got ['', ''" in rejection(stop=[""] * 1025).sentence
    assert ", got {'0x': 1, " in rejection(logit_bias={f"{number}x": 1 for number in range(1025)}).sentence


def test_an_unknown_name_is_shown_short_and_on_one_line() -> None:
    assert "\n" not in str(rejection(**{"a\nb": 1}))
    assert len(str(rejection(**{"a" * 10_000: 1}))) < 900


def test_all_mistakes_are_reported_at_once() -> None:
    assert rejection(top_p=2, seed=-2).sentence.count(" must be ") == 2


@pytest.mark.parametrize(
    "values",
    [
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": False, "top_p": 0.9},
        {"do_sample": False, "top_k": 50},
        {"do_sample": False, "min_p": 0.1},
        {"do_sample": False, "typical_p": 0.9},
        {"ignore_eos": True, "eos_token_id": 5},
        {"do_sample": True, "temperature": 0},
        {"do_sample": True, "temperature": 0.0005},
    ],
    ids=str,
)
def test_contradictions_are_rejected(values: dict[str, object]) -> None:
    assert rejection(**values).sentence.endswith("leave one of them out")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"top_p": 1.0},
        {"top_k": 0},
        {"top_k": -1},
        {"min_p": 0},
        {"typical_p": 1},
    ],
    ids=str,
)
def test_do_sample_false_accepts_neutral_values(values: dict[str, object]) -> None:
    assert resolve_sampling_params(parse_parameters({"do_sample": False, **values}), TOKENS) == SamplingParams(8)


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
        ({"min_p": 0.1}, True),
        ({"typical_p": 0.9}, True),
        ({"presence_penalty": 1, "logit_bias": {1: 1}, "best_of": 2}, None),
        ({"do_sample": False}, False),
    ],
    ids=str,
)
def test_which_parameters_enable_sampling(values: dict[str, object], samples: bool | None) -> None:
    assert parse_parameters(values).wants_sampling is samples


def test_the_neutral_values_are_in_range() -> None:
    assert parse_parameters(dict(NEUTRAL_VALUES)).temperature == 1.0


# --- settling --------------------------------------------------------------------------------------------------------


def test_the_first_layer_with_a_value_wins() -> None:
    request = GenerationParameters(temperature=0.5)
    folder = GenerationParameters(temperature=0.9, top_p=0.8, max_new_tokens=4)
    plan = resolve_sampling_params(request, folder, TOKENS)
    assert (plan.temperature, plan.top_p, plan.max_new_tokens, plan.do_sample) == (0.5, 0.8, 4, True)


def test_zero_counts_as_given() -> None:
    plan = resolve_sampling_params(
        GenerationParameters(top_k=0, seed=0, temperature=1.0), GenerationParameters(top_k=50, seed=7), TOKENS
    )
    assert (plan.top_k, plan.seed) == (0, 0)


def test_a_greedy_request_ignores_sampling_defaults() -> None:
    folder = GenerationParameters(temperature=0.9, top_p=0.8, top_k=5, seed=3)
    assert resolve_sampling_params(GenerationParameters(temperature=0), folder, TOKENS) == SamplingParams(8)


def test_a_sampling_request_over_a_greedy_folder_has_temperature_one() -> None:
    plan = resolve_sampling_params(GenerationParameters(top_p=0.5), GenerationParameters(temperature=0), TOKENS)
    assert (plan.do_sample, plan.temperature, plan.top_p) == (True, 1.0, 0.5)


def test_minus_one_for_top_k_keeps_all_tokens() -> None:
    assert resolve_sampling_params(GenerationParameters(top_k=-1), TOKENS).top_k == 0


def test_several_completions_need_sampling() -> None:
    with pytest.raises(RequestError, match="num_return_sequences 3 would give 3 equal completions"):
        resolve_sampling_params(GenerationParameters(num_return_sequences=3), TOKENS)
    assert (
        resolve_sampling_params(GenerationParameters(num_return_sequences=3, top_p=0.9), TOKENS).num_return_sequences
        == 3
    )


def test_a_penalty_is_kept_without_sampling() -> None:
    assert resolve_sampling_params(GenerationParameters(repetition_penalty=1.2), TOKENS).repetition_penalty == 1.2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens 9 is more than max_new_tokens 8: lower one or raise the other",
        ),
        (
            {"best_of": 2, "num_return_sequences": 3},
            "best_of 2 is less than num_return_sequences 3: raise one or lower the other",
        ),
    ],
)
def test_contradictory_counts_are_rejected(values: dict[str, object], sentence: str) -> None:
    assert rejection(**values).sentence == sentence


def test_contradictory_counts_of_two_layers_are_rejected() -> None:
    with pytest.raises(RequestError, match="min_new_tokens 9 is more than max_new_tokens 8"):
        resolve_sampling_params(GenerationParameters(min_new_tokens=9), TOKENS)
    with pytest.raises(RequestError, match="best_of 2 is less than num_return_sequences 3"):
        resolve_sampling_params(parse_parameters({"n": 3, "top_p": 0.9}), GenerationParameters(best_of=2), TOKENS)


def test_a_default_min_new_tokens_rejects_nothing() -> None:
    plan = resolve_sampling_params(
        GenerationParameters(max_new_tokens=4), GenerationParameters(min_new_tokens=9), TOKENS
    )
    assert (plan.min_new_tokens, plan.max_new_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("given", "num_beams", "num_return_sequences"),
    [({"n": 4}, 4, 4), ({"best_of": 4}, 4, None), ({"best_of": 4, "n": 2}, 4, 2), ({"num_beams": 4, "n": 2}, 4, 2)],
)
def test_vllms_beam_search_has_as_many_beams_as_completions(
    given: dict[str, Any], num_beams: int, num_return_sequences: int | None
) -> None:
    expected = GenerationParameters(num_beams=num_beams, num_return_sequences=num_return_sequences)
    assert parse_parameters({"use_beam_search": True, "temperature": 0, **given}) == expected.model_copy(
        update={"temperature": 0}
    )
    assert parse_parameters({"use_beam_search": False, "top_k": 3}) == GenerationParameters(top_k=3)
    assert rejection(use_beam_search="yes").sentence == "use_beam_search must be true or false, got 'yes'"


@pytest.mark.parametrize(
    ("request_", "default", "num_beams"),
    [
        ({}, {"num_beams": 4}, 4),
        ({"num_beams": 1}, {"num_beams": 4}, 1),
        ({"num_beams": 2}, {"do_sample": True, "temperature": 0.5, "best_of": 3}, 2),
        ({"temperature": 1.0}, {"num_beams": 4}, 4),  # changes nothing
        ({"temperature": 0}, {"num_beams": 4}, 4),
        ({"temperature": 0.5}, {"num_beams": 4}, 1),
        ({"do_sample": True}, {"num_beams": 4}, 1),
        ({"guided_choice": ["a"]}, {"num_beams": 4}, 1),
        ({"logprobs": 2}, {"num_beams": 4}, 1),
    ],
)
def test_beams_of_a_default_give_way(request_: dict[str, Any], default: dict[str, Any], num_beams: int) -> None:
    params = resolve_sampling_params(parse_parameters(request_), parse_parameters(default), TOKENS)
    assert params.num_beams == num_beams
    assert params.do_sample == (num_beams == 1 and not {"temperature", "do_sample"}.isdisjoint(request_))
    assert params.num_rows == max(num_beams, 1)


def test_best_of_needs_sampling() -> None:
    with pytest.raises(RequestError, match="best_of 3 would give 3 equal completions"):
        resolve_sampling_params(GenerationParameters(best_of=3), TOKENS)
    plan = resolve_sampling_params(GenerationParameters(best_of=3, min_p=0.1), TOKENS)
    assert (plan.best_of, plan.num_return_sequences, plan.num_sequences, plan.num_top_logprobs) == (3, 1, 3, 0)


def test_a_greedy_request_is_not_shaped_by_its_folder() -> None:
    folder = GenerationParameters(min_p=0.1, typical_p=0.9)
    assert resolve_sampling_params(GenerationParameters(do_sample=False), folder, TOKENS) == SamplingParams(8)
    plan = resolve_sampling_params(GenerationParameters(), folder, TOKENS)
    assert (plan.do_sample, plan.min_p, plan.typical_p) == (True, 0.1, 0.9)


@pytest.mark.parametrize(
    ("request_says", "folder_says", "expected"),
    [
        ({}, {}, None),
        ({"ignore_eos": True}, {}, frozenset()),
        ({"ignore_eos": False}, {}, None),
        ({"eos_token_id": [5, 6, 5]}, {}, frozenset([5, 6])),
        ({"eos_token_id": 5}, {"ignore_eos": True}, frozenset([5])),
        ({"eos_token_id": 5}, {"eos_token_id": 6}, frozenset([5])),
        ({"ignore_eos": True}, {"eos_token_id": 5}, frozenset()),
        ({"ignore_eos": False}, {"eos_token_id": 5}, frozenset([5])),
        ({"ignore_eos": False}, {"ignore_eos": True}, None),
    ],
    ids=str,
)
def test_which_layer_sets_end_of_sequence_tokens(
    request_says: dict[str, object], folder_says: dict[str, object], expected: frozenset[int] | None
) -> None:
    assert (
        resolve_sampling_params(parse_parameters(request_says), parse_parameters(folder_says), TOKENS).eos_ids
        == expected
    )


def test_biases_become_pairs() -> None:
    plan = resolve_sampling_params(parse_parameters({"logit_bias": {"5": 1, "7": -2.5}}), TOKENS)
    assert plan.logit_bias == ((5, 1.0), (7, -2.5))


def test_request_params_hold_the_rest() -> None:
    request = parse_parameters({"stop": "\n", "bad_words": [], "max_time": 2})
    folder = parse_parameters({"stop": "x", "bad_words": ["y"], "queue_priority": -3})
    assert resolve_task_params(request, folder, TOKENS) == TaskParams(
        stop_strings=("\n",), max_time_s=2.0, queue_priority=-3
    )
    assert resolve_task_params(TOKENS) == TaskParams()


def test_a_folder_may_want_log_probabilities_of_every_prompt() -> None:
    folder = parse_parameters({"prompt_logprobs": 2})
    assert resolve_sampling_params(parse_parameters({}), folder, TOKENS).prompt_logprobs == 2
    assert resolve_sampling_params(parse_parameters({"prompt_logprobs": 0}), folder, TOKENS).prompt_logprobs == 0


def test_tokens_beyond_the_vocabulary_are_rejected() -> None:
    biased = resolve_sampling_params(GenerationParameters(logit_bias={9: 1.0, 10: 1.0}), TOKENS)
    ended = resolve_sampling_params(GenerationParameters(eos_token_id=(10,)), TOKENS)
    for plan, name in ((biased, "logit_bias"), (ended, "eos_token_id")):
        check_token_ids(plan, 11)
        with pytest.raises(RequestError) as caught:
            check_token_ids(plan, 10)
        assert caught.value.sentence == f"{name} names the token 10, and the model's token ids are below 10"
    check_token_ids(resolve_sampling_params(TOKENS), 1)


def test_every_parameter_is_resolved() -> None:
    places = {field.name for plan in (SamplingParams, TaskParams) for field in dataclasses.fields(plan)}
    renamed = {"eos_token_id": "eos_ids", "ignore_eos": "eos_ids", "max_time": "max_time_s"}
    renamed["include_stop_str_in_output"] = "includes_stop"
    renamed |= dict.fromkeys(GRAMMARS, "grammar")
    wanted = {renamed.get(name, name) for name in GenerationParameters.model_fields}
    assert places - wanted == {"bad_words_ids", "first_id"}
    assert wanted <= places


@pytest.mark.parametrize("name", GenerationParameters.model_fields)
def test_every_parameter_reaches_its_plan(name: str) -> None:
    others: dict[str, object] = {"temperature": 1.0} if name != "do_sample" else {}
    if name in ("length_penalty", "early_stopping"):
        others = {"num_beams": 2}
    values = {"max_new_tokens": 8, **others, name: BORDERS[name][0][-1 if name != "ignore_eos" else 0]}
    if name in SAME_AS_UNSAID:
        values[name] = SAME_AS_UNSAID[name]
    plain = parse_parameters({"max_new_tokens": 8, **others})
    given = parse_parameters(values)
    assert (resolve_sampling_params(given), resolve_task_params(given)) != (
        resolve_sampling_params(plain),
        resolve_task_params(plain),
    )


SAME_AS_UNSAID: dict[str, object] = {
    "do_sample": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "typical_p": 0.5,
    "min_new_tokens": 8,
}
"""Where the last value in range is what an unsaid parameter means, or needs others beside it: another one."""


# --- grammars --------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("values", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": '{"type": "json_object"}'}, ("json_schema", '{"type": "object"}')),
        ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", json.dumps(SCHEMA))),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ("json_schema", json.dumps(SCHEMA)),
        ),
        ({"guided_regex": "[a-z]+"}, ("regex", "[a-z]+")),
        ({"guided_choice": "yes"}, ("choice", '["yes"]')),
        ({"guided_choice": '["yes", "no"]'}, ("choice", '["yes", "no"]')),
        ({"guided_grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ],
)
def test_every_grammar_parameter_gives_a_grammar(values: dict[str, object], grammar: tuple[str, str] | None) -> None:
    settled = resolve_task_params(parse_parameters(values)).grammar
    assert (settled and (settled.kind, settled.text)) == grammar
    assert settled is None or settled.parameter == next(iter(values))


@pytest.mark.parametrize("also", [{"guided_json": SCHEMA}, {"stop_token_ids": [5]}, {"ignore_eos": True}], ids=str)
def test_a_grammar_excludes_other_grammars_and_ends(also: dict[str, object]) -> None:
    sentence = rejection(guided_choice=["a"], **also).sentence
    assert "guided_choice" in sentence
    assert next(iter(also)) in sentence
    assert "leave one of them out" in sentence


def test_stop_strings_may_cut_what_a_grammar_allows() -> None:
    own = parse_parameters({"guided_json": SCHEMA, "stop_strings": ["b"]})
    stopping, folder = parse_parameters({"stop_strings": ["x"]}), parse_parameters({"guided_regex": "a+"})
    assert resolve_task_params(own, stopping).stop_strings == ("b",)
    assert resolve_task_params(stopping, folder).stop_strings == ("x",)
    assert resolve_task_params(folder, stopping).stop_strings == ()


def test_the_first_layer_with_a_grammar_decides() -> None:
    folder = parse_parameters({"guided_regex": "a+"})
    endless = parse_parameters({"ignore_eos": True})
    assert resolve_task_params(parse_parameters({"response_format": {"type": "text"}}), folder).grammar is None
    assert resolve_task_params(TOKENS, folder).grammar == Grammar("regex", "a+", "guided_regex")
    with pytest.raises(RequestError, match="the folder's guided_regex"):
        resolve_task_params(endless, folder)


@pytest.mark.parametrize("write", [json.dumps, dict], ids=["text", "object"])
def test_a_schema_that_is_too_long_is_not_parsed(write: Callable[[object], object]) -> None:
    assert "65536 characters" in rejection(guided_json=write({"enum": ["x" * 70_000]})).sentence
    response_format = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}
    assert "65536 characters" in rejection(response_format=write(response_format)).sentence


def test_an_object_is_measured_as_compact_json() -> None:
    schema = {"enum": [0] * 30_000}
    assert parse_parameters({"guided_json": schema}) == parse_parameters(
        {"guided_json": json.dumps(schema, separators=(",", ":"))}
    )


@pytest.mark.parametrize("num_levels", [250, 100_000])
@pytest.mark.parametrize("is_text", [False, True])
def test_an_object_that_is_nested_too_deeply_is_rejected(num_levels: int, is_text: bool) -> None:
    schema: Any = {}
    for _ in range(0 if is_text else num_levels):
        schema = {"not": schema}
    if is_text:
        num_levels = min(num_levels, 5000)
        schema = '{"not":' * num_levels + "{}" + "}" * num_levels
    sentence = rejection(guided_json=schema).sentence
    assert sentence == "guided_json is nested too deeply: up to 200 levels are read"


def test_an_object_of_many_levels_is_taken() -> None:
    schema: dict[str, Any] = {}
    for _ in range(190):
        schema = {"not": schema}
    assert parse_parameters({"guided_json": schema}) == parse_parameters({"guided_json": json.dumps(schema)})


def test_a_string_that_is_too_long_is_rejected_with_its_length() -> None:
    sentence = rejection(guided_regex="[" * 70_000).sentence
    assert sentence.startswith("guided_regex must be a string of 1 to 65536 characters, got '[[[")
    assert sentence.endswith(", which has 70000")


SCHEMA = {"type": "integer"}
GUIDED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "a schema": ({"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA}),
    "a schema as text": ({"guided_decoding": json.dumps({"json": json.dumps(SCHEMA)})}, {"guided_json": SCHEMA}),
    "a pattern": ({"structured_outputs": '{"regex": "a+"}'}, {"guided_regex": "a+"}),
    "choices": ({"structured_outputs": {"choice": ["a", "b"]}}, {"guided_choice": ["a", "b"]}),
    "a grammar": ({"structured_outputs": {"grammar": "start: /a/"}}, {"guided_grammar": "start: /a/"}),
    "any object": ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
    "vLLM's own class": (
        {
            "guided_decoding": {
                **dict.fromkeys(("regex", "choice", "grammar", "json_object", "backend", "whitespace_pattern")),
                **dict.fromkeys(("backend_was_auto", "disable_fallback", "disable_any_whitespace"), False),
                "json": SCHEMA,
                "_backend": "xgrammar",
            }
        },
        {"guided_json": SCHEMA},
    ),
    "TensorRT-LLM's schema": (
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)},
        {"guided_json": SCHEMA},
    ),
    "TensorRT-LLM's pattern": (
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"},
        {"guided_regex": "a+"},
    ),
    "TensorRT-LLM's object": ({"guided_decoding_guide_type": "json"}, {"response_format": {"type": "json_object"}}),
    "none": (dict.fromkeys(GUIDES), {}),
}


@pytest.mark.parametrize("case", GUIDED)
def test_the_guides_of_other_servers_are_ours(case: str) -> None:
    theirs, ours = GUIDED[case]
    assert parse_parameters(theirs) == parse_parameters(ours)


NAMES = "json, regex, choice, grammar, json_object"
BAD_GUIDES: dict[str, tuple[dict[str, object], str]] = {
    "no object": (
        {"structured_outputs": "[1]"},
        f"structured_outputs must be a JSON object with one of {NAMES}, got '[1]'",
    ),
    "none": ({"structured_outputs": {}}, f"structured_outputs must have one of {NAMES}, got none"),
    "two": (
        {"guided_decoding": {"json": {}, "regex": "a"}},
        f"guided_decoding must have one of {NAMES}, got 'json', 'regex'",
    ),
    "another": (
        {"structured_outputs": {"structural_tag": "x"}},
        f"structured_outputs must have one of {NAMES}, got 'structural_tag'",
    ),
    "a wrong value": ({"structured_outputs": {"json": 5}}, "structured_outputs.json must be a JSON object, got 5"),
    "beside ours": (
        {"structured_outputs": {"json": {}}, "guided_json": {}},
        "guided_json and structured_outputs.json mean the same: leave one out",
    ),
    "an unsupported type": (
        {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "x"},
        "guided_decoding_guide_type must be one of json, json_schema, regex, got 'ebnf_grammar'",
    ),
    "no guide": ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide is required with the type regex"),
    "a stop token": (
        {"structured_outputs": {"regex": "a"}, "stop_token_ids": 5},
        "stop_token_ids would end the output against structured_outputs.regex: leave one of them out",
    ),
}


@pytest.mark.parametrize("case", BAD_GUIDES)
def test_a_malformed_guide_is_rejected(case: str) -> None:
    values, sentence = BAD_GUIDES[case]
    assert rejection(**values).sentence == sentence


@pytest.mark.parametrize(("name", "value"), NO_EFFECT.items())
def test_parameters_without_effect_are_accepted(name: str, value: object) -> None:
    assert parse_parameters({name: value, "top_k": 3}) == GenerationParameters(top_k=3)


@pytest.mark.parametrize(("name", "value"), [("skip_special_tokens", False), ("detokenize", 1)])
def test_unsupported_values_are_rejected(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"there is no parameter '{name}'"):
        parse_parameters({name: value})


@pytest.mark.parametrize("name", ["logit_bias", "eos_token_id", "guided_choice", "stop"])
def test_a_string_of_megabytes_is_rejected_unparsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[" + " " * MAX_JSON + "1]"
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was read"))
    with pytest.raises(RequestError, match=f"{name} must be"):
        parse_parameters({name: text})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens 9 is more than max_tokens 3: "),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3: "),
        ({"n": 3, "beam_width": 2}, "n 3 is more than beam_width 2: "),
        ({"top_p": 0.5, "beam_width": 2}, "top_p cannot be combined with beam_width 2: "),
        ({"ignore_eos": True, "guided_choice": ["a"]}, "ignore_eos would end the output against guided_choice: "),
        ({"end_id": 5, "ignore_eos": True}, "end_id has no effect with ignore_eos true: "),
    ],
)
def test_conflicting_parameters_are_named_as_spelled(values: dict[str, Any], sentence: str) -> None:
    assert rejection(**values).sentence.startswith(sentence)
