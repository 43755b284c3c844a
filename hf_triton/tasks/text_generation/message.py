# SPDX-License-Identifier: Apache-2.0
"""Reads a completion's text as the assistant's message in OpenAI's form, whole or in deltas. Knows no tokens.

A `MessageReader` takes the text in pieces of any size; the pieces do not change the message.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hf_triton.protocol.custom_tools import CUSTOM, INPUT, input_of
from hf_triton.protocol.thinking_switches import Thinking

REASONING_CONTENT: Final = "reasoning_content"
BARE_CALL: Final = frozenset({"name", "id", "type"})
"""What a call without arguments may have: other objects with a name are answers."""
MAX_QUOTE: Final = 32
"""Characters of what a string begins or ends with."""
ALPHANUMERIC: Final = string.ascii_letters + string.digits


def new_call_id(*, is_short: bool = False) -> str:
    """A random id for a tool call; a short one has the 9 letters and digits that Mistral's chat templates demand."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9)) if is_short else f"call_{secrets.token_hex(12)}"


class MessageReader:
    """Reads one completion. As it is, everything is content.

    Args:
        has_short_ids: Whether the ids of tool calls are short ones, see `new_call_id`.
        call_id: The form of the ids if they are no random ones, with `{name}` and `{index}`.
        num_past_calls: The tool calls of the conversation so far, for the first index.
        custom_names: Names of custom tools, whose calls have a text in place of arguments.
    """

    def __init__(
        self,
        *,
        has_short_ids: bool = False,
        call_id: str = "",
        num_past_calls: int = 0,
        custom_names: frozenset[str] = frozenset(),
    ) -> None:
        self._content = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._num_calls = 0
        self._has_short_ids = has_short_ids
        self._call_id = call_id
        self._num_past_calls = num_past_calls
        self._custom_names = custom_names

    def feed(self, text: str) -> None:
        """Read a piece of the completion."""
        self._content += text

    def finish(self, *, is_cut: bool = False) -> None:
        """Read what was held back at the end; if it is cut, the beginning of a tag of reasoning is no text."""

    def take(self) -> dict[str, Any]:
        """What was read since the last call, as the delta of a stream."""
        delta: dict[str, Any] = {}
        if self._reasoning:
            delta[REASONING_CONTENT] = self._reasoning
        if self._content:
            delta["content"] = self._content
        if self._calls:
            delta["tool_calls"] = self._calls
        self._content, self._reasoning, self._calls = "", "", []
        return delta

    def message(self) -> dict[str, Any]:
        """The whole message, of a completion of which nothing was taken."""
        delta = self.take()
        message = {"role": "assistant", "content": delta.get("content", None if delta else "")}
        if REASONING_CONTENT in delta:
            message[REASONING_CONTENT] = delta[REASONING_CONTENT]
        if "tool_calls" in delta:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in delta["tool_calls"]
            ]
        return message

    def _add_call(self, name: str, arguments: str) -> None:
        if name in self._custom_names:
            self._add_custom_call(name, input_of(arguments))
        else:
            self._start_call("function", {"name": name, "arguments": arguments})

    def _add_custom_call(self, name: str, text: str) -> None:
        self._start_call(CUSTOM, {"name": name, INPUT: text})

    def _start_call(self, kind: str, tool: dict[str, str]) -> None:
        index = str(self._num_past_calls + self._num_calls)
        call_id = self._call_id.replace("{name}", tool["name"]).replace("{index}", index)
        call_id = call_id or new_call_id(is_short=self._has_short_ids)
        self._calls.append({"index": self._num_calls, "id": call_id, "type": kind, kind: tool})
        self._num_calls += 1


class ThinkingReader(MessageReader):
    """Reads thinking as reasoning, and what follows by another reader."""

    def __init__(self, build_answer: Callable[[], MessageReader], thinking: Thinking) -> None:
        super().__init__()
        self._answer = build_answer()
        self._thinking = thinking
        self._lead = thinking.lead
        self._unread = ""
        self._has_thought = False
        self._read: Callable[[str], None] = self._read_thought if thinking.is_open else self._read_start

    def feed(self, text: str) -> None:
        text, self._unread = self._unread + text, ""
        self._read(text)

    def finish(self, *, is_cut: bool = False) -> None:
        """Read what was held back; the completion has ended."""
        if self._read == self._read_thought and not is_cut:
            self._reasoning += self._unread.rstrip()
        elif self._read == self._read_start and not is_cut:
            self._answer.feed(self._unread)
        self._unread = ""
        self._answer.finish(is_cut=is_cut)

    def take(self) -> dict[str, Any]:
        """What was read since the last call, as the delta of a stream."""
        return super().take() | self._answer.take()

    def _read_start(self, text: str) -> None:
        opening, begun = self._thinking.opening, text.lstrip()
        lead = self._lead[self._thinking.num_led :]
        if begun.startswith(opening):
            self._go_on(self._read_thought, begun[len(opening) :])
        elif lead and begun.startswith(lead):
            self._lead = ""
            self._go_on(self._read_space, begun[len(lead) :])
        elif opening.startswith(begun) or lead.startswith(begun):
            self._unread = text
        else:
            self._go_on(self._answer.feed, text)

    def _read_thought(self, text: str) -> None:
        closing = self._thinking.closing
        if not self._has_thought:
            text = text.lstrip()
        thought, tag, rest = text.partition(closing)
        thought = (thought if tag else _without_start_of(closing, thought)).rstrip()
        self._reasoning += thought
        self._has_thought |= bool(thought)
        if tag:
            self._go_on(self._read_space, rest)
        else:
            self._unread = text[len(thought) :]

    def _read_space(self, text: str) -> None:
        """Read what stands between thinking and the answer: white space, and the lead."""
        text = text.lstrip()
        answer = text.removeprefix(self._lead).lstrip()
        if answer and not self._lead.startswith(text):
            self._go_on(self._answer.feed, answer)
        else:
            self._unread = text

    def _go_on(self, read: Callable[[str], None], text: str) -> None:
        """Read the rest in another way."""
        self._read = read
        read(text)


def _without_start_of(tag: str, text: str) -> str:
    """A text without what may become a tag at its end."""
    num = next(num for num in range(len(tag) - 1, -1, -1) if text.endswith(tag[:num]))
    return text[: len(text) - num]


class NamedCallReader(MessageReader):
    """Reads one call, of a tool that the request names: its arguments, or the text of a custom tool."""

    def __init__(self, name: str, *, is_input: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._name = name
        self._is_input = is_input
        self._arguments = ""  # of a custom tool, read when they are complete
        self._is_whole = name in self._custom_names and not is_input

    def feed(self, text: str) -> None:
        if not text:
            return
        kind, field = (CUSTOM, INPUT) if self._is_input else ("function", "arguments")
        if self._is_whole:
            self._arguments += text
        elif self._calls:
            self._calls[0][kind][field] += text
        elif self._num_calls:
            self._calls.append({"index": 0, kind: {field: text}})
        else:
            self._start_call(kind, {"name": self._name, field: text})

    def finish(self, *, is_cut: bool = False) -> None:
        """Read arguments that were held back."""
        if self._arguments:
            self._add_call(self._name, self._arguments)
            self._arguments = ""


class JsonDepth:
    """Finds the end of an object or array of JSON, or of a like syntax, read piece by piece.

    Args:
        quotes: What strings begin and end with.
        escape: The letter that escapes the next one in a string; an empty string if none does.
    """

    def __init__(self, quotes: Sequence[tuple[str, str]] = (('"', '"'),), escape: str = "\\") -> None:
        self.depth = 0
        self._num_read = 0
        self._quotes = quotes
        self._escape = escape
        self._is_escaped = False
        self._end_quote = ""  # of the string that has begun
        self._tail = ""  # the last letters, which may be a quote

    @property
    def is_in_string(self) -> bool:
        """Whether a string has begun and not ended."""
        return bool(self._end_quote)

    def read(self, letter: str) -> None:
        """Read a letter; `depth` is that behind it."""
        self._tail = self._tail[-MAX_QUOTE + 1 :] + letter
        if self._is_escaped:
            self._is_escaped = False
        elif self._end_quote:
            self._is_escaped = letter == self._escape
            if self._tail.endswith(self._end_quote):
                self._end_quote = self._tail = ""
        elif end_quotes := [end for start, end in self._quotes if self._tail.endswith(start)]:
            self._end_quote, self._tail = end_quotes[0], ""
        elif letter in "[{":
            self.depth += 1
        elif letter in "]}":
            self.depth -= 1

    def end_of(self, text: str, start: int) -> int | None:
        """The end of a value that begins, or white space before it, at `start` of a text that grows; None: none yet."""
        for index in range(start + self._num_read, len(text)):
            self.read(text[index])
            if self.depth == 0 and text[index] in "]}":
                return index + 1
        self._num_read = len(text) - start
        return None


class CallArrayReader(MessageReader):
    """Reads a JSON array of calls, `[{"name": ..., "arguments": {...}}]`; each is read when it is complete."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unread = ""  # of an object that has begun
        self._json = JsonDepth()

    def feed(self, text: str) -> None:
        start = 0
        for index, letter in enumerate(text):
            before = self._json.depth
            self._json.read(letter)
            if before == 1 and self._json.depth == 2:
                start = index
            elif before == 2 and self._json.depth == 1:
                self._read(self._unread + text[start : index + 1])
                self._unread = ""
        if self._json.depth > 1:
            self._unread += text[start:]

    def finish(self, *, is_cut: bool = False) -> None:
        """Give a call that is cut off as content."""
        self._content += self._unread
        self._unread = ""

    def _read(self, text: str) -> None:
        try:
            [call] = calls_of(json.loads(text))
        except (ValueError, RecursionError):
            self._content += text
        else:
            self._add_call(*call)


class RequiredCallReader(CallArrayReader):
    """Reads an array of calls, or the name of a custom tool, a line end, and its text."""

    def __init__(self, input_names: frozenset[str], **options: Any) -> None:
        super().__init__(**options)
        self._starts = tuple(f"{name}\n" for name in input_names)
        self._start: str | None = ""  # what may become the name; None: it is read, or there is none
        self._is_input = False

    def feed(self, text: str) -> None:
        if self._start is not None:
            text = self._start + text
            self._start = None
            name, line_end, rest = text.partition("\n")
            self._is_input = name + line_end in self._starts
            if self._is_input:
                self._add_custom_call(name, rest)
                return
            if any(start.startswith(text) for start in self._starts):
                self._start = text
                return
        if not self._is_input:
            super().feed(text)
        elif self._calls:
            self._calls[0][CUSTOM][INPUT] += text
        elif text:
            self._calls.append({"index": 0, CUSTOM: {INPUT: text}})

    def finish(self, *, is_cut: bool = False) -> None:
        """Give what is cut off before a call as content."""
        self._content += self._start or ""
        super().finish()


def calls_of(value: object, names: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """The names and arguments (JSON text) of the tool calls that a model has written.

    Args:
        value: `{"name": ..., "arguments": ...}`, or Llama's `parameters`; also as the `function` of an object, and
            arrays of any of them. Arguments are an object, or JSON text; null is none.
        names: Tools whose calls may lack them.

    Raises:
        ValueError: It is something else, or JSON cannot hold it.
    """
    if isinstance(value, list):
        return [call for entry in value for call in calls_of(entry, names)]
    if isinstance(value, Mapping) and isinstance(value.get("function"), list | dict):
        return calls_of(value["function"], names)
    name, arguments = None, None
    if isinstance(value, Mapping):
        name = value.get("name")
        key = next((key for key in ("arguments", "parameters") if key in value), None)
        is_bare = key is None and isinstance(name, str) and name.strip() in names and value.keys() <= BARE_CALL
        arguments = {} if is_bare else value[key] if key else None
        if key and (arguments is None or arguments == ""):
            arguments = {}
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict | str):
        raise ValueError("not a tool call")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()  # half a surrogate pair
    return [(name.strip(), arguments)]


@dataclass(frozen=True)
class MessagePlan:
    """How the completions of one prompt become messages."""

    build_reader: Callable[[], MessageReader] = MessageReader
    markers: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the reader has to see, and their text."""
