# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, and what goes in and out of it. Knows neither text nor Triton, and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from hf_triton.engine.sequence import SequenceGroup, SequenceObserver
from hf_triton.errors import HfTritonError


@dataclass(frozen=True)
class EngineLoad:
    """What an engine holds at a moment."""

    num_waiting: int = 0
    """Prompts in the queue and others without memory yet, preempted sequences among them."""
    num_running: int = 0
    """Sequences that are being prefilled or decoded."""
    num_used_tokens: int = 0
    """Tokens of KV cache in use, in whole blocks; 0 if the engine does not manage it."""
    max_used_tokens: int = 0
    """Tokens of KV cache that it may use now."""
    num_free_slots: int = 0
    """Sequences that could start at the next step; those in the queue are not subtracted."""
    is_sleeping: bool = False
    """Whether its memory is given back, see `Worker`."""


class Nap(NamedTuple):
    """What has become of an engine that was told to sleep or to wake."""

    is_sleeping: bool
    seconds: float = 0.0
    """How long it took; 0: it slept, or was awake."""
    given_back_bytes: int = 0
    """Of the GPU, or of the process on a CPU."""


class Observer:
    """Observes an engine, in the engine's thread: must be quick, and must not raise. This one does nothing."""

    def on_admit(self, group: SequenceGroup) -> SequenceObserver:
        return SequenceObserver()

    def on_prefix_hit(self, num_tokens: int) -> None:
        """A context's first `num_tokens` tokens are in the prefix cache and are not computed."""

    def on_step(self, num_sequences: int) -> None:
        """A step has given `num_sequences` sequences their next token."""

    def on_proposal(self, num_proposed: int, num_accepted: int) -> None:
        """A step has computed a sequence's proposal of `num_proposed` tokens; the first `num_accepted` were right."""

    def on_preempt(self, num_sequences: int) -> None:
        """`num_sequences` running sequences go back to the queue."""

    def expect_images(self) -> None:
        """The model takes images; called before the engine starts."""

    def on_tower(self, seconds: float) -> None:
        """The vision tower has computed the features of an image, while all sequences waited."""


class Engine(Protocol):
    """Computes for many requests at a time in a thread of its own."""

    @property
    def slower(self) -> Sequence[str]:
        """Sentences on why it runs slower than it could, see `Worker`."""

    def is_healthy(self) -> bool:
        """Whether the engine can still compute."""

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is given back."""

    def set_sleeping(self, is_sleeping: bool) -> Future[Nap]:
        """Sleep once there is no work, or wake; from any thread, as is the result. Cancelling it withdraws the call."""

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread, and not quite at one moment."""

    def close(self) -> None:
        """Finish every queued and running group with an error, then end the thread."""


class GenerationEngine(Engine, Protocol):
    """Generates for sequence groups."""

    name: ClassVar[str]
    """The setting `engine` names it so."""
    images: str
    """How it computes prompts with images: `continuous`, by `generate`, or `no`: it takes none."""
    image_obstacle: str
    """Why not `continuous`; empty: it is, or takes none."""

    def submit(self, groups: list[SequenceGroup]) -> None:
        """Queue the sequence groups of one request and return at once; all of them, or none.

        An engine that cannot take them finishes each with an error instead.
        """

    def admission_error(self, group: SequenceGroup) -> HfTritonError | None:
        """The error of a sequence group that can never run here; None: it can."""


def eos_ids(model: Any) -> frozenset[int]:
    """The end-of-sequence tokens of the model's generation_config."""
    eos = model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])
