# SPDX-License-Identifier: Apache-2.0
"""GrammarConstraint: the tokens that a grammar allows one sequence next, and whether it has reached its end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from hf_triton.errors import GenerationError, panics_as_errors

Bits = npt.NDArray[np.uint8]
"""One bit for each token id, lowest bit first."""


class GrammarConstraint:
    """A constraint of one sequence, as `sampling.types.Constraint`.

    Args:
        matcher: The grammar, at its start; it is this sequence's alone.
        text_bits: The tokens that may spell text: the model's, without end-of-sequence.
        eos_bits: The end-of-sequence tokens.
        eos_ids: The same.
    """

    def __init__(self, matcher: LLMatcher, text_bits: Bits, eos_bits: Bits, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
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
            GenerationError: No token may come next, or the grammar exceeds the limits of a token.
        """
        if self._bitmask is None:
            with panics_as_errors():
                self._bitmask = self._compute_bitmask()
        return self._bitmask

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            GenerationError: The token is not allowed, or the grammar exceeds the limits of a token.
        """
        if token_id not in self._eos_ids:
            with panics_as_errors():
                is_allowed = self._matcher.consume_token(token_id)
            if not is_allowed:
                raise GenerationError("generation_failed", "the grammar cannot follow the completion's next token")
        self._bitmask = None

    def _compute_bitmask(self) -> Bits:
        matcher = self._matcher
        bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8) & self._text_bits
        if matcher.is_error():
            raise GenerationError("generation_failed", "the grammar needs too much work for the next token")
        if matcher.is_accepting():
            bitmask |= self._eos_bits
        if not bitmask.any():
            raise GenerationError("generation_failed", "the grammar allows none of the model's tokens here")
        return bitmask
