# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, and what goes in and out of it. Knows neither text nor Triton, and no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hf_triton.errors import HfTritonError
from hf_triton.generation import SamplingPlan

FinishReason = Literal["eos", "stop_string", "length", "deadline"]
"""`eos`: the model ended it. `stop_string`: its listener did. `length`: it has `max_new_tokens` tokens. `deadline`: its
time was up."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One token, and how likely the model found it and others in its place.

    Natural logarithms of the softmax of the model's own logits, before penalties, biases and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, the likeliest first; as many as the plan asks for."""


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


@dataclass(frozen=True)
class Sequence:
    """One prompt on its way through an engine."""

    prompt_ids: list[int]
    """At least one."""
    plan: SamplingPlan
    on_finish: Callable[[Outcome], None]
    """Called exactly once, in the engine's thread or in that of `submit`; what it raises is logged and goes no
    further."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Asked at every step, so it must be cheap; true gives the sequence up."""
    on_token: Callable[[int, int], bool] | None = None
    """Called in the engine's thread with the number of the text (below `plan.num_rows`) and each of its tokens but the
    end-of-sequence token; true ends that text here, as a stop string does."""
    deadline_s: float | None = None
    """By `time.monotonic()`; the texts end with what they have then, and a sequence that has nothing yet is refused."""
    priority: int = 0
    """The lower, the earlier it leaves the queue; first come first served among equals."""


def eos_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, by the model's generation_config; none where it names none."""
    eos = model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


class Engine(Protocol):
    """Runs many sequences at a time in a thread of its own."""

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of one request and return at once; all of them, or none.

        An engine that cannot take them finishes each with an error instead.
        """

    def is_healthy(self) -> bool:
        """Whether the engine can still run sequences."""

    def close(self) -> None:
        """Stop: every sequence that is waiting or running is finished with an error, then the thread ends."""
