# SPDX-License-Identifier: Apache-2.0
"""ThinkingConstraint: leaves a model's thinking free, bounds its length, and constrains the answer behind it.

The completion is in one of four phases. At the start the model writes the opening tag or the answer, whichever it
takes; a prompt that ends with an open block begins in `thinking`. There all tokens are allowed but those that end the
sequence, and those that spell the closing tag and a part of the answer at once. When the budget is used up, the closing
tag is forced, token by token. Behind it a few tokens of white space are allowed, and then the answer's own constraint.
Tags are found in the bytes of the tokens: one token, several, or other spellings of the same text.

Some models write a lead in front of the answer (gpt-oss names a channel). It is forced behind the closing tag; at the
start the model writes the opening tag, or the lead without what the prompt has of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

import numpy as np

from hf_triton.sampling.types import Bits, Constraint, bits_of

SPACE: Final = b" \t\r\n"
MAX_SPACES: Final = 4
"""Tokens of white space between the closing tag and the answer."""


class TagTokens:
    """The tokens that may spell a pair of tags.

    Args:
        lead: What comes in front of the answer; may be empty.
        texts: The bytes of each token, by id; empty for those without text.
        closing_ids: Tokens whose bytes end with `closing`.
        lead_ids: Tokens that spell `lead`.
        size: Bits of a bitmask.
    """

    def __init__(
        self,
        opening: bytes,
        closing: bytes,
        lead: bytes,
        texts: Sequence[bytes],
        closing_ids: Sequence[int],
        lead_ids: Sequence[int],
        size: int,
    ) -> None:
        self.opening, self.closing, self.lead = opening, closing, lead
        self.texts = texts
        self.size = size
        self.closing_ids, self.lead_ids = closing_ids, lead_ids
        self.spaces = bits_of((token_id for token_id, text in enumerate(texts) if text and not text.strip(SPACE)), size)
        self.openers = self._find_openers(size)
        """The tokens that go on with `opening`, by the number of its bytes that are written."""
        self.leaders = self._find_leaders(size)
        """The tokens that go on with `lead`, likewise."""
        self.breakers = self._find_breakers(size)
        """The tokens that end `closing` and go on with other text, likewise."""

    def num_closing(self, tail: bytes) -> int:
        """How many bytes of `closing` a text ends with."""
        return next(num for num in range(len(self.closing) - 1, -1, -1) if tail.endswith(self.closing[:num]))

    def _find_openers(self, size: int) -> list[Bits]:
        rests = [self.opening[start:] for start in range(len(self.opening))]
        candidates = {
            token_id: text
            for token_id, text in enumerate(self.texts)
            if text and (text in self.opening or text.startswith(tuple(rests)))
        }
        return [
            bits_of((token_id for token_id, text in candidates.items() if self._goes_on(rest, text)), size)
            for rest in rests
        ]

    def _goes_on(self, rest: bytes, text: bytes) -> bool:
        return rest.startswith(text) or (text.startswith(rest) and self.closing not in text)

    def _find_leaders(self, size: int) -> list[Bits]:
        candidates = {token_id: text for token_id, text in enumerate(self.texts) if text and text in self.lead}
        rests = (self.lead[start:] for start in range(len(self.lead)))
        return [
            bits_of((token_id for token_id, text in candidates.items() if rest.startswith(text)), size)
            for rest in rests
        ]

    def _find_breakers(self, size: int) -> list[Bits]:
        rests = tuple(self.closing[start:] for start in range(len(self.closing)))
        candidates = {
            token_id: text for token_id, text in enumerate(self.texts) if text.startswith(rests) or self.closing in text
        }
        starts = [self.closing[:num] for num in range(len(self.closing))]
        return [
            bits_of(
                (
                    token_id
                    for token_id, text in candidates.items()
                    if (start + text).partition(self.closing)[2].strip(SPACE)
                ),
                size,
            )
            for start in starts
        ]


class ThinkingConstraint:
    """A constraint of one sequence, as `sampling.types.Constraint`.

    Args:
        tags: The tags around thinking.
        text_bits: The tokens that do not end the sequence.
        build_answer: Makes the constraint of the answer; None: any, and the sequence may end anywhere.
        is_open: Whether the prompt ends in the block.
        budget: Tokens of thinking, behind the opening tag; None: no limit.
        num_led: Bytes of the lead that the prompt ends with.
    """

    def __init__(
        self,
        tags: TagTokens,
        text_bits: Bits,
        build_answer: Callable[[], Constraint] | None,
        *,
        is_open: bool,
        budget: int | None,
        num_led: int = 0,
    ) -> None:
        self._tags = tags
        self._text_bits = text_bits
        self._build_answer = build_answer
        self._answer = None if build_answer is None else build_answer()
        self._phase: Literal["start", "thinking", "space", "answer"] = "start"
        self._is_answer = not tags.lead  # at the start: whether the answer may have begun
        self._lead = tags.lead[num_led:]  # of an answer without thinking
        self._beginnings = ((tags.opening, tags.openers), (self._lead, tags.leaders[num_led:]))
        self._tail = b""  # of the text: what may become a tag
        self._num_left = budget
        self._forced: deque[int] = deque()  # tokens of the closing tag and the lead
        self._num_spaces = 0
        if is_open:
            self._think(b"")

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end-of-sequence may follow."""
        is_over = self._phase in ("space", "answer") and not self._forced
        return is_over and self._answer is not None and self._answer.is_complete

    def bitmask(self) -> Bits | None:
        """The tokens that may come next, None for any; raises as `GrammarConstraint.bitmask` does."""
        if self._forced:
            return bits_of([self._forced[0]], self._tags.size)
        if self._answer is None:
            return None
        if self._phase == "thinking":
            return self._text_bits & ~self._tags.breakers[self._tags.num_closing(self._tail)]
        if self._phase == "start":
            tail = self._tail
            going_on = [tokens[len(tail)] for tag, tokens in self._beginnings if tag and tag.startswith(tail)]
            openers: Bits = np.bitwise_or.reduce(going_on) & self._text_bits
            return _either(self._answer.bitmask(), openers) if self._is_answer else openers
        has_space = self._phase == "space" and self._num_spaces < MAX_SPACES
        answer = self._answer.bitmask()
        return _either(answer, self._tags.spaces & self._text_bits) if has_space else answer

    def accept(self, token_id: int) -> None:
        """Advance by one token; raises as `GrammarConstraint.accept` does."""
        texts = self._tags.texts
        text = texts[token_id] if token_id < len(texts) else b""
        is_forced = bool(self._forced)
        if is_forced:
            self._forced.popleft()
        if self._phase == "thinking":
            if self._num_left is not None and not is_forced:
                self._num_left -= 1
            self._read_thought(text)
        elif self._phase == "start":
            self._begin(token_id, text)
        elif self._answer is not None and not is_forced:
            if self._phase == "space" and not text.strip(SPACE) and not _has(self._answer.bitmask(), token_id):
                self._num_spaces += 1
            else:
                self._answer.accept(token_id)
                self._phase = "answer"

    def _begin(self, token_id: int, text: bytes) -> None:
        opening, tail = self._tags.opening, (self._tail + text).lstrip()
        is_tag = tail.startswith(opening) or any(tag.startswith(tail) for tag, _ in self._beginnings)
        if self._answer is not None and self._is_answer:
            if not is_tag or _has(self._answer.bitmask(), token_id):
                self._answer.accept(token_id)
            else:
                self._is_answer = False
        if tail.startswith(opening):
            self._think(tail[len(opening) :])
        elif self._lead and tail == self._lead:
            self._phase = "space"
        elif is_tag:
            self._tail = tail
        else:
            self._phase = "answer"

    def _think(self, text: bytes) -> None:
        """Enter the block; the answer is yet to begin."""
        self._phase, self._tail = "thinking", b""
        if self._build_answer is not None:
            self._answer = self._build_answer()
        self._read_thought(text)

    def _read_thought(self, text: bytes) -> None:
        tail, closing = self._tail + text, self._tags.closing
        if closing in tail:
            self._phase = "space"
            self._forced = deque(() if self._answer is None else self._tags.lead_ids)
            return
        self._tail = tail[max(len(tail) - len(closing) + 1, 0) :]
        if self._num_left == 0 and not self._forced:
            self._forced.extend(self._tags.closing_ids)


def _either(bits: Bits | None, others: Bits) -> Bits | None:
    return None if bits is None else bits | others


def _has(bits: Bits | None, token_id: int) -> bool:
    if bits is None:
        return True
    index = token_id // 8
    return index < len(bits) and bool(bits[index] >> (token_id % 8) & 1)
