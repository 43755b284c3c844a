# SPDX-License-Identifier: Apache-2.0
"""GrammarConstraint: the tokens that a grammar allows one sequence, and the completion that is known for it.

While a completion of the sequence is known, a token is allowed only if one within `max_new_tokens` is found behind it
too; otherwise the next token of the known one takes its place. So a search that finds nothing costs freedom and never
validity. A sequence for which no completion was found yet follows the grammar and may end as `length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from hf_triton.errors import GenerationError, panics_as_errors
from hf_triton.grammar.completion import MAX_FALLBACKS, CompletionFinder, SearchBudget, Tokens


@dataclass(frozen=True)
class ConstraintState:
    """The state of a sequence."""

    matcher: LLMatcher
    completion: Tokens | None
    """Tokens that complete the sequence, without end-of-sequence; None: not known."""


class GrammarConstraint:
    """A constraint of one sequence, as `sampling.types.Constraint`.

    Args:
        start: The state of the empty sequence.
        finder: Finds completions.
        budget: Limits of the search behind a token; the engine waits for it.
        max_wasted_visits: Visits of searches that find nothing, after which the sequence has no more searches.
        max_new_tokens: Tokens of the sequence, end-of-sequence not included.
        hints: Literals that the grammar may ask for.
    """

    def __init__(
        self,
        start: ConstraintState,
        finder: CompletionFinder,
        budget: SearchBudget,
        max_wasted_visits: int,
        max_new_tokens: int,
        hints: Sequence[str],
    ) -> None:
        self._state = start
        self._finder = finder
        self._budget = budget
        self._num_visits_left = max_wasted_visits
        self._num_tokens_left = max_new_tokens
        self._hints = hints
        self._eos_ids = sorted(finder.eos_ids)
        self._bitmask: npt.NDArray[np.uint8] | None = None
        self._next: dict[int, ConstraintState | None] = {}
        """States behind tokens that were asked for."""

    def bitmask(self) -> npt.NDArray[np.uint8]:
        """The tokens that may come next, one bit each, lowest bit first; end-of-sequence where the grammar may end.

        Raises:
            GenerationError: No completion is known, and the grammar exceeds the limits of a token.
        """
        if self._bitmask is None:
            with panics_as_errors():
                self._bitmask = self._compute_bitmask()
        return self._bitmask

    def enforce(self, token_id: int) -> int:
        """The token if it is allowed, else the next one of the known completion, else the lowest one.

        Raises:
            GenerationError: No token is allowed.
        """
        with panics_as_errors():
            if self._is_allowed(token_id):
                return token_id
            others = self.completion_tokens()[:1] or self._finder.allowed_tokens(self._state.matcher)[:MAX_FALLBACKS]
            for other in others:
                if self._is_allowed(other):
                    return other
        raise GenerationError("generation_failed", "the grammar allows none of the model's tokens here")

    def completion_tokens(self) -> list[int]:
        """Tokens that complete the sequence, an end-of-sequence token last; empty if none are known."""
        completion = self._state.completion
        return [] if completion is None else [*completion, self._eos_ids[0]]

    def accept(self, token_id: int) -> None:
        """Advance by one enforced token."""
        if token_id not in self._eos_ids:
            with panics_as_errors():
                state = self._state_behind(token_id)
            assert state is not None, "a token that was not enforced"
            self._state = state
        self._num_tokens_left -= 1
        self._bitmask = None
        self._next = {}

    def _is_allowed(self, token_id: int) -> bool:
        if token_id in self._eos_ids:
            return self._state.completion == ()
        return self._state_behind(token_id) is not None

    def _state_behind(self, token_id: int) -> ConstraintState | None:
        if token_id not in self._next:
            self._next[token_id] = self._compute_state_behind(token_id)
        return self._next[token_id]

    def _compute_state_behind(self, token_id: int) -> ConstraintState | None:
        """The state behind a token; None if it is not allowed."""
        matcher, completion = self._state.matcher, self._state.completion
        is_expected = bool(completion) and completion is not None and token_id == completion[0]
        if self._num_visits_left < 0 and completion is not None:  # the completion follows, without the matcher
            return ConstraintState(matcher, completion[1:]) if is_expected else None
        matcher = matcher.deep_copy()
        matcher.consume_token(token_id)
        if is_expected and completion is not None:
            return ConstraintState(matcher, () if matcher.is_accepting() else completion[1:])
        if matcher.is_error():
            return None
        if self._num_visits_left < 0:
            return ConstraintState(matcher, () if matcher.is_accepting() else None)
        start_s = self._finder.clock()
        tokens, num_visits = self._finder.find(
            matcher, self._num_tokens_left - 1, self._budget, completion or (), self._hints
        )
        if tokens is None:
            self._num_visits_left -= num_visits
        if self._finder.clock() - start_s > self._budget.max_cpu_s:  # the other sequences wait
            self._num_visits_left = -1
        return None if tokens is None and completion is not None else ConstraintState(matcher, tokens)

    def _compute_bitmask(self) -> npt.NDArray[np.uint8]:
        matcher, completion = self._state.matcher, self._state.completion
        if self._num_visits_left >= 0 or completion is None:
            bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8).copy()
            if not matcher.is_error():
                for token_id in self._eos_ids:
                    _set_bit(bitmask, token_id, completion == ())
                return bitmask
            if completion is None:
                raise GenerationError("generation_failed", "the grammar needs too much work for the next token")
            self._num_visits_left = -1
        token_id = self.completion_tokens()[0]
        bitmask = np.zeros(token_id // 8 + 1, np.uint8)
        _set_bit(bitmask, token_id, True)
        return bitmask


def _set_bit(bitmask: npt.NDArray[np.uint8], token_id: int, value: bool) -> None:
    bit = np.uint8(1 << token_id % 8)
    bitmask[token_id // 8] = bitmask[token_id // 8] | bit if value else bitmask[token_id // 8] & ~bit
