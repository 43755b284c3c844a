# SPDX-License-Identifier: Apache-2.0
"""AllowedTokens: keeps one sequence to the tokens of a list, and to another constraint's as well. No torch."""

from __future__ import annotations

from collections.abc import Callable

from hf_triton.errors import RequestError
from hf_triton.sampling.types import Bits, Constraint
from hf_triton.sentence import param

ALLOWED_TOKEN_IDS = "allowed_token_ids"


class AllowedTokens:
    """A constraint of one sequence, as `sampling.types.Constraint`.

    Args:
        bits: The allowed tokens, see `bits_of`.
        eos_bits: The end-of-sequence tokens: where `other` lets the sequence end, and none of the allowed tokens goes
            on, it ends.
        build_other: Makes the other constraint; None: there is none.
    """

    def __init__(self, bits: Bits, eos_bits: Bits, build_other: Callable[[], Constraint] | None = None) -> None:
        self._bits = bits
        self._eos_bits = eos_bits
        self._other = None if build_other is None else build_other()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end-of-sequence may follow."""
        return self._other is not None and self._other.is_complete

    def bitmask(self) -> Bits:
        """The tokens that may come next.

        Raises:
            RequestError: There is none.
        """
        others = None if self._other is None else self._other.bitmask()
        if others is None:
            return self._bits
        for bits in (self._bits, self._eos_bits):
            size = min(len(bits), len(others))
            if (both := bits[:size] & others[:size]).any():
                return both
        sentence = f"{param(ALLOWED_TOKEN_IDS)} has no token that what else constrains the output allows next"
        raise RequestError("invalid_parameter", sentence, field=ALLOWED_TOKEN_IDS)

    def accept(self, token_id: int) -> None:
        if self._other is not None:
            self._other.accept(token_id)
