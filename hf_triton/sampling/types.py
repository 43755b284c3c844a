# SPDX-License-Identifier: Apache-2.0
"""Types that sampling shares with the engine: constraints, logits processors and log probabilities. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

LogitsProcessor = Callable[[list[int], Any], Any]
"""Maps a sequence's token ids, prompt included, and the scores of its next token (float32 tensor `[vocabulary]`) to new
scores of the same shape."""
Bits = npt.NDArray[np.uint8]
"""A bit for each token id, lowest bit first."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token and of its likeliest alternatives.

    Natural logarithms of the softmax of the model's own logits, before penalties, biases and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """`(token_id, logprob)` of the likeliest tokens in descending order; as many as the sampling parameters ask for."""


class Constraint(Protocol):
    """Restricts the tokens of one sequence, such as by a grammar."""

    def bitmask(self) -> Bits | None:
        """The tokens that may come next, at least one; ids beyond its length are banned.

        None: any token.

        An end-of-sequence token is allowed exactly where the completion may end.
        """

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end-of-sequence may follow."""

    def accept(self, token_id: int) -> None:
        """Advance by one token; called once for each, end-of-sequence included. Raises if the token is not allowed."""


def bits_of(token_ids: Iterable[int], size: int) -> Bits:
    """The bits of tokens, of `size` in all; other ids are those of no token."""
    bits = np.zeros(size, bool)
    bits[[token_id for token_id in token_ids if 0 <= token_id < size]] = True
    return np.packbits(bits, bitorder="little")
