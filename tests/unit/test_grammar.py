# SPDX-License-Identifier: Apache-2.0
"""Completions that follow a grammar, of random tokens: those that it ends are whole."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits
from transformers import PreTrainedTokenizerFast

from hf_triton.errors import HfTritonError, RequestError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.grammar.constraint import GrammarConstraint, OwnConstraint
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from tests.support.grammars import (
    KIND,
    allowed_tokens,
    build_compiler,
    check_completions,
    choice,
    compiler_of,
    constraint_of,
    decode,
    draw,
    eos_of,
    json_schema,
    lark,
    regex,
    rejection,
)
from tests.support.marks import full
from tests.support.tokenizers import WITH_BYTES, bytes_of, raw_ids, tokenizer_of

KINDS = [WITH_BYTES[0], *full(WITH_BYTES[1])]
NULLABLE = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": NULLABLE},
    "required": ["value", "next"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["of"],
}
MANY = {f"part {number}": {"type": "string"} for number in range(8)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "anything": {"type": "object"},
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "an option with much in it": {
        "type": "object",
        "properties": {
            "short": {"type": "string"},
            "long": {"type": "object", "properties": MANY, "required": [*MANY]},
        },
        "required": ["short"],
    },
    "nested": {"type": "array", "minItems": 2, "items": {"type": "array", "items": {"enum": ["red", "é\n", 1, None]}}},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "items": False, "minItems": 2},
    "text": {"type": "string", "minLength": 12, "maxLength": 40},
    "pattern": {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2,4}$"},
    "number": {"type": "number"},
    "range": {"type": "integer", "minimum": 100, "maximum": 2500},
    "union": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "array", "items": {"type": "number"}}]},
    "list": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "tree": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "constant": {"const": {"a": [1, 'é"\n\\']}},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "required": ["key"]},
}
REGEXES = [
    "[a-z]{5,10}-[0-9]{3}",
    "(a|b)*c",
    "[0-9]+([.][0-9]{2})?",
    "(yes|no), (sir|madam)",
    "[a-z]*q",
    "[a-z]+@[a-z]+[.](com|org)",
    "a{3}x|b{5}y",
    "x?",
    r"[a-z]+\n",
    r"(.*\n){3}",
    r"- .+\n- .+\n",
    r"Reasoning: .*\nAnswer: (yes|no)",
    "[a-z]+ed",
    "(a|b)*abb",
    "[a-z]{2,100}x",
    "[🙂a]+🙂b",
]
SIZE = len(tokenizer_of(KIND))
CHOICES = ["yes", "no", "yes and no", 'a "quote"', "back\\slash", "line\nbreak", "é", "del\x7f\u0085"]


def follow(constraint: GrammarConstraint, text: str) -> None:
    """Accept the tokens of a text, each of which must be allowed."""
    for token_id in raw_ids(KIND, text):
        assert token_id in allowed_tokens(constraint, SIZE)
        assert not constraint.is_complete
        constraint.accept(token_id)


# --- whole completions -----------------------------------------------------------------------------------------------


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_that_ends_follows_its_schema(name: str, kind: str) -> None:
    check_completions(json_schema(SCHEMAS[name]), lambda text: is_valid(text, SCHEMAS[name]), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", REGEXES)
def test_completion_matches_its_regex_in_full(pattern: str, kind: str) -> None:
    check_completions(regex(pattern), lambda text: re.fullmatch(pattern, text), kind)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_completion_is_one_of_the_choices_and_can_be_each(kind: str) -> None:
    grammar, source = choice(*CHOICES), random.Random(0)
    check_completions(grammar, lambda text: text in CHOICES, kind)
    drawn = [draw(constraint_of(grammar, kind), 40, source, kind) for _ in range(200)]
    assert {decode(token_ids, kind) for token_ids in drawn if token_ids is not None} == set(CHOICES)


@pytest.mark.parametrize("kind", ["unigram", "metaspace"])
def test_tokenizers_without_bytes_use_the_letters_they_have(kind: str) -> None:
    check_completions(choice("the river goes", "the sea"), lambda text: text in ("the river goes", "the sea"), kind)
    check_completions(regex("[a-z]{3,9}"), lambda text: re.fullmatch("[a-z]{3,9}", text), kind)
    assert "allows no text" in rejection(regex("[0-9]{4}~"), kind=kind)


EMAIL = {"type": "string", "format": "email"}
SQL = r"""
start: "SELECT " cols " FROM " NAME " WHERE " cond (" AND " cond)* ";"
cols: NAME ("," NAME)*
cond: NAME "=" STR
NAME: /[a-z_]{3,}/
STR: /'[^']{2,}'/
"""
LINES = lark('start: item+\nitem: "- " /[^\\n]+/ "\\n"')
FREE: list[tuple[Grammar, str]] = [
    (regex(r"(.+\n)+"), "one\ntwo\nthree\n"),
    (regex(r"none|(- .+\n)+"), "- a\n- bc\n"),
    (regex(r".*(yes|no)\.?"), "maybe no, surely yes."),
    (regex("```python\n[\\s\\S]*?\n```"), "```python\nx = 1\ny = 2\n```"),
    (regex(r"<(a|b)>.*</(a|b)>"), "<a>x</i>y</b>"),
    (regex(r".*\[\d+\]\."), "see [3] and [12]."),
    (regex(r"https?://[\w.-]+\.[a-z]{2,}"), "https://www.example.com"),
    (regex(r"<think>(.|\n)*</think>"), "<think>so <b>\n</think>"),
    (regex(r"SELECT .+ FROM \w+( WHERE .+)?;"), "SELECT a FROM t WHERE x > 1;"),
    (json_schema({"type": "array", "items": EMAIL}), '["me@x.org","you@y.com"]'),
    (json_schema({"type": "array", "items": {"type": "string", "pattern": "ing$"}}), '["going","sing"]'),
    (json_schema({"properties": {"n": {"type": "integer"}, "e": EMAIL}, "required": ["n"]}), '{"n":1,"e":"me@x.org"}'),
    (json_schema({"anyOf": [EMAIL, {"type": "string", "pattern": "^\\+[0-9]{7,}$"}]}), '"nn@x.org"'),
    (LINES, "- one\n- two\n"),
    (lark(SQL), "SELECT name,age FROM people WHERE name='Ann' AND age='41' AND town='Bern';"),
]


@pytest.mark.parametrize(("grammar", "text"), FREE, ids=[grammar.text for grammar, _ in FREE])
def test_typical_completion_is_allowed_and_may_end(grammar: Grammar, text: str) -> None:
    follow(constraint := constraint_of(grammar), text)
    assert eos_of(KIND) in allowed_tokens(constraint, SIZE)


def test_property_may_have_the_name_of_a_keyword() -> None:
    names = {"pattern": {"type": "integer"}, "patternProperties": True, "format": {"type": "string"}}
    schema = {"type": "object", "properties": names, "examples": [{"pattern": 1}]}
    check_completions(json_schema(schema), lambda text: isinstance(json.loads(text), dict))


def test_lark_grammar_is_followed() -> None:
    check_completions(lark('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"\(*x\)*", text))


LOOPS = {
    "parts within parts": ('start: "if(" e ";" e ";" e ")"\ne: "x" | "y" | start', r"if\(.*[xy]\)+"),
    "brackets": ('start: s s s\ns: "(" s ")" | "[" s "]" | "{" s "}" | "ab"', r"([\[{(]*ab[\]})]*){3}"),
    "options": (
        'start: "select " col ("," " "? col)* " from" /[a-z]+/?\ncol: ("sum"|"avg") "(" col ")" | /x+y/',
        "select .*",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_recursive_and_repeated_rules_end(name: str) -> None:
    source, pattern = LOOPS[name]
    check_completions(lark(source), lambda text: re.fullmatch(pattern, text))


def test_asking_changes_nothing() -> None:
    """A step that fails after sampling is sampled again."""
    constraint, other = constraint_of(json_schema(SCHEMAS["object"])), constraint_of(json_schema(SCHEMAS["object"]))
    for token_id in raw_ids(KIND, '{"name": "Ann"'):
        for _ in range(3):
            assert constraint.bitmask().tolist() == other.bitmask().tolist()
            assert not constraint.is_complete
        constraint.accept(token_id)
        other.accept(token_id)


def test_sequences_of_a_prompt_do_not_share_their_state() -> None:
    _, build_constraint = compiler_of(KIND).compile(choice("yes", "no"), SamplingParams(5))
    first, second = build_constraint(), build_constraint()
    follow(first, "yes")
    follow(second, "no")
    assert first.is_complete
    assert second.is_complete


# --- the end of a grammar ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (json_schema(SCHEMAS["object"]), '{"name": "Ann, who said \\"no\\"", "age": 41}'),
        (json_schema({"type": "object"}), "{}"),
        (json_schema({"type": "string"}), '"a"'),
        (json_schema({"enum": ["a", 1]}), "1"),
        (choice("yes", "no"), "no"),
        (regex("[0-9]{3}-[0-9]{4}"), "555-0199"),
        (regex("a+b?"), "aab"),
        (lark('start: "(" start ")" | "x"'), "((x))"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.text[:24],
)
def test_completion_is_complete_as_soon_as_nothing_may_follow(grammar: Grammar, text: str) -> None:
    """The engine then ends it as `stop`, even if it has no token left."""
    follow(constraint := constraint_of(grammar), text)
    assert constraint.is_complete
    assert allowed_tokens(constraint, SIZE) == [eos_of(KIND)]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [(json_schema({"type": "integer"}), "12"), (choice("yes", "yes and no"), "yes"), (regex("a+b?"), "aa")],
    ids=["a number", "the beginning of another choice", "a repetition"],
)
def test_completion_that_could_go_on_is_not_complete(grammar: Grammar, text: str) -> None:
    follow(constraint := constraint_of(grammar), text)
    assert not constraint.is_complete
    assert eos_of(KIND) in allowed_tokens(constraint, SIZE)


def test_eos_is_allowed_exactly_where_the_grammar_may_end() -> None:
    constraint, eos = constraint_of(regex("a+b?")), eos_of(KIND)
    assert eos not in allowed_tokens(constraint, SIZE)
    follow(constraint, "a")
    assert eos in allowed_tokens(constraint, SIZE)
    constraint.accept(eos)


def test_eos_tokens_of_the_request_spell_nothing() -> None:
    eos_ids = frozenset([*raw_ids(KIND, "a"), *raw_ids(KIND, "b")])
    params, build_constraint = compiler_of(KIND).compile(regex("[a-d]+"), SamplingParams(20, eos_ids=eos_ids))
    assert params.eos_ids == eos_ids
    constraint = build_constraint()
    assert not eos_ids.intersection(allowed_tokens(constraint, SIZE))
    constraint.accept(raw_ids(KIND, "c")[0])
    assert eos_ids <= set(allowed_tokens(constraint, SIZE))
    assert eos_of(KIND) not in allowed_tokens(constraint, SIZE)
    with pytest.raises(RequestError, match="allows no text"):
        compiler_of(KIND).compile(regex("a|b"), params)


def test_tokens_beyond_the_models_vocabulary_are_not_used() -> None:
    size = max(bytes_of(KIND, "".join(chr(code) for code in range(32, 127)))) + 1
    assert max(raw_ids(KIND, "the river goes")) >= size
    constraint = constraint_of(
        regex("[a-z ]+"), compiler=GrammarCompiler(tokenizer_of(KIND), size, frozenset([eos_of(KIND)]))
    )
    for token_id in bytes_of(KIND, "the river goes"):
        assert max(allowed_tokens(constraint, SIZE)) < size
        constraint.accept(token_id)


def test_model_without_eos_takes_the_tokenizers() -> None:
    compiler = GrammarCompiler(tokenizer_of(KIND), len(tokenizer_of(KIND)), frozenset())
    params, _ = compiler.compile(regex("a"), SamplingParams(1, eos_ids=frozenset()))
    assert params.eos_ids == frozenset([eos_of(KIND)])
    without_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(KIND).backend_tokenizer)  # type: ignore[no-untyped-call]
    with pytest.raises(RequestError, match="eos_token_id"):
        GrammarCompiler(without_eos, len(without_eos), frozenset()).compile(regex("a"), SamplingParams(1))


# --- limits ----------------------------------------------------------------------------------------------------------


def test_token_that_is_not_allowed_is_an_error() -> None:
    constraint = constraint_of(choice("yes"))
    with pytest.raises(RequestError, match="invalid_parameter: guided_choice "):
        constraint.accept(raw_ids(KIND, "x")[0])


def test_grammar_beyond_its_limits_is_an_error() -> None:
    compiler = build_compiler(limits=LLParserLimits(max_lexer_states=200))
    constraint = constraint_of(regex("(a|b)*a(a|b){12}c"), compiler=compiler)
    source = random.Random(0)

    def generate() -> None:
        for _ in range(1000):
            constraint.bitmask()
            constraint.accept(source.choice(bytes_of(KIND, "ab")))

    with pytest.raises(RequestError, match="invalid_parameter: guided_regex needs too much work for the next token"):
        generate()


def test_a_failing_grammar_refuses_its_own_request_and_no_step() -> None:
    refused: list[HfTritonError] = []
    constraint = OwnConstraint(constraint_of(lark('start: "a" b\nb: b "c"')), refused.append)
    assert constraint.bitmask() is not None
    constraint.accept(bytes_of(KIND, "a")[0])
    assert not refused
    for _ in range(2):
        assert constraint.bitmask() is None
        constraint.accept(bytes_of(KIND, "c")[0])
        assert constraint.is_complete
    assert [str(error) for error in refused] == [
        "invalid_parameter: guided_grammar leads to a text that none of the model's tokens can continue: it "
        "contradicts itself"
    ]
