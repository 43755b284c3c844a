# SPDX-License-Identifier: Apache-2.0
"""Literals of a grammar that a completion may need: `.*done` allows the same tokens before its `done` and within it."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_triton.grammar.schema_checks import subschemas
from hf_triton.protocol.structured_output import Grammar

MAX_SOURCE: Final = 10_000
"""Characters of a grammar that are searched."""
FORMATS: Final = {"email": "a@b.co", "ipv6": "::", "uri": "a:b", "date": "2000-01-01", "time": "00:00:00Z"}
LARK_TERMINALS: Final = re.compile(r'(?://|\#)[^\n]*+ | "((?:[^"\\\n]|\\.)*+)" | /((?:[^/\\\n]|\\.)++)/', re.VERBOSE)
"""Comments, strings and regular expressions."""
REGEX_ITEMS: Final = re.compile(r"\\([^\w\s])|\\(\w)|\[([^\\\]^])(?:\\.|[^\]\\])*+\]|([^\\\[\](){}.*?|$])|.", re.DOTALL)
"""An escaped character, a class by its letter, a class by its first character, a character, and the rest."""
CLASS_EXAMPLES: Final = {"n": "\n", "r": "\r", "t": "\t", "d": "0", "w": "a", "s": " "}


def completion_hints(grammar: Grammar) -> tuple[str, ...]:
    """The first 16 literals of up to 64 characters, as they appear in the output."""
    hints = dict[str, None]()
    for literal in _literals(grammar):
        if len(hints) == 16:
            break
        if literal and len(literal) <= 64:
            hints[json.dumps(literal, ensure_ascii=False)[1:-1] if grammar.kind == "json_schema" else literal] = None
    return tuple(hints)


def _literals(grammar: Grammar) -> Iterator[str]:
    if grammar.kind == "regex":
        yield from _regex_literals(grammar.text)
    elif grammar.kind == "lark":
        for terminal in LARK_TERMINALS.finditer(grammar.text[:MAX_SOURCE]):
            if terminal[1]:
                with contextlib.suppress(ValueError):
                    yield json.loads(f'"{terminal[1]}"')
            elif terminal[2]:
                yield from _regex_literals(terminal[2])
    elif grammar.kind == "json_schema":
        for schema in subschemas(json.loads(grammar.text)):
            if isinstance(pattern := schema.get("pattern"), str):
                yield from _regex_literals(pattern)
            if isinstance(schema.get("format"), str):
                yield FORMATS.get(schema["format"], "")
            with contextlib.suppress(TypeError, ValueError, OverflowError, ZeroDivisionError):  # not numbers, or inf
                yield _smallest_multiple(schema)


def _regex_literals(pattern: str) -> Iterator[str]:
    """Runs of characters that a regular expression may ask for, such as `</`, `a` and `b` of `.*</(a|b)`."""
    run = ""
    for item in REGEX_ITEMS.finditer(pattern[:MAX_SOURCE]):
        escaped, letter, first, plain = item.groups()
        if character := escaped or CLASS_EXAMPLES.get(letter) or first or plain:
            run += "" if character == plain and plain in "+^" else character
        elif run:
            yield run
            run = ""
    yield run


def _smallest_multiple(schema: Mapping[str, Any]) -> str:
    """The multiple of `multipleOf` next to 0 and within the bounds; empty without that keyword."""
    step = schema.get("multipleOf")
    if type(step) is not int:
        return ""
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf) + 1)
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf) - 1)
    return str(math.ceil(low / step) * step if low > 0 else math.floor(high / step) * step if high < 0 else 0)
