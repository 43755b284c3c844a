# SPDX-License-Identifier: Apache-2.0
"""Completions that follow a grammar, of random tokens: each is whole if a short ending exists."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits
from transformers import PreTrainedTokenizerFast

from hf_triton.errors import GenerationError, RequestError
from hf_triton.grammar.compiler import GrammarCompiler, GrammarConfig
from hf_triton.grammar.completion import SearchBudget
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from tests.support.grammars import (
    KIND,
    allowed_tokens,
    build_compiler,
    check_completions,
    choice,
    compiler_of,
    completion_length,
    constraint_of,
    decode,
    draw,
    eos_of,
    json_schema,
    lark,
    regex,
    rejection,
)
from tests.support.tokenizers import WITH_BYTES, bytes_of, raw_ids, tokenizer_of

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
    "patterns": {
        "type": "object",
        "properties": {
            "free": {"type": "string"},
            "end": {"type": "string", "pattern": "ing$"},
            "address": {"type": "string", "pattern": r"^[A-Z][a-z]+ (Street|Avenue)$"},
            "lines": {"type": "array", "items": {"type": "string", "pattern": '^.*\n"x$'}, "minItems": 2},
            "mail": {"type": "string", "format": "email"},
        },
        "required": ["free", "end", "address", "lines", "mail"],
    },
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
    "[^@ ]+@[^@ ]+[.][a-z]+",
    "x?",
    r"[a-z]+\n",
    r"(.*\n){3}",
    r"- .+\n- .+\n",
    r"<think>(.|\n)*</think>",
    r"```json\n(.|\n)*\n```",
    r"Reasoning: .*\nAnswer: (yes|no)",
    r".*\(.*\).*\[END\]",
    "[a-z]+ed",
    "([a-z]+ing )+[a-z]+ed",
    "(a|b)*abb",
    "[^x]*xyx[^x]*xyx",
    "[a-z]{2,100}x",
    "[🙂a]+🙂b",
]
CHOICES = ["yes", "no", "yes and no", 'a "quote"', "back\\slash", "line\nbreak", "é", "del\x7f\u0085"]


# --- whole completions -----------------------------------------------------------------------------------------------


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_whole_however_few_tokens_it_has(name: str, kind: str) -> None:
    check_completions(json_schema(SCHEMAS[name]), lambda text: is_valid(text, SCHEMAS[name]), kind)


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("pattern", REGEXES)
def test_completion_matches_its_regex_in_full(pattern: str, kind: str) -> None:
    check_completions(regex(pattern), lambda text: re.fullmatch(pattern, text), kind)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_completion_is_one_of_the_choices_and_can_be_each(kind: str) -> None:
    grammar, source = choice(*CHOICES), random.Random(0)
    check_completions(grammar, lambda text: text in CHOICES, kind)
    texts = {decode(draw(constraint_of(grammar, 40, kind), 40, source, kind), kind) for _ in range(200)}
    assert texts == set(CHOICES)


@pytest.mark.parametrize("kind", ["unigram", "metaspace"])
def test_tokenizers_without_bytes_use_the_letters_they_have(kind: str) -> None:
    check_completions(choice("the river goes", "the sea"), lambda text: text in ("the river goes", "the sea"), kind)
    check_completions(regex("[a-z]{3,9}"), lambda text: re.fullmatch("[a-z]{3,9}", text), kind)
    assert "allows no text" in rejection(regex("[0-9]{4}~"), kind=kind)


@pytest.mark.parametrize(("pattern", "length"), [("[a-z]{2,100}x", 3), (".*done", 4), ("[a-z]+q[0-9]{3}", 5)])
def test_completion_of_a_regex_is_short(pattern: str, length: int) -> None:
    assert completion_length(regex(pattern)) <= length


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
    (regex(r"SELECT .+ FROM \w+( WHERE .+)?;"), "SELECT a FROM t WHERE x > 1;"),
    (json_schema({"type": "array", "items": EMAIL}), '["me@x.org","you@y.com"]'),
    (json_schema({"type": "array", "items": {"type": "string", "pattern": "ing$"}}), '["going","sing"]'),
    (json_schema({"properties": {"n": {"type": "integer"}, "e": EMAIL}, "required": ["n"]}), '{"n":1,"e":"me@x.org"}'),
    (json_schema({"anyOf": [EMAIL, {"type": "string", "pattern": "^\\+[0-9]{7,}$"}]}), '"nn@x.org"'),
    (LINES, "- one\n- two\n"),
    (
        lark(SQL),
        "SELECT name,age FROM people WHERE name='Ann' AND age='41' AND town='Bern';",
    ),
]


@pytest.mark.parametrize(("grammar", "text"), FREE, ids=[grammar.text for grammar, _ in FREE])
def test_typical_completion_is_not_cut_short(grammar: Grammar, text: str) -> None:
    constraint = constraint_of(grammar, len(text) + 60)
    for token_id in tokenizer_of(KIND).encode(text, add_special_tokens=False):
        assert constraint.enforce(token_id) == token_id
        constraint.accept(token_id)


def test_property_may_have_the_name_of_a_keyword() -> None:
    names = {"pattern": {"type": "integer"}, "patternProperties": True, "format": {"type": "string"}}
    schema = {"type": "object", "properties": names, "examples": [{"pattern": 1}]}
    check_completions(json_schema(schema), lambda text: isinstance(json.loads(text), dict))


def test_minimum_length_is_filled_with_long_tokens() -> None:
    assert completion_length(regex(".{300,}")) < 150


@pytest.mark.parametrize("source", [r"start: /[a-z]+q\/x/", 'start: /(.|\\n)*/ "END"'])
def test_literals_of_a_lark_grammar_are_found(source: str) -> None:
    assert completion_length(lark(source)) <= 4


def test_lark_grammar_is_followed() -> None:
    check_completions(lark('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"\(*x\)*", text))


LOOPS = {
    "parts within parts": ('start: "if(" e ";" e ";" e ")"\ne: "x" | "y" | start', r"if\(.*[xy]\)+"),
    "SQL": (SQL, r"SELECT [a-z_,]+ FROM [a-z_]+ WHERE [a-z_]+='[^']+'( AND [a-z_]+='[^']+')*;"),
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


def required(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def fields(value: dict[str, Any], count: int = 12) -> dict[str, Any]:
    return required({f"field {number}": value for number in range(count)})


def tree(leaf: str, branch: str) -> dict[str, Any]:
    """Of which each node is a leaf or has four others."""
    nodes = {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 4, "maxItems": 4}
    node = {"anyOf": [required({leaf: {"type": "integer"}}), required({branch: nodes})]}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


MANY_PARTS = {
    "a tree whose leaves come last": tree("value", "children"),
    "points": {
        "type": "array",
        "minItems": 64,
        "items": required({"x": {"type": "number"}, "label": {"type": "string", "minLength": 4}}),
    },
    "multiples": required(
        {
            "some": {"type": "integer", "minimum": 100, "multipleOf": 7},
            "many": {"type": "integer", "exclusiveMinimum": 1020, "multipleOf": 60},
            "less than none": {"type": "integer", "maximum": -100, "multipleOf": 9},
            "small": {"type": "integer", "exclusiveMinimum": -4, "exclusiveMaximum": 0, "multipleOf": 3},
        }
    ),
    "texts of a least length": fields({"type": "string", "minLength": 2}),
    "long texts": fields({"type": "string", "minLength": 50}),
    "large numbers": fields({"type": "integer", "minimum": 1000}),
    "texts or null": fields({"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]}),
    "items": {"type": "array", "minItems": 8, "items": {"type": "string", "minLength": 2}},
    "objects": {
        "type": "array",
        "minItems": 5,
        "items": required({"name": {"type": "string", "minLength": 1}, "note": {"type": "string", "minLength": 5}}),
    },
    "a book": required(
        {
            "title": {"type": "string", "minLength": 3},
            "isbn": {"type": "string", "minLength": 10, "maxLength": 13},
            "publisher": {"type": "string", "minLength": 3},
            "summary": {"type": "string", "minLength": 20},
            "year": {"type": "integer"},
        }
    ),
}


@pytest.mark.parametrize("name", MANY_PARTS)
def test_schema_of_many_required_parts_is_completed(name: str) -> None:
    schema = MANY_PARTS[name]
    is_valid(decode(draw(constraint_of(json_schema(schema), 2000), 2000, random.Random(0))), schema)


def test_any_completion_of_the_grammar_can_be_generated() -> None:
    """Whatever completion is known, while there are tokens left."""
    text = '{"name": "Ann, who said \\"no\\"", "age": 41}'
    constraint = constraint_of(json_schema(SCHEMAS["object"]), 200)
    for token_id in raw_ids(KIND, text):
        assert constraint.enforce(token_id) == token_id
        constraint.accept(token_id)
    assert allowed_tokens(constraint, len(tokenizer_of(KIND))) == [eos_of(KIND)]


def test_max_new_tokens_too_small_is_refused_with_the_number_needed() -> None:
    grammar = json_schema(SCHEMAS["an option with much in it"])
    length = completion_length(grammar)
    assert f"of max_new_tokens {length - 1} or less that could be found: ask for {length} or more" in rejection(
        grammar, length - 1
    )
    constraint_of(grammar, length)


def test_asking_changes_nothing() -> None:
    """A step that fails after sampling is sampled again."""
    grammar, source = json_schema(SCHEMAS["object"]), random.Random(1)
    constraint, other = constraint_of(grammar, 40), constraint_of(grammar, 40)
    for _ in range(30):
        for _ in range(5):
            constraint.enforce(source.randrange(400))
        assert constraint.bitmask().tolist() == other.bitmask().tolist()
        sampled = source.choice(allowed_tokens(other, 400))
        token_id = constraint.enforce(sampled)
        assert token_id == other.enforce(sampled)
        constraint.accept(token_id)
        other.accept(token_id)
        if token_id == eos_of(KIND):
            break


# --- end of sequence -------------------------------------------------------------------------------------------------


def test_eos_is_allowed_exactly_where_the_grammar_may_end() -> None:
    constraint, eos = constraint_of(regex("a+b?"), 20), eos_of(KIND)
    (letter,) = raw_ids(KIND, "a")
    assert eos not in allowed_tokens(constraint, 400)
    assert constraint.enforce(eos) != eos
    constraint.accept(letter)
    assert eos in allowed_tokens(constraint, 400)
    assert constraint.enforce(eos) == eos
    assert constraint.completion_tokens() == [eos]


def test_eos_tokens_of_the_request_spell_nothing() -> None:
    eos_ids = frozenset([*raw_ids(KIND, "a"), *raw_ids(KIND, "b")])
    params, build_constraint = compiler_of(KIND).compile(regex("[a-d]+"), SamplingParams(20, eos_ids=eos_ids))
    assert params.eos_ids == eos_ids
    constraint = build_constraint()
    assert not eos_ids.intersection(allowed_tokens(constraint, 400))
    constraint.accept(raw_ids(KIND, "c")[0])
    assert eos_ids <= set(allowed_tokens(constraint, 400))
    with pytest.raises(RequestError, match="allows no text"):
        compiler_of(KIND).compile(regex("a|b"), params)


def test_tokens_beyond_the_models_vocabulary_are_not_used() -> None:
    size = max(bytes_of(KIND, "".join(chr(code) for code in range(32, 127)))) + 1
    assert max(raw_ids(KIND, "the river goes")) >= size
    compiler = GrammarCompiler(tokenizer_of(KIND), size, frozenset([eos_of(KIND)]))
    token_ids = constraint_of(choice("the river goes"), 40, compiler=compiler).completion_tokens()
    assert max(token_ids) < size
    assert decode(token_ids[:-1]) == "the river goes"


def test_model_without_eos_takes_the_tokenizers() -> None:
    compiler = GrammarCompiler(tokenizer_of(KIND), len(tokenizer_of(KIND)), frozenset())
    params, _ = compiler.compile(regex("a"), SamplingParams(1, eos_ids=frozenset()))
    assert params.eos_ids == frozenset([eos_of(KIND)])
    without_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(KIND).backend_tokenizer)  # type: ignore[no-untyped-call]
    with pytest.raises(RequestError, match="eos_token_id"):
        GrammarCompiler(without_eos, len(without_eos), frozenset()).compile(regex("a"), SamplingParams(1))


# --- without a known completion --------------------------------------------------------------------------------------

NO_SEARCH = GrammarConfig(first_search=SearchBudget(0, 1.0), token_search=SearchBudget(0, 1.0), max_wasted_visits=0)


def test_grammar_without_a_known_completion_is_followed_to_the_last_token() -> None:
    """The engine ends such a sequence as `length`."""
    constraint = constraint_of(regex("[ab]{200}c"), 300, compiler=build_compiler(config=NO_SEARCH))
    assert constraint.completion_tokens() == []
    assert re.fullmatch("[ab]{30,}", decode(draw(constraint, 30, random.Random(0))))


def test_sequence_is_whole_if_it_happens_to_end() -> None:
    constraint = constraint_of(regex("[ab]{4}c"), 30, compiler=build_compiler(config=NO_SEARCH))
    assert constraint.completion_tokens() == []
    token_ids = draw(constraint, 30, random.Random(0))
    assert re.fullmatch("[ab]{4}c", decode(token_ids))
    assert constraint.completion_tokens() == [eos_of(KIND)]


def test_grammar_beyond_its_limits_without_a_completion_fails_alone() -> None:
    config = GrammarConfig(LLParserLimits(max_lexer_states=200), SearchBudget(0, 1.0), SearchBudget(0, 1.0), 0)
    constraint = constraint_of(regex("(a|b)*a(a|b){12}c"), 1000, compiler=build_compiler(config=config))
    source = random.Random(0)

    def generate() -> None:
        for _ in range(1000):
            constraint.bitmask()
            constraint.accept(constraint.enforce(source.choice(bytes_of(KIND, "ab"))))

    with pytest.raises(GenerationError, match="generation_failed"):
        generate()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_grammar_beyond_its_limits_ends_with_the_known_completion() -> None:
    pattern, source = "(a|b)*a(a|b){12}", random.Random(0)
    config = GrammarConfig(parser=LLParserLimits(max_lexer_states=200))
    constraint = constraint_of(regex(pattern), 1000, compiler=build_compiler(config=config))
    token_ids: list[int] = []
    while (token_id := constraint.enforce(source.choice(bytes_of(KIND, "ab")))) != eos_of(KIND):
        constraint.bitmask()
        constraint.accept(token_id)
        token_ids.append(token_id)
        assert len(token_ids) < 200
    assert re.fullmatch(pattern, decode(token_ids))


def test_known_completion_follows_where_no_other_is_found() -> None:
    grammar = json_schema(SCHEMAS["nested"])
    compiler = build_compiler(config=GrammarConfig(token_search=SearchBudget(0, 1.0)))
    for seed in range(8):
        json.loads(decode(draw(constraint_of(grammar, 40, compiler=compiler), 40, random.Random(seed))))


class Clock:
    """CPU time that stands still, apart from a step at some of its readings.

    Args:
        step_s: Seconds.
        step_at: The number of the reading; None: at each.
    """

    def __init__(self, step_s: float, step_at: int | None = None) -> None:
        self._step_s = step_s
        self._step_at = step_at
        self._now_s = 0.0
        self._num_readings = 0
        self.is_running = False

    def __call__(self) -> float:
        if self.is_running:
            self._num_readings += 1
            self._now_s += self._step_s * (self._step_at in (None, self._num_readings))
        return self._now_s


def generate_with(clock: Clock) -> list[int]:
    """A nested array with too few tokens for all that is drawn."""
    constraint = constraint_of(json_schema(SCHEMAS["nested"]), 60, compiler=build_compiler(clock=clock))
    clock.is_running = True
    return draw(constraint, 60, random.Random(5))


def test_a_busy_machine_changes_no_sequence() -> None:
    idle = generate_with(Clock(0.0))
    for reading in range(1, 60):
        assert generate_with(Clock(0.05, reading)) == idle, reading


def test_sequence_whose_searches_are_slow_ends_with_the_known_completion() -> None:
    idle, slow = generate_with(Clock(0.0)), generate_with(Clock(1.0))
    assert json.loads(decode(slow)) is not None
    assert slow != idle


def test_searches_in_vain_are_limited_by_their_visits() -> None:
    grammar, drawn = json_schema(SCHEMAS["nested"]), list[list[str]]()
    for max_wasted_visits in (0, 10_000):
        config = GrammarConfig(token_search=SearchBudget(3, 60.0), max_wasted_visits=max_wasted_visits)
        compiler = build_compiler(config=config)
        drawn.append(
            [decode(draw(constraint_of(grammar, 30, compiler=compiler), 30, random.Random(n))) for n in range(9)]
        )
        assert all(is_valid(text, SCHEMAS["nested"]) for text in drawn[-1])
    assert drawn[0] != drawn[1]
