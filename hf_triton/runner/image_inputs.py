# SPDX-License-Identifier: Apache-2.0
"""The images of a prompt, as data: which tokens they stand at, and what the model's vision tower is given. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arguments of a model by name."""


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image of a prompt, as the model's processor has prepared it; images that it prepares as one are one."""

    places: npt.NDArray[np.int64]
    """`[features]`: the prompt's tokens whose embeddings its features replace, in this order, ascending."""
    arguments: Arrays
    """What the model's `get_image_features` is given."""
    digest: bytes
    """32 bytes that tell its content: equal images have equal digests, in whichever prompt."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """A step names it so."""

    @property
    def start(self) -> int:
        return int(self.places[0])

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return int(self.places[-1]) + 1

    def has_places(self, start: int, end: int) -> bool:
        """Whether some of the tokens `[start:end]` are its own."""
        first, behind = np.searchsorted(self.places, (start, end))
        return bool(first < behind)


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    images: tuple[ImageInput, ...]
    """At least one, in the order of their places, none within another."""
    arguments: Arrays
    """What `generate` is given beside the prompt's tokens."""
    positions: npt.NDArray[np.int64] | None = None
    """`[axes, tokens]`: the positions of the prompt's tokens; None: they are counted from 0."""

    @cached_property
    def offset(self) -> int:
        """What is added to the number of a token behind the prompt to have its position, on all axes."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]

    def among(self, start: int, end: int) -> list[ImageInput]:
        """The images that have places among the tokens `[start:end]`."""
        if start >= self.images[-1].end:  # a decoding sequence asks at every step
            return []
        return [image for image in self.images if image.has_places(start, end)]

    def positions_of(self, start: int, end: int) -> npt.NDArray[np.int64] | None:
        """Positions of the tokens `[start:end]` of the prompt and of what follows it, as those of a `TokenRange`."""
        if self.positions is None:
            return None
        num_axes, num_prompt = self.positions.shape
        behind = np.arange(max(start, num_prompt), end) + self.offset
        positions: npt.NDArray[np.int64] = np.hstack([self.positions[:, start:end], np.tile(behind, (num_axes, 1))])
        return positions


@dataclass(frozen=True, eq=False)
class ImageSample:
    """A prompt with images that a model is tried with at load."""

    prompt_ids: list[int]
    images: PromptImages
