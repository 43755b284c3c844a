# SPDX-License-Identifier: Apache-2.0
"""Grammars, constraints for them, and completions drawn at random from the tokens that they allow."""

import json
import random
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
from tests.support.tokenizers import EOS, bytes_of, codec_of, raw_ids, tokenizer_of

KIND = "byte_level"


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


def constraint_of(grammar: Grammar, kind: str = KIND, compiler: GrammarCompiler | None = None) -> GrammarConstraint:
    _, build_constraint = (compiler or compiler_of(kind)).compile(grammar, SamplingParams(1))
    return build_constraint()


def rejection(grammar: Grammar, kind: str = KIND) -> str:
    with pytest.raises(RequestError) as caught:
        compiler_of(kind).compile(grammar, SamplingParams(100))
    assert caught.value.code == "invalid_parameter"
    assert caught.value.sentence.startswith(grammar.parameter)
    assert len(caught.value.sentence) < 300
    return caught.value.sentence


def allowed_tokens(constraint: GrammarConstraint, size: int) -> list[int]:
    bits = np.unpackbits(constraint.bitmask(), bitorder="little")[:size]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def draw(constraint: GrammarConstraint, max_tokens: int, source: random.Random, kind: str = KIND) -> list[int] | None:
    """Random allowed tokens up to the grammar's end; None if it has not ended after `max_tokens`.

    Tokens that close something come more often than others, as a model's do.
    """
    eos, size, token_ids = eos_of(kind), len(tokenizer_of(kind)), list[int]()
    closing = set(bytes_of(kind, '}]"),;\n'))
    while not constraint.is_complete:
        allowed = allowed_tokens(constraint, size)
        if eos in allowed and source.random() < 0.3:
            break
        if len(token_ids) == max_tokens:
            return None
        others = [token_id for token_id in allowed if token_id != eos]
        likely = [token_id for token_id in others if token_id in closing]
        token_ids.append(source.choice(likely if likely and source.random() < 0.5 else others))
        constraint.accept(token_ids[-1])
    return token_ids


def decode(token_ids: list[int], kind: str = KIND) -> str:
    return codec_of(kind).continuation(raw_ids(kind, "The river"), token_ids)


def check_completions(grammar: Grammar, matches: Callable[[str], object], kind: str = KIND) -> None:
    """Draw completions up to their end, and check that each matches; some must end."""
    source = random.Random(0)
    drawn = [draw(constraint_of(grammar, kind), 300, source, kind) for _ in range(20)]
    ended = [token_ids for token_ids in drawn if token_ids is not None]
    assert ended
    for token_ids in ended:
        assert matches(decode(token_ids, kind)), decode(token_ids, kind)
