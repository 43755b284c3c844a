# SPDX-License-Identifier: Apache-2.0
"""A sequence group on its way through an engine: its prompt, its listener and its sequences. Knows no model."""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hf_triton.engine.group import Group, Listener
from hf_triton.engine.prompt_lookup import PromptLookup, PromptNgrams
from hf_triton.errors import DeadlineExceededError, HfTritonError, panics_as_errors, where
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, LogitsProcessor, TokenLogprobs

if TYPE_CHECKING:
    from hf_triton.runner.image_inputs import PromptImages
    from hf_triton.runner.lora.model_adapters import Adapter
    from hf_triton.sampling.sampler import SampledToken
    from hf_triton.sampling.sequence_sampler import SequenceSampler

logger = logging.getLogger(__name__)

FinishReason = Literal["eos", "stop_string", "length", "deadline"]
"""`eos`: an end-of-sequence token, or its constraint lets nothing else follow. `stop_string`: the listener stopped it.
`length`: it has `max_new_tokens` tokens. `deadline`: it has passed its deadline."""


@dataclass(frozen=True)
class Completion:
    """One generated sequence of tokens."""

    token_ids: list[int]
    """New tokens, without the end-of-sequence token."""
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if `logprobs` was asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each prompt token but the first, if `prompt_logprobs` was asked for."""
    num_cached: int = 0
    """Tokens of its prompt that the prefix cache had."""


Outcome = list[Completion] | HfTritonError
"""A prompt's completions, `num_return_sequences` of them, or the error that it is refused with."""


@dataclass
class RequestUsage:
    """What a request's completions hold, for its trace."""

    num_input_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: list[FinishReason] = field(default_factory=list)


@dataclass
class RequestTimes:
    """Times of a request, by `time.monotonic()`. Its sequence groups share the object and run in one thread."""

    arrival_s: float = field(default_factory=lambda: time.monotonic())
    admitted_s: float | None = None
    """The time when its first sequence group left the queue."""
    first_token_s: float | None = None
    """The time when one of its sequences had the first token."""
    usage: RequestUsage | None = None
    """It is counted unless None."""

    def note_completions(self, num_prompt_tokens: int, completions: list[Completion]) -> None:
        """A sequence group has finished."""
        if self.usage is not None:
            self.usage.num_input_tokens += num_prompt_tokens
            self.usage.num_output_tokens += sum(len(completion.token_ids) for completion in completions)
            self.usage.finish_reasons += [completion.finish_reason for completion in completions]

    def note_admitted(self, now_s: float) -> None:
        """A sequence group leaves the queue."""
        if self.admitted_s is None:
            self.admitted_s = now_s


class SequenceObserver:
    def on_token_sampled(self, index: int, *, is_text: bool) -> None:
        """A sequence has its next token; `is_text` is false for an end-of-sequence token."""

    def on_complete(self, completions: list[Completion]) -> None:
        """All sequences have finished. Not called if the group ends with an error."""


class SequenceListener(Listener[list[Completion]]):
    """Follows the sequence groups of one request, see `Listener`."""

    def on_token(self, row: int, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """A sequence of a group that `listens_to_tokens` has one more; true finishes it with `stop_string`.

        `row` is the group's, `index` the sequence's in it. The token is no end-of-sequence token.
        """
        return False

    def is_complete(self, row: int, token_ids: list[int]) -> bool:
        """Whether a hypothesis of beam search ends with the last of its tokens; called in place of `on_token`."""
        return False

    def logits_processor(self) -> LogitsProcessor | None:
        """What changes the scores of one sequence, before its constraint. Called once for each sequence."""
        return None


@dataclass(eq=False)
class SequenceGroup(Group[list[Completion]]):
    """The sequences of one prompt, from submission to the outcome.

    Past its deadline a sequence finishes with the tokens that it has, and a group without any is refused.
    """

    prompt_ids: list[int]
    """There is at least one token."""
    params: SamplingParams
    listener: SequenceListener = field(default_factory=SequenceListener, kw_only=True)
    listens_to_tokens: bool = False
    """Whether the listener is asked at every token, by `on_token` or `is_complete`."""
    constraint: Callable[[], Constraint] | None = None
    """The engine's thread calls it once for each sequence; None: they are unconstrained."""
    adapter: Adapter | None = None
    images: PromptImages | None = None
    """None: its prompt is text alone."""
    cache_salt: str = ""
    """Groups share cached prefixes with those of the same salt."""
    times: RequestTimes = field(default_factory=RequestTimes)

    sequences: list[Sequence] = field(default_factory=list, init=False)
    """They exist from admission until the outcome."""
    eos_ids: frozenset[int] = field(default=frozenset(), init=False)
    observer: SequenceObserver = field(default_factory=SequenceObserver, init=False)
    arrival_number: int = field(default=0, init=False)
    """Groups are numbered as they are admitted: the higher, the younger."""
    prompt_logprobs: list[TokenLogprobs] | None = field(default=None, init=False)
    """They are known once the prompt has been prefilled."""
    num_cached: int | None = field(default=None, init=False)
    """Tokens of the prompt that the prefix cache had when its first sequence was admitted; None before."""
    no_room_since_s: float | None = field(default=None, init=False)
    """It has waited for memory since, while nothing else runs; None: it does not."""

    @cached_property
    def ngrams(self) -> PromptNgrams:
        """Those of the prompt, for proposals."""
        return PromptNgrams(self.prompt_ids)

    def take_turn(self, budget: int, *, takes_any: bool) -> int:
        """Take the prompt; it costs as many as it has sequences."""
        cost = self.params.num_sequences
        if cost > budget and not takes_any:
            return 0
        self.num_waiting = 0
        return cost

    def start(
        self,
        new_sampler: Callable[[int], SequenceSampler],
        eos_ids: frozenset[int],
        observer: SequenceObserver,
        arrival_number: int = 0,
    ) -> None:
        """Create the sequences; `new_sampler` is given the index of each."""
        self.eos_ids, self.observer, self.arrival_number = eos_ids, observer, arrival_number
        self.sequences = [Sequence(self, index, new_sampler(index)) for index in range(self.params.num_sequences)]

    def finish(self, outcome: Outcome) -> None:
        observer = self.observer
        self.sequences, self.observer = [], SequenceObserver()  # breaks reference cycles
        if not isinstance(outcome, HfTritonError):
            observer.on_complete(outcome)
        super().finish(outcome)

    def finish_if_complete(self) -> None:
        """Deliver the completions once all sequences have finished."""
        if all(sequence.finish_reason for sequence in self.sequences):
            self.finish([sequence.completion() for sequence in self._best()])

    def drop_if_ended(self) -> None:
        """Finish the group if it was cancelled or has passed its deadline; a late beam search ends itself."""
        cancellation = self.cancellation()
        if cancellation is not None:
            self.finish(cancellation)
        elif self.is_late() and self.params.num_beams == 1:  # beam search has no tokens before its end
            self.expire()

    def expire(self) -> None:
        """Finish the sequences with the tokens that they have."""
        if not any(sequence.token_ids for sequence in self.sequences):
            self.finish(DeadlineExceededError())
            return
        for sequence in self.sequences:
            sequence.expire()
        self.finish_if_complete()

    def _best(self) -> list[Sequence]:
        """The `num_return_sequences` sequences of the highest mean logprob; all of them, unless `best_of` is set."""
        if self.params.num_sequences == self.params.num_return_sequences:
            return self.sequences
        ranked = sorted(self.sequences, key=lambda sequence: sequence.mean_logprob(), reverse=True)
        return ranked[: self.params.num_return_sequences]


@dataclass(eq=False)
class Sequence:
    """One sequence being generated: the unit of scheduling."""

    group: SequenceGroup
    index: int
    sampler: SequenceSampler
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    trial: int = 0
    """Only sequences of one trial run together after a failed step, see `Recovery`; 0: it is under no suspicion."""
    failed_length: int = 0
    """Tokens of its context in the step that failed; one that has more has passed its trial."""
    id: int = field(default_factory=itertools.count(1).__next__)
    """A step names it so."""
    num_computed: int = 0
    """Tokens of the context whose keys and values are in its blocks, or will be after the step in flight."""
    num_inflight: int = 0
    """Tokens that are being sampled for it, by steps whose output is not taken yet."""
    blocks: array[int] = field(default_factory=lambda: array("q"))
    """Its block table: an array, as every step copies it."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of its full blocks, if prefixes are cached."""
    slot: int = -1
    """The slot of its states; -1: none."""
    cuts: list[int] = field(default_factory=list)
    """Tokens of its context at which chunks end, so that the prefix cache can keep its states; ascending."""
    kept: bytes | None = None
    """The digest where the prefix cache has the last states that it kept while decoding."""
    siblings: list[Sequence] = field(default_factory=list)
    """Sequences of its group that wait for it to compute the prompt."""
    lookup: PromptLookup | None = None
    """Proposes its next tokens; None: it has not been asked."""
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt tokens computed so far."""

    @property
    def is_done(self) -> bool:
        """Whether it has finished, or its group has."""
        return self.finish_reason is not None or self.group.is_finished

    @property
    def adapter_key(self) -> str | None:
        return self.group.adapter.key if self.group.adapter else None

    @property
    def wants_scores(self) -> bool:
        """Whether the log probabilities of prompt tokens are asked for and not known yet."""
        return self.group.params.prompt_logprobs is not None and self.group.prompt_logprobs is None

    @property
    def age(self) -> tuple[int, int]:
        """The higher, the younger."""
        return self.group.arrival_number, self.index

    def tokens(self, start: int, end: int) -> list[int]:
        num_prompt = len(self.group.prompt_ids)
        if start >= num_prompt:
            return self.token_ids[start - num_prompt : end - num_prompt]
        return self.group.prompt_ids[start:end] + self.token_ids[: max(0, end - num_prompt)]

    @property
    def num_missing(self) -> int:
        """Tokens of the context, one in flight included, that are not computed yet; 0 if no token may follow them."""
        num_tokens = len(self.token_ids) + self.num_inflight
        if num_tokens >= self.group.params.max_new_tokens:
            return 0
        return len(self.group.prompt_ids) + num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only its last token is missing, which stands for no image."""
        if not self.num_computed or self.num_missing != 1:
            return False
        images = self.group.images
        return images is None or not images.among(self.num_computed, self.num_computed + 1)

    @property
    def num_tokens(self) -> int:
        return len(self.group.prompt_ids) + len(self.token_ids)

    @property
    def max_tokens(self) -> int:
        """The most tokens that the context may come to have."""
        return len(self.group.prompt_ids) + self.group.params.max_new_tokens

    def append(self, token: SampledToken) -> bool:
        """Append the next token; whether the sequence is done with it. The group finishes with its last sequence."""
        if self.is_done:
            return True
        self.sampler.accept(token.token_id)
        self.group.observer.on_token_sampled(self.index, is_text=token.token_id not in self.group.eos_ids)
        self.finish_reason = self._append(token.token_id, token.logprobs)
        if self.finish_reason:
            self.group.finish_if_complete()
        return self.finish_reason is not None

    def propose(self, most: int, cost: float) -> list[int]:
        """Tokens that may follow those that it has, see `PromptLookup.propose`.

        A logits processor is the user's own code, and called once for each token that the sequence gets: none then.
        """
        most = min(most, self.group.params.max_new_tokens - len(self.token_ids) - 1)
        if most <= 0 or self.trial or self.sampler.processor is not None:
            return []
        if self.lookup is None:
            self.lookup = PromptLookup(self.group.prompt_ids, self.group.ngrams)
        self.lookup.follow(self.token_ids)
        return self.lookup.propose(most, cost)

    def add_scores(self, scores: list[TokenLogprobs], num_tokens: int) -> None:
        """Note the log probabilities of its first prompt tokens; the group has them when all are known."""
        self.prompt_scores += scores
        if num_tokens >= len(self.group.prompt_ids):
            self.group.prompt_logprobs = self.prompt_scores

    def expire(self) -> None:
        """Finish with the tokens that it has: it is late."""
        if not self.is_done:
            self.finish_reason = "deadline"

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.group.finish_if_complete()

    def _append(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        if token_id in self.group.eos_ids:
            return "eos"
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.group.listens_to_tokens and self._is_stopped(token_id, logprobs):
            return "stop_string"
        if self.sampler.is_complete:
            return "eos"
        return None if len(self.token_ids) < self.group.params.max_new_tokens else "length"

    def _is_stopped(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        group = self.group
        if group.params.num_beams > 1:  # beam search has asked `is_complete`
            return False
        try:
            with panics_as_errors():
                return group.listener.on_token(group.row, self.index, token_id, logprobs)
        except Exception as error:  # one listener's mistake must not end the loop
            logger.error("delivering a token failed: %s", where(error))
            group.finish(HfTritonError("internal", "the text could not be delivered; the server's log says why"))
            return True

    def mean_logprob(self) -> float:
        """The mean logprob of its tokens; 0, the highest, if it has none."""
        return sum(logprob.logprob for logprob in self.logprobs) / max(1, len(self.logprobs))

    def completion(self) -> Completion:
        """The sequence as its listener gets it; it must have finished."""
        assert self.finish_reason is not None
        group = self.group
        logprobs = None if group.params.logprobs is None else self.logprobs
        return Completion(self.token_ids, self.finish_reason, logprobs, group.prompt_logprobs, group.num_cached or 0)
