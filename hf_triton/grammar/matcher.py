# SPDX-License-Identifier: Apache-2.0
"""Builds llguidance's matcher for a grammar, with limits on its work and error messages for the client.

llguidance (MIT, no dependencies, wheels for every CPU) computes the allowed tokens in some 10 us for a vocabulary of
32,000 and without a start-up cost; xgrammar took 0.1 s to compile a small schema and five times as long for a token.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from hf_triton.errors import RequestError
from hf_triton.grammar.schema_checks import check_schema, drop_annotations
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sentence import plain

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=100_000,  # 25 ms of compilation; (a{1000}){1000} takes a second by the library's own limit
    step_lexer_fuel=50_000,  # 4 ms of a token
    step_max_items=20_000,  # 1 ms of a token
    max_lexer_states=30_000,  # 30 to 60 MB
    max_grammar_size=100_000,
    verbose_errors=False,  # they would show the whole grammar
)
GBNF_RULE: Final = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
JSON_IN_LARK: Final = re.compile(r"%json\s*(?=\{)")
JSON_SPACE: Final = r" ?|\n[ \t]{0,40}"  # unbounded white space would use up the tokens


def build_matcher(tokenizer: LLTokenizer, grammar: Grammar, limits: LLParserLimits = LIMITS) -> LLMatcher:
    """A matcher at the start of a grammar; raises RequestError if the grammar is wrong or too large."""
    try:
        source = _source(grammar)
    except ValueError as error:  # nested too deeply, or not enforced
        raise rejection(grammar, f"cannot be read: {plain(_reason(str(error)))}") from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.get_error().startswith("NoExtension"):
        raise rejection(grammar, "allows no text at all")
    if matcher.is_error():
        raise rejection(grammar, f"cannot be read: {plain(_reason(matcher.get_error()))}")
    return matcher


def rejection(grammar: Grammar, sentence: str) -> RequestError:
    """The error of a grammar; the sentence follows the name of its parameter."""
    return RequestError("invalid_parameter", f"{grammar.about} {sentence}")


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's own form."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        check_schema(schema)
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema) if drop_annotations(schema) else grammar.text,
            overrides={"whitespace_pattern": JSON_SPACE, "lenient": False, "coerce_one_of": False},
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        # Lark's lexer takes no raw control character, and JSON does not escape this one.
        choices = (json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f") for text in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    if grammar.kind == "one_of":
        return _one_of(json.loads(grammar.text))
    for match in JSON_IN_LARK.finditer(grammar.text):
        with contextlib.suppress(json.JSONDecodeError):  # it is no schema, or the library refuses it
            check_schema(json.JSONDecoder().raw_decode(grammar.text, match.end())[0])
    return LLMatcher.grammar_from_lark(_lark(grammar.text) if GBNF_RULE.search(grammar.text) else grammar.text)


def _one_of(alternatives: list[tuple[str, Any, str]]) -> str:
    """Grammars behind strings that tell them apart, as one."""
    sources = [(kind, _source(Grammar(kind, text, ""))) for _, kind, text in alternatives]
    parts = [  # Lark stays as it is
        {"lark_grammar": source} if kind == "lark" else json.loads(source)["grammars"][0] for kind, source in sources
    ]
    starts = [
        f"{json.dumps(prefix, ensure_ascii=False)} @part{index}" if prefix else f"@part{index}"
        for index, (prefix, _, _) in enumerate(alternatives)
    ]
    main = {"name": "main", "lark_grammar": "start: " + " | ".join(starts)}
    return json.dumps({"grammars": [main, *({**part, "name": f"part{index}"} for index, part in enumerate(parts))]})


def _lark(gbnf: str) -> str:
    """A grammar in llama.cpp's syntax as Lark; raises ValueError if it cannot be read."""
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:  # llguidance 1.9 raises errors of no class of their own
        raise ValueError(str(error)) from None


def _reason(message: str) -> str:
    """What llguidance reports, without the lines that quote its own form of the grammar."""
    match = re.search(r"^error: (.*)$", message, re.MULTILINE)  # in a regular expression
    reason = match[1] if match else re.split(r"\n\s*\d+ \|", message.replace("<non-verbose/>", ""), maxsplit=1)[0]
    if "coerce_one_of" in reason:  # an option that requests cannot set
        return "oneOf is taken only where it is clear which one a text is: write anyOf"
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(reason.split()))
    if (keys := line.removeprefix("Unimplemented keys: ")) != line:
        line = f"{keys} would not be kept: leave it out"
    return line if len(line) <= 160 else f"{line[:157]}..."
