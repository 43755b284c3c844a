# SPDX-License-Identifier: Apache-2.0
"""Builds llguidance's matcher for a grammar, with limits on its work and error messages for the client.

llguidance (MIT, no dependencies, wheels for every CPU) computes the allowed tokens in some 10 us for a vocabulary of
32,000 and without a start-up cost; xgrammar took 0.1 s to compile a small schema and five times as long for a token.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
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
SPACE: Final = r"[ \t\r\n]{1,8}"  # of forms of calls
JSON_SPACE: Final = r" ?|\n[ \t]{0,40}"  # unbounded white space would use up the tokens


def build_matcher(tokenizer: LLTokenizer, grammar: Grammar, limits: LLParserLimits = LIMITS) -> LLMatcher:
    """A matcher at the start of a grammar; raises RequestError if the grammar is wrong or too large."""
    try:
        source = _source(grammar, tokenizer)
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


def _source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """A grammar in llguidance's own form; special tokens are the tokenizer's."""
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
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, json.loads(grammar.text))))
    if grammar.kind == "parts":
        return _PartsGrammar(tokenizer).source(**json.loads(grammar.text))
    for match in JSON_IN_LARK.finditer(grammar.text):
        with contextlib.suppress(json.JSONDecodeError):  # it is no schema, or the library refuses it
            check_schema(json.JSONDecoder().raw_decode(grammar.text, match.end())[0])
    return LLMatcher.grammar_from_lark(_lark(grammar.text) if GBNF_RULE.search(grammar.text) else grammar.text)


class _PartsGrammar:
    """Writes parts as Lark that names grammars of their own."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = [f"SPACE: /{SPACE}/"]
        self._grammars: list[dict[str, Any]] = []
        self._names: dict[tuple[str, str], str] = {}

    def source(self, alternatives: Sequence[Sequence[Any]], separator: Sequence[Any] | None) -> str:
        call = " | ".join(map(self._sequence, alternatives))
        again = "" if separator is None else f" ({self._sequence(separator)} call)*"
        main = "\n".join([f"start: call{again}", f"call: {call}", *self._rules])
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._grammars]})

    def _sequence(self, parts: Sequence[Any]) -> str:
        return " ".join(self._literal(part) if isinstance(part, str) else self._part(part) for part in parts)

    def _part(self, part: Mapping[str, Any]) -> str:
        kind = part["kind"]
        if kind == "space":
            return "SPACE?"
        if kind == "repeat":
            return f"({self._sequence(part['of'])})*"
        if kind == "any":
            ways = [self._sequence(way) for way in part["of"]]
            return f"({' | '.join(filter(None, ways))}){'' if all(ways) else '?'}"
        return self._text(**part) if kind == "text" else self._grammar(kind, part["text"])

    def _grammar(self, kind: Any, text: str) -> str:
        name = self._names.setdefault((kind, text), f"part{len(self._names)}")
        if len(self._names) > len(self._grammars):
            source = _source(Grammar(kind, text, ""), self._tokenizer)
            own = {"lark_grammar": source} if kind == "lark" else json.loads(source)["grammars"][0]
            self._grammars.append({**own, "name": name})
        return f"@{name}"

    def _text(self, *, kind: str, without: Sequence[str], min: int, max: int | None, end: str) -> str:
        """Text and its end as one terminal, which is over with the end: the text does not hold it."""
        held = "|".join(re.escape(text).replace("/", r"\/") for text in without)
        text = f"(/(?s:.{{{min},{'' if max is None else max}}})/ & ~/(?s:.*)({held})(?s:.*)/)"
        [*literals] = self._pieces(end)
        is_special = literals[0].startswith("<")
        self._rules.append(f"TEXT{len(self._rules)}: {text}{'' if is_special else ' ' + literals[0]}")
        return " ".join([f"TEXT{len(self._rules) - 1}", *literals[not is_special :]])

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        """A literal as strings, and the ids of special tokens."""
        ids = self._tokenizer.tokenize_str(text, parse_special=True)
        special = {
            self._tokenizer.decode_str([token_id]): token_id
            for token_id in ids
            if self._tokenizer.is_special_token(token_id)
        }
        pieces = filter(None, re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text])
        return [f"<[{special[piece]}]>" if piece in special else _quoted(piece) for piece in pieces]


def _quoted(text: str) -> str:
    """A string of Lark, whose lexer takes no raw control character, and JSON does not escape one of them."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")


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
