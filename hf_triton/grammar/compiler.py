# SPDX-License-Identifier: Apache-2.0
"""GrammarCompiler: compiles a JSON schema, regular expression, choice or Lark grammar to constraints of sequences.

Knows no engine and no Triton.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hf_triton.errors import panics_as_errors, where
from hf_triton.grammar.constraint import GrammarConstraint
from hf_triton.grammar.free_calls import CallPlan, CallsConstraint, Ends, FreeText, Opening, as_bytes, as_text
from hf_triton.grammar.guidance_tokenizer import build_guidance_tokenizer
from hf_triton.grammar.matcher import LIMITS, build_matcher, rejection
from hf_triton.grammar.sandbox import MAX_CPU_S, MAX_WAIT_S, GrammarSandbox
from hf_triton.grammar.thinking import TagTokens, ThinkingConstraint
from hf_triton.protocol.structured_output import Grammar
from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Bits, Constraint, bits_of
from hf_triton.sentence import param, remedy

logger = logging.getLogger(__name__)

NUM_GRAMMARS_KEPT: Final = 64
MAX_FIRST_TOKENS: Final = 16
"""First tokens of a completion that are tried before a grammar is taken."""
SANDBOX: Final = GrammarSandbox()
atexit.register(SANDBOX.close)


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    Args:
        vocabulary_size: Rows of the model's embedding.
        eos_ids: The end-of-sequence tokens if the sampling parameters have none.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        eos_ids: frozenset[int],
        limits: LLParserLimits = LIMITS,
        sandbox: GrammarSandbox = SANDBOX,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._limits = limits
        self._sandbox = sandbox
        fallback = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._eos_ids = frozenset(token_id for token_id in eos_ids or fallback if token_id < vocabulary_size)
        self._lock = threading.Lock()
        self._guidance: LLTokenizer | None = None
        self._bits = lru_cache(4)(self._build_bits)
        self._tags = lru_cache(4)(self._build_tags)
        self._texts = lru_cache(4)(self._build_texts)
        self._ends = lru_cache(8)(self._build_ends)
        self._compiles_in_time: dict[Grammar, bool] = {}  # the most recent last
        self._known_tags: set[tuple[str, str, str]] = set()

    def knows(self, grammar: Grammar) -> bool:
        """Whether a grammar was compiled recently, so that it takes less than 0.1 s."""
        return grammar in self._compiles_in_time

    def compile(
        self, grammar: Grammar, params: SamplingParams
    ) -> tuple[SamplingParams, Callable[[], GrammarConstraint]]:
        """Compile a grammar for the sequences of one prompt.

        Returns:
            The sampling parameters with at least one end-of-sequence token, and a factory of the sequences'
            constraints. Each prompt has a matcher of its own: the library's limits add up over its life.

        Raises:
            RequestError: The grammar is wrong, too large, unsupported or contradictory; or the model's tokenizer is
                unsupported or has no end-of-sequence token.
        """
        eos_ids = params.eos_ids or self._eos_ids
        if not eos_ids:
            say = remedy(f": say {param('eos_token_id')}")
            raise rejection(grammar, f"needs a token that ends the text, and this model has none{say}")
        guidance = self._guidance_tokenizer(grammar)
        if not self._is_compiled_in_time(grammar):
            raise rejection(
                grammar,
                f"takes more than {MAX_CPU_S} s of a processor, or {MAX_WAIT_S:g} s in all, to read: "
                "make it smaller, or its patterns simpler",
            )
        with panics_as_errors():
            matcher = build_matcher(guidance, grammar, self._limits)
            text_bits, eos_bits = self._bits(eos_ids, 8 * len(matcher.compute_bitmask()))
            if not _can_begin(matcher, text_bits):
                raise rejection(grammar, "allows no text of the model's tokens: it contradicts itself, or is too large")

        def build_constraint() -> GrammarConstraint:
            return GrammarConstraint(matcher.deep_copy(), text_bits, eos_bits, eos_ids, grammar.about, guidance)

        return replace(params, eos_ids=eos_ids), build_constraint

    def compile_calls(
        self, plan: CallPlan, params: SamplingParams
    ) -> tuple[SamplingParams, Callable[[], CallsConstraint], Callable[[], CallsConstraint]]:
        """Compile the calls in free text, for the sequences of one prompt.

        Returns:
            The sampling parameters that `compile` returns, and factories of the sequences' constraints: behind the
            prompt, and behind thinking.

        Raises:
            RequestError: As `compile` does; or the prompt ends within a call.
        """
        openings = []
        for calls in plan.calls:
            params, build_call = self.compile(calls.grammar, params)
            ends = self._ends(calls.pattern, calls.last_letter, plan.visible_ids)
            openings.append(Opening(ends, build_call, calls.is_free_behind))
        free = FreeText(self._texts(plan.visible_ids), openings, plan.thinking, self._bitmask_size)
        CallsConstraint(free, plan.prefix).bitmask()  # takes a while for the first prompt of a model
        return params, partial(CallsConstraint, free, plan.prefix), partial(CallsConstraint, free)

    def knows_tags(self, thinking: Thinking) -> bool:
        """Whether `behind_thinking` is quick for these tags; it takes up to a second the first time."""
        return thinking.spellings in self._known_tags

    def behind_thinking(
        self, thinking: Thinking, params: SamplingParams, build_answer: Callable[[], Constraint] | None
    ) -> Callable[[], ThinkingConstraint] | None:
        """A factory of constraints that leave thinking free.

        Without `build_answer`, nothing constrains what follows. The sampling parameters are those that `compile`
        returns.

        Returns:
            None: the model has no tokens that spell the tags.
        """
        tags = self._tags(*thinking.spellings)
        self._known_tags.add(thinking.spellings)
        if tags is None:
            return None
        text_bits, _ = self._bits(params.eos_ids or self._eos_ids, tags.size)

        num_led = len(thinking.lead[: thinking.num_led].encode())

        def build_constraint() -> ThinkingConstraint:
            return ThinkingConstraint(
                tags, text_bits, build_answer, is_open=thinking.is_open, budget=thinking.budget, num_led=num_led
            )

        return build_constraint

    def _build_tags(self, opening: str, closing: str, lead: str) -> TagTokens | None:
        guidance = self._build_guidance()
        if guidance is None:
            logger.warning("thinking is not told from the answer: the tokenizer's tokens are not known by their bytes")
            return None
        words = "\n".join((opening, closing, lead))
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        visible_ids = frozenset(token_id for token_id, token in added.items() if token.content in words)
        texts = [as_bytes(text) for text in self._texts(visible_ids)]
        num_ids = len(texts)
        closing_ids, lead_ids = (guidance.tokenize_str(text, parse_special=True) for text in (closing, lead))
        spelled = [guidance.decode_bytes(ids).decode(errors="replace").strip() for ids in (closing_ids, lead_ids)]
        if spelled != [closing, lead] or max(closing_ids + lead_ids) >= num_ids:
            logger.warning("thinking is not told from the answer: the tokenizer cannot spell its tags")
            return None
        tags = opening.encode(), closing.encode(), lead.encode()
        return TagTokens(*tags, texts, closing_ids, lead_ids, self._bitmask_size)

    def _build_texts(self, visible_ids: frozenset[int]) -> list[str]:
        """The text of each token of the model, by id, as `free_calls` has it; none of special ones but the visible."""
        guidance = self._build_guidance()
        assert guidance is not None
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        silent = {token_id for token_id, token in added.items() if token.special} - visible_ids
        num_ids = min(self._vocabulary_size, len(self._tokenizer))
        return ["" if token_id in silent else as_text(guidance.decode_bytes([token_id])) for token_id in range(num_ids)]

    def _build_ends(self, pattern: Any, letter: str, visible_ids: frozenset[int]) -> Ends:
        texts = self._texts(visible_ids)
        return Ends(pattern, [(token_id, text) for token_id, text in enumerate(texts) if letter in text])

    @cached_property
    def _bitmask_size(self) -> int:
        """The bits of a grammar's bitmask."""
        guidance = self._build_guidance()
        assert guidance is not None
        matcher = LLMatcher(guidance, LLMatcher.grammar_from_regex("a"), log_level=0)
        return 8 * len(matcher.compute_bitmask())

    def _guidance_tokenizer(self, grammar: Grammar) -> LLTokenizer:
        if (guidance := self._build_guidance()) is None:
            raise rejection(grammar, "needs a tokenizer whose tokens are known by their bytes, and this model's is not")
        return guidance

    def _build_guidance(self) -> LLTokenizer | None:
        """The tokenizer of llguidance, built at the first grammar, which takes up to a second; None: see its module."""
        with self._lock:
            if self._guidance is None:
                self._guidance = build_guidance_tokenizer(self._tokenizer, self._vocabulary_size)
        return self._guidance

    def _build_bits(self, eos_ids: frozenset[int], size: int) -> tuple[Bits, Bits]:
        """The tokens that may spell text, and those that end it, each `[size]` bits as the library's bitmasks."""
        assert self._guidance is not None
        own_eos = self._guidance.eos_token  # the library's, which the request may have replaced
        text_ids = (token_id for token_id in range(self._vocabulary_size) if token_id != own_eos)
        eos_bits = bits_of(eos_ids, size)
        return bits_of(text_ids, size) & ~eos_bits, eos_bits

    def _is_compiled_in_time(self, grammar: Grammar) -> bool:
        with self._lock:
            if grammar in self._compiles_in_time:
                self._compiles_in_time[grammar] = self._compiles_in_time.pop(grammar)
                return self._compiles_in_time[grammar]
        try:
            is_in_time = self._sandbox.compiles_in_time(grammar)
        except OSError as error:
            logger.warning("compiling a grammar without the sandbox, which cannot be started: %s", where(error))
            is_in_time = True
        with self._lock:
            self._compiles_in_time[grammar] = is_in_time
            if len(self._compiles_in_time) > NUM_GRAMMARS_KEPT:
                del self._compiles_in_time[next(iter(self._compiles_in_time))]
        return is_in_time


def _can_begin(matcher: LLMatcher, text_bits: Bits) -> bool:
    """Whether a completion may be empty, or begin with a token behind which the library computes the state."""
    bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8) & text_bits
    first_ids = np.flatnonzero(np.unpackbits(bitmask, bitorder="little"))[:MAX_FIRST_TOKENS].tolist()
    return matcher.is_accepting() or any(matcher.deep_copy().consume_token(token_id) for token_id in first_ids)
