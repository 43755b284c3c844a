# SPDX-License-Identifier: Apache-2.0
"""Reads a config.pbtxt without protobuf, which Triton's container does not have. Knows no field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

TOKEN: Final = re.compile(
    r"""\s*(?:\#[^\n]*(?:\n\s*|\Z))*("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|[][{}<>:,;]|$)"""
)
ENDS: Final = {"{": "}", "<": ">"}

Fields = dict[str, list[Any]]
"""Every value that a field is given, by name: a text, or the fields of a message."""


def parse_config_text(text: str) -> Fields:
    """The fields of a message in protobuf's text format. Escapes in strings stay as they are.

    Raises:
        ValueError: It is not in this format.
    """
    return _message(_tokens(text), "")


def _tokens(text: str) -> Iterator[str]:
    """The tokens of a text, and an empty one at its end."""
    position = 0
    while match := TOKEN.match(text, position):
        yield match[1]
        if not match[1]:
            return
        position = match.end()
    raise ValueError(f"unexpected {text[position : position + 20]!r}")


def _message(tokens: Iterator[str], end: str) -> Fields:
    fields: Fields = {}
    while (name := next(tokens)) != end:
        if name in (",", ";"):
            continue
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name of a field")
        fields.setdefault(name, []).extend(_values(tokens))
    return fields


def _values(tokens: Iterator[str]) -> Iterator[Any]:
    """The value behind a field's name, or those of its list."""
    token = next(tokens)
    if token == ":":
        token = next(tokens)
    if token != "[":
        yield _value(token, tokens)
        return
    while (token := next(tokens)) != "]":
        if token != ",":
            yield _value(token, tokens)


def _value(token: str, tokens: Iterator[str]) -> Any:
    if token in ENDS:
        return _message(tokens, ENDS[token])
    if token[:1] in ("'", '"'):
        return token[1:-1]
    if not token or token in "[]{}<>:,;":
        raise ValueError(f"{token!r} is no value")
    return token
