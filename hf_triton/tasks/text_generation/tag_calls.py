# SPDX-License-Identifier: Apache-2.0
"""Finds the end of a tool call whose arguments are texts between tags. Knows the tags by their patterns alone.

Such a format escapes nothing, so a value may hold the format's own tags, as when a model writes about it. A completion
is read in two ways: tags within a value are balanced, or else its end is the first one behind which the format goes on.
The first reading that leaves no tag over is taken; if neither does, there is no call: a part of one is worse than none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

VALUE: Final = "(?P<value>.*?)"
KEY: Final = "(?P<key>"
SPACE: Final = re.compile(r"\s*")
JSON: Final = "json"
"""The group of a head's pattern that tells that the value is JSON."""
Call = tuple[Any, dict[str, Any]]
"""The match of a call's end, and its values: texts, or what the JSON of some is."""


@dataclass(frozen=True)
class CallTags:
    opening: Any
    """Begins a call."""
    closing: Any
    """Ends it."""
    head: Any
    """Begins a value, and has its `key`; a group `json` that matches tells that the value is JSON."""
    tail: Any
    """Ends a value."""

    def calls(self, text: str, start: int) -> Mapping[int, Call]:
        """The calls of a completion from `start`, behind the first opening, by where what follows theirs begins.

        Returns:
            Nothing if no reading makes sense of all tags. The last call may be missing: it is cut off.
        """
        return self._read(text, start, is_nested=True) or self._read(text, start, is_nested=False) or {}

    def _read(self, text: str, start: int, *, is_nested: bool) -> dict[int, Call] | None:
        calls: dict[int, Call] = {}
        while (call := self._read_call(text, start, is_nested=is_nested)) is not None:
            calls[start] = call
            end = call[0].end()
            opening = self.opening.search(text, end)
            between = text[end : opening.start() if opening else len(text)]
            if self.closing.search(between) or self.tail.search(between):
                return None
            if opening is None:
                return calls
            start = opening.end()
        return None if self.closing.search(text, start) else calls

    def _read_call(self, text: str, start: int, *, is_nested: bool) -> Call | None:
        values: dict[str, Any] = {}
        while True:
            start = _behind_space(text, start)
            if (closing := self.closing.match(text, start)) is not None:
                return closing, values
            if (head := self.head.match(text, start)) is None or head["key"] in values:
                return None
            tail = (self._balanced_tail if is_nested else self._plain_tail)(text, head.end())
            if tail is None:
                return None
            value = text[head.end() : tail.start()]
            try:
                values[head["key"]] = json.loads(value) if head.groupdict().get(JSON) else value
            except (ValueError, RecursionError):
                return None
            start = tail.end()

    def _balanced_tail(self, text: str, start: int) -> Any:
        """The end of a value, within which each beginning of a value has its end."""
        depth, heads = 1, self.head.finditer(text, start)
        head = next(heads, None)
        for tail in self.tail.finditer(text, start):
            while head is not None and head.start() < tail.start():
                depth, head = depth + 1, next(heads, None)
            depth -= 1
            if not depth:
                return tail
        return None

    def _plain_tail(self, text: str, start: int) -> Any:
        """The first end of a value behind which the format goes on; None if it seems to be forgotten before."""
        for tail in self.tail.finditer(text, start):
            behind = _behind_space(text, tail.end())
            if self.head.match(text, behind) or self.closing.match(text, behind):
                value = text[start : tail.start()]
                is_forgotten = any(value[: head.start()].endswith("\n") for head in self.head.finditer(value))
                return None if is_forgotten else tail
        return None


def _behind_space(text: str, start: int) -> int:
    match = SPACE.match(text, start)
    assert match is not None
    return match.end()
