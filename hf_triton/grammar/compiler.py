# SPDX-License-Identifier: Apache-2.0
"""Texts that follow a grammar: a JSON schema, a regular expression, a choice of texts, a Lark grammar.

llguidance (MIT, no dependencies, wheels for every CPU) finds the tokens that may come next, in some 10 us for a
vocabulary of 32,000 and without a start-up cost; xgrammar, the other library of the field, took 0.1 s to read a small
schema and five times as long for a token.

A text is always whole: from its beginning on, tokens are known that end it within `max_new_tokens` (`closing.py`). A
token of the model's is taken where such an ending is found behind it too; else comes the next token of the ending that
is known. So a grammar that the library gives up on half-way, or an ending that is hard to find, costs freedom and never
the form. Knows no engine and no Triton.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hf_triton.errors import RequestError, clip, where
from hf_triton.grammar.completion import ClosingFinder, Effort
from hf_triton.grammar.regex_example import sample
from hf_triton.grammar.sandbox import MAX_TRIAL_S, MAX_WAIT_S, GrammarTrial, answer_trials
from hf_triton.grammar.tokenizer import build_guide
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=100_000,  # 25 ms of reading a grammar; (a{1000}){1000} takes a second by the library's own limit
    step_lexer_fuel=50_000,  # 4 ms of a token
    step_max_items=20_000,  # 1 ms of a token
    max_lexer_states=30_000,  # 30 to 60 MB
    max_grammar_size=100_000,
    verbose_errors=False,  # they would show the whole grammar
)
BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
VALUES: Final = ("const", "enum", "default", "examples")
"""What in a schema holds schemas by names of their own, and what holds no schemas."""
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
UNKNOWN_KEYS: Final = "Unimplemented keys: "
MAX_INTEGER: Final = 2**53
"""Beyond it the library's numbers are no longer those of the schema."""
JSON_SPACE: Final = r" ?|\n[ \t]{0,40}"  # endless white space would use up the tokens
BEFORE: Final = Effort(
    max_visits=2_000, max_time_s=0.4, max_visits_for_less=1_000, max_visits_walking=6_000, lets_others=True
)
"""To find a first ending, outside the engine."""
DURING: Final = Effort(max_visits=200, max_time_s=0.25)
"""To find one behind a token, while the engine waits. A visit takes some 50 us: the time is for grammars with which it
takes much longer. It must not decide otherwise, or the same seed would write another text where the machine is busy."""
MAX_VAIN_VISITS: Final = 1_000
"""Of a text's searches that find nothing, before it has no more freedom."""
MAX_CLOSING: Final = 8192
"""Tokens of a first ending."""
NUM_FINDERS_KEPT: Final = 4
NUM_CLOSINGS_KEPT: Final = 64
FORMATS: Final = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@b.co",
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "time": "00:00:00Z",
    "uri": "a:b",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
"""Short texts of JSON schema's formats."""
LARK_TERMINALS: Final = re.compile(
    r'(?://|\#)[^\n]*+ | (?P<text>"(?:[^"\\\n]|\\.)*+") | /(?P<regex>(?:[^/\\\n]|\\.)++)/', re.VERBOSE
)
"""Comments, texts and regular expressions of a Lark grammar."""
MAX_WORDS: Final = 16
MAX_LARK_WORD: Final = 256  # characters: of a grammar's own rules, each token may take as long as those before together
MAX_PATTERNS: Final = 10_000  # characters that are read for them
GBNF: Final = "; rules are written `name: ...` and not `name ::= ...`, and the first one is `start`"
MAX_REASON: Final = 160  # characters of the library's words in a message

_trial: Final = GrammarTrial()
atexit.register(_trial.close)


class GrammarCompiler:
    """Makes constraints for one model's texts. For any thread.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary_size: Rows of the model's embedding.
        eos_ids: The tokens that end a text where a plan does not say.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        fallback = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._eos_ids = frozenset(token_id for token_id in eos_ids or fallback if token_id < vocabulary_size)
        self._lock = threading.Lock()
        self._guide: LLTokenizer | None = None
        self._finder = lru_cache(NUM_FINDERS_KEPT)(self._build_finder)
        self._closings: dict[tuple[Grammar, frozenset[int]], tuple[int, ...] | None] = {}  # the latest last

    def knows(self, grammar: Grammar, plan: SamplingParams) -> bool:
        """Whether a grammar has been read lately, and is read again in less than 0.1 s."""
        return (grammar, plan.eos_ids or self._eos_ids) in self._closings

    def compile(self, grammar: Grammar, plan: SamplingParams) -> tuple[SamplingParams, Callable[[], GrammarConstraint]]:
        """Read a grammar for one prompt's texts.

        Args:
            grammar: What they follow.
            plan: The prompt's settings.

        Returns:
            The plan with the tokens that end its texts, of which there is at least one; and what makes the constraint
            of each text. Each prompt has a grammar of its own: the library's limits count all that was done with it.

        Raises:
            RequestError: The grammar is wrong, too large, or of a kind that the library does not know; or no text of it
                has `max_new_tokens` or less; or the model's tokenizer or its lack of an end do not allow for one.
        """
        end_ids = plan.eos_ids or self._eos_ids
        if not end_ids:
            raise _rejection(grammar, "needs a token that ends the text, and this model has none: say eos_token_id")
        guide = self._guide_of(grammar)
        if not (self.knows(grammar, plan) or _is_quick(grammar)):
            raise _rejection(
                grammar,
                f"takes more than {MAX_TRIAL_S} s of a processor, or {MAX_WAIT_S:g} s in all, to read: "
                "make it smaller, or its patterns simpler",
            )
        matcher = _matcher(guide, grammar)
        finder = self._finder(end_ids)
        closing = self._closing(grammar, end_ids)
        if closing is None:
            raise _rejection(grammar, "allows no text that could be found: it contradicts itself, or is too large")
        if len(closing) > plan.max_new_tokens:
            raise _rejection(
                grammar,
                f"allows no text of max_new_tokens {plan.max_new_tokens} or less that could be found: "
                f"ask for {len(closing)} or more",
            )
        start, words = _State(matcher, closing), _words(grammar)
        return replace(plan, eos_ids=end_ids), lambda: GrammarConstraint(
            replace(start, matcher=matcher.deep_copy()), finder, end_ids, plan.max_new_tokens, words
        )

    def _guide_of(self, grammar: Grammar) -> LLTokenizer:
        """The tokenizer as the library wants it; made when it is first needed, which takes up to a second."""
        with self._lock:
            if self._guide is None:
                self._guide = build_guide(self._tokenizer, self._vocabulary_size)
        if self._guide is None:
            raise _rejection(
                grammar, "needs a tokenizer whose tokens are known by their bytes, and this model's is not"
            )
        return self._guide

    def _build_finder(self, end_ids: frozenset[int]) -> ClosingFinder:
        assert self._guide is not None
        return ClosingFinder(self._guide, self._vocabulary_size, end_ids)

    def _closing(self, grammar: Grammar, end_ids: frozenset[int]) -> tuple[int, ...] | None:
        """The tokens of a short text; None where none was found."""
        assert self._guide is not None
        key = grammar, end_ids
        with self._lock:
            if key in self._closings:
                self._closings[key] = self._closings.pop(key)
                return self._closings[key]
        matcher = _matcher(self._guide, grammar)
        closing = self._finder(end_ids).find(matcher, MAX_CLOSING, BEFORE, words=_words(grammar)).tokens
        with self._lock:
            self._closings[key] = closing
            if len(self._closings) > NUM_CLOSINGS_KEPT:
                del self._closings[next(iter(self._closings))]
        return closing


@dataclass(frozen=True)
class _State:
    """Where a text is."""

    matcher: LLMatcher
    closing: tuple[int, ...]
    """Tokens that end it, without an end-of-sequence token."""


class GrammarConstraint:
    """One text that follows a grammar: what the engine asks before each of its tokens.

    Args:
        start: Where it begins.
        finder: Finds its endings.
        end_ids: Its end-of-sequence tokens, at least one.
        room: Tokens that it may have.
        words: Texts that the grammar may ask for.
    """

    def __init__(
        self, start: _State, finder: ClosingFinder, end_ids: frozenset[int], room: int, words: tuple[str, ...]
    ) -> None:
        self._state = start
        self._finder = finder
        self._end_ids = sorted(end_ids)
        self._room = room
        self._words = words
        self._is_forced = False  # nothing is asked of the library any more: the ending comes, token by token
        self._num_vain = 0  # visits of searches that found nothing
        self._mask: npt.NDArray[np.uint8] | None = None
        self._next: dict[int, _State | None] = {}  # behind tokens that were asked for, for the text as it is

    def bitmask(self) -> npt.NDArray[np.uint8]:
        """The tokens that may come next, a bit each, the lowest first; of the end, where it may come."""
        if self._mask is None:
            self._mask = self._forced_mask() if self._is_forced else self._free_mask()
        return self._mask

    def completion_tokens(self) -> list[int]:
        """Tokens that end the text, an end-of-sequence token the last."""
        return [*self._state.closing, self._end_ids[0]]

    def enforce(self, token_id: int) -> int:
        """The token where the text can be ended within its room behind it, else the next of `completion_tokens`."""
        return token_id if self._may_come(token_id) else self.completion_tokens()[0]

    def accept(self, token_id: int) -> None:
        """The text goes on with a token that was settled."""
        if token_id not in self._end_ids:
            state = self._behind(token_id)
            assert state is not None
            self._state = state
        self._room -= 1
        self._mask = None
        self._next = {}

    def _may_come(self, token_id: int) -> bool:
        if token_id in self._end_ids:
            return not self._state.closing
        return self._behind(token_id) is not None

    def _behind(self, token_id: int) -> _State | None:
        if token_id not in self._next:
            self._next[token_id] = self._search_behind(token_id)
        return self._next[token_id]

    def _search_behind(self, token_id: int) -> _State | None:
        matcher, closing = self._state.matcher, self._state.closing
        is_ending = bool(closing) and token_id == closing[0]
        if not self._is_forced:
            matcher = matcher.deep_copy()
            matcher.consume_token(token_id)
        if is_ending:
            has_ended = not self._is_forced and matcher.is_accepting()
            return _State(matcher, () if has_ended else closing[1:])
        if self._is_forced or matcher.is_error():
            return None
        start_s = time.thread_time()
        found = self._finder.find(matcher, self._room - 1, DURING, closing, self._words)
        if found.tokens is None:
            self._num_vain += found.num_visits
        is_slow = time.thread_time() - start_s > DURING.max_time_s
        self._is_forced = is_slow or self._num_vain > MAX_VAIN_VISITS  # it holds up the other texts
        return None if found.tokens is None else _State(matcher, found.tokens)

    def _free_mask(self) -> npt.NDArray[np.uint8]:
        mask = np.frombuffer(self._state.matcher.compute_bitmask(), np.uint8).copy()
        if self._state.matcher.is_error():
            self._is_forced = True
            return self._forced_mask()
        for token_id in self._end_ids:
            _set_bit(mask, token_id, not self._state.closing)
        return mask

    def _forced_mask(self) -> npt.NDArray[np.uint8]:
        token_id = self.completion_tokens()[0]
        mask = np.zeros(token_id // 8 + 1, np.uint8)
        _set_bit(mask, token_id, True)
        return mask


def _is_quick(grammar: Grammar) -> bool:
    try:
        return _tried(grammar)
    except OSError as error:
        logger.warning("a grammar is read without a trial: %s", where(error))
        return True


@lru_cache(NUM_CLOSINGS_KEPT)
def _tried(grammar: Grammar) -> bool:
    return _trial.is_quick(grammar.kind, grammar.text)


def _try_out(kind: Any, text: str) -> None:
    """Read a grammar for a tokenizer of bytes, to see how long it takes; whether it is right does not matter."""
    with contextlib.suppress(RequestError):
        _matcher(LLTokenizer("byte"), Grammar(kind, text, ""))


def _set_bit(mask: npt.NDArray[np.uint8], token_id: int, value: bool) -> None:
    place, bit = token_id // 8, np.uint8(1 << token_id % 8)
    mask[place] = mask[place] | bit if value else mask[place] & ~bit


def _matcher(guide: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A grammar at its beginning.

    Raises:
        RequestError: It is wrong, or too much.
    """
    try:
        source = _source(grammar)
    except ValueError as error:
        raise _rejection(grammar, f"cannot be read: {_reason(str(error))}") from None
    matcher = LLMatcher(guide, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.get_error().startswith("NoExtension"):
        raise _rejection(grammar, "allows no text at all")
    if matcher.is_error():
        form = GBNF if grammar.kind == "lark" and "::=" in grammar.text else ""
        raise _rejection(grammar, f"cannot be read: {_reason(matcher.get_error())}{form}")
    return matcher


def _source(grammar: Grammar) -> str:
    """A grammar in the library's own form.

    Raises:
        ValueError: It is nested too deeply, holds the library's own options, or asks for what that does not keep.
    """
    if grammar.kind == "json_schema":
        if '"x-guidance"' in grammar.text and "x-guidance" in json.loads(grammar.text):
            raise ValueError("x-guidance is not taken: leave it out")
        for part in _parts(json.loads(grammar.text)):
            _check_part(part)
        return LLMatcher.grammar_from_json_schema(
            grammar.text, overrides={"whitespace_pattern": JSON_SPACE, "lenient": False, "coerce_one_of": False}
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        # Lark's lexer takes no raw control character, and JSON leaves this one as it is.
        choices = (json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f") for text in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    return LLMatcher.grammar_from_lark(grammar.text)


@lru_cache(NUM_CLOSINGS_KEPT)
def _words(grammar: Grammar) -> tuple[str, ...]:
    """Texts for the regular expressions of a grammar, as far as they can be told; the library does not show them."""
    room, words = MAX_PATTERNS, dict[str, None]()
    for text, is_pattern in _expressions(grammar):
        room -= len(text)
        if room < 0 or len(words) == MAX_WORDS:
            break
        word = sample(text) if is_pattern else text
        if word and (grammar.kind != "lark" or len(word) <= MAX_LARK_WORD):
            words[json.dumps(word, ensure_ascii=False)[1:-1] if grammar.kind == "json_schema" else word] = None
    return tuple(words)


def _expressions(grammar: Grammar) -> Iterator[tuple[str, bool]]:
    """The regular expressions of a grammar and the texts that it asks for; whether each is an expression."""
    if grammar.kind == "regex":
        yield grammar.text, True
    elif grammar.kind == "json_schema":
        yield from _expressions_of_schema(json.loads(grammar.text))
    elif grammar.kind == "lark":
        for each in LARK_TERMINALS.finditer(grammar.text):
            if each["regex"]:
                yield each["regex"].replace("\\/", "/"), True
            elif each["text"]:
                with contextlib.suppress(ValueError):
                    yield json.loads(each["text"]), False


def _expressions_of_schema(schema: Any) -> Iterator[tuple[str, bool]]:
    for part in _parts(schema):
        pattern, form, named = part.get("pattern"), part.get("format"), part.get("patternProperties")
        if isinstance(pattern, str):
            yield pattern, True
        if isinstance(form, str) and form in FORMATS:
            yield FORMATS[form], False
        if (number := _multiple(part)) is not None:
            yield str(number), False
        if isinstance(named, dict):
            yield from ((each, True) for each in named)


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those within it; not the values that it names."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name in BY_NAME and isinstance(value, dict):
                    waiting += value.values()
                elif name not in VALUES:
                    waiting.append(value)


def _check_part(part: Mapping[str, Any]) -> None:
    """Refuse what the library reads and does not keep.

    Raises:
        ValueError: A bound of numbers that it passes over, or of names, of which it takes one twice.
    """
    kinds = part.get("type", "number")
    bounds = {name: part[name] for name in BOUNDS if type(part.get(name)) in (int, float)}
    if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds):
        for name, bound in bounds.items():
            if abs(bound) > MAX_INTEGER:
                raise ValueError(f"{name} of integers must be within -2**53 and 2**53, got {clip(bound)}: leave it out")
    elif kinds == "number" or (isinstance(kinds, list) and "number" in kinds):
        for name in bounds.keys() & {"exclusiveMinimum", "exclusiveMaximum"}:
            if any(_takes(bounds, text) for text in (json.dumps(bounds[name]), "0", "-0")):
                instead = name.replace("exclusiveM", "m")
                raise ValueError(f"{name} {bounds[name]} would not be kept here: give {instead}, a little off it")
    least, named = part.get("minProperties"), part.get("required", ())
    if type(least) is int and isinstance(named, list | tuple) and least > max(1, len(named)):
        raise ValueError(f"minProperties {least} would not be kept, as a name may come twice: name them in required")


def _takes(bounds: Mapping[str, float], text: str) -> bool:
    """Whether the library lets a number be this text, and the bounds do not."""
    number = float(text)
    keeps_low = number >= bounds.get("minimum", -math.inf) and number > bounds.get("exclusiveMinimum", -math.inf)
    keeps_high = number <= bounds.get("maximum", math.inf) and number < bounds.get("exclusiveMaximum", math.inf)
    if keeps_low and keeps_high:
        return False
    source = LLMatcher.grammar_from_json_schema(json.dumps({"type": "number", **bounds}))
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


def _multiple(part: Mapping[str, Any]) -> int | None:
    """The multiple next to 0 that a part of a schema asks for: its digits do not show where they lead."""
    step = part.get("multipleOf")
    if type(step) is not int or step < 1:
        return None
    with contextlib.suppress(TypeError, OverflowError, ValueError):  # bounds that are no numbers, or without end
        least = max(math.ceil(part.get("minimum", 0)), math.floor(part.get("exclusiveMinimum", -1)) + 1)
        most = min(math.floor(part.get("maximum", 0)), math.ceil(part.get("exclusiveMaximum", 1)) - 1)
        return -(-least // step) * step if least > 0 else most // step * step if most < 0 else 0
    return None


def _rejection(grammar: Grammar, sentence: str) -> RequestError:
    return RequestError("invalid_parameter", f"{grammar.parameter} {sentence}")


def _reason(text: str) -> str:
    """What the library found wrong, without the lines that show where in a source of its own."""
    found = re.search(r"^error: (.*)$", text, re.MULTILINE)  # in a regular expression
    words = found[1] if found else re.split(r"\n\s*\d+ \|", text.replace("<non-verbose/>", ""), maxsplit=1)[0]
    if "coerce_one_of" in words:  # an option that is not for those who send requests
        return "oneOf is taken only where it is clear which one a text is: write anyOf"
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(words.split()))
    if line.startswith(UNKNOWN_KEYS):
        line = f"{line.removeprefix(UNKNOWN_KEYS)} would not be kept: leave it out"
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 3]}..."


if __name__ == "__main__":
    answer_trials(_try_out)
