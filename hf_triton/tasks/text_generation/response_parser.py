# SPDX-License-Identifier: Apache-2.0
"""Reads messages by a response template, with transformers' own response parser. Knows no tokens and no files.

transformers' parser raises an exception if a tool call is malformed, and keeps the whole text. Here such a call becomes
content, and only what is still needed is kept.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final

import regex  # type: ignore[import-untyped]

from hf_triton.errors import where
from hf_triton.tasks.text_generation.message import MessageReader, calls_of

logger = logging.getLogger(__name__)

TOOL_CALLS: Final = "tool_calls"
REASONING: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
"""The names that response templates have for reasoning."""
MAX_PIECE: Final = 256
"""Characters that are parsed at once: patterns that begin with white space take quadratic time."""
MAX_SPACE: Final = 1024
"""Characters that a run of white space keeps: a model may write nothing else until its tokens are used up."""
MAX_SEARCH_S: Final = 3
"""CPU time, of all threads of the process, that one search for a pattern of the template may take."""
NUM_KEPT: Final = 256
"""Characters before the current one that the patterns of a template may look back to."""


@cache
def _parser_class() -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    class LenientParser(ResponseParser):
        """A response parser that goes on after a malformed region, and forgets what it has read.

        The events of a region that ends have its `raw` text; `region_malformed` takes the place of `region_close`.
        """

        _opened_at = 0
        _num_prefix = 0

        def _consume_prefix(self, prefix: str) -> None:
            super()._consume_prefix(prefix)
            self._num_prefix = len(self._buffer)

        def read(self, text: str, events: list[dict[str, Any]], *, is_last: bool = False) -> None:
            """Add the events of a piece. Unlike `finalize`, without a check for fields that are missing."""
            self._buffer += text
            self._process(events, eos=is_last)

        def drop_cut_tag(self) -> None:
            """Forget the beginning of a tag of reasoning at the end of the text."""
            watch = [(kind, field) for kind, field in self._watchlist() if field.name in REASONING]
            if self._current in REASONING or not self._opened:
                self._buffer = self._buffer[: self._scan(watch, eos=False)[1]]

        def unread(self) -> str:
            """The text of a completion that no event has."""
            is_raw = self._current is not None and not self._is_text(self._current)
            return self._buffer[max(self._opened_at if is_raw else self._pos, self._num_prefix) :]

        def forget(self) -> None:
            """Drop text that no pattern needs any more."""
            is_raw_needed = self._current is not None and not self._is_text(self._current)
            if not is_raw_needed and (num_dropped := self._pos - NUM_KEPT) > NUM_KEPT:
                self._buffer = self._buffer[num_dropped:]
                self._pos -= num_dropped
                self._opened_at -= num_dropped
                self._num_prefix = max(self._num_prefix - num_dropped, 0)

        def _is_text(self, name: str) -> bool:
            return bool(self._spec.fields[name].content == "text")

        def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
            super()._accumulate(events, text)
            if self._current is not None and self._is_text(self._current):
                self._body = ""  # its events have it

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            self._opened_at = m.start()
            super()._open_explicit(events, field, m)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            name, num_events = self._current, len(events)
            raw = self._buffer[max(self._opened_at, 0) : self._pos]
            try:
                self._try_tags()
                super()._close_current(events)
            except TimeoutError:
                raise
            except Exception:  # a content parser's, of any kind
                events.append({"type": "region_malformed", "field": name})
                self._reset_to_implicit()
            for event in events[num_events:]:
                event["raw"] = raw

        def _try_tags(self) -> None:
            """Search a region's tags with a limit of time, which the content parser does not have.

            Raises:
                TimeoutError: The search takes too long.
            """
            field = self._spec.fields.get(self._current or "")
            if field is not None and (pattern := field.content_args.get("tag_pattern")):
                for _ in regex.finditer(pattern, self._body, regex.DOTALL, timeout=MAX_SEARCH_S):
                    pass

    return LenientParser


class TemplateReader(MessageReader):
    """Reads a completion by a response template.

    Content is the completion's text but for the regions of the template, and for white space between a region and the
    beginning or the end of the message.

    Args:
        template: transformers' `ResponseTemplate`.
        prefix: The end of the prompt that is a part of the message, such as `<think>`.
        tools: The functions of the request, whose schemas tell the types of arguments.
        is_parallel: Whether the message may have more than one tool call.
        options: Those of `MessageReader`.
    """

    def __init__(
        self,
        template: Any,
        prefix: str,
        tools: list[dict[str, Any]],
        *,
        is_parallel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._is_parallel = is_parallel
        self._parser: Any = _parser_of(template, prefix, tools)
        before = self._parser.initial_events
        names = {event["field"] for event in before if event["type"] == "region_chunk" and event["text"].strip()}
        self._has_regions = any(event["field"] != "content" for event in before)
        self._has_content, self._has_reasoning = "content" in names, bool(names & REASONING)
        self._is_behind_region = False
        self._num_space = 0  # at the end of what was read
        self._content_space = self._reasoning_space = ""  # held back

    def feed(self, text: str) -> None:
        """Read a piece of the completion."""
        for start in range(0, len(text), MAX_PIECE):
            self._feed_piece(self._cut_space(text[start : start + MAX_PIECE]))

    def _cut_space(self, text: str) -> str:
        """A piece without what makes a run of white space longer than `MAX_SPACE`."""
        rest = text.lstrip()
        space = text[: len(text) - len(rest)][: MAX_SPACE - self._num_space]
        self._num_space = len(rest) - len(rest.rstrip()) if rest else self._num_space + len(space)
        return space + rest

    def _feed_piece(self, text: str) -> None:
        if self._parser is None:
            self._add_content(text)
        else:
            self._read(text)

    def finish(self, *, is_cut: bool = False) -> None:
        """Read what was held back; the completion has ended."""
        if self._parser is not None:
            self._read("", is_last=True, is_cut=is_cut)
        if not self._is_behind_region:
            self._content += self._content_space

    def _read(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> None:
        events: list[dict[str, Any]] = []
        try:
            if is_cut:
                self._parser.drop_cut_tag()
            self._parser.read(text, events, is_last=is_last)
        except Exception as error:
            logger.warning("the response template fails, so the rest of a completion is content: %s", where(error))
            rest, self._parser = self._parser.unread(), None
            self._take_events(events)
            self._add_content(rest)
        else:
            self._take_events(events)
            self._parser.forget()

    def _take_events(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_chunk" and not event["dirty"]:
                if name == "content":
                    self._add_content(event["text"])
                elif name in REASONING:
                    self._add_reasoning(event["text"])
            elif name == "content":
                continue
            elif kind == "region_malformed":
                self._add_content(event["raw"])
            elif kind == "region_open":
                self._open(name)
            elif kind == "region_close" and name == TOOL_CALLS:
                self._add_calls(event["value"], event["raw"])

    def _open(self, name: str) -> None:
        self._has_regions = self._is_behind_region = True
        if name in REASONING:
            self._reasoning_space = "\n" if self._has_reasoning else ""

    def _add_content(self, text: str) -> None:
        text = self._content_space + text
        if self._has_regions and not self._has_content:
            text = text.lstrip()
        new = text.rstrip()
        self._content_space = text[len(new) :]
        if new:
            self._content += new
            self._has_content, self._is_behind_region = True, False

    def _add_reasoning(self, text: str) -> None:
        text = self._reasoning_space + text
        if not self._has_reasoning:
            text = text.lstrip()
        new = text.rstrip()
        self._reasoning_space = text[len(new) :]
        if new:
            self._reasoning += new
            self._has_reasoning = True

    def _add_calls(self, value: object, raw: str) -> None:
        try:
            calls = calls_of(value)
        except (ValueError, RecursionError):
            self._add_content(raw)
            return
        for call in calls:
            if self._is_parallel or not self._num_calls:
                self._add_call(*call)


def _parser_of(template: Any, prefix: str, tools: list[dict[str, Any]]) -> Any:
    """A parser behind a prompt; one that the prompt's end makes fail starts anew."""
    try:
        return _parser_class()(template, prefix=prefix, tools=tools)
    except Exception as error:
        logger.warning("the response template fails for the end of a prompt, which it ignores: %s", where(error))
        return _parser_class()(template, prefix="", tools=tools)
