# SPDX-License-Identifier: Apache-2.0
"""What a text brings along for the choice of its tokens, and how likely they were. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

LogitsProcessor = Callable[[list[int], Any], Any]
"""Given a text's tokens so far, prompt included, and the scores of the next one, a float32 tensor `[vocabulary]`: the
scores to go by."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One token, and how likely the model found it and others in its place.

    Natural logarithms of the softmax of the model's own logits, before penalties, biases and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, the likeliest first; as many as the plan asks for."""


class Constraint(Protocol):
    """What one text may hold. It knows how many tokens the text may have, and that it can be ended within them."""

    def mask(self) -> npt.NDArray[np.uint8]:
        """The tokens that may come next, a bit each, the lowest first; token ids beyond it may not.

        An end-of-sequence token may come exactly where the text may end.
        """

    def resolve_sampling_params(self, token_id: int) -> int:
        """The token itself where it may come and the text can still be ended behind it, else the first of `closing`.

        It changes nothing.
        """

    def closing(self) -> list[int]:
        """Tokens with which the text can be ended, in order, an end-of-sequence token the last."""

    def accept(self, token_id: int) -> None:
        """The text goes on with a token that was settled; to be called once for each, end-of-sequence included."""
