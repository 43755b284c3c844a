# SPDX-License-Identifier: Apache-2.0
"""How to end a text that follows a grammar: a short sequence of tokens behind which the grammar may end.

llguidance says which tokens may come next, and not how far the end is. So the end is searched for, byte by byte, with
the bytes first that tend to close something (limited discrepancy search, Harvey and Ginsberg 1995): each time that the
search passes over the first byte that would do, it pays one, and the cheapest way is followed first. Short texts of the
grammar's regular expressions come before single bytes. What is found is short, not always the shortest. Before a text's
first token there is time for walks as well, which never turn back, and find an end where the search has too many cheap
ways to go. Knows no model and no requests.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

BRACKETS: Final = b"}])>"
ORDER: Final = BRACKETS + b"\"'`,:;0123456789ntfyxabcdeghijklmopqrsuvwzABCDEFGHIJKLMNOPQRSTUVWXYZ_-.=+*/{[(<"
"""What closes something; then what begins a short value (0, null, true); what opens something or is white comes last.
"""
QUOTE: Final = ord('"')
"""Closes a text of JSON, which brackets do not."""
LETTERS: Final = b"kx"
"""None of them begins a value of JSON: where one may come, anything may."""
ESCAPE: Final = ord("\\")
"""Comes, as the bytes beyond ASCII do, only where nothing else may: what it begins leads back to where one was."""
STRETCH_LENGTHS: Final = (16, 8, 4, 2)
"""Bytes of the tokens that fill a text of a least length."""
MAX_FALLBACKS: Final = 16
"""Tokens tried where no single printable character may come: a tokenizer may have none for those that may."""
MAX_BEGUN: Final = 32
"""Tokens of a text that may be the beginning of a word."""
MAX_TAILS: Final = 32
"""Of a long ending, the longest and the shortest that are tried again: each takes as long as it has tokens."""
MAX_LINEAR: Final = 256
"""Tokens of an ending of which these are tried one after the other, where halving has found none."""
MAX_PLACES: Final = 2048
"""Places that a search keeps, up to 0.2 MB each."""

VISITS_AT_A_TIME: Final = 4
"""Some 0.2 ms."""
LEAST_SLEEP_S: Final = 1e-6
"""Long enough for a thread that waits for the interpreter to take it."""
FIRST_STRETCH: Final = 32
LONGER_STRETCH: Final = 1.25
"""Steps of a walk at random before it begins anew, and how many times as many the next one may have."""

Manner = Literal["first", "turns", "tosses"]

_Tokens = tuple[int, ...]
_Way = tuple[int, _Tokens]
"""The state of a place, and what was tried there."""


@dataclass(frozen=True)
class Effort:
    """How long to search."""

    max_visits: int
    max_time_s: float
    """Of this thread's time on the processor, for the search and for each walk."""
    max_visits_for_less: int = 0
    """To find something shorter than a word that would do."""
    max_visits_walking: int = 0
    """Of each walk. Where many parts cost the search something each (`minLength`), it has too many cheaper ways to
    write the first ones; where a part may come again and again (`(" AND " part)*`), that costs it nothing."""
    lets_others: bool = False
    """Whether other threads have the interpreter meanwhile, as the engine's must: it would wait 5 ms at each of its
    operations."""

    def let_others(self, num_visits: int) -> None:
        """After every few visits, wait until other threads have had the interpreter."""
        if self.lets_others and num_visits % VISITS_AT_A_TIME == 0:
            time.sleep(LEAST_SLEEP_S)


@dataclass(frozen=True)
class Found:
    """What a search has come to."""

    tokens: _Tokens | None
    """Behind which the grammar may end; None: none were found."""
    num_visits: int


class ClosingFinder:
    """Finds tokens that end a text.

    Args:
        tokenizer: llguidance's.
        vocabulary_size: The model's tokens.
        end_ids: The tokens that end a text, which therefore cannot write one.
    """

    def __init__(self, tokenizer: LLTokenizer, vocabulary_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_ids = end_ids
        spelled = {
            token_id: tokenizer.decode_bytes([token_id])
            for token_id in range(min(vocabulary_size, tokenizer.vocab_size))
            if self._can_write(token_id) and not tokenizer.is_special_token(token_id)
        }
        self._by_byte = {text[0]: token_id for token_id, text in reversed(spelled.items()) if len(text) == 1}
        order = dict.fromkeys([*ORDER, *range(32, 127), *b"\n\t"])
        self._single = [(self._by_byte[byte],) for byte in order if byte in self._by_byte and byte != ESCAPE]
        self._quote = [(self._by_byte[byte],) for byte in (QUOTE,) if byte in self._by_byte]
        self._letters = [self._by_byte[byte] for byte in LETTERS if byte in self._by_byte]
        self._brackets = frozenset(self._by_byte[byte] for byte in BRACKETS if byte in self._by_byte)
        self._stretches = _stretches(spelled)

    def find(
        self, matcher: LLMatcher, room: int, effort: Effort, known: Sequence[int] = (), words: Sequence[str] = ()
    ) -> Found:
        """Look for at most `room` tokens behind which the grammar may end.

        Args:
            matcher: The grammar, at the text's present end. It is left as it is.
            room: Tokens.
            effort: How long to search.
            known: What ended the text a token ago: often a part of it does again.
            words: Texts that the grammar may ask for. They are tried at every place, also where the same may come next
                behind all that was tried: `.*done` does not show that it waits for its `done`.
        """
        if matcher.is_accepting():
            return Found((), 0)
        deadline_s = time.thread_time() + effort.max_time_s
        if (rest := _ending_tail(matcher, known, deadline_s)) is not None:
            return Found(rest if len(rest) <= room else None, 0)
        texts = [word.encode(errors="ignore") for word in words]
        best: _Tokens | None = None
        for text in texts:
            rest = _ending_tail(matcher, self._spell(text), deadline_s)
            if rest is not None and len(rest) <= room:
                best, room = rest, len(rest) - 1
        max_visits = effort.max_visits if best is None else effort.max_visits_for_less
        num_visits = 0
        search = _Search(self, matcher, texts)
        while search.heap and num_visits < max_visits and time.thread_time() < deadline_s:
            num_visits += 1
            effort.let_others(num_visits)
            place = search.visit(room)
            if place is None:
                continue
            rest = () if place.matcher.is_accepting() else _ending_tail(place.matcher, known, deadline_s)
            if rest is not None and len(place.tokens) + len(rest) <= room:
                return Found(self._shortened(matcher, place.tokens + rest), num_visits)
        if best is None and effort.max_visits_walking:
            walks = (_Walk(self, matcher, texts, manner) for manner in get_args(Manner))
            best = next((found for walk in walks if (found := walk.end(room, effort)) is not None), None)
        return Found(None if best is None else self._shortened(matcher, best), num_visits)

    def candidates(self, place: _Place, words: list[bytes]) -> Iterator[_Tokens]:
        """What to try at a place of the search, in order; little where all was tried one place before."""
        bits = np.unpackbits(np.frombuffer(place.matcher.compute_bitmask(), np.uint8), bitorder="little")
        words_left = self._spelled(words, place)
        if place.repeats:
            tried = [*self._filling(bits), *words_left, place.tokens[-1:]]
        else:
            tried = [*(self._quote if place.is_text else ()), *words_left, *self._single]
        found = [tokens for tokens in dict.fromkeys(tried) if bits[tokens[0]]]
        if not found:
            found = [(int(token_id),) for token_id in np.flatnonzero(bits)[:MAX_FALLBACKS] if self._can_write(token_id)]
        return iter(found or [(token_id,) for token_id in self.forced(place.matcher)[:1]])

    def _spelled(self, words: list[bytes], place: _Place) -> list[_Tokens]:
        """What is left of each word, where the text ends with its beginning."""
        if not words:
            return []
        text = self._tokenizer.decode_bytes(list(place.tokens[-MAX_BEGUN:]))
        return [tokens for word in words if (tokens := tuple(self._spell(word[_begun(text, word) :])))]

    def _filling(self, bits: npt.NDArray[np.uint8]) -> Iterator[_Tokens]:
        """The longest token for a text that must be longer."""
        return islice(((token_id,) for token_id in self._stretches if bits[token_id]), 1)

    def forced(self, matcher: LLMatcher) -> list[int]:
        """Tokens for the text that must come next; byte by byte where the tokenizer's own cannot be written."""
        return self._spell(matcher.compute_ff_bytes())

    def _spell(self, text: bytes) -> list[int]:
        """Tokens of a text; none where they cannot be written."""
        tokens: list[int] = self._tokenizer.tokenize_bytes(text) if text else []
        if all(map(self._can_write, tokens)):
            return tokens
        return [self._by_byte[byte] for byte in text] if self._by_byte.keys() >= set(text) else []

    def place(self, matcher: LLMatcher, tokens: _Tokens) -> _Place:
        """Where the search has come to with these tokens."""
        mask = matcher.compute_bitmask()
        is_text = any(mask[letter // 8] >> letter % 8 & 1 for letter in self._letters)
        return _Place(matcher, tokens, state=hash(mask), is_text=is_text)

    def behind(self, place: _Place, tokens: _Tokens) -> _Place | None:
        """Where tokens lead to from a place, with those that must follow; None where they may not come."""
        matcher = place.matcher.deep_copy()
        if not matcher.consume_tokens(list(tokens)):
            return None
        closes = len(tokens) == 1 and tokens[0] in self._brackets and not place.is_text
        if not matcher.is_accepting() and (forced := self.forced(matcher)):
            if not matcher.consume_tokens(forced):
                return None
            tokens += tuple(forced)
        reached = self.place(matcher, (*place.tokens, *tokens))
        reached.repeats = reached.state == place.state and not closes
        return None if matcher.is_error() else reached

    def _can_write(self, token_id: int) -> bool:
        """Whether the model has this token, and it does not end the text."""
        return token_id < self._vocabulary_size and token_id not in self._end_ids

    def _shortened(self, matcher: LLMatcher, tokens: _Tokens) -> _Tokens:
        """The same text as the tokenizer would spell it, where that is shorter."""
        spelled = tuple(self._tokenizer.tokenize_bytes(self._tokenizer.decode_bytes(list(tokens))))
        is_better = len(spelled) < len(tokens) and all(map(self._can_write, spelled)) and _ends(matcher, spelled)
        return spelled if is_better else tokens


@dataclass(eq=False)
class _Place:
    """A text that the search has come to."""

    matcher: LLMatcher
    tokens: _Tokens = ()
    repeats: bool = False
    """Whether its last token changed nothing: the grammar wants more of the kind."""
    state: int = 0
    """Of what may come next; places of the same state are taken to be alike."""
    is_text: bool = False
    """Whether letters may come next, and so brackets that close nothing."""
    seen: set[int] = field(default_factory=set)
    """The states behind the tokens that were tried."""


class _Search:
    """The places to go on from, the cheapest first and the furthest of them."""

    def __init__(self, finder: ClosingFinder, matcher: LLMatcher, words: list[bytes]) -> None:
        self._finder = finder
        self._words = words
        self._numbers = itertools.count()
        self.heap: list[tuple[int, int, int, _Place, Iterator[_Tokens]]] = []
        self._open(0, finder.place(matcher.deep_copy(), ()))

    def visit(self, room: int) -> _Place | None:
        """Try what is next at the first place; where it leads to, unless it is too far or nowhere new."""
        cost, _, _, place, candidates = heapq.heappop(self.heap)
        tokens = next(candidates, None)
        if tokens is None:
            return None
        reached = self._finder.behind(place, tokens)
        if reached is None or len(reached.tokens) > room:
            self._push(cost, place, candidates)
            return None
        is_known = reached.state in place.seen
        place.seen.add(reached.state)
        if reached.repeats and place.repeats:
            self._push(cost + 1, place, candidates)
            self._open(cost + _is_power_of_two(len(reached.tokens)), reached)
        elif reached.repeats or is_known:  # rather another token, which leads on
            self._push(cost, place, candidates)
            if not is_known or len(tokens) > 1:
                self._open(cost + 1, reached)
        else:
            self._push(cost + 1, place, candidates)
            self._open(cost, reached)
        return reached

    def _open(self, cost: int, place: _Place) -> None:
        self._push(cost, place, self._finder.candidates(place, self._words))

    def _push(self, cost: int, place: _Place, candidates: Iterator[_Tokens]) -> None:
        heapq.heappush(self.heap, (cost, -len(place.tokens), next(self._numbers), place, candidates))
        if len(self.heap) > MAX_PLACES:
            self.heap = heapq.nsmallest(MAX_PLACES // 2, self.heap)


class _Walk:
    """A way through the grammar without turning back, through any number of parts that are alike.

    Args:
        manner: Which way it takes, of those that lead on. `first`: always the first. `turns`: the one that it has taken
            the fewest times where it was before, to come out of loops. `tosses`: by the toss of a coin, beginning anew
            where it has grown long, to come out of parts within parts.
    """

    def __init__(self, finder: ClosingFinder, matcher: LLMatcher, words: list[bytes], manner: Manner) -> None:
        self._finder = finder
        self._words = words
        self._manner = manner
        self._source = random.Random(0)
        self._start = self._place = finder.place(matcher.deep_copy(), ())
        self._num_visits = 0
        self._num_taken = Counter[_Way]()
        self._leads_on = dict[_Way, bool]()

    def end(self, room: int, effort: Effort) -> _Tokens | None:
        """At most `room` tokens behind which the grammar may end; None where it has not come to an end."""
        deadline_s = time.thread_time() + effort.max_time_s
        begins_anew = self._manner == "tosses"
        num_steps, most = 0, float(FIRST_STRETCH) if begins_anew else math.inf
        while self._num_visits < effort.max_visits_walking and time.thread_time() < deadline_s:
            effort.let_others(self._num_visits)
            if not self._go_on():
                return None
            num_steps += 1
            is_long = len(self._place.tokens) > room
            if self._place.matcher.is_accepting() and not is_long:
                return self._place.tokens
            if is_long and not begins_anew:
                return None
            if is_long or num_steps > most:
                self._place, num_steps, most = self._start, 0, most * LONGER_STRETCH
        return None

    def _go_on(self) -> bool:
        """Take the next tokens; whether there are any."""
        ways = [(self._place.state, tokens) for tokens in self._finder.candidates(self._place, self._words)]
        leading: list[_Way] = []
        tried: dict[_Way, _Place | None] = {}
        for way in ways:
            if way not in self._leads_on:
                reached = tried[way] = self._reached(way)
                self._leads_on[way] = reached is not None and not reached.repeats
            if self._leads_on[way]:
                leading.append(way)
                if self._manner == "first":
                    break
        # Where none leads on, the grammar wants more of the kind, or does not show what there is.
        for way in (*self._in_order(leading), *self._in_order(ways)):
            reached = tried[way] if way in tried else self._reached(way)
            if reached is not None:
                self._place = reached
                self._num_taken[way] += 1
                return True
        return False

    def _in_order(self, ways: Iterable[_Way]) -> list[_Way]:
        if self._manner == "first":
            return [*ways]
        if self._manner == "turns":
            return sorted(ways, key=self._num_taken.__getitem__)
        return sorted(ways, key=lambda _: self._source.random() < 0.5)

    def _reached(self, way: _Way) -> _Place | None:
        self._num_visits += 1
        return self._finder.behind(self._place, way[1])


def _ending_tail(matcher: LLMatcher, known: Sequence[int], deadline_s: float) -> _Tokens | None:
    """The shortest tail of `known` that ends the text; None where none does, of those that are tried of a long one."""

    def does(start: int) -> bool:
        tail = list(known[start:])
        is_late = time.thread_time() > deadline_s
        return not is_late and matcher.validate_tokens(tail) == len(tail) and _ends(matcher, tail)

    num_short = min(len(known), MAX_TAILS)
    starts = range(max(0, len(known) - num_short))[:MAX_TAILS]  # of the long ones, which take long
    found = next((start for start in range(-1, -num_short - 1, -1) if does(start)), None)
    if found is None and (place := bisect.bisect_left(starts, True, key=lambda start: not does(start))):
        found = starts[place - 1]  # the last that does, as it is where a text must have a length
    elif found is None and len(known) <= MAX_LINEAR:
        found = next((start for start in reversed(starts) if does(start)), None)
    return None if found is None else tuple(known[found:])


def _begun(text: bytes, word: bytes) -> int:
    """How many bytes of a word the text ends with."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)


def _ends(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    ended = matcher.deep_copy()
    return ended.consume_tokens(list(tokens)) and ended.is_accepting()


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _stretches(spelled: dict[int, bytes]) -> list[int]:
    """Long tokens of small letters, of digits and of hyphens, the longest first."""
    found = []
    for length, kind in itertools.product(STRETCH_LENGTHS, (_is_letters, bytes.isdigit, _is_hyphens)):
        found += list(islice((each for each, text in spelled.items() if len(text) == length and kind(text)), 1))
    return found


def _is_letters(text: bytes) -> bool:
    return text.isalpha() and text.islower()


def _is_hyphens(text: bytes) -> bool:
    return set(text) == {ord("-")}
