# SPDX-License-Identifier: Apache-2.0
"""Grammars and tokenizers that are refused, and what hostile grammars cost."""

import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_triton.errors import RequestError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from tests.support.grammars import constraint_of, draw, json_schema, lark, regex, rejection

MAX_CPU_S = 20.0
"""Of what takes a second on an idle machine."""


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex("a("), "unclosed group"),
        (regex("(?=a)b"), "guided_regex cannot be read: look-around, including look-ahead and look-behind, is not"),
        (json_schema({"type": "integer", "x-guidance": {"whitespace_flexible": False}}), "x-guidance is not taken"),
        (lark('root ::= "a'), "guided_grammar cannot be read: "),
        (lark("root ::= " + "(" * 5000), "guided_grammar cannot be read: "),
        (regex("[^\\s\\S]"), "allows no text at all"),
        (regex("(" * 500 + "a" + ")" * 500), "cannot be read"),
        (json_schema({"type": "strin"}), "strin"),
        (json_schema({"$ref": "http://localhost/x"}), "cannot be read"),
        (json_schema({"$ref": "#"}), "$ref '#' leads to what no finite text satisfies"),
        (lark('start: "a" %json {"$ref": "#"}'), "$ref '#' leads to what no finite text satisfies"),
        (lark('start: %json {"type": "integer", "minimum": 1e30}'), "minimum of integers must be within"),
        (regex("[^\\x00-\\U0010ffff]"), "allows no text"),
        (json_schema({"$ref": "#/$defs/none"}), "cannot be read"),
        (json_schema({"enum": ["x" * 70_000] * 8}), "allows no text of the model's tokens"),
        (lark('start: "a" start'), "no text"),
        (lark('begin: "a"'), "no start rule"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.text[:30],
)  # fmt: skip
def test_unusable_grammar_is_refused_with_the_reason(grammar: Grammar, words: str) -> None:
    assert words in rejection(grammar)


@pytest.mark.parametrize(
    "grammar",
    [lark("start: A start\nA: /[ab]/"), json_schema({"type": "string", "minLength": 50_000})],
    ids=["endless rule", "minimum length"],
)
def test_grammar_without_a_short_ending_is_served(grammar: Grammar) -> None:
    assert draw(constraint_of(grammar), 50, random.Random(0)) is None


def test_option_that_requests_cannot_set_is_not_recommended() -> None:
    sentence = rejection(json_schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}))
    assert "coerce" not in sentence
    assert "write anyOf" in sentence


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
    lark('start: e\ne: e e | "a" | '),
    lark('start: "a"\n# ' + "\\/" * 30_000 + "\n"),
    lark('start: s "z!"\ns: e s | e\ne: "a" | "b"\nA: /a{4000}/\nB: /a{4001}/\n'),
    json_schema({"type": "string", "examples": [{"pattern": "[" + "一丁" * 4_000 + "]"}] * 6}),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda grammar: grammar.text[:24])
def test_hostile_grammar_takes_little_time(grammar: Grammar) -> None:
    start_s, source = time.thread_time(), random.Random(0)
    try:
        constraint = constraint_of(grammar)
    except RequestError:
        pass
    else:
        draw(constraint, 200, source)
    assert time.thread_time() - start_s < MAX_CPU_S


def test_tokenizer_whose_tokens_have_no_bytes_is_refused() -> None:
    assert "tokenizer" in rejection(regex("a+"), kind="wordpiece")


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        eos_token_id = 1

    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(Slow(), 10, frozenset([1])).compile(regex("a"), SamplingParams(1))


def test_tokenizer_whose_decoder_changes_bytes_is_refused() -> None:
    vocabulary = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "")])
    built: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(built, 256, frozenset([0])).compile(regex("a"), SamplingParams(1))
