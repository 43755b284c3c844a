# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization and stop strings.

The text of a token depends on the tokens before it: a sentencepiece tokenizer drops the space at the beginning, and a
character may spread over several tokens. So a token is decoded after a few others, whose text is cut off.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hf_triton.tasks.text_generation.text_codec import TextCodec

REPLACEMENT: Final = "\ufffd"
NUM_CONTEXT_TOKENS: Final = 4
"""Tokens that are decoded before a new one: an unfinished UTF-8 character has at most three of them."""


class TextStream:
    """The text of one sequence, token by token. Made by `TextCodec.stream`; for one thread at a time.

    Args:
        prompt_ids: The tokens that the text continues.
        stop_strings: The text ends before the first of them; none is empty.
        includes_stop: Whether it ends after it instead.
    """

    def __init__(
        self, codec: TextCodec, prompt_ids: list[int], stop_strings: tuple[str, ...], *, includes_stop: bool
    ) -> None:
        self._detokenizer = _Detokenizer(codec, prompt_ids)
        self._stops = _StopStringFinder(stop_strings, includes_stop=includes_stop)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return bool(self._stops.found)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty: none did."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty if it depends on later tokens."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()


class MarkedTextStream(TextStream):
    """A text stream that also keeps the text with `markers` in it, some special tokens by id and their text."""

    def __init__(
        self,
        codec: TextCodec,
        prompt_ids: list[int],
        stop_strings: tuple[str, ...],
        *,
        includes_stop: bool,
        markers: Mapping[int, str],
    ) -> None:
        super().__init__(codec, prompt_ids, stop_strings, includes_stop=includes_stop)
        self._markers = markers
        self._waiting = deque[tuple[int, str]]()  # markers behind text that is held back, by where they stand in it
        self._num_emitted = 0
        self._marked = ""

    def push(self, token_id: int) -> str:
        """The text that this token completes, without markers."""
        if (marker := self._markers.get(token_id)) is not None and not self.is_stopped:
            self._waiting.append((self._num_emitted + self._stops.num_held, marker))
        return self._mark(super().push(token_id))

    def finish(self) -> str:
        """The rest of the text, after the last token, without markers."""
        return self._mark(super().finish())

    def take_marked(self) -> str:
        """The text with markers since the last call."""
        marked, self._marked = self._marked, ""
        return marked

    def _mark(self, text: str) -> str:
        start = 0
        while self._waiting and self._waiting[0][0] <= self._num_emitted + len(text):
            end, marker = self._waiting.popleft()
            end -= self._num_emitted
            self._marked += text[start:end] + marker
            start = end
        self._marked += text[start:]
        self._num_emitted += len(text)
        return text


class _Detokenizer:
    """Turns tokens into text, holding back unfinished characters."""

    def __init__(self, codec: TextCodec, prompt_ids: list[int]) -> None:
        self._codec = codec
        self._context = codec.context(prompt_ids)
        self._num_used = 0  # characters at the end of the context's text that were held back
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._codec.is_silent(token_id):
            return ""
        byte = self._codec.byte_of.get(token_id)
        if byte is None:
            return self._utf8.decode(b"", final=True) + self._decode_after_context(token_id)
        # sentencepiece's decoders spoil a whole run of byte tokens if one character in it is incomplete
        text = self._held() + self._utf8.decode(bytes([byte]))
        self._context, self._num_used = [*self._context, token_id][-NUM_CONTEXT_TOKENS:], 0
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True) + self._held()

    def _held(self) -> str:
        return self._codec.decode(self._context)[-self._num_used :] if self._num_used else ""

    def _decode_after_context(self, token_id: int) -> str:
        window = [*self._context, token_id]
        before, text = self._codec.decode(self._context), self._codec.decode(window)
        num_common = _common_length(before, text)
        end = num_common if self._codec.revises else len(text)
        if text.endswith(REPLACEMENT, 0, end):
            end -= 1  # perhaps the beginning of a character
        start = min(len(before) - self._num_used, num_common)
        self._context, self._num_used = window[-NUM_CONTEXT_TOKENS:], len(text) - max(start, end)
        return text[start:end]


def up_to_stop(text: str, stop_strings: tuple[str, ...], *, includes_stop: bool) -> tuple[str, str]:
    """A string up to the first of the stop strings, none of which is empty; and that one, empty if there is none."""
    start = min((start for stop in stop_strings if (start := text.find(stop)) >= 0), default=None)
    if start is None:
        return text, ""
    end = _stop_end(text, start, stop_strings)
    return text[: end if includes_stop else start], text[start:end]


def _stop_end(text: str, start: int, stop_strings: tuple[str, ...]) -> int:
    """The end of the shortest stop string at `start`."""
    return start + min(len(stop) for stop in stop_strings if text.startswith(stop, start))


class _StopStringFinder:
    """Passes a completion on up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stop_strings: tuple[str, ...], *, includes_stop: bool) -> None:
        self._stops = stop_strings
        self._includes_stop = includes_stop
        self._longest = max(map(len, stop_strings), default=0)
        self._held = ""
        self.found = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end = next((start for start in range(len(text)) if self._may_stop_at(text, start)), len(text))
        if text.startswith(self._stops, end):
            self._held = ""
            return self._up_to(text, end)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The text held back, up to a stop string within it."""
        text, self._held = self._held, ""
        for start in range(len(text)):
            if text.startswith(self._stops, start):
                return self._up_to(text, start)
        return text

    def _up_to(self, text: str, start: int) -> str:
        """Note the stop string at `start`. Returns the text with or without it."""
        end = _stop_end(text, start, self._stops)
        self.found = text[start:end]
        return text[: end if self._includes_stop else start]

    def _may_stop_at(self, text: str, start: int) -> bool:
        if text.startswith(self._stops, start):
            return True
        if len(text) - start >= self._longest:
            return False
        tail = text[start:]
        return any(stop.startswith(tail) for stop in self._stops)


def _common_length(first: str, second: str) -> int:
    """The length of the common beginning of two strings."""
    if second.startswith(first):
        return len(first)
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second)
    )
