# SPDX-License-Identifier: Apache-2.0
"""Texts that follow a grammar, drawn token by token with nothing but chance to choose them: each is whole."""

import json
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import Mock, call

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_triton.errors import RequestError
from hf_triton.grammar import compiler as grammar_module
from hf_triton.grammar import completion as closing_module
from hf_triton.grammar import sandbox as grammar_trial
from hf_triton.grammar.compiler import NUM_CLOSINGS_KEPT, GrammarCompiler, GrammarConstraint
from hf_triton.grammar.sandbox import MAX_TRIAL_S, RETRY_S, GrammarTrial
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from tests.support.tokenizers import EOS, WITH_BYTES, bytes_of, codec_of, raw_ids, tokenizer_of

KIND = "byte_level"
NULLABLE = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": NULLABLE},
    "required": ["value", "next"],
    "additionalProperties": False,
}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
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
LIMIT_S = 20.0  # of what takes a second on an idle machine


@cache
def compiler_of(kind: str) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_of(kind), len(tokenizer_of(kind)), frozenset([end_of(kind)]))


def end_of(kind: str) -> int:
    return int(tokenizer_of(kind).convert_tokens_to_ids(EOS))


def json_schema(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), "guided_json")


def regex(text: str) -> Grammar:
    return Grammar("regex", text, "guided_regex")


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts), "guided_choice")


def constraint_of(kind: str, grammar: Grammar, most: int, **plan: Any) -> GrammarConstraint:
    _, make = compiler_of(kind).compile(grammar, SamplingParams(most, **plan))
    return make()


def rejection(grammar: Grammar, most: int = 100, kind: str = KIND) -> str:
    with pytest.raises(RequestError) as caught:
        compiler_of(kind).compile(grammar, SamplingParams(most))
    assert caught.value.code == "invalid_parameter"
    assert caught.value.sentence.startswith(grammar.parameter)
    assert len(caught.value.sentence) < 300
    return caught.value.sentence


def least_of(kind: str, grammar: Grammar) -> int:
    """The tokens of the shortest text that is found."""
    try:
        compiler_of(kind).compile(grammar, SamplingParams(1))
    except RequestError as error:
        return int(re.findall(r"ask for (\d+) or more$", error.sentence)[0])
    return 1


def allowed_by(constraint: GrammarConstraint, size: int) -> list[int]:
    bits = np.unpackbits(constraint.bitmask(), bitorder="little")[:size]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def draw(kind: str, constraint: GrammarConstraint, most: int, source: random.Random) -> list[int]:
    """A text of random tokens: any that may come, as a rule one that goes on, and now and then one that may not."""
    end, size, ids = end_of(kind), len(tokenizer_of(kind)), list[int]()
    while len(ids) < most:
        allowed = allowed_by(constraint, size)
        going_on = [token_id for token_id in allowed if token_id != end]
        wanted = source.choice(going_on if going_on and source.random() < 0.9 else allowed)
        if source.random() < 0.05:
            wanted = source.randrange(size)
        token_id = constraint.enforce(wanted)
        assert token_id in allowed
        constraint.accept(token_id)
        if token_id == end:
            break
        ids.append(token_id)
    return ids


def read(kind: str, ids: list[int]) -> str:
    return codec_of(kind).continuation(raw_ids(kind, "The river"), ids)


def check_texts(kind: str, grammar: Grammar, matches: Any, num_texts: int = 8) -> None:
    source, least = random.Random(0), least_of(kind, grammar)
    for extra in [0, 0, 1, 2, 3, 5, 10, 40][:num_texts]:
        most = least + extra
        ids = draw(kind, constraint_of(kind, grammar, most), most, source)
        assert len(ids) <= most
        assert matches(read(kind, ids)), read(kind, ids)


# --- whole texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_whole_however_few_tokens_it_has(name: str, kind: str) -> None:
    schema = SCHEMAS[name]

    def matches(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    check_texts(kind, json_schema(schema), matches)


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("pattern", REGEXES)
def test_the_whole_text_matches_its_regex(pattern: str, kind: str) -> None:
    check_texts(kind, regex(pattern), lambda text: re.fullmatch(pattern, text))


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_one_of_the_choices_is_written_and_each_can_be(kind: str) -> None:
    check_texts(kind, choice(*CHOICES), lambda text: text in CHOICES)
    source, grammar = random.Random(0), choice(*CHOICES)
    texts = {read(kind, draw(kind, constraint_of(kind, grammar, 40), 40, source)) for _ in range(200)}
    assert texts == set(CHOICES)


@pytest.mark.parametrize("kind", ["unigram", "metaspace"])
def test_tokenizers_without_bytes_write_what_they_have_letters_for(kind: str) -> None:
    check_texts(kind, choice("the river goes", "the sea"), lambda text: text in ("the river goes", "the sea"))
    check_texts(kind, regex("[a-z]{3,9}"), lambda text: re.fullmatch("[a-z]{3,9}", text))
    assert "allows no text" in rejection(regex("[0-9]{4}~"), kind=kind)


@pytest.mark.parametrize(("pattern", "length"), [("[a-z]{2,100}x", 3), (".*done", 4), ("[a-z]+q[0-9]{3}", 5)])
def test_the_shortest_text_of_a_regex_is_known(pattern: str, length: int) -> None:
    assert least_of(KIND, regex(pattern)) <= length


EMAIL = {"type": "string", "format": "email"}
SQL = r"""
start: "SELECT " cols " FROM " NAME " WHERE " cond (" AND " cond)* ";"
cols: NAME ("," NAME)*
cond: NAME "=" STR
NAME: /[a-z_]{3,}/
STR: /'[^']{2,}'/
"""
LINES = Grammar("lark", 'start: item+\nitem: "- " /[^\\n]+/ "\\n"', "guided_grammar")
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
        Grammar("lark", SQL, "guided_grammar"),
        "SELECT name,age FROM people WHERE name='Ann' AND age='41' AND town='Bern';",
    ),
]


@pytest.mark.parametrize(("grammar", "text"), FREE, ids=[grammar.text for grammar, _ in FREE])
def test_what_a_model_would_write_is_not_ended_before(grammar: Grammar, text: str) -> None:
    constraint = constraint_of(KIND, grammar, len(text) + 60)
    for token_id in tokenizer_of(KIND).encode(text, add_special_tokens=False):
        assert constraint.enforce(token_id) == token_id
        constraint.accept(token_id)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    names = {"pattern": {"type": "integer"}, "patternProperties": True, "format": {"type": "string"}}
    schema = {"type": "object", "properties": names, "examples": [{"pattern": 1}]}
    check_texts(KIND, json_schema(schema), lambda text: isinstance(json.loads(text), dict))


def test_the_least_length_is_filled_with_long_tokens() -> None:
    assert least_of(KIND, regex(".{300,}")) < 150


@pytest.mark.parametrize("text", [r"start: /[a-z]+q\/x/", 'start: /(.|\\n)*/ "END"'])
def test_what_a_lark_grammar_waits_for_is_found(text: str) -> None:
    assert least_of(KIND, Grammar("lark", text, "guided_grammar")) <= 4


def test_a_lark_grammar_is_followed() -> None:
    source = 'start: "(" start ")" | "x"'
    check_texts(KIND, Grammar("lark", source, "guided_grammar"), lambda text: re.fullmatch(r"\(*x\)*", text))


LOOPS = {
    "parts within parts": ('start: "if(" e ";" e ";" e ")"\ne: "x" | "y" | start', r"if\(.*[xy]\)"),
    "SQL": (SQL, r"SELECT [a-z_,]+ FROM [a-z_]+ WHERE [a-z_]+='[^']+'( AND [a-z_]+='[^']+')*;"),
    "brackets": ('start: s s s\ns: "(" s ")" | "[" s "]" | "{" s "}" | "ab"', r"([\[{(]*ab[\]})]*){3}"),
    "options": (
        'start: "select " col ("," " "? col)* " from" /[a-z]+/?\ncol: ("sum"|"avg") "(" col ")" | /x+y/',
        "select .*",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_parts_that_may_come_again_and_again_have_an_end(name: str) -> None:
    source, pattern = LOOPS[name]
    check_texts(KIND, Grammar("lark", source, "guided_grammar"), lambda text: re.fullmatch(pattern, text))


def test_a_text_goes_on_freely_while_there_is_room() -> None:
    """Whatever the endings that are known: every text of the grammar can be written, token by token."""
    text = '{"name": "Ann, who said \\"no\\"", "age": 41}'
    constraint = constraint_of(KIND, json_schema(SCHEMAS["object"]), 200)
    for token_id in raw_ids(KIND, text):
        assert constraint.enforce(token_id) == token_id
        constraint.accept(token_id)
    assert allowed_by(constraint, len(tokenizer_of(KIND))) == [end_of(KIND)]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_may_come_exactly_where_the_text_may_end() -> None:
    constraint, end = constraint_of(KIND, regex("a+b?"), 20), end_of(KIND)
    (letter,) = raw_ids(KIND, "a")
    assert end not in allowed_by(constraint, 400)
    assert constraint.enforce(end) != end
    constraint.accept(letter)
    assert end in allowed_by(constraint, 400)
    assert constraint.enforce(end) == end
    assert constraint.completion_tokens() == [end]


def test_other_tokens_that_end_a_text_write_none() -> None:
    ends = frozenset([*raw_ids(KIND, "a"), *raw_ids(KIND, "b")])
    plan, make = compiler_of(KIND).compile(regex("[a-d]+"), SamplingParams(20, eos_ids=ends))
    assert plan.eos_ids == ends
    constraint = make()
    assert not ends.intersection(allowed_by(constraint, 400))
    constraint.accept(raw_ids(KIND, "c")[0])
    assert ends <= set(allowed_by(constraint, 400))
    with pytest.raises(RequestError, match="allows no text"):
        compiler_of(KIND).compile(regex("a|b"), plan)


def test_tokens_that_only_the_tokenizer_has_end_no_text() -> None:
    size = max(bytes_of(KIND, "".join(chr(place) for place in range(32, 127)))) + 1
    assert max(raw_ids(KIND, "the river goes")) >= size
    compiler = GrammarCompiler(tokenizer_of(KIND), size, frozenset([end_of(KIND)]))
    constraint = compiler.compile(choice("the river goes"), SamplingParams(40))[1]()
    ids = constraint.completion_tokens()
    assert max(ids) < size
    assert read(KIND, ids[:-1]) == "the river goes"


def test_a_model_without_an_end_takes_its_tokenizers() -> None:
    compiler = GrammarCompiler(tokenizer_of(KIND), len(tokenizer_of(KIND)), frozenset())
    plan, _ = compiler.compile(regex("a"), SamplingParams(1, eos_ids=frozenset()))
    assert plan.eos_ids == frozenset([end_of(KIND)])
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(KIND).backend_tokenizer)  # type: ignore[no-untyped-call]
    with pytest.raises(RequestError, match="eos_token_id"):
        GrammarCompiler(endless, len(endless), frozenset()).compile(regex("a"), SamplingParams(1))


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
def test_many_parts_that_each_want_something_are_no_contradiction(name: str) -> None:
    schema = MANY_PARTS[name]
    ids = draw(KIND, constraint_of(KIND, json_schema(schema), 2000), 2000, random.Random(0))
    jsonschema.validate(json.loads(read(KIND, ids)), schema)


def test_a_text_that_fits_is_asked_for() -> None:
    grammar = json_schema(SCHEMAS["an option with much in it"])
    least = least_of(KIND, grammar)
    assert f"of max_new_tokens {least - 1} or less that could be found: ask for {least} or more" in rejection(
        grammar, least - 1
    )
    constraint_of(KIND, grammar, least)


def test_asking_changes_nothing() -> None:
    """A step that failed after its picks is picked again."""
    grammar, source = json_schema(SCHEMAS["object"]), random.Random(1)
    constraint, other = constraint_of(KIND, grammar, 40), constraint_of(KIND, grammar, 40)
    for _ in range(30):
        for _ in range(5):
            constraint.enforce(source.randrange(400))
        assert constraint.bitmask().tolist() == other.bitmask().tolist()
        wanted = source.choice(allowed_by(other, 400))
        token_id = constraint.enforce(wanted)
        assert token_id == other.enforce(wanted)
        constraint.accept(token_id)
        other.accept(token_id)
        if token_id == end_of(KIND):
            break


# --- a library that gives up -----------------------------------------------------------------------------------------


def test_a_grammar_that_grows_too_large_on_its_way_still_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own limits: the ending that is known comes, without it."""
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(max_lexer_states=200))
    pattern, source = "(a|b)*a(a|b){12}", random.Random(0)
    constraint = constraint_of(KIND, regex(pattern), 1000)
    ids: list[int] = []
    while (token_id := constraint.enforce(source.choice(bytes_of(KIND, "ab")))) != end_of(KIND) and len(ids) < 1000:
        constraint.bitmask()
        constraint.accept(token_id)
        ids.append(token_id)
    assert len(ids) < 200
    assert re.fullmatch(pattern, read(KIND, ids))


def test_where_no_ending_is_found_the_known_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "DURING", grammar_module.Effort(0, 1.0))
    check_texts(KIND, json_schema(SCHEMAS["nested"]), lambda text: json.loads(text) is not None)


class Processor:
    """Its time, which stands still but for a step with some of its prefill_requests.

    Args:
        step_s: How far it goes on then.
        steps_at: The numbers of those prefill_requests.
    """

    def __init__(self, step_s: float, steps_at: Callable[[int], bool]) -> None:
        self._step_s = step_s
        self._steps_at = steps_at
        self._now_s = 0.0
        self._num_readings = 0

    def thread_time(self) -> float:
        self._num_readings += 1
        self._now_s += self._step_s * self._steps_at(self._num_readings)
        return self._now_s


def write_with(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A text of a nested object, which has not room for all that is drawn."""
    constraint = constraint_of(KIND, json_schema(SCHEMAS["nested"]), 60)
    for module in (grammar_module, closing_module):
        monkeypatch.setattr(module, "time", processor)
    return draw(KIND, constraint, 60, random.Random(5))


def test_a_moment_without_the_processor_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = write_with(Processor(0.0, bool), monkeypatch)
    for at in range(1, 60):
        assert write_with(Processor(0.05, lambda number, at=at: number == at), monkeypatch) == quiet, at


def test_a_text_whose_endings_take_long_to_find_loses_its_freedom(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, slow = write_with(Processor(0.0, bool), monkeypatch), write_with(Processor(1.0, bool), monkeypatch)
    assert json.loads(read(KIND, slow)) is not None
    assert slow != quiet


def test_so_does_one_whose_endings_are_looked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much was tried, and not by the time it took."""
    effort, num_searches = grammar_module.Effort(max_visits=3, max_time_s=60.0), 0
    monkeypatch.setattr(grammar_module, "DURING", effort)

    def in_vain(finder: Any, matcher: Any, *args: Any) -> closing_module.Found:
        nonlocal num_searches
        num_searches += 1
        return closing_module.Found(None, effort.max_visits)

    constraint = constraint_of(KIND, regex("(ab|cd){40}"), 100)
    monkeypatch.setattr(closing_module.ClosingFinder, "find", in_vain)
    monkeypatch.setattr(grammar_module, "MAX_VAIN_VISITS", 10)
    ids = draw(KIND, constraint, 100, random.Random(0))
    assert num_searches == 4
    assert re.fullmatch("(ab|cd){40}", read(KIND, ids))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex("a("), "unclosed group"),
        (regex("(?=a)b"), "guided_regex cannot be read: look-around, including look-ahead and look-behind, is not"),
        (json_schema({"type": "integer", "x-guidance": {"whitespace_flexible": False}}), "x-guidance is not taken"),
        (Grammar("lark", 'root ::= "a"', "guided_grammar"), "rules are written `name: ...` and not `name ::= ...`"),
        (regex("[^\\s\\S]"), "allows no text at all"),
        (regex("(" * 500 + "a" + ")" * 500), "cannot be read"),
        (json_schema({"type": "strin"}), "strin"),
        (json_schema({"type": "array", "uniqueItems": True}), '["uniqueItems"] would not be kept: leave it out'),
        (json_schema({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}), "exclusiveMinimum 0 would not be"),
        (json_schema({"items": {"type": "number", "minimum": -0.001, "exclusiveMaximum": 0}}), "exclusiveMaximum 0"),
        (json_schema({"properties": {"default": {"type": "integer", "minimum": 2**60}}}), "minimum of integers must"),
        (json_schema({"type": "object", "minProperties": 2}), "minProperties 2 would not be kept"),
        (json_schema({"type": "integer", "minimum": -(2**63)}), "minimum of integers must be within -2**53 and 2**53"),
        (json_schema({"type": ["integer", "null"], "exclusiveMaximum": 10**400}), "exclusiveMaximum of integers must"),
        (json_schema({"$ref": "http://localhost/x"}), "cannot be read"),
        (json_schema({"$ref": "#"}), "allows no text"),
        (json_schema({"$ref": "#/$defs/none"}), "cannot be read"),
        (json_schema({"enum": ["x" * 70_000] * 8}), "allows no text that could be found"),
        (json_schema({"$defs": {"node": ENDLESS}, "$ref": "#/$defs/node"}), "no text"),
        (Grammar("lark", 'begin: "a"', "guided_grammar"), "no start rule"),
        (Grammar("lark", 'start: "a" start', "guided_grammar"), "no text"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.text[:30],
)  # fmt: skip
def test_a_grammar_that_cannot_be_is_refused_with_the_reason(grammar: Grammar, words: str) -> None:
    assert words in rejection(grammar)


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
def test_what_is_kept_is_not_refused(schema: dict[str, object]) -> None:
    for seed in range(10):
        constraint = constraint_of(KIND, json_schema(schema), 100)
        text = read(KIND, draw(KIND, constraint, 100, random.Random(seed)))
        jsonschema.validate(json.loads(text), schema)


def nest(depth: int) -> str:
    schema = '{"type": "integer"}'
    for _ in range(depth):
        schema = f'{{"type": "object", "properties": {{"a": {schema}}}, "required": ["a"]}}'
    return schema


HOSTILE = [
    regex("(a{1000}){1000}"),
    regex("(.*a.{20}){3}"),
    regex("(x+x+)+y"),
    regex("(a|a)*b(a|b){2000}"),
    regex("|".join(f"w{number}x" for number in range(8000))),
    regex("a" * 60_000),
    Grammar("json_schema", nest(40), "guided_json"),
    Grammar("json_schema", nest(1000), "guided_json"),
    json_schema({"type": "string", "pattern": "^(a|b)*a(a|b){18}$"}),
    json_schema({"type": "string", "minLength": 1_000_000}),
    json_schema({"type": "array", "minItems": 10_000, "items": {"type": "integer"}}),
    json_schema({"enum": [f"value {number}" for number in range(3000)]}),
    json_schema({"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(6)]} for i in range(6)]}),
    Grammar("lark", 'start: e\ne: e e | "a" | ', "guided_grammar"),
    Grammar("lark", 'start: "a"\n# ' + "\\/" * 30_000 + "\n", "guided_grammar"),
    Grammar("lark", 'start: s "z!"\ns: e s | e\ne: "a" | "b"\nA: /a{4000}/\nB: /a{4001}/\n', "guided_grammar"),
    json_schema({"type": "string", "examples": [{"pattern": "[" + "一丁" * 4_000 + "]"}] * 6}),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda grammar: grammar.text[:24])
def test_a_hostile_grammar_takes_no_long_time(grammar: Grammar) -> None:
    start_s, source = time.thread_time(), random.Random(0)
    try:
        constraint = constraint_of(KIND, grammar, 4096)
    except RequestError:
        pass
    else:
        draw(KIND, constraint, 200, source)
    assert time.thread_time() - start_s < LIMIT_S


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_not_known_by_its_bytes_is_refused() -> None:
    assert "tokenizer" in rejection(regex("a+"), kind="wordpiece")


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        eos_token_id = 1

    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(Slow(), 10, frozenset([1])).compile(regex("a"), SamplingParams(1))


def test_a_tokenizer_that_reads_otherwise_than_it_says_is_refused() -> None:
    tokenizer = Tokenizer(
        models.BPE({letter: place for place, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "")])
    built: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(built, 256, frozenset([0])).compile(regex("a"), SamplingParams(1))


HOSTILE = json_schema({"allOf": [{"pattern": f".*{number:x}"} for number in range(50)]})
"""In a thousand characters, what takes the library minutes."""


def test_a_grammar_that_takes_minutes_to_read_is_refused_and_the_next_one_is_read() -> None:
    started_s = time.monotonic()
    assert "takes more than 3 s of a processor" in rejection(HOSTILE)
    assert time.monotonic() - started_s < 60
    check_texts(KIND, regex("[ab]{3}"), re.compile("[ab]{3}").fullmatch)


def test_trials_begin_anew_where_their_process_has_ended() -> None:
    trial = GrammarTrial()
    assert trial.is_quick("regex", "a")
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert trial.is_quick("lark", "what is wrong is refused elsewhere")
    process = trial._process
    trial.close()
    assert process.poll() is not None


def test_what_else_the_machine_does_is_no_time_of_a_trial() -> None:
    trial = GrammarTrial()
    assert trial.is_quick("regex", "a")
    process = trial._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(MAX_TRIAL_S + 1, process.send_signal, [signal.SIGCONT])
    goes_on.start()
    assert trial.is_quick("regex", "b")
    goes_on.join()
    assert trial._process is process
    trial.close()


def test_grammars_are_read_without_a_trial_while_no_process_can_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_trial, "RETRY_S", 0.0)
    trial = Mock(wraps=GrammarTrial())
    monkeypatch.setattr(grammar_module, "_trial", trial)
    secret = "secret[ab]"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        compiler_of.__wrapped__(KIND).compile(regex(secret), SamplingParams(20))
    assert "without a trial: FileNotFoundError" in caplog.text
    assert "secret" not in caplog.text
    compiler_of.__wrapped__(KIND).compile(regex(secret), SamplingParams(20))
    compiler_of.__wrapped__(KIND).compile(regex(secret), SamplingParams(20))
    assert trial.is_quick.call_args_list == [call("regex", secret)] * 2
    trial.close()


def test_a_trial_that_cannot_begin_is_not_tried_for_each_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, now_s = GrammarTrial(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        with pytest.raises(FileNotFoundError):
            trial.is_quick("regex", "a")
    with pytest.raises(TimeoutError):
        trial.is_quick("regex", "a")
    now_s[0] += RETRY_S
    assert trial.is_quick("regex", "a")
    trial.close()


def test_grammars_that_were_read_lately_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, plan = compiler_of(KIND), SamplingParams(20)
    grammars = [regex(f"a{number}") for number in range(NUM_CLOSINGS_KEPT + 1)]
    assert not compiler.knows(grammars[0], plan)
    for grammar in (*grammars[:-1], grammars[0], grammars[-1]):
        compiler.compile(grammar, plan)
    assert [compiler.knows(grammar, plan) for grammar in grammars] == [True, False, *[True] * (NUM_CLOSINGS_KEPT - 1)]
    assert not compiler.knows(grammars[0], SamplingParams(20, eos_ids=frozenset([5])))
    monkeypatch.setattr(grammar_module, "_trial", None)
    compiler.compile(grammars[0], plan)  # without another trial, which may wait for that of others


def test_an_option_that_nobody_may_set_is_not_recommended() -> None:
    sentence = rejection(json_schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}))
    assert "coerce" not in sentence
    assert "write anyOf" in sentence
