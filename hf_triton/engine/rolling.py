# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over any decoder-only model's own forward: prompts join the running rows, finished ones leave.

A prompt is prefilled apart, a piece at a time, so that the running rows keep their pace; then its keys and values are
laid into a free row that ends at the common clock (`cache.py`), and it takes part from the next step on.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache

from hf_triton.engine.cache import KeyValueRows
from hf_triton.engine.faults import error_outcome, is_fatal, is_memory, kind
from hf_triton.engine.interface import Completion, Outcome, Sequence, eos_ids
from hf_triton.engine.padding import pad
from hf_triton.engine.sampling import RowSampler, pick_tokens
from hf_triton.engine.thread import EngineThread, finish
from hf_triton.errors import CancelledError

logger = logging.getLogger(__name__)

PREFILL_TOKENS: Final = 512
"""Padded tokens of one piece of prefill: what running rows wait for between two of their steps."""
CANCEL_POLL_S: Final = 0.1  # asking Triton costs a round trip between processes: not at every token


@dataclass(eq=False)
class _Job:
    """One sequence on its way: the texts it wants, and those it has."""

    sequence: Sequence
    completions: list[Completion | None]
    is_finished: bool = False

    def finish(self, outcome: Outcome) -> None:
        if not self.is_finished:
            self.is_finished = True
            finish(self.sequence, outcome)


@dataclass(eq=False)
class _Row:
    """One text being written."""

    job: _Job
    copy: int
    sampler: RowSampler
    number: int
    """Counts the rows of an engine: the higher, the younger."""
    token_ids: list[int] = field(default_factory=list)
    is_suspect: bool = False
    """It was in a batch that failed, and runs alone until its end."""

    def context(self) -> list[int]:
        """The tokens that its next token follows."""
        return self.job.sequence.prompt_ids + self.token_ids


@dataclass(eq=False)
class _Prefill:
    """Contexts being read, left-padded into one batch; each may belong to several rows (`num_return_sequences`)."""

    groups: list[list[_Row]]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cache: DynamicCache = field(default_factory=DynamicCache)
    num_read: int = 0


class RollingEngine(EngineThread):
    """Continuous batching: admit, prefill, step, sample, retire.

    Args:
        model: A decoder-only transformers model with a key/value cache, in eval mode, on its device.
        max_rows: The most texts that are written at a time.
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered everyone.
    """

    def __init__(self, model: Any, *, max_rows: int, on_fatal: Callable[[], None] = lambda: None) -> None:
        super().__init__(on_fatal)
        self._forward = Forward(model)
        self._max_rows = max_rows
        self._row_limit = max_rows  # less than max_rows after the memory ran out
        self._numbers = itertools.count()
        self._eos_ids = eos_ids(model)
        self._memory = KeyValueRows(self._forward.device)
        self._rows: list[_Row] = []  # in the order of the memory's rows
        self._prefill: _Prefill | None = None
        # Admitted, or put back after a failure: to be prefilled, the rows of one context together.
        self._ready: deque[list[_Row]] = deque()
        self._next_poll_s = 0.0
        self._thread.start()

    @torch.inference_mode()
    def _turn(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._guarded(self._advance_prefill, self._rows_in_prefill())
        if self._rows:
            self._guarded(self._step, self._rows)
        if not self._is_busy():
            self._memory.release()
            self._row_limit = self._max_rows

    def _unfinished(self) -> list[Sequence]:
        jobs = {id(row.job): row.job for row in self._all_rows()}
        return [job.sequence for job in jobs.values() if not job.is_finished]

    def _all_rows(self) -> Iterable[_Row]:
        yield from self._rows
        yield from self._rows_in_prefill()
        for group in self._ready:
            yield from group

    def _rows_in_prefill(self) -> list[_Row]:
        return [row for group in self._prefill.groups for row in group] if self._prefill else []

    def _is_busy(self) -> bool:
        return bool(self._rows or self._prefill or self._ready)

    # --- admit -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Take waiting sequences while there are rows for them, first come first served."""
        room = self._max_rows - sum(1 for _ in self._all_rows())
        with self._wake:
            while self._waiting:
                count = self._waiting[0].plan.num_return_sequences
                if count > room and self._is_busy():
                    break
                sequence = self._waiting.popleft()
                job = _Job(sequence, [None] * count)
                plan, prompt = sequence.plan, sequence.prompt_ids
                samplers = [RowSampler(plan, copy, prompt) for copy in range(count)]
                self._ready.append([_Row(job, *each, next(self._numbers)) for each in enumerate(samplers)])
                room -= count

    def _drop_cancelled(self) -> None:
        if time.monotonic() < self._next_poll_s:
            return
        self._next_poll_s = time.monotonic() + CANCEL_POLL_S
        for job in {id(row.job): row.job for row in self._all_rows()}.values():
            try:
                if job.sequence.is_cancelled():
                    job.finish(CancelledError())
            except Exception as error:  # one request's mistake must not end the loop that serves the others
                job.finish(error_outcome(error))
        self._ready = deque(group for group in self._ready if not group[0].job.is_finished)
        self._retire([index for index, row in enumerate(self._rows) if row.job.is_finished])

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _advance_prefill(self) -> None:
        """Read one more piece of the contexts at hand; when they are read, their rows join the running ones."""
        if self._prefill is None:
            self._prefill = self._next_prefill()
        prefill = self._prefill
        if prefill is None:
            return
        num_contexts, length = prefill.input_ids.shape
        end = min(length, prefill.num_read + max(1, PREFILL_TOKENS // num_contexts))
        logits = self._forward(
            prefill.input_ids[:, prefill.num_read : end], prefill.attention_mask[:, :end], prefill.cache
        )
        prefill.num_read = end
        if end == length:
            self._join(prefill, logits)
            self._prefill = None

    def _next_prefill(self) -> _Prefill | None:
        """The oldest contexts that fit one piece together; a suspect comes alone, when nobody else runs."""
        if any(row.is_suspect for row in self._rows):
            return None
        groups: list[list[_Row]] = []
        longest, num_rows = 0, len(self._rows)
        for group in self._ready:
            longest = max(longest, len(group[0].context()))
            num_rows += len(group)
            has_company = bool(self._rows or groups)
            is_too_much = num_rows > self._row_limit or bool(groups and longest * (len(groups) + 1) > PREFILL_TOKENS)
            if has_company and (is_too_much or group[0].is_suspect):
                break
            groups.append(group)
            if group[0].is_suspect:
                break
        if not groups:
            return None
        prefill = _Prefill(
            groups, *pad([group[0].context() for group in groups], 0, self._forward.device, at_left=True)
        )
        for _ in groups:
            self._ready.popleft()
        return prefill

    def _join(self, prefill: _Prefill, logits: torch.Tensor) -> None:
        """Give every row of the prefill its first token and its place."""
        places = [(index, row) for index, group in enumerate(prefill.groups) for row in group]
        index = torch.tensor([index for index, _ in places], device=logits.device)
        tokens = pick_tokens(logits[index], [row.sampler for _, row in places])
        for (index_in_batch, row), token_id in zip(places, tokens, strict=True):
            length = len(row.context())
            if not self._take_token(row, token_id) and not row.job.is_finished:
                self._memory.add(prefill.cache, index_in_batch, length)
                self._rows.append(row)

    # --- step --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for every running row."""
        memory = self._memory
        memory.make_column()
        input_ids = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self._forward.device)
        logits = self._forward(input_ids, memory.attention_mask(1), memory.cache, memory.lengths())
        tokens = pick_tokens(logits, [row.sampler for row in self._rows])
        memory.clock += 1
        self._retire([index for index, row in enumerate(self._rows) if self._take_token(row, tokens[index])])

    def _take_token(self, row: _Row, token_id: int) -> bool:
        """Whether the row is complete with this token; its job is finished with its last row."""
        row.sampler.note(token_id)
        if token_id not in self._eos_ids:
            row.token_ids.append(token_id)
            if len(row.token_ids) < row.job.sequence.plan.max_new_tokens:
                return False
        reason = "stop" if token_id in self._eos_ids else "length"
        job = row.job
        job.completions[row.copy] = Completion(row.token_ids, reason)  # type: ignore[arg-type]
        completions = [each for each in job.completions if each is not None]
        if len(completions) == len(job.completions):
            job.finish(completions)
        return True

    def _retire(self, indices: list[int]) -> None:
        """Free rows; the last one takes the place of each."""
        for index in reversed(indices):
            self._memory.remove(index)
            self._row_limit = min(self._row_limit + 1, self._max_rows)
            last = self._rows.pop()
            if index < len(self._rows):
                self._rows[index] = last

    # --- failure -----------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None], rows: list[_Row]) -> None:
        """Do some work for `rows`; where it fails, put them back so that only the guilty are refused."""
        try:
            work()
        except Exception as error:
            if is_fatal(error):
                raise
            rows = list(rows or self._rows_in_prefill())
            if self._memory.is_torn:
                rows = [*self._rows, *(row for row in self._rows_in_prefill() if row not in self._rows)]
            if not rows:
                raise  # not a row's fault
            others = [row for row in self._rows if row not in rows]
            are_running = all(row in self._rows for row in rows)
            num_parts = len(rows) if are_running else len({id(row.job) for row in rows})
            if not others and num_parts == 1:
                rows[0].job.finish(error_outcome(error))
            else:
                logger.warning("%d rows failed together (%s) and are tried again", len(rows), kind(error))
            self._put_back(rows if self._memory.is_torn else self._to_put_back(rows, others, error))
            if self._memory.is_torn:
                self._memory = KeyValueRows(self._forward.device)

    def _to_put_back(self, rows: list[_Row], others: list[_Row], error: Exception) -> list[_Row]:
        """Which rows leave the memory after a failure, and how many may share it from now on.

        Out of memory makes the younger half of the running rows wait, or the contexts that were being read. Any other
        failure makes every row a suspect, which runs alone.
        """
        if not is_memory(error):
            for row in rows:
                row.is_suspect = True
            return rows
        rows.sort(key=lambda row: row.number)
        are_running = all(row in self._rows for row in rows)
        leaving = rows[(len(rows) + 1) // 2 :] if are_running else rows
        self._row_limit = max(1, len(rows) - len(leaving) or len(others) or len(rows) // 2)
        return [row for row in rows if row.job.is_finished or row in leaving]

    def _put_back(self, rows: list[_Row]) -> None:
        """Take rows out of memory; those of unfinished jobs are prefilled again, with what they have written."""
        if any(row in rows for row in self._rows_in_prefill()):
            self._prefill = None
        self._retire([index for index, row in enumerate(self._rows) if row in rows])
        self._ready.extendleft([row] for row in reversed(rows) if not row.job.is_finished)


class Forward:
    """A model's forward, given what it accepts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self.device = model.get_input_embeddings().weight.device

    def prefill(self, prompt: list[int]) -> tuple[DynamicCache, torch.Tensor]:
        """The keys and values of one prompt, and the logits that follow it, `[1, vocabulary]`."""
        cache = DynamicCache()
        input_ids, attention_mask = pad([prompt], 0, self.device, at_left=True)
        return cache, self(input_ids, attention_mask, cache)

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Any, lengths: list[int] | None = None
    ) -> torch.Tensor:
        """The logits that follow the last column, `[rows, vocabulary]`.

        Args:
            input_ids: `[rows, new]`, the newest tokens.
            attention_mask: `[rows, columns]`, cached and new ones.
            cache: Keys and values of the columns before; the new ones are appended.
            lengths: Cached tokens of each row, where one new token follows; worked out from the mask if absent.
        """
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "attention_mask": attention_mask}
        if "position_ids" in self._accepts:
            if lengths is None:
                positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            else:
                positions = torch.tensor(lengths, device=self.device).unsqueeze(1)
            arguments["position_ids"] = positions
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = 1
        logits: torch.Tensor = self._model(input_ids=input_ids, **arguments).logits[:, -1]
        return logits
