# SPDX-License-Identifier: Apache-2.0
"""What one step computes, as data: no tensor, callback or live object, so another process could run it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hf_triton.runner.image_inputs import ImageInput


class TokenRange(NamedTuple):
    """Tokens of one sequence that a step computes."""

    sequence_id: int
    start: int
    """Tokens of the sequence in its blocks before the step."""
    end: int
    """Tokens in its blocks after the step."""
    token_ids: Sequence[int]
    """The tokens at `[start:end]`; empty if there is one, which the step in flight samples."""
    block_table: Sequence[int]
    """The blocks of the tokens `[0:end]`, in order."""
    context_length: int
    """Tokens of the context that is being computed, in this step and later ones."""
    samples: tuple[int, ...] = ()
    """Sequences whose next token follows `end`: none within a context; several that share a prompt behind its end."""
    num_top_logprobs: int | None = None
    """Alternatives to score with each prompt token of the range; None: they are not scored."""
    num_scored: int = 0
    """The first tokens of the range whose logits score the token behind them."""
    num_drafted: int = 0
    """The last tokens of the range that are a proposal: each has logits too, and is kept if it is what is sampled."""
    slot: int = -1
    """The sequence's states are there; -1: the model has none."""
    kept_slot: int = -1
    """Where its states behind `end` are copied to after the step, for the prefix cache; -1: they are not."""
    images: tuple[int, ...] = ()
    """Numbers of the images that have places among its tokens."""
    positions: npt.NDArray[np.int64] | None = None
    """`[axes, tokens]`: the positions of its tokens, where an image has changed them; None: they are counted from 0."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_rows(self) -> int:
        """Rows of logits that are wanted."""
        return self.num_scored + (1 + self.num_drafted if self.samples else 0)

    @property
    def is_decode(self) -> bool:
        """Whether one token is computed behind cached ones, beside a proposal."""
        return self.end - self.start == 1 + self.num_drafted and self.start > 0


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence that joins the running ones."""

    sequence_id: int
    adapter: str | None
    """The key of its LoRA adapter."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what to copy, then what to compute."""

    ranges: tuple[TokenRange, ...] = ()
    """Decoding sequences first."""
    admitted: tuple[AdmittedSequence, ...] = ()
    finished: tuple[int, ...] = ()
    """Sequences that have left since the last step."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy first: from, to."""
    full_blocks: tuple[int, ...] = ()
    """Blocks that the step fills and that other sequences may share, if their numbers are finite."""
    slot_copies: tuple[tuple[int, int], ...] = ()
    """State slots to copy first: from, to."""
    images: tuple[ImageInput, ...] = ()
    """Images whose features are computed first, and kept; one whose features are kept already costs nothing."""
    dropped_images: tuple[int, ...] = ()
    """Numbers of images whose features no sequence needs any more."""
    stays_inflight: bool = False
    """Whether the next step is scheduled before the tokens of this one are read."""
    wait_s: float = 0.0
    """Seconds to wait in place of a step: a context needs memory that others on the device may free."""

    @property
    def sequence_ids(self) -> set[int]:
        """The sequences that a failure of this step may have come from."""
        return {number for part in self.ranges for number in (part.sequence_id, *part.samples)}
