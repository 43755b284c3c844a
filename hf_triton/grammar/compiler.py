# SPDX-License-Identifier: Apache-2.0
"""GrammarCompiler: compiles a JSON schema, regular expression, choice or Lark grammar to constraints of sequences.

Knows no engine and no Triton.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from llguidance import LLParserLimits, LLTokenizer

from hf_triton.errors import panics_as_errors, where
from hf_triton.grammar.completion import CompletionFinder, SearchBudget, Tokens
from hf_triton.grammar.constraint import ConstraintState, GrammarConstraint
from hf_triton.grammar.hints import completion_hints
from hf_triton.grammar.matcher import LIMITS, build_matcher, rejection
from hf_triton.grammar.sandbox import MAX_CPU_S, MAX_WAIT_S, GrammarSandbox
from hf_triton.grammar.tokenizer import build_guidance_tokenizer
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

FIRST_SEARCH: Final = SearchBudget(max_visits=6_000, max_cpu_s=0.8, num_shortening_visits=500, yields=True)
TOKEN_SEARCH: Final = SearchBudget(max_visits=200, max_cpu_s=0.25)
NUM_GRAMMARS_KEPT: Final = 64
SANDBOX: Final = GrammarSandbox()
atexit.register(SANDBOX.close)


@dataclass(frozen=True)
class GrammarConfig:
    """Limits on the work that a grammar may cause."""

    parser: LLParserLimits = LIMITS
    first_search: SearchBudget = FIRST_SEARCH
    """The search for a first completion, outside the engine."""
    token_search: SearchBudget = TOKEN_SEARCH
    """The search behind each token, while the engine waits. The CPU time limits only grammars with which a visit takes
    much longer than 50 us; otherwise a seed would give other tokens on a busy machine."""
    max_wasted_visits: int = 1_000
    """Of a sequence's searches that find nothing."""


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary_size: Rows of the model's embedding.
        eos_ids: The end-of-sequence tokens if the sampling parameters have none.
        config: Limits; None: the defaults.
        sandbox: Tries grammars that are new.
        clock: CPU time of the thread in seconds.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        eos_ids: frozenset[int],
        config: GrammarConfig | None = None,
        sandbox: GrammarSandbox = SANDBOX,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._config = config or GrammarConfig()
        self._clock = clock
        fallback = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._eos_ids = frozenset(token_id for token_id in eos_ids or fallback if token_id < vocabulary_size)
        self._lock = threading.Lock()
        self._guidance: LLTokenizer | None = None
        self._finder = lru_cache(4)(self._build_finder)
        self._compiles_in_time = lru_cache(NUM_GRAMMARS_KEPT)(sandbox.compiles_in_time)
        self._completions: dict[tuple[Grammar, frozenset[int]], Tokens | None] = {}  # the most recent last

    def knows(self, grammar: Grammar, params: SamplingParams) -> bool:
        """Whether a grammar was compiled recently, so that it takes less than 0.1 s."""
        return (grammar, params.eos_ids or self._eos_ids) in self._completions

    def compile(
        self, grammar: Grammar, params: SamplingParams
    ) -> tuple[SamplingParams, Callable[[], GrammarConstraint]]:
        """Compile a grammar for the sequences of one prompt.

        Args:
            grammar: What the completions follow.
            params: The prompt's sampling parameters.

        Returns:
            The sampling parameters with at least one end-of-sequence token, and a factory of the sequences'
            constraints. Each prompt has a matcher of its own: the library's limits add up over its life.

        Raises:
            RequestError: The grammar is wrong, too large, unsupported or contradictory; or the completion that was
                found does not fit `max_new_tokens`; or the model's tokenizer is unsupported or has no end-of-sequence
                token.
        """
        eos_ids = params.eos_ids or self._eos_ids
        if not eos_ids:
            raise rejection(grammar, "needs a token that ends the text, and this model has none: say eos_token_id")
        guidance = self._guidance_tokenizer(grammar)
        if not (self.knows(grammar, params) or self._is_compiled_in_time(grammar)):
            raise rejection(
                grammar,
                f"takes more than {MAX_CPU_S} s of a processor, or {MAX_WAIT_S:g} s in all, to read: "
                "make it smaller, or its patterns simpler",
            )
        with panics_as_errors():
            matcher = build_matcher(guidance, grammar, self._config.parser)
            finder, hints = self._finder(eos_ids), _completion_hints(grammar)
            completion = self._completion(grammar, finder, hints)
            if completion is None and not finder.can_continue(matcher):
                raise rejection(grammar, "allows no text that could be found: it contradicts itself, or is too large")
        if completion is not None and len(completion) > params.max_new_tokens:
            raise rejection(
                grammar,
                f"allows no text of max_new_tokens {params.max_new_tokens} or less that could be found: "
                f"ask for {len(completion)} or more",
            )

        def build_constraint() -> GrammarConstraint:
            start, config = ConstraintState(matcher.deep_copy(), completion), self._config
            return GrammarConstraint(
                start, finder, config.token_search, config.max_wasted_visits, params.max_new_tokens, hints
            )

        return replace(params, eos_ids=eos_ids), build_constraint

    def _guidance_tokenizer(self, grammar: Grammar) -> LLTokenizer:
        """The tokenizer of llguidance, built at the first grammar, which takes up to a second."""
        with self._lock:
            if self._guidance is None:
                self._guidance = build_guidance_tokenizer(self._tokenizer, self._vocabulary_size)
        if self._guidance is None:
            raise rejection(grammar, "needs a tokenizer whose tokens are known by their bytes, and this model's is not")
        return self._guidance

    def _build_finder(self, eos_ids: frozenset[int]) -> CompletionFinder:
        assert self._guidance is not None
        return CompletionFinder(self._guidance, self._vocabulary_size, eos_ids, self._clock)

    def _is_compiled_in_time(self, grammar: Grammar) -> bool:
        try:
            return self._compiles_in_time(grammar)
        except OSError as error:
            logger.warning("compiling a grammar without the sandbox, which cannot be started: %s", where(error))
            return True

    def _completion(self, grammar: Grammar, finder: CompletionFinder, hints: tuple[str, ...]) -> Tokens | None:
        """The tokens of a short completion; None if none was found."""
        assert self._guidance is not None
        key = grammar, finder.eos_ids
        with self._lock:
            if key in self._completions:
                self._completions[key] = self._completions.pop(key)
                return self._completions[key]
        matcher = build_matcher(self._guidance, grammar, self._config.parser)
        completion, _ = finder.find(matcher, 2048, self._config.first_search, hints=hints)
        with self._lock:
            self._completions[key] = completion
            if len(self._completions) > NUM_GRAMMARS_KEPT:
                del self._completions[next(iter(self._completions))]
        return completion


_completion_hints = lru_cache(NUM_GRAMMARS_KEPT)(completion_hints)
