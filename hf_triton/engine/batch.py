# SPDX-License-Identifier: Apache-2.0
"""The plain engine: `model.generate`, a padded batch at a time, in a thread of its own.

It runs every architecture that transformers generates with, and only puts those prompts into one batch that cannot
change each other's text: what a batch shares (sampling settings, a seed, sometimes the length) is in `_batch_key`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_triton.engine.faults import error_outcome, is_fatal, kind
from hf_triton.engine.interface import Completion, Outcome, Sequence, eos_ids
from hf_triton.engine.padding import pad
from hf_triton.engine.probe import Sharing
from hf_triton.engine.thread import EngineThread, finish
from hf_triton.errors import CancelledError, HfTritonError

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)

HISTORY_PROCESSORS = (
    "no_repeat_ngram_size",
    "min_length",
    "bad_words_ids",
    "sequence_bias",
    "encoder_no_repeat_ngram_size",
)
"""Settings of a checkpoint's generation_config that look back at the tokens of a row."""
CANCEL_POLL_S = 0.1  # asking Triton costs a round trip between processes: not at every token


class BatchEngine(EngineThread):
    """Padded batches of `model.generate`.

    Args:
        model: A transformers model that generates, in eval mode, on its device.
        max_rows: The most sequences in a batch, `num_return_sequences` counted.
        context_length: Tokens that a padded prompt and the longest continuation of its batch may have together.
        sharing: Which prompts may share a batch with this model: `padded` ones of any length, those of `equal_length`,
            or none, each `alone` (see `probe_sharing`).
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered everyone.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        context_length: int,
        sharing: Sharing,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(on_fatal)
        self._model = model
        self._max_rows = max_rows
        self._context_length = context_length
        self._sharing = sharing
        self._eos_ids = eos_ids(model)
        self._vocabulary_size = model.get_input_embeddings().weight.shape[0]
        self._history_counts = _has_history_processors(model.generation_config)
        self._is_timed = model.generation_config.max_time is not None  # a limit of the whole batch
        self._length_counts = model.generation_config.forced_eos_token_id is not None
        self._batch: list[Sequence] = []
        self._thread.start()

    def _turn(self) -> None:
        self._batch = self._take()
        self._run(self._batch)

    def _is_busy(self) -> bool:
        return bool(self._batch)

    def _unfinished(self) -> list[Sequence]:
        return self._batch

    def _take(self) -> list[Sequence]:
        """The oldest sequence, and those behind it that may share its batch."""
        with self._wake:
            key = self._batch_key(self._waiting[0])
            batch: list[Sequence] = []
            others = deque[Sequence]()
            for sequence in self._waiting:
                fits = not batch or self._fits([*batch, sequence])
                (batch if fits and self._batch_key(sequence) == key else others).append(sequence)
            self._waiting = others
            return batch

    def _fits(self, batch: list[Sequence]) -> bool:
        """Whether the batch has rows to spare, and none of its rows leaves the context while the longest is written."""
        rows = sum(sequence.plan.num_return_sequences for sequence in batch)
        longest = max(len(sequence.prompt_ids) for sequence in batch)
        steps = max(sequence.plan.max_new_tokens for sequence in batch)
        columns = max(longest, steps) if self._model.config.is_encoder_decoder else longest + steps
        return rows <= self._max_rows and columns <= self._context_length

    def _batch_key(self, sequence: Sequence) -> Hashable:
        """Equal keys may share a batch: `generate` takes one setting for all rows, and one random stream."""
        plan = sequence.plan
        # Penalties look at the padding too, so rows of unequal length would feel each other's.
        looks_back = plan.repetition_penalty != 1.0 or self._history_counts
        length = len(sequence.prompt_ids) if looks_back or self._sharing == "equal_length" else None
        alone = id(sequence) if plan.seed is not None or self._is_timed or self._sharing == "alone" else None
        # BART's checkpoints force an end at the last step of the batch, which must be the last of every row.
        last_step = plan.max_new_tokens if self._length_counts else None
        sampling = (plan.temperature, plan.top_p, plan.top_k, plan.num_return_sequences) if plan.do_sample else None
        return (sampling, plan.repetition_penalty, length, last_step, alone)

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _run(self, batch: list[Sequence]) -> None:
        """Generate for a batch; where that fails, for smaller ones, so that only the guilty are refused."""
        size = len(batch)
        while batch:
            if self._attempt(batch[:size]):
                del batch[:size]
            else:
                size = (size + 1) // 2

    def _attempt(self, batch: list[Sequence]) -> bool:
        """Whether every sequence of the batch has its outcome now; a batch of one always has."""
        try:
            outcomes = self._generate(batch)
        except Exception as error:
            if is_fatal(error):
                raise
            if len(batch) > 1:
                logger.warning("a batch of %d sequences failed (%s); trying smaller ones", len(batch), kind(error))
                return False
            outcomes = [error_outcome(error)]
        for sequence, outcome in zip(batch, outcomes, strict=True):
            finish(sequence, outcome)
        return True

    def _generate(self, batch: list[Sequence]) -> list[Outcome]:
        import torch

        device = self._model.get_input_embeddings().weight.device
        seed = batch[0].plan.seed
        generators = [device] if device.type == "cuda" else []
        with torch.inference_mode(), torch.random.fork_rng(generators, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            if self._sharing == "alone":  # not even a prompt's own sequences may sit side by side
                return _gather([self._forward([single])[0] for single in _singles(batch[0])])
            return self._forward(batch)

    def _forward(self, batch: list[Sequence]) -> list[Outcome]:
        from transformers import StoppingCriteriaList

        device = self._model.get_input_embeddings().weight.device
        prompts = [sequence.prompt_ids for sequence in batch]
        is_encoder_decoder = self._model.config.is_encoder_decoder
        input_ids, attention_mask = pad(prompts, self._pad_id(), device, at_left=not is_encoder_decoder)
        limits = _RowLimits(batch, self.refusal)
        output = self._model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=self._generation_config(batch),
            stopping_criteria=StoppingCriteriaList([limits]),
        )
        start = 1 if is_encoder_decoder else input_ids.shape[1]
        return limits.outcomes(output[:, start:].tolist(), self._eos_ids)

    def _generation_config(self, batch: list[Sequence]) -> GenerationConfig:
        from transformers import GenerationConfig

        plan = batch[0].plan
        sampling = {"temperature": plan.temperature, "top_p": plan.top_p, "top_k": plan.top_k} if plan.do_sample else {}
        return GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max(sequence.plan.max_new_tokens for sequence in batch),
            do_sample=plan.do_sample,
            num_beams=1,
            num_return_sequences=plan.num_return_sequences,
            repetition_penalty=plan.repetition_penalty,
            pad_token_id=self._pad_id(),
            return_dict_in_generate=False,
            **sampling,
        )

    def _pad_id(self) -> int:
        """Any id of the vocabulary does, the mask hides it. An end-of-sequence id would do no harm either."""
        configured = self._model.generation_config.pad_token_id
        return configured if isinstance(configured, int) and 0 <= configured < self._vocabulary_size else 0


class _RowLimits:
    """`generate`'s stopping rule: each row ends at its own `max_new_tokens`, or when its request was cancelled."""

    def __init__(self, batch: list[Sequence], refusal: Callable[[], HfTritonError | None]) -> None:
        self._batch = batch
        self._refusal = refusal
        self._num_steps = 0
        self._next_poll_s = 0.0
        self._is_cancelled = [False] * len(batch)

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Which rows are done, `[rows]` bool."""
        import torch

        self._num_steps += 1
        if time.monotonic() >= self._next_poll_s:
            self._poll()
        done = [
            self._num_steps >= sequence.plan.max_new_tokens or is_cancelled
            for sequence, is_cancelled in zip(self._batch, self._is_cancelled, strict=True)
            for _ in range(sequence.plan.num_return_sequences)
        ]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    def _poll(self) -> None:
        closing = self._refusal() is not None
        self._is_cancelled = [
            was or closing or sequence.is_cancelled()
            for was, sequence in zip(self._is_cancelled, self._batch, strict=True)
        ]
        self._next_poll_s = time.monotonic() + CANCEL_POLL_S

    def outcomes(self, rows: list[list[int]], eos_ids: frozenset[int]) -> list[Outcome]:
        """Each sequence's part of `generate`'s output, `[rows, steps]`, cut where the sequence ended."""
        outcomes: list[Outcome] = []
        for sequence, is_cancelled in zip(self._batch, self._is_cancelled, strict=True):
            count = sequence.plan.num_return_sequences
            own, rows = rows[:count], rows[count:]
            if is_cancelled:
                outcomes.append(self._refusal() or CancelledError())
            else:
                outcomes.append([_cut(row, sequence.plan.max_new_tokens, eos_ids) for row in own])
        return outcomes


def _cut(row: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> Completion:
    """A row ends before its first end-of-sequence token, or at its own length: its batch may have run longer."""
    row = row[:max_new_tokens]
    end = next((index for index, token_id in enumerate(row) if token_id in eos_ids), None)
    return Completion(row, "length") if end is None else Completion(row[:end], "stop")


def _singles(sequence: Sequence) -> list[Sequence]:
    """A sequence that wants n completions as n that want one."""
    single = replace(sequence, plan=replace(sequence.plan, num_return_sequences=1))
    return [single] * sequence.plan.num_return_sequences


def _gather(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes of `_singles` as one: all completions, or the first error."""
    completions: list[Completion] = []
    for outcome in outcomes:
        if isinstance(outcome, HfTritonError):
            return [outcome]
        completions += outcome
    return [completions]


def _has_history_processors(config: Any) -> bool:
    """Whether the checkpoint's own defaults make `generate` look back at the tokens of a row, padding included."""
    has_penalty = getattr(config, "encoder_repetition_penalty", None) not in (None, 1.0)
    return has_penalty or any(getattr(config, name, None) for name in HISTORY_PROCESSORS)
