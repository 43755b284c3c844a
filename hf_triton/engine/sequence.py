# SPDX-License-Identifier: Apache-2.0
"""One text being written, and the sequence that it belongs to: what both engines keep of a text. Knows no model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

import torch

from hf_triton.engine.types import (
    Completion,
    FinishReason,
    Outcome,
    SequenceGroup,
    SequenceObserver,
)
from hf_triton.engine.worker import cancellation, finish, is_late, too_late
from hf_triton.errors import HfTritonError, where
from hf_triton.runner.transfer import to_device
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledToken, SampledTokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.sampling.types import TokenLogprobs

logger = logging.getLogger(__name__)

IDLE: Final = SequenceSampler(SamplingParams(1), 0, [], frozenset(), None, None)
"""SampledTokens for a text that needs none."""


class GroupState:
    """A sequence on its way: the texts it wants, and those it has.

    Args:
        sequence: The prompt, its plan and its listeners.
        eos_ids: The tokens that end a text, where the plan does not say.
        observer: Is told what becomes of it.
        number: The higher, the younger.
        context_ids: What its texts go on from; None: the prompt.
    """

    def __init__(
        self,
        sequence: SequenceGroup,
        eos_ids: frozenset[int],
        observer: SequenceObserver,
        number: int = 0,
        context_ids: list[int] | None = None,
    ) -> None:
        plan = sequence.plan
        self.number = number
        self.sequence = sequence
        self.observer = observer
        self.eos_ids = eos_ids if plan.eos_ids is None else plan.eos_ids
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.num_cached: int | None = None
        """Tokens that the prompt had in common with another text when that was looked up; None: not yet."""
        self.no_room_since_s: float | None = None
        """Since when it has waited for memory while nothing runs; None: it does not."""
        self.is_finished = False
        self._context_ids = sequence.prompt_ids if context_ids is None else context_ids
        self.rows = [Sequence(self, copy, self._sampler(copy)) for copy in range(plan.num_sequences)]

    def _sampler(self, copy: int) -> SequenceSampler:
        sequence = self.sequence
        constraint = sequence.constraint() if sequence.constraint else None
        processor = sequence.logits_processor()
        return SequenceSampler(sequence.plan, copy, self._context_ids, self.eos_ids, constraint, processor)

    def finish(self, outcome: Outcome) -> None:
        """Tell the listener, once."""
        if not self.is_finished:
            self.is_finished, self.rows = True, []  # which hold it: nothing is left to the garbage collector
            if not isinstance(outcome, HfTritonError):
                self.observer.on_complete(outcome)
            finish(self.sequence, outcome)

    def finish_if_complete(self) -> None:
        """Tell the listener its completions when all rows are done."""
        if all(row.finish_reason for row in self.rows):
            self.finish([row.completion() for row in self._best()])

    def drop_if_ended(self) -> None:
        """Finish it where nobody waits for it any more, or its time is up."""
        ending = cancellation(self.sequence)
        if ending is not None:
            self.finish(ending)
        elif is_late(self.sequence):
            self.expire()

    def expire(self) -> None:
        """The time is up: the texts end with what they have."""
        if not any(row.token_ids or row.again for row in self.rows):
            self.finish(too_late())
        for row in self.rows:
            row.expire()
        self.finish_if_complete()

    def _best(self) -> list[Sequence]:
        """The `num_return_sequences` rows whose tokens are likeliest on average; all of them, as a rule."""
        plan = self.sequence.plan
        if plan.num_sequences == plan.num_return_sequences:
            return self.rows
        ranked = sorted(self.rows, key=lambda row: row.mean_logprob(), reverse=True)
        return ranked[: plan.num_return_sequences]


@dataclass(eq=False)
class Sequence:
    """One text being written."""

    job: GroupState
    copy: int
    sampler: SequenceSampler
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it is being written."""
    again: list[int] = field(default_factory=list)
    """The next tokens, where it has had them before: see `regenerate`."""
    is_suspect: bool = False
    """It was in a batch that failed, and runs alone until its end."""

    @property
    def is_done(self) -> bool:
        """Whether it is complete, or nobody waits for it any more."""
        return self.finish_reason is not None or self.job.is_finished

    @property
    def age(self) -> tuple[int, int]:
        """The higher, the younger."""
        return self.job.number, self.copy

    def context(self) -> list[int]:
        """The tokens that its next token follows."""
        return self.job.sequence.prompt_ids + self.token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, with those that come again."""
        return len(self.job.sequence.prompt_ids) + len(self.token_ids) + len(self.again)

    @property
    def num_left(self) -> int:
        """Tokens that it may have yet, those that come again included."""
        return self.job.sequence.plan.max_new_tokens - len(self.token_ids)

    @property
    def picker(self) -> SequenceSampler:
        """What picks its next token; of one that it has had before, anything."""
        return IDLE if self.again else self.sampler

    def regenerate(self) -> None:
        """Have the tokens so far written once more, one by one, of which nobody is told."""
        self.token_ids, self.again = [], self.token_ids + self.again

    def begins_with(self, head: list[int]) -> bool:
        """Whether the context begins with these tokens."""
        prompt = self.job.sequence.prompt_ids[: len(head)]
        return prompt + self.token_ids[: len(head) - len(prompt)] == head

    def take(self, pick: SampledToken) -> bool:
        """Take the next token; whether the text is complete with it. The job is finished with its last row."""
        if self.is_done:
            return True
        if self.again:
            self.token_ids.append(self.again.pop(0))
            return False
        self.sampler.accept(pick.token_id)
        self.job.observer.on_token_sampled(self.copy, is_text=pick.token_id not in self.job.eos_ids)
        self.finish_reason = self._appended(pick)
        if self.finish_reason:
            self.job.finish_if_complete()
        return self.finish_reason is not None

    def expire(self) -> None:
        """The time is up: the text ends with what it has, and with what its constraint still wants."""
        if self.is_done:
            return
        self.token_ids, self.again = self.token_ids + self.again, []
        for token_id in self.sampler.completion_tokens():
            self.sampler.accept(token_id)
            if self._appended(SampledToken(token_id, TokenLogprobs(token_id, 0.0))):  # nothing else could have come
                break
        self.finish_reason = "deadline"

    def _appended(self, pick: SampledToken) -> FinishReason | None:
        if pick.token_id in self.job.eos_ids:
            return "eos"
        self.token_ids.append(pick.token_id)
        if pick.logprobs is not None:
            self.logprobs.append(pick.logprobs)
        if self._is_stopped(pick.token_id):
            return "stop_string"
        return None if self.num_left > 0 else "length"

    def _is_stopped(self, token_id: int) -> bool:
        listener = self.job.sequence.on_token
        try:
            return listener is not None and listener(self.copy, token_id)
        except BaseException as error:  # one listener's mistake, a panic in Rust code too, must not end the loop
            logger.error("delivering a token failed: %s", where(error))
            self.job.finish(HfTritonError("internal", "the text could not be delivered; the server's log says why"))
            return True

    def mean_logprob(self) -> float:
        """The mean logprob of its tokens; 0 for an empty text, which is as good as can be."""
        return sum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))

    def completion(self) -> Completion:
        """The text that it has become."""
        assert self.finish_reason is not None
        wants_logprobs = self.job.sequence.plan.logprobs is not None
        return Completion(
            self.token_ids, self.finish_reason, self.logprobs if wants_logprobs else None, self.job.prompt_logprobs
        )


@dataclass(frozen=True)
class Step:
    """A step of running rows whose tokens they do not have yet."""

    rows: list[Sequence]
    picks: SampledTokens

    def tokens_of(self, rows: list[Sequence]) -> torch.Tensor:
        """The tokens of some of the rows, `[rows]` int64 on the device."""
        tokens = self.picks.tokens
        if rows == self.rows:
            return tokens
        places = {row: place for place, row in enumerate(self.rows)}
        return tokens[to_device([places[row] for row in rows], torch.int64, tokens.device)]

    def read(self) -> dict[Sequence, SampledToken]:
        """Every row's, once they are on the host."""
        return dict(zip(self.rows, self.picks.read(), strict=True))
