# SPDX-License-Identifier: Apache-2.0
"""The plain engine: `model.generate`, a batch at a time, in a thread of its own.

It runs every architecture that transformers generates with. `generate` does the forward passes and what the
checkpoint's own generation_config asks for; which token comes next is decided by the same sampler that the
continuous engine has, row by row, so that rows of different settings share a batch. Which may not is in `_batch_key`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_triton.engine.sequence import GroupState, Sequence
from hf_triton.engine.types import EngineLoad, Observer, SequenceGroup, eos_ids
from hf_triton.engine.worker import EngineThread, finish
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.cpu import fast_attention
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind
from hf_triton.runner.forward import begin_anew
from hf_triton.runner.padding import pad
from hf_triton.runner.probe import PLAIN, Sharing, asks_for
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.sampler import sample_tokens

logger = logging.getLogger(__name__)

ENCODER_HISTORY: Final = ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty")
HISTORY: Final = (*ENCODER_HISTORY, "bad_words_ids", "sequence_bias", "min_length", "forced_bos_token_id")
"""Settings of a checkpoint's generation_config by which `generate` looks back at what a row has read, padding too."""
EOS_SETTINGS: Final = ("bad_words_ids", "min_length", "exponential_decay_length_penalty")
"""Those by which it looks at the end-of-sequence tokens."""


class BatchEngine(EngineThread):
    """Padded batches of `model.generate`; a batch runs until its last row is done, then comes the next.

    The log probabilities of new tokens are of the scores that reach the sampler, after what the checkpoint's own
    generation_config makes `generate` do to them (`suppress_tokens`, `sequence_bias`, ...).

    Args:
        model: A transformers model that generates, in eval mode, on its device.
        max_rows: The most texts that are written at a time.
        context_length: Tokens that a padded prompt and the longest continuation of its batch may have together.
        sharing: Which prompts may share a batch with this model: `padded` ones of any length, those of `equal_length`,
            or none, each row `alone` (see `probe_batching`).
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered everyone.
        observer: Is told what the engine does.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        context_length: int,
        sharing: Sharing,
        on_fatal: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(on_fatal, observer, model.get_input_embeddings().weight.device)
        self._model = model
        self._max_rows = max_rows
        self._context_length = context_length
        self._sharing = sharing
        self._eos_ids = eos_ids(model)
        self._is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self._asks = _Asks(model)
        self._pad_id = _pad_id(model)
        self._attention = fast_attention(patches_torch=False)
        self._jobs: list[GroupState] = []
        self._thread.start()

    @torch.inference_mode()
    def _turn(self) -> None:
        self._take_batch()
        for job in self._jobs:
            self._score_prompt(job)
        self._run([row for job in self._jobs for row in job.rows])

    def load(self) -> EngineLoad:
        """What it has in hand; from any thread, and not quite at one moment."""
        num_running = sum(not row.is_done for job in self._jobs for row in job.rows)
        return EngineLoad(len(self._waiting), num_running, num_free_slots=max(0, self._max_rows - num_running))

    def _is_busy(self) -> bool:
        return bool(self._unfinished())

    def _unfinished(self) -> list[SequenceGroup]:
        return [job.sequence for job in self._jobs if not job.is_finished]

    def admission_error(self, sequence: SequenceGroup) -> HfTritonError | None:
        """Why a sequence can never run here; None where it can."""
        if sequence.plan.prompt_logprobs is None or not self._is_encoder_decoder:
            return None
        return RequestError(
            "invalid_parameter",
            "prompt_logprobs needs a model that goes on from its prompt, and this one is an encoder-decoder: leave it "
            "out",
        )

    # --- what shares a batch -----------------------------------------------------------------------------------------

    def _take_batch(self) -> None:
        """Make jobs of the first sequence that waits, and of those behind it that may share its batch."""
        batch: list[SequenceGroup] = []
        others: list[SequenceGroup] = []
        num_rows = 0
        with self._wake:
            if self._waiting:
                self._note_leaving(self._waiting[0])
            for sequence in self._waiting:
                if not batch or (num_rows < self._max_rows and self._may_join(sequence, batch)):
                    batch.append(sequence)
                    num_rows += sequence.plan.num_sequences
                else:
                    others.append(sequence)
            self._waiting = others
        self._jobs = self._jobs_of(batch)

    def _may_join(self, sequence: SequenceGroup, batch: list[SequenceGroup]) -> bool:
        return self._batch_key(sequence) == self._batch_key(batch[0]) and self._fits([*batch, sequence])

    def _job(self, sequence: SequenceGroup) -> GroupState:
        # Penalties look at what the decoder has read, which is not the prompt of an encoder-decoder.
        context_ids = [_start_id(self._model)] if self._is_encoder_decoder else None
        return GroupState(sequence, self._eos_ids, self._observer.on_admit(sequence), context_ids=context_ids)

    def _jobs_of(self, sequences: list[SequenceGroup]) -> list[GroupState]:
        jobs = []
        for sequence in sequences:
            try:
                jobs.append(self._job(sequence))
            except Exception as error:  # one request's mistake must not end the loop that serves the others
                finish(sequence, error_outcome(error))
        return jobs

    def _batch_key(self, sequence: SequenceGroup) -> Hashable:
        """Equal keys may share a batch."""
        plan, asks = sequence.plan, self._asks
        by_length = self._sharing == "equal_length" or asks.looks_back
        return (
            id(sequence) if self._sharing == "alone" or asks.max_time else None,
            len(sequence.prompt_ids) if by_length else None,
            plan.max_new_tokens if asks.forces_end else None,
            plan.eos_ids if asks.knows_ends else None,
        )

    def _fits(self, batch: list[SequenceGroup]) -> bool:
        """Whether the batch has rows to spare, and none of its rows leaves the context while the longest is written."""
        longest = max(len(sequence.prompt_ids) for sequence in batch)
        steps = max(sequence.plan.max_new_tokens for sequence in batch)
        columns = max(longest, steps) if self._is_encoder_decoder else longest + steps
        rows = sum(sequence.plan.num_sequences for sequence in batch)
        return columns <= self._context_length and rows <= self._max_rows

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _run(self, rows: list[Sequence]) -> None:
        """Write the rows; where a part of them fails, smaller ones, so that only the guilty are refused.

        The parts grow again as they succeed, but not beyond what the memory had no room for.
        """
        most = size = 1 if self._sharing == "alone" else self._max_rows  # not even a prompt's own texts side by side
        while not self._is_over(rows):
            rows = [row for row in rows if not row.is_done]
            part = rows[:size]
            try:
                self._generate(part)
            except Exception as error:
                if is_fatal(error):
                    raise
                if len(part) == 1:
                    part[0].job.finish(error_outcome(error))
                    continue
                logger.warning("a batch of %d rows failed (%s); trying smaller ones", len(part), kind(error))
                size = (len(part) + 1) // 2
                most = size if is_memory(error) else most
            else:
                size = min(2 * size, most)

    def _is_over(self, rows: list[Sequence]) -> bool:
        """Whether nobody waits for these rows any more, or the engine is closing. Answers those who need not wait."""
        self._device_context.busy()
        self._sweep_queue()
        for job in self._jobs:
            if not job.is_finished:
                job.drop_if_ended()
        return self.rejection() is not None or all(row.is_done for row in rows)

    def _generate(self, rows: list[Sequence]) -> None:
        """Write these rows to their ends.

        Rows that have tokens already, from a batch that failed, are given the same tokens again: that way `generate`
        counts and looks back as if nothing had happened, and their listeners and random streams notice nothing.
        """
        prompts = [row.job.sequence.prompt_ids for row in rows]
        input_ids, attention_mask = pad(prompts, self._pad_id, self._device, at_left=not self._is_encoder_decoder)
        begin_anew(self._model, len(rows), self._device)
        with self._attention:
            self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max(row.job.sequence.plan.max_new_tokens for row in rows),
                pad_token_id=self._pad_id,
                logits_processor=LogitsProcessorList([_Picker(rows, self._pad_id, self._observer)]),
                stopping_criteria=StoppingCriteriaList([_Ending(rows, self._is_over)]),
                **self._asks.arguments(rows[0].job.eos_ids),
            )
        if self.rejection() is None:
            for row in rows:
                _end(row)

    def _score_prompt(self, job: GroupState) -> None:
        """Find the log probabilities of the prompt's tokens, where the plan asks for them."""
        num_top, prompt = job.sequence.plan.prompt_logprobs, job.sequence.prompt_ids
        if num_top is None or self._is_over(job.rows):
            return
        try:
            begin_anew(self._model, 1, self._device)
            logits = self._model(input_ids=torch.tensor([prompt], device=self._device), use_cache=False).logits
            job.prompt_logprobs = token_logprobs(logits[0, :-1], prompt[1:], num_top)
        except Exception as error:
            if is_fatal(error):
                raise
            job.finish(error_outcome(error))


class _Asks:
    """What a checkpoint's generation_config asks of `generate` beyond what a plan says."""

    def __init__(self, model: Any) -> None:
        config = model.generation_config

        def has(names: tuple[str, ...]) -> bool:
            return any(asks_for(model, name) for name in names)

        self.looks_back = has(ENCODER_HISTORY if model.config.is_encoder_decoder else HISTORY)
        """Rows of unequal length would feel each other's padding."""
        self.knows_ends = has(EOS_SETTINGS)
        """It must be told the end-of-sequence tokens of its rows; else they are our own business."""
        self.forces_end = config.forced_eos_token_id is not None
        """It forces an end at the last step of a batch, which must be the last of every row."""
        self.max_time: float | None = config.max_time
        """Seconds that a batch may take."""
        self._has_min_new_tokens = config.min_new_tokens is not None

    def arguments(self, eos_ids: frozenset[int]) -> dict[str, Any]:
        """Arguments of `generate` for rows that end with `eos_ids`, or with different ones unless `knows_ends`."""
        arguments = PLAIN | {"eos_token_id": sorted(eos_ids) if self.knows_ends else None}
        return arguments | {"min_length": 0} if self._has_min_new_tokens else arguments  # as transformers has it


class _Picker(LogitsProcessor):
    """The last of `generate`'s processors: takes the scores, and leaves of each row only the token that comes next."""

    def __init__(self, rows: list[Sequence], idle_id: int, observer: Observer) -> None:
        self._rows = rows
        self._idle_id = idle_id
        self._observer = observer
        self._num_steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """0 for the row's next token, minus infinity for all others, both `[rows, vocabulary]` float32."""
        tokens = [self._settled(row) for row in self._rows]
        picking = [index for index, token_id in enumerate(tokens) if token_id is None]
        if picking:
            logits = scores if len(picking) == len(tokens) else scores[torch.tensor(picking, device=scores.device)]
            picks = sample_tokens(logits, [self._rows[index].sampler for index in picking])
            self._observer.on_step(len(picking))
            for index, pick in zip(picking, picks, strict=True):
                tokens[index] = pick.token_id
                if not self._rows[index].is_done:  # its job may have failed with another of its rows
                    self._rows[index].take(pick)
        self._num_steps += 1
        chosen = torch.tensor(tokens, device=scores.device).unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)  # type: ignore[return-value]

    def _settled(self, row: Sequence) -> int | None:
        """The next token of a row that has it already, or needs none; None where it is to be picked."""
        if row.is_done:
            return self._idle_id
        return row.token_ids[self._num_steps] if self._num_steps < len(row.token_ids) else None


class _Ending(StoppingCriteria):
    """`generate`'s stopping rule: asked after every step."""

    def __init__(self, rows: list[Sequence], is_over: Callable[[list[Sequence]], bool]) -> None:
        self._rows = rows
        self._is_over = is_over

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        """Which rows are done, `[rows]` bool."""
        is_over = self._is_over(self._rows)
        done = [is_over or row.is_done for row in self._rows]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def _end(row: Sequence) -> None:
    """End a row that `generate` left unfinished: the checkpoint's `max_time` was up."""
    if not row.is_done:
        row.expire()
        row.job.finish_if_complete()


def _pad_id(model: Any) -> int:
    """Any id of the vocabulary does: the mask hides it."""
    configured = model.generation_config.pad_token_id
    size = model.get_input_embeddings().weight.shape[0]
    return configured if isinstance(configured, int) and 0 <= configured < size else 0


def _start_id(model: Any) -> int:
    """What an encoder-decoder's text begins with."""
    config = model.generation_config
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    return int(start)
