# SPDX-License-Identifier: Apache-2.0
"""A short text that a regular expression matches: what a grammar waits for where it does not show it.

`.*done` allows the same tokens before its `done` and within it, so that nobody finds the way to its end by trying.
Patterns are read by Python's own parser, which knows most of what llguidance's does; a text is a guess, to be tried.
"""

from __future__ import annotations

import re
import string
import warnings
from collections.abc import Callable, Mapping
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

MAX_TEXT: Final = 4_096  # characters
LETTERS: Final = string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation + " \n\t"
"""What to take where there is a choice, the first that will do."""
CATEGORIES: Final[Mapping[Any, Callable[[str], bool]]] = {
    kinds.CATEGORY_DIGIT: str.isdigit,
    kinds.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdigit(),
    kinds.CATEGORY_SPACE: str.isspace,
    kinds.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    kinds.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    kinds.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}
REPEATS: Final = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
NOTHING: Final = (kinds.AT, kinds.ASSERT, kinds.ASSERT_NOT)
"""What takes no letter."""

warnings.filterwarnings("ignore", "Possible (nested set|set )", FutureWarning)  # of Python's, once for all threads


def sample(pattern: str) -> str | None:
    """A short text for a regular expression, often the shortest; None where it is too long, or that is not Python's.

    Takes up to 0.2 s for 10,000 characters.
    """
    classes = re.sub(r"\\p\{(N?)\w*\}", lambda found: r"\d" if found[1] else r"\w", pattern)
    try:
        return _of_all(parser.parse(classes))
    except (re.error, ValueError, OverflowError, RecursionError):
        return None


def _of_all(items: Any) -> str:
    text = ""
    for kind, value in items:
        text += _of_one(kind, value)
        if len(text) > MAX_TEXT:
            raise ValueError("too long")
    return text


def _of_one(kind: Any, value: Any) -> str:
    if kind is kinds.LITERAL:
        return chr(value)
    if kind in REPEATS:
        least, _, repeated = value
        text = _of_all(repeated) if least else ""
        if len(text) * least > MAX_TEXT:
            raise ValueError("too long")
        return str(text * least)
    if kind is kinds.BRANCH:
        return min(map(_of_all, value[1]), key=len)
    if kind is kinds.SUBPATTERN:
        return _of_all(value[-1])
    if kind is kinds.ATOMIC_GROUP:
        return _of_all(value)
    if kind in NOTHING:
        return ""
    if kind is kinds.IN:
        return _letter_in(value)
    if kind is kinds.NOT_LITERAL:
        return _letter_in([(kinds.NEGATE, None), (kinds.LITERAL, value)])
    if kind is kinds.ANY:
        return LETTERS[0]
    raise ValueError(f"what {kind} matches depends on the text before")


def _letter_in(items: list[tuple[Any, Any]]) -> str:
    """A letter of a class; the first of those that it names, where none of ours is in it."""
    wanted = items[0][0] is not kinds.NEGATE
    for letter in LETTERS:
        if any(_is_in(letter, kind, value) for kind, value in items) == wanted:
            return letter
    kind, value = items[0]
    if kind not in (kinds.LITERAL, kinds.RANGE):
        raise ValueError("no letter")
    return chr(value if kind is kinds.LITERAL else value[0])


def _is_in(letter: str, kind: Any, value: Any) -> bool:
    if kind is kinds.LITERAL:
        return letter == chr(value)
    if kind is kinds.RANGE:
        return chr(value[0]) <= letter <= chr(value[1])
    if kind is kinds.CATEGORY:
        return CATEGORIES[value](letter)
    return False
