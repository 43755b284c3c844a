# SPDX-License-Identifier: Apache-2.0
"""What goes in and out of the engine of speech. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hf_triton.engine.group import Group


@dataclass(frozen=True)
class SpeechParams:
    """What is done with an audio; equal ones may share a batch."""

    task: Literal["transcribe", "translate"] | None
    """None: the model knows one task and one language."""
    timestamps: Literal["none", "segment", "word"] = "none"
    prompt_ids: tuple[int, ...] = ()
    """Tokens of an initial prompt, its special token first."""
    temperature: float | None = None
    """None samples greedily."""
    max_new_tokens: int | None = None
    """The most of each window; None: as the checkpoint says."""


@dataclass(frozen=True)
class Segment:
    """A part of a transcript, as the model divides it by its timestamps."""

    start_s: float
    end_s: float
    token_ids: list[int]
    token_ends_s: list[float] | None
    """The end of each token; None unless words have timestamps."""


@dataclass(frozen=True)
class Transcript:
    segments: list[Segment]
    language_id: int | None
    """The token of the language, given or detected; None: the model knows one language."""

    @property
    def token_ids(self) -> list[int]:
        return [token_id for segment in self.segments for token_id in segment.token_ids]


@dataclass(eq=False)
class SpeechGroup(Group[Transcript]):
    samples: npt.NDArray[np.float32]
    """Samples at the model's rate, `[samples]`."""
    params: SpeechParams
    language_id: int | None = None
    """The language's token; None: the model detects it."""
