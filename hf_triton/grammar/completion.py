# SPDX-License-Identifier: Apache-2.0
"""CompletionFinder: finds a short token sequence behind which a grammar may end.

llguidance says which tokens may come next and not how far the end is, so the end is searched for: by walks from the
present state that prefer bytes which close something and bytes after which other tokens are allowed than before. A
greedy walk and random restarts take turns, which grow longer. The seed is fixed and the budget counts visits, so the
result depends on the grammar and the tokens before alone. It is not always the shortest completion, and some grammars
have one that is not found. Knows no model and no requests.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

BRACKETS: Final = b"}])>"
ORDER: Final = BRACKETS + b"\"'`,:;0123456789ntfyxabcdeghijklmopqrsuvwzABCDEFGHIJKLMNOPQRSTUVWXYZ_-.=+*/{[(<"
"""Bytes that close something first, then those that begin a short value (0, null, true), last those that open one."""
MAX_FALLBACKS: Final = 16
"""Tokens to try if no single byte is allowed: a vocabulary may lack some."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class SearchBudget:
    """Limits of one search."""

    max_visits: int
    """States to visit, some 50 us each."""
    max_cpu_s: float
    """CPU time of the thread, for grammars with which a visit takes much longer."""
    num_shortening_visits: int = 0
    """More states to visit for a shorter completion than one that a random walk found."""
    yields: bool = False
    """Whether other threads get the interpreter lock between visits: an engine would wait 5 ms at each operation."""


class CompletionFinder:
    """Finds tokens that complete a sequence.

    Args:
        tokenizer: llguidance's.
        vocabulary_size: The model's tokens.
        eos_ids: End-of-sequence tokens, which a completion cannot hold.
        clock: CPU time of the thread in seconds.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        vocabulary_size: int,
        eos_ids: frozenset[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.eos_ids = eos_ids
        self.clock = clock
        self._tokenizer = tokenizer
        spellings = {
            token_id: tokenizer.decode_bytes([token_id])
            for token_id in range(min(vocabulary_size, tokenizer.vocab_size))
            if self._is_usable(token_id) and not tokenizer.is_special_token(token_id)
        }
        self._by_byte = {text[0]: token_id for token_id, text in reversed(spellings.items()) if len(text) == 1}
        order = dict.fromkeys([*ORDER, *range(32, 127), *b"\n\t"])
        del order[ord("\\")]  # an escape leads back to where it began
        self.bytes = [(self._by_byte[byte],) for byte in order if byte in self._by_byte]
        self.quotes = [(self._by_byte[byte],) for byte in b'"' if byte in self._by_byte]
        self.brackets = frozenset(self._by_byte[byte] for byte in BRACKETS if byte in self._by_byte)
        # No JSON value begins with k or x: if one is allowed, this is a string, which a quote closes.
        self.string_letters = [self._by_byte[byte] for byte in b"kx" if byte in self._by_byte]
        self.fillers = _fillers(spellings)

    def find(
        self,
        matcher: LLMatcher,
        max_tokens: int,
        budget: SearchBudget,
        known: Sequence[int] = (),
        hints: Sequence[str] = (),
    ) -> tuple[Tokens | None, int]:
        """Search for at most `max_tokens` tokens behind which the grammar may end.

        Args:
            matcher: The grammar, in the sequence's state. It is not changed.
            max_tokens: Tokens.
            budget: Limits of the search.
            known: What completed the sequence a token ago: a part of it often does again.
            hints: Literals that the grammar may ask for.

        Returns:
            The tokens, or None if none were found; and the visits that it took.
        """
        spelled = [spelling for hint in hints if (spelling := self.spell(hint.encode(errors="ignore")))]
        search = _Search(self, matcher, max_tokens, budget, known, spelled)
        tokens = search.run()
        if tokens is not None:
            respelled = tuple(self._tokenizer.tokenize_bytes(self._tokenizer.decode_bytes(list(tokens))))
            is_usable = len(respelled) < len(tokens) and all(map(self._is_usable, respelled))
            if is_usable and _ends(matcher, respelled):
                tokens = respelled
        return tokens, search.num_visits

    def spell(self, text: bytes) -> Tokens:
        """Tokens of a string; empty if the model has none for it."""
        tokens: Tokens = tuple(self._tokenizer.tokenize_bytes(text)) if text else ()
        if all(map(self._is_usable, tokens)):
            return tokens
        return tuple(self._by_byte[byte] for byte in text) if self._by_byte.keys() >= set(text) else ()

    def allowed_tokens(self, matcher: LLMatcher) -> list[int]:
        """The tokens that may come next, without end-of-sequence."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(token_id) for token_id in np.flatnonzero(bits) if self._is_usable(token_id)]

    def can_continue(self, matcher: LLMatcher) -> bool:
        """Whether the library computes the state behind one of the allowed tokens."""
        return any(
            matcher.deep_copy().consume_token(token_id) for token_id in self.allowed_tokens(matcher)[:MAX_FALLBACKS]
        )

    def _is_usable(self, token_id: int) -> bool:
        return token_id < self.vocabulary_size and token_id not in self.eos_ids


@dataclass(eq=False)
class _State:
    """A state of the grammar that a walk has reached."""

    matcher: LLMatcher
    tokens: Tokens
    bitmask: bytes
    """The allowed tokens. States of equal bitmasks are taken to be alike, which those of a repetition are not."""
    is_repeated: bool = False
    """Whether the last tokens led to the same bitmask: the grammar wants more of the kind."""


class _Search:
    """One search: see `CompletionFinder.find`."""

    def __init__(
        self,
        finder: CompletionFinder,
        matcher: LLMatcher,
        max_tokens: int,
        budget: SearchBudget,
        known: Sequence[int],
        hints: list[Tokens],
    ) -> None:
        self.num_visits = 0
        self._finder = finder
        self._start = _State(matcher.deep_copy(), (), matcher.compute_bitmask())
        self._max_tokens = max_tokens
        self._budget = budget
        self._deadline_s = finder.clock() + budget.max_cpu_s
        self._known = list(known)
        self._hints = hints
        self._random = random.Random(0)
        self._leads_on: dict[bytes, dict[Tokens, bool]] = {}
        """By bitmask: whether candidates led to states of another bitmask."""

    def run(self) -> Tokens | None:
        """Walk until a completion is found or the budget is used up."""
        if (best := self._completion(self._start)) is not None:
            return best
        greedy: _State | None = self._start
        max_visits = self._budget.max_visits
        turn: float = 32  # visits of each walk
        while True:
            num_before = self.num_visits
            for is_greedy, state in ((True, greedy), (False, self._start)):
                end = min(self.num_visits + turn, max_visits)
                while state is not None and self.num_visits < end:
                    state = self._next(state, is_greedy)
                    if state is None or (completion := self._completion(state)) is None:
                        continue
                    if is_greedy or not self._budget.num_shortening_visits:
                        return completion
                    if best is None:
                        max_visits = min(max_visits, self.num_visits + self._budget.num_shortening_visits)
                    best, self._max_tokens = completion, len(completion) - 1
                    break
                if is_greedy:
                    greedy = state
            turn *= 1.25 if turn < max_visits else 1
            if self.num_visits == num_before or self._is_late():
                return best

    def _next(self, state: _State, is_greedy: bool) -> _State | None:
        """The next state of a walk; None at a dead end, beyond `max_tokens` and out of time."""
        if len(state.tokens) > self._max_tokens or self._is_late():
            return None
        candidates, leading = self._candidates(state), list[Tokens]()
        leads_on = self._leads_on.setdefault(state.bitmask, {})
        reached: dict[Tokens, _State | None] = {}
        for tokens in candidates:
            if tokens not in leads_on:
                new = reached[tokens] = self._reach(state, tokens)
                if new is not None and new.matcher.is_accepting():
                    return new
                leads_on[tokens] = new is not None and not new.is_repeated
            if leads_on[tokens]:
                leading.append(tokens)
                if is_greedy:
                    break
        if not is_greedy:
            leading.sort(key=lambda _: self._random.random() < 0.5)
            self._random.shuffle(candidates)
        for tokens in (*leading, *candidates):
            new = reached[tokens] if tokens in reached else self._reach(state, tokens)
            if new is not None:
                if new.is_repeated and leads_on[tokens]:  # another state of this bitmask: forget the first one's
                    leads_on.clear()
                return new
        return None

    def _candidates(self, state: _State) -> list[Tokens]:
        """What to try in a state, in order; little if the last tokens changed nothing."""
        finder, allowed = self._finder, state.bitmask
        is_string = self._is_string(allowed)
        filler = [tokens for tokens in finder.fillers if _is_set(allowed, tokens[0])][:1]
        if state.is_repeated:
            order = [*filler, *self._hints, *([state.tokens[-1:]] if is_string else finder.bytes)]
        else:
            order = [*(finder.quotes if is_string else ()), *self._hints, *(filler if is_string else ()), *finder.bytes]
        candidates = [tokens for tokens in dict.fromkeys(order) if _is_set(allowed, tokens[0])]
        return candidates or [(token_id,) for token_id in finder.allowed_tokens(state.matcher)[:MAX_FALLBACKS]]

    def _reach(self, state: _State, tokens: Tokens) -> _State | None:
        """The state behind these tokens and those that must follow; None if they are not allowed."""
        self.num_visits += 1
        if self._budget.yields and self.num_visits % 4 == 0:  # every 0.2 ms
            time.sleep(1e-6)  # a waiting thread takes the interpreter lock
        matcher = state.matcher.deep_copy()
        if not matcher.consume_tokens(list(tokens)):
            return None
        forced = () if matcher.is_accepting() else self._finder.spell(matcher.compute_ff_bytes())
        if not matcher.consume_tokens(list(forced)):
            return None
        bitmask = matcher.compute_bitmask()
        if matcher.is_error():
            return None
        closes = tokens[0] in self._finder.brackets and not self._is_string(state.bitmask)
        return _State(matcher, (*state.tokens, *tokens, *forced), bitmask, bitmask == state.bitmask and not closes)

    def _completion(self, state: _State) -> Tokens | None:
        """The tokens to a state and from there to the end, if the grammar may end there or behind a known tail."""
        tail = () if state.matcher.is_accepting() else self._known_tail(state.matcher)
        return None if tail is None or len(state.tokens) + len(tail) > self._max_tokens else state.tokens + tail

    def _known_tail(self, matcher: LLMatcher) -> Tokens | None:
        """The shortest tail of the known completion that ends the grammar, of its 32 shortest and 8 longest tails."""
        starts = range(len(self._known))
        for start in reversed(starts if len(starts) <= 40 else (*starts[:8], *starts[-32:])):
            tail = self._known[start:]
            if not self._is_late() and matcher.validate_tokens(tail) == len(tail) and _ends(matcher, tail):
                return tuple(tail)
        return None

    def _is_string(self, bitmask: bytes) -> bool:
        return any(_is_set(bitmask, letter) for letter in self._finder.string_letters)

    def _is_late(self) -> bool:
        return self._finder.clock() > self._deadline_s


def _is_set(bitmask: bytes, token_id: int) -> bool:
    return bool(bitmask[token_id // 8] >> token_id % 8 & 1)


def _ends(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    matcher = matcher.deep_copy()
    return matcher.consume_tokens(list(tokens)) and matcher.is_accepting()


def _fillers(spellings: dict[int, bytes]) -> list[Tokens]:
    """Tokens that fill a minimum length: of lower-case letters, of digits and of hyphens, the longest first."""
    fillers = list[Tokens]()
    for length in (16, 8, 4, 2):
        for pattern in (rb"[a-z]*", rb"[0-9]*", rb"-*"):
            spelled = (at for at, text in spellings.items() if len(text) == length and re.fullmatch(pattern, text))
            fillers += [(token_id,) for token_id in itertools.islice(spelled, 1)]
    return fillers
