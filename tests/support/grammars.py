# SPDX-License-Identifier: Apache-2.0
"""Grammars, constraints for them, and completions drawn at random from the tokens that they allow."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import RequestError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.grammar.constraint import GrammarConstraint
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from tests.support.tokenizers import EOS, codec_of, raw_ids, tokenizer_of

KIND = "byte_level"
LENGTHS = [0, 0, 1, 2, 3, 5, 10, 40]
"""Tokens beyond the known completion that random completions may have."""


@cache
def compiler_of(kind: str) -> GrammarCompiler:
    return build_compiler(kind)


def build_compiler(kind: str = KIND, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_of(kind), len(tokenizer_of(kind)), frozenset([eos_of(kind)]), **options)


def eos_of(kind: str) -> int:
    return int(tokenizer_of(kind).convert_tokens_to_ids(EOS))


def json_schema(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), "guided_json")


def regex(pattern: str) -> Grammar:
    return Grammar("regex", pattern, "guided_regex")


def choice(*strings: str) -> Grammar:
    return Grammar("choice", json.dumps(strings), "guided_choice")


def lark(source: str) -> Grammar:
    return Grammar("lark", source, "guided_grammar")


def constraint_of(
    grammar: Grammar, max_new_tokens: int, kind: str = KIND, compiler: GrammarCompiler | None = None
) -> GrammarConstraint:
    _, build_constraint = (compiler or compiler_of(kind)).compile(grammar, SamplingParams(max_new_tokens))
    return build_constraint()


def rejection(grammar: Grammar, max_new_tokens: int = 100, kind: str = KIND) -> str:
    """The sentence with which a grammar is refused."""
    with pytest.raises(RequestError) as caught:
        compiler_of(kind).compile(grammar, SamplingParams(max_new_tokens))
    assert caught.value.code == "invalid_parameter"
    assert caught.value.sentence.startswith(grammar.parameter)
    assert len(caught.value.sentence) < 300
    return caught.value.sentence


def completion_length(grammar: Grammar, kind: str = KIND) -> int:
    """Tokens of the completion that is found for an empty sequence."""
    try:
        compiler_of(kind).compile(grammar, SamplingParams(1))
    except RequestError as error:
        return int(re.findall(r"ask for (\d+) or more$", error.sentence)[0])
    return 1


def allowed_tokens(constraint: GrammarConstraint, size: int) -> list[int]:
    bits = np.unpackbits(constraint.bitmask(), bitorder="little")[:size]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def draw(constraint: GrammarConstraint, max_tokens: int, source: random.Random, kind: str = KIND) -> list[int]:
    """A sequence of random tokens: mostly allowed ones other than end-of-sequence, and some that are not allowed."""
    eos, size, token_ids = eos_of(kind), len(tokenizer_of(kind)), list[int]()
    while len(token_ids) < max_tokens:
        allowed = allowed_tokens(constraint, size)
        others = [token_id for token_id in allowed if token_id != eos]
        sampled = source.choice(others if others and source.random() < 0.9 else allowed)
        if source.random() < 0.05:
            sampled = source.randrange(size)
        token_id = constraint.enforce(sampled)
        assert token_id in allowed
        constraint.accept(token_id)
        if token_id == eos:
            break
        token_ids.append(token_id)
    return token_ids


def decode(token_ids: list[int], kind: str = KIND) -> str:
    return codec_of(kind).continuation(raw_ids(kind, "The river"), token_ids)


def check_completions(
    grammar: Grammar, matches: Callable[[str], object], kind: str = KIND, lengths: list[int] = LENGTHS
) -> None:
    """Draw completions of the shortest and of longer lengths, and check that each is whole."""
    source, shortest = random.Random(0), completion_length(grammar, kind)
    for extra in lengths:
        max_tokens = shortest + extra
        token_ids = draw(constraint_of(grammar, max_tokens, kind), max_tokens, source, kind)
        assert len(token_ids) <= max_tokens
        assert matches(decode(token_ids, kind)), decode(token_ids, kind)
