# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, and what goes in and out of it. Knows neither text nor Triton, and no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hf_triton.errors import HfTritonError
from hf_triton.generation import SamplingPlan

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One generated sequence of tokens."""

    token_ids: list[int]
    """Without the prompt, and without the end-of-sequence token."""
    finish_reason: FinishReason
    """`stop`: the model ended it. `length`: it has `max_new_tokens` tokens."""


Outcome = list[Completion] | HfTritonError
"""A prompt's completions, `num_return_sequences` of them, or why there are none."""


@dataclass(frozen=True)
class Sequence:
    """One prompt on its way through an engine."""

    prompt_ids: list[int]
    """At least one."""
    plan: SamplingPlan
    on_finish: Callable[[Outcome], None]
    """Called exactly once, in the engine's thread; what it raises is logged and goes no further."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Asked now and then; true gives the sequence up."""


def eos_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, by the model's generation_config; none where it names none."""
    eos = model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


class Engine(Protocol):
    """Runs many sequences at a time in a thread of its own."""

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence and return at once. An engine that cannot take it finishes it with an error instead."""

    def is_healthy(self) -> bool:
        """Whether the engine can still run sequences."""

    def close(self) -> None:
        """Stop: every sequence that is waiting or running is finished with an error, then the thread ends."""
