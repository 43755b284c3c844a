# SPDX-License-Identifier: Apache-2.0
"""CallsConstraint: leaves a model's text free until it opens a tool call, and holds the call by its grammar.

Free text is searched for what opens a call, and for thinking, by the patterns with which messages are read; in thinking
no call opens. An opening may be one token, several, or end within one: a token that goes on behind it is allowed if the
grammar takes its rest. The sequence may end in free text, and not in a call. Behind a call the text is free again, or
the grammar goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_triton.errors import RequestError
from hf_triton.grammar.constraint import GrammarConstraint
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.types import Bits, bits_of
from hf_triton.sentence import param

NUM_KEPT: Final = 256
"""Characters of the text that patterns may look back to."""
MAX_STATES: Final = 1024
"""Beginnings of openings whose tokens are remembered."""


@dataclass(frozen=True)
class Calls:
    """The calls of a request's tools in one form."""

    pattern: Any
    """What opens one: a compiled pattern of `regex`, whose searches have a limit of time."""
    last_letter: str
    """A letter with which each match ends, or what it looks ahead for."""
    grammar: Grammar
    is_free_behind: bool


@dataclass(frozen=True)
class CallPlan:
    """What is to be held in the free text of one prompt's completions."""

    calls: Sequence[Calls]
    tool_grammars: Callable[[], Iterable[Grammar]]
    """The grammars of each tool alone, to find one that is wrong."""
    thinking: tuple[Any, Any] | None
    """The patterns that begin and end thinking, likewise."""
    visible_ids: frozenset[int]
    """The special tokens that the reader of a message sees."""
    prefix: str = ""
    """What the prompt has of the message."""


class Ends:
    """The tokens with which an opening may end, for one model. Thread-safe.

    Args:
        pattern: The opening's.
        tokens: Those with the last letter of a match, and their text.
    """

    def __init__(self, pattern: Any, tokens: Sequence[tuple[int, str]]) -> None:
        self.pattern = pattern
        self._tokens = tokens
        self._known: dict[tuple[str, bool], list[tuple[int, bytes]]] = {}

    def behind(self, text: str, start: int) -> list[tuple[int, bytes]]:
        """The tokens that end an opening behind a text, read from `start`, and go on; and how."""
        match = self.pattern.search(text, start, partial=True)
        beginning = "" if match is None else text[match.start() :]
        key = beginning, start == 0 and len(beginning) == len(text)
        if (found := self._known.get(key)) is None:
            if len(self._known) >= MAX_STATES:
                self._known.clear()
            found = self._known[key] = list(self._find(*key))
        return found

    def _find(self, beginning: str, is_start: bool) -> Iterator[tuple[int, bytes]]:
        before = beginning if is_start else f"\n{beginning}"  # `\A` and what looks behind see that there is a text
        for token_id, text in self._tokens:
            match = self.pattern.search(before + text, int(not is_start))
            if match is not None and (rest := (before + text)[match.end() :]):
                yield token_id, as_bytes(rest)


@dataclass(frozen=True)
class Opening:
    """What opens a call, and the grammar of what follows."""

    ends: Ends
    build_call: Callable[[], GrammarConstraint]
    is_free_behind: bool

    def forbidden(self, text: str, start: int) -> Iterator[int]:
        """The tokens that go on behind the opening as no call does."""
        if ends := self.ends.behind(text, start):
            call = self.build_call()
            yield from (token_id for token_id, rest in ends if not call.takes(rest))


@dataclass(frozen=True)
class FreeText:
    """What is known of a prompt's free text."""

    texts: Sequence[str]
    """The text of each token, by id, in which bytes that are no UTF-8 are escaped."""
    openings: Sequence[Opening]
    thinking: tuple[Any, Any] | None
    size: int
    """Bits of a bitmask."""


class CallsConstraint:
    """A constraint of one sequence, as `sampling.types.Constraint`.

    Args:
        prefix: What the prompt has of the message.

    Raises:
        RequestError: The prompt ends within a call.
    """

    def __init__(self, free: FreeText, prefix: str = "") -> None:
        self._free = free
        self._text = prefix
        self._start = 0  # of what is not read yet
        self._is_thinking = False
        self._opening: Opening | None = None
        self._call: GrammarConstraint | None = None
        self._read()
        if self._call is not None:
            raise RequestError("invalid_parameter", f"{param('tools')}: the prompt ends within a call: leave it out")

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end-of-sequence may follow."""
        return self._call is not None and self._call.is_complete

    def bitmask(self) -> Bits | None:
        """The tokens that may come next, None for any; raises as `GrammarConstraint.bitmask` does."""
        if self._call is not None:
            return self._call.bitmask()
        if self._is_thinking:
            return None
        openings = self._free.openings
        if not (token_ids := [each for opening in openings for each in opening.forbidden(self._text, self._start)]):
            return None
        return ~bits_of(token_ids, self._free.size)

    def accept(self, token_id: int) -> None:
        """Advance by one token; raises as `GrammarConstraint.accept` does."""
        text = self._free.texts[token_id] if token_id < len(self._free.texts) else ""
        self._text = as_text(as_bytes(self._text + text))  # what the tokens have of a letter together
        if self._call is None:
            self._read()
        else:
            self._call.accept(token_id)
            assert self._opening is not None
            if self._opening.is_free_behind and self._call.is_complete:
                self._call, self._start = None, len(self._text)
        if (num_dropped := len(self._text) - NUM_KEPT) > NUM_KEPT:
            self._text, self._start = self._text[num_dropped:], max(self._start - num_dropped, 1)

    def _read(self) -> None:
        """Read free text up to its end, or to the opening of a call."""
        while True:
            starts, ends = self._free.thinking or (None, None)
            if self._is_thinking:
                if (match := self._search(ends)) is None:
                    return
                self._is_thinking, self._start = False, match.end()
                continue
            thought = None if starts is None else self._search(starts)
            calls = [(match, each) for each in self._free.openings if (match := self._search(each.ends.pattern))]
            match, opening = min(calls, key=lambda call: int(call[0].start()), default=(None, None))
            if thought is not None and (match is None or thought.start() <= match.start()):
                self._is_thinking, self._start = True, thought.end()
            elif match is not None and opening is not None:
                self._opening, self._call = opening, opening.build_call()
                self._call.accept_text(as_bytes(self._text[match.end() :]))
                return
            else:
                return

    def _search(self, pattern: Any) -> Any:
        return None if pattern is None else pattern.search(self._text, self._start)


def as_text(text: bytes) -> str:
    """A text with the bytes that are no UTF-8 escaped."""
    return text.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
