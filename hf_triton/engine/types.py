# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, and what goes in and out of it. Knows neither text nor Triton, and no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hf_triton.errors import HfTritonError
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, LogitsProcessor, TokenLogprobs

FinishReason = Literal["eos", "stop_string", "length", "deadline"]
"""`eos`: the model ended it. `stop_string`: its listener did. `length`: it has `max_new_tokens` tokens. `deadline`: its
time was up."""


@dataclass(frozen=True)
class Completion:
    """One generated sequence of tokens."""

    token_ids: list[int]
    """Without the prompt, and without the end-of-sequence token."""
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, where the plan asks for `logprobs`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each prompt token but the first, which nothing precedes; where the plan asks for `prompt_logprobs`."""


Outcome = list[Completion] | HfTritonError
"""A prompt's completions, `num_return_sequences` of them, or why there are none."""


@dataclass
class RequestTimes:
    """When what happened to a request, by `time.monotonic()`. Its sequences share it; they run in one thread."""

    arrival_s: float = field(default_factory=lambda: time.monotonic())
    """When it came."""
    admitted_s: float | None = None
    """When the first of its sequences left the queue."""
    first_token_s: float | None = None
    """When the first of its texts had a token."""

    def note_admitted(self, now_s: float) -> None:
        """A sequence leaves the queue."""
        if self.admitted_s is None:
            self.admitted_s = now_s

    def note_token(self, now_s: float) -> None:
        """A text has a token."""
        if self.first_token_s is None:
            self.first_token_s = now_s


@dataclass(frozen=True)
class SequenceGroup:
    """One prompt on its way through an engine."""

    prompt_ids: list[int]
    """At least one."""
    plan: SamplingParams
    on_finish: Callable[[Outcome], None]
    """Called exactly once, in the engine's thread or in that of `submit`; what it raises is logged and goes no
    further."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Asked at every step, so it must be cheap; true gives the sequence up."""
    on_token: Callable[[int, int], bool] | None = None
    """Called in the engine's thread with a sequence's index (below `plan.num_sequences`) and each of its tokens but the
    end-of-sequence token; true ends that sequence here, as a stop string does."""
    constraint: Callable[[], Constraint] | None = None
    """Called in the engine's thread, once for each of `plan.num_sequences` texts; None: they may hold anything."""
    logits_processor: Callable[[], LogitsProcessor | None] = lambda: None
    """Called likewise; made of what the model's user brings, it is applied before the constraint."""
    deadline_s: float | None = None
    """By `time.monotonic()`; the texts end with what they have then, and a sequence that has nothing yet is refused."""
    priority: int = 0
    """The lower, the earlier it leaves the queue; among equals, requests take turns."""
    turn: int = 0
    """In which of them it is to leave; the queue's own."""
    times: RequestTimes = field(default_factory=RequestTimes)
    """Of the request that it belongs to."""


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has in hand at a moment."""

    num_waiting: int = 0
    """Prompts in the queue, and texts that were put back."""
    num_running: int = 0
    """Texts that are being written, or whose prompts are being read."""
    num_used_tokens: int = 0
    """Tokens of key/value memory, padding counted; 0 where the engine does not manage it."""
    max_used_tokens: int = 0
    """How many it may hold now."""
    num_free_slots: int = 0
    """Sequences that could start at the next step, were they in the queue; those in it are not subtracted."""


class SequenceObserver:
    """Is told what becomes of one sequence, see `Observer`."""

    def on_token_sampled(self, copy: int, *, is_text: bool) -> None:
        """A text has its next token; `is_text` unless that is an end-of-sequence token."""

    def on_complete(self, completions: list[Completion]) -> None:
        """The sequence has all its texts. Not called where it ends with an error."""


class Observer:
    """Is told what an engine does, in the engine's thread: must be quick, and must not raise. This one looks away."""

    def on_admit(self, sequence: SequenceGroup) -> SequenceObserver:
        """A sequence leaves the queue."""
        return SequenceObserver()

    def on_prefix_hit(self, num_tokens: int) -> None:
        """So many first tokens of a context are known from another text and are not computed."""

    def on_step(self, num_rows: int) -> None:
        """A step has given so many rows their next token."""

    def on_preempt(self, num_rows: int) -> None:
        """So many running rows are made to wait again."""


def eos_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, by the model's generation_config; none where it names none."""
    eos = model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


class Engine(Protocol):
    """Runs many sequences at a time in a thread of its own."""

    def submit(self, sequences: list[SequenceGroup]) -> None:
        """Queue the sequences of one request and return at once; all of them, or none.

        An engine that cannot take them finishes each with an error instead.
        """

    def admission_error(self, sequence: SequenceGroup) -> HfTritonError | None:
        """Why a sequence could never run here; None where it could."""

    def is_healthy(self) -> bool:
        """Whether the engine can still run sequences."""

    def load(self) -> EngineLoad:
        """What it has in hand; from any thread, and not quite at one moment."""

    def close(self) -> None:
        """Stop: every sequence that is waiting or running is finished with an error, then the thread ends."""
