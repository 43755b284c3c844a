# SPDX-License-Identifier: Apache-2.0
"""Sentences with names left open: each client reads the names that it sends itself. Knows no client.

`f"{param('max_new_tokens')} must be <= {room}, got {clip(value)}"` marks the name with characters that Unicode reserves
for a program's own use, which `clip` escapes in a client's values. The mark alone is replaced, never a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final, Protocol

_MARKS: Final = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5"
_FIELD, _FIELD_END, _ROW, _ROW_END, _REMEDY, _REMEDY_END = _MARKS
_OPEN: Final = re.compile(f"{_FIELD}([^{_MARKS}]*){_FIELD_END}")
_MARKED: Final = re.compile(
    f"{_OPEN.pattern}|{_ROW}(\\d+)([^{_MARKS}]*){_ROW_END}|{_REMEDY}([^{_REMEDY_END}]*){_REMEDY_END}"
)
_UNMARKED: Final = str.maketrans(dict.fromkeys(_MARKS, "\ufffd"))


class Names(Protocol):
    """What a client calls fields and rows."""

    def words(self, path: str) -> str:
        """The client's name of a field, or of a place in it: `messages[2].content`."""

    def knows(self, path: str) -> bool:
        """Whether the client can send the field."""

    def row(self, number: int) -> int | str | None:
        """The client's number of a row, or its place; None: it sent one."""


def param(path: str) -> str:
    """A field of the request, by our name, or a place in it; to be put into a sentence."""
    return f"{_FIELD}{plain(path)}{_FIELD_END}"


def param_list(names: Iterable[str], between: str = ", ") -> str:
    return between.join(map(param, names))


def row(number: int, form: str = " row {}") -> str:
    """The row of the request that the sentence is about; it is left out for a client that sent one."""
    return f"{_ROW}{number}{form}{_ROW_END}"


def remedy(words: str) -> str:
    """Words for clients that can send all of the fields in them."""
    return f"{_REMEDY}{words}{_REMEDY_END}"


def plain(text: str) -> str:
    """Words of others, for a sentence: a library's reason, a client's name."""
    return text.translate(_UNMARKED)


def text(sentence: str, names: Names | None = None) -> str:
    """A sentence in a client's names; in ours if there are none."""

    def word(match: re.Match[str]) -> str:
        path, number, form, words = match.groups()
        if path is not None:
            return path if names is None else names.words(path)
        if number is not None:
            shown = int(number) if names is None else names.row(int(number))
            open_words = "row {}" if isinstance(shown, str) else "{}"
            return "" if shown is None else form.replace(open_words, str(shown))
        known = names is None or all(map(names.knows, _OPEN.findall(words)))
        return text(words, names) if known else ""

    return _MARKED.sub(word, sentence)


def renamed(sentence: str, of: Callable[[str], str]) -> str:
    """A sentence with other names, which are still open."""
    return _OPEN.sub(lambda match: param(of(match[1])), sentence)


def first_field(sentence: str) -> str | None:
    """The first field of a sentence outside its remedies; None: it names none."""
    return next((match[1] for match in _MARKED.finditer(sentence) if match[1] is not None), None)


def names_row(sentence: str) -> bool:
    """Whether a sentence says which row it is about."""
    return _ROW in sentence


def begins_with_field(sentence: str) -> bool:
    return sentence.startswith(_FIELD)
