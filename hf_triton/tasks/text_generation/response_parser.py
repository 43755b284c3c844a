# SPDX-License-Identifier: Apache-2.0
"""Reads messages by a response template, with transformers' own response parser. Knows no tokens and no files.

transformers' parser raises an exception if a tool call is malformed, drops what opens no region, and keeps the whole
text. Here both become content, and only what is still needed is kept. And the first closing tag ends a call there, even
within an argument; here it is the first behind the call's value (JSON, a dialect of it, a list of calls in Python), and
between tags, see `tag_calls`. What those parsers do not read of their syntax, `value_syntax` writes for them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import regex  # type: ignore[import-untyped]

from hf_triton.errors import where
from hf_triton.tasks.text_generation.message import JsonDepth, MessageReader, calls_of
from hf_triton.tasks.text_generation.tag_calls import Call
from hf_triton.tasks.text_generation.value_syntax import PYTHON, depth_of, finite, plain_text, read_python

logger = logging.getLogger(__name__)

TOOL_CALLS: Final = "tool_calls"
CALL_TAGS: Final = "call_tags"
"""The `content_args` of fields that `CallTags` read: their text is the JSON of what these find."""
REASONING: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
"""The names that response templates have for reasoning."""
MAX_PIECE: Final = 256
"""Characters that are parsed at once: patterns that begin with white space take quadratic time."""
MAX_SPACE: Final = 1024
"""Characters that a run of white space keeps: a model may write nothing else until its tokens are used up."""
MAX_BROKEN: Final = 16
"""Values of a completion that never end: each is read up to the end of the text."""
MAX_SEARCH_S: Final = 3
"""CPU time, of all threads of the process, that one search for a pattern of the template may take."""
NUM_KEPT: Final = 256
"""Characters before the current one that the patterns of a template may look back to."""


@cache
def _parser_class() -> Any:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_parser import _schema_types

    class LenientParser(ResponseParser):
        """A response parser that goes on after a malformed region, and forgets what it has read.

        The events of a region that ends have its `raw` text; `region_malformed` takes the place of `region_close`.
        """

        _opened_at = 0
        _num_prefix = 0
        _depth: JsonDepth | None = None  # of the region's value, which has not ended yet
        _num_broken = 0
        _is_cut = False
        _is_unclosed = False
        _calls: Mapping[int, Call] = MappingProxyType({})  # in tags

        def _consume_prefix(self, prefix: str) -> None:
            super()._consume_prefix(prefix)
            self._num_prefix = len(self._buffer)

        def read(self, text: str, events: list[dict[str, Any]], *, is_last: bool = False, is_cut: bool = False) -> None:
            """Add the events of a piece. Unlike `finalize`, without a check for fields that are missing."""
            self._buffer += text
            self._is_cut = is_cut
            if is_cut:
                self._drop_cut_tag()
            self._process(events, eos=is_last)

        def _drop_cut_tag(self) -> None:
            """Forget the beginning of a tag of reasoning, of a header, or of what closes a text, at the very end."""
            names = {*REASONING, self._current}
            watch = [(kind, field) for kind, field in self._watchlist() if field.name in names or self._current is None]
            is_in_text = self._current != self._implicit_name and not self._raw_field()
            if is_in_text or self._current in REASONING or not self._opened:
                self._buffer = self._buffer[: self._scan(watch, eos=False)[1]]

        def unread(self) -> str:
            """The text of a completion that no event has."""
            start = self._opened_at if self._raw_field() else self._pos
            return self._buffer[max(start, self._num_prefix) :]

        def forget(self) -> None:
            """Drop text that no pattern needs any more."""
            if not self._raw_field() and (num_dropped := self._pos - NUM_KEPT) > NUM_KEPT:
                self._buffer = self._buffer[num_dropped:]
                self._pos -= num_dropped
                self._opened_at -= num_dropped
                self._num_prefix = max(self._num_prefix - num_dropped, 0)

        def _raw_field(self) -> Any:
            """The current field if its text is a value that is read as a whole; else None."""
            field = None if self._current is None else self._spec.fields[self._current]
            return None if field is None or field.content == "text" else field

        def _scan(self, watch: Any, eos: bool) -> Any:
            field = self._raw_field()
            if field is not None and CALL_TAGS in field.content_args:
                best, hold_start = (self._close_tags(field), len(self._buffer)) if eos else (None, self._pos)
            elif field is not None and self._is_in_value(field):
                best, hold_start = (self._close_broken_value(field), len(self._buffer)) if eos else (None, self._pos)
            else:
                best, hold_start = super()._scan(watch, eos)
            self._is_unclosed = eos and best is None
            return best, hold_start

        def _close_tags(self, field: Any) -> Any:
            """The end of a call in tags, whose values become the region's text."""
            if self._pos not in self._calls:
                self._calls = field.content_args[CALL_TAGS].calls(self._buffer, self._pos)
            if self._pos not in self._calls:
                return None
            closing, values = self._calls[self._pos]
            self._body, self._pos = json.dumps(values), closing.start()
            return "close", field, closing

        def _is_in_value(self, field: Any) -> bool:
            """Whether an object or array has begun and not ended; one that has ended becomes the region's text."""
            if (
                self._depth is None
                and not self._body.strip()
                and self._buffer[self._pos :].lstrip().startswith(("{", "["))
            ):
                self._depth = depth_of(field)
            if self._depth is None:
                return False
            end = self._depth.end_of(self._buffer, self._pos)
            if end is None:
                return True
            self._body, self._pos, self._depth = self._body + self._buffer[self._pos : end], end, None
            return False

        def _close_broken_value(self, field: Any) -> Any:
            """The first closing tag that is not within a string of a value that never ends; `MAX_BROKEN` values may."""
            self._num_broken += 1
            if self._num_broken > MAX_BROKEN:
                raise ValueError(f"more than {MAX_BROKEN} values never end")
            depth, start = depth_of(field) or JsonDepth(), self._pos
            for match in () if field.close_re is None else field.close_re.finditer(self._buffer, start):
                for letter in self._buffer[start : match.start()]:
                    depth.read(letter)
                if not depth.is_in_string:
                    return "close", field, match
                start = match.start()
            return None

        def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
            if self._current is None and text:  # before a region, in a template whose content has an opening
                events.append({"type": "region_chunk", "field": "content", "text": text, "dirty": False})
            super()._accumulate(events, text)
            if self._current is not None and not self._raw_field():
                self._body = ""  # its events have it

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            self._opened_at, self._depth = m.start(), None
            super()._open_explicit(events, field, m)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            name, num_events = self._current, len(events)
            raw = self._buffer[max(self._opened_at, 0) : self._pos]
            try:
                self._check_call()
                super()._close_current(events)
            except TimeoutError:
                raise
            except Exception:  # a content parser's, of any kind
                events.append({"type": "region_malformed", "field": name})
                self._reset_to_implicit()
            for event in events[num_events:]:
                event["raw"] = raw

        def _check_call(self) -> None:
            """Let a named call without a text have no arguments.

            Raises:
                ValueError: The region may be a part of a call.
            """
            field = self._raw_field()
            if field is None:
                return
            if self._depth is not None:
                raise ValueError("a value that never ends")  # parsers take quadratic time to find it
            self._try_tags(field)
            if field.name != TOOL_CALLS:
                return
            has_arguments = self._body.strip() not in ("", "null")
            if self._is_unclosed and (field.content not in ("json", PYTHON) or CALL_TAGS in field.content_args):
                raise ValueError("no closing tag")
            self._body = plain_text(field, self._body)
            if field.content == "json" and not has_arguments and "name" in self._captures:
                if self._is_unclosed and self._is_cut:
                    raise ValueError("no arguments yet")
                self._body = "{}"

        def _coerce_tool_calls(self, value: Any) -> Any:
            """Read objects and arrays among texts as Python too: Seed-OSS's chat template writes them so."""
            value = super()._coerce_tool_calls(value)
            function = value.get("function") if isinstance(value, dict) else None
            if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), dict):
                for key, schema in (self._tool_params.get(str(function.get("name"))) or {}).items():
                    is_text = "string" in (types := _schema_types(schema)) or not {"object", "array"} & {*types}
                    if not is_text and isinstance(text := arguments.get(key), str):
                        arguments[key] = read_python(text)
            return value

        def _try_tags(self, field: Any) -> None:
            """Search a region's tags with a limit of time, which the content parser does not have.

            Raises:
                ValueError: There is text between them, which would be lost.
                TimeoutError: The search takes too long.
            """
            if pattern := field.content_args.get("tag_pattern"):
                rest = regex.sub(pattern, "", self._body, flags=regex.DOTALL, timeout=MAX_SEARCH_S)
                if rest.strip():
                    raise ValueError("text between tags")

    return LenientParser


class TemplateReader(MessageReader):
    """Reads a completion by a response template.

    Content is the completion's text but for the regions of the template, and for white space between a region and the
    beginning or the end of the message.

    Args:
        template: transformers' `ResponseTemplate`.
        prefix: The end of the prompt that is a part of the message, such as `<think>`.
        tools: The functions of the request, whose schemas tell the types of arguments.
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
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._parser: Any = _parser_of(template, prefix, tools)
        before = self._parser.initial_events
        names = {event["field"] for event in before if event["type"] == "region_chunk" and event["text"].strip()}
        self._has_regions = any(event["field"] != "content" for event in before)
        self._has_content, self._has_reasoning = "content" in names, bool(names & REASONING)
        self._is_behind_region = False
        self._num_space = 0  # at the end of what was read
        self._content_space = self._reasoning_space = ""  # held back

    def feed(self, text: str) -> None:
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
            self._parser.read(text, events, is_last=is_last, is_cut=is_cut)
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
            calls = calls_of(value if "Infinity" in raw else _finite(value), self._names)
            for name, arguments in calls:
                if name not in self._custom_names and not isinstance(json.loads(arguments), dict):
                    raise ValueError("arguments are an object")
        except (ValueError, RecursionError):
            self._add_content(raw)
            return
        for call in calls:
            if self._is_parallel or not self._num_calls:
                self._add_call(*call)


def _finite(value: Any) -> Any:
    """A value of JSON with numbers that are beyond those of a float (1e999) as the largest one."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return {name: _finite(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _parser_of(template: Any, prefix: str, tools: list[dict[str, Any]]) -> Any:
    """A parser behind a prompt; one that the prompt's end makes fail starts anew."""
    try:
        return _parser_class()(template, prefix=prefix, tools=tools)
    except Exception as error:
        logger.warning("the response template fails for the end of a prompt, which it ignores: %s", where(error))
        return _parser_class()(template, prefix="", tools=tools)
