# SPDX-License-Identifier: Apache-2.0
"""What goes in and out of an encoder's engine. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_triton.errors import HfTritonError


@dataclass(frozen=True)
class EncoderInput:
    """One sequence, special tokens included."""

    ids: list[int]
    type_ids: list[int] | None = None
    """`token_type_ids`; None if the tokenizer gives none."""
    output_positions: list[int] | None = None
    """Of outputs per token, the tokens whose outputs are wanted, ascending; None: all. A masked-language head is
    computed for these alone."""


@dataclass(eq=False)
class EncoderGroup:
    """The sequences of one request, which are answered together."""

    inputs: list[EncoderInput]
    on_done: Callable[[list[npt.NDArray[np.float32]] | HfTritonError], None]
    """Called once, with one array for each input or an error. From the engine's thread; or in `submit`, if the engine
    refuses the group."""
    is_cancelled: Callable[[], bool]
    """Asked before a forward, and now and then while the group waits; must not raise."""
    deadline_s: float | None = None
    """By `time.monotonic()`: a group that has not begun its last forward by then is answered with an error."""
    on_begin: Callable[[], None] = lambda: None
    """Called in the engine's thread before the first forward with one of its inputs; must not raise."""


@dataclass(frozen=True)
class EncoderLoad:
    """What an encoder's engine holds at a moment."""

    num_waiting: int = 0
    """Sequences in the queue."""
    num_running: int = 0
    """Sequences of the current forward."""
