# SPDX-License-Identifier: Apache-2.0
"""GrammarConstraint: the tokens that a grammar allows one sequence next, and whether it has reached its end.

A grammar may fail behind any token: `OwnConstraint` makes that the end of its own request.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from hf_triton.errors import HfTritonError, RequestError, as_own_error, panics_as_errors
from hf_triton.sampling.types import Bits, Constraint

"""One bit for each token id, lowest bit first."""


class GrammarConstraint:
    """A constraint of one sequence, as `sampling.types.Constraint`.

    Args:
        matcher: The grammar, at its start; it is this sequence's alone.
        text_bits: The tokens that may spell text: the model's, without end-of-sequence.
        parameter: The request parameter that holds the grammar, for error messages.
        tokenizer: The matcher's.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        text_bits: Bits,
        eos_bits: Bits,
        eos_ids: frozenset[int],
        parameter: str,
        tokenizer: LLTokenizer,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._parameter = parameter
        self._text_bits = text_bits
        self._eos_bits = eos_bits
        self._eos_ids = eos_ids
        self._bitmask: Bits | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the grammar has ended: nothing but end-of-sequence may follow."""
        return self._matcher.is_stopped()

    def bitmask(self) -> Bits:
        """The tokens that may come next; end-of-sequence where the grammar may end.

        Raises:
            RequestError: No token may come next, or the grammar exceeds the limits of a token.
        """
        if self._bitmask is None:
            with panics_as_errors():
                self._bitmask = self._compute_bitmask()
        return self._bitmask

    def accept(self, token_id: int) -> None:
        """Advance by one token; raises RequestError if it is not allowed, or exceeds the grammar's limits."""
        if token_id not in self._eos_ids:
            with panics_as_errors():
                is_allowed = self._matcher.consume_token(token_id)
            if not is_allowed:
                raise self._failure()
        self._bitmask = None

    def takes(self, text: bytes) -> bool:
        """Whether a text may come next."""
        with panics_as_errors():
            return self._consume(self._matcher.deep_copy(), text)

    def accept_text(self, text: bytes) -> None:
        """Advance by a text, however its tokens spell it; raises as `accept` does."""
        with panics_as_errors():
            is_allowed = self._consume(self._matcher, text)
        if not is_allowed:
            raise self._failure()
        self._bitmask = None

    def _consume(self, matcher: LLMatcher, text: bytes) -> bool:
        return not text or bool(matcher.consume_tokens(self._tokenizer.tokenize_bytes(text)))

    def _compute_bitmask(self) -> Bits:
        matcher = self._matcher
        bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8) & self._text_bits
        if matcher.is_error():
            raise self._failure()
        if matcher.is_accepting():
            bitmask |= self._eos_bits
        if not bitmask.any():
            raise self._failure()
        return bitmask

    def _failure(self) -> RequestError:
        error = self._matcher.get_error()
        if error and not error.startswith("NoExtension"):
            reason = "needs too much work for the next token: make it smaller, or its patterns simpler"
        else:
            reason = "leads to a text that none of the model's tokens can continue: it contradicts itself"
        return RequestError("invalid_parameter", f"{self._parameter} {reason}")


class OwnConstraint:
    """A constraint whose failure ends its own request, by `refuse`, and not the engine's step."""

    def __init__(self, constraint: Constraint, refuse: Callable[[HfTritonError], None]) -> None:
        self._constraint = constraint
        self._refuse = refuse
        self._has_failed = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end-of-sequence may follow; so it is behind a failure."""
        return self._has_failed or self._constraint.is_complete

    def bitmask(self) -> Bits | None:
        """The tokens that may come next; None: any."""
        try:
            return None if self._has_failed else self._constraint.bitmask()
        except Exception as error:
            self._fail(error)
            return None

    def accept(self, token_id: int) -> None:
        try:
            if not self._has_failed:
                self._constraint.accept(token_id)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._refuse(as_own_error("following a grammar", error))
