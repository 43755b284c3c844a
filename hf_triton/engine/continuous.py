# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over any decoder-only model's own forward: prompts join the running rows, finished ones leave.

A prompt is prefilled apart, a piece at a time, so that the running rows keep their pace; then its keys and values are
laid into a free row that ends at the common clock (`runner/`), and it takes part from the next step on.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from hf_triton.engine.prefill import Prefill, PrefillRequest, are_worth_one_batch, num_padded
from hf_triton.engine.prefill_delay import PrefillDelay
from hf_triton.engine.prefix_cache import HybridPrefixCache, LayerContents, Prefix, PrefixCache
from hf_triton.engine.sequence import GroupState, Sequence, Step
from hf_triton.engine.types import EngineLoad, Observer, SequenceGroup, eos_ids
from hf_triton.engine.worker import EngineThread, ending_in_queue, finish
from hf_triton.errors import HfTritonError, RequestError, UnavailableError
from hf_triton.runner.budget import TokenBudget
from hf_triton.runner.decode import Decoder, DecodingMode
from hf_triton.runner.device import chunk_sizes_for
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import buffer_tokens
from hf_triton.runner.kv_lanes import KVCacheLanes
from hf_triton.runner.numerics import are_finite
from hf_triton.runner.states import TextStates, cloned
from hf_triton.runner.transfer import to_device
from hf_triton.sampling.sampler import SampledTokens, sample_tokens

logger = logging.getLogger(__name__)

NO_ROOM_S: Final = 5.0
"""How long a context waits for others on the device to give memory back, before it is refused."""
NO_ROOM_POLL_S: Final = 0.02
PREFIX_PART: Final = 4
"""The prefixes of past texts take a fourth of the key/value memory at most, and leave it to whoever needs it."""
OF_LONG_TEXT: Final = 1 << 32
"""Added to the token ids of texts beyond `Forward.switch_length`: they share keys with each other alone."""
PADDING_PART: Final = 0.25
"""A row whose padding would take more than this part of the weights' memory gets a lane of its own: attention takes
about twice as long as the layers for a byte, and several such rows may come."""


class ContinuousBatchingEngine(EngineThread):
    """Continuous batching.

    Args:
        model: A decoder-only transformers model with a key/value cache, in eval mode, on its device.
        max_rows: The most texts that are written at a time.
        max_cache_tokens: Tokens of key/value memory, padding counted; None: what the device has free.
        shares_prefixes: Whether a prompt that begins as an earlier text does takes that part over.
        prefills_whole: Whether a context is prefilled in one chunk (`probe_continuous_batching`); then none is cached.
        decoding: How a step runs, see `Decoder`.
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered everyone.
        observer: Is told what the engine does.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        max_cache_tokens: int | None = None,
        shares_prefixes: bool = True,
        prefills_whole: bool = False,
        decoding: DecodingMode = "auto",
        on_fatal: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
    ) -> None:
        self._forward = Forward(model)
        super().__init__(on_fatal, observer, self._forward.device)
        self._decoder = Decoder(self._forward, decoding)
        if max_cache_tokens is not None and not self._forward.has_keys:
            logger.warning("the setting max_cache_tokens does nothing for a model without keys and values")
            max_cache_tokens = None
        bytes_per_token, tokens_of_states = self._forward.memory_of_text()
        self._tokens_of_states = tokens_of_states if max_cache_tokens is None else 0  # it limits keys and values
        self._budget = TokenBudget(bytes_per_token, max_cache_tokens)
        weight_bytes = model.get_memory_footprint(return_buffers=False)
        self._max_padding = PADDING_PART * weight_bytes / sum(bytes_per_token.values())
        if self._decoder.is_static:
            self._max_padding = math.inf  # captured graphs are those of one lane
        self._memory = self._new_memory()
        self._prefills_whole = prefills_whole
        self._shares_prefixes = shares_prefixes and not prefills_whole
        self._prefixes = PrefixCache()
        if self._forward.has_states:
            self._prefixes = HybridPrefixCache(2 * chunk_sizes_for(self._device).per_weights, tokens_of_states)
            room = self._budget.most() // PREFIX_PART
            if self._shares_prefixes and room < self._prefixes.least + tokens_of_states:
                logger.warning(
                    "no prefixes are shared: there are %d tokens, a text's states weigh %d", room, tokens_of_states
                )
        self._max_rows = max_rows
        self._row_limit = max_rows  # less than max_rows after the memory ran out
        self._eos_ids = eos_ids(model)
        self._numbers = itertools.count()
        self._rows: list[Sequence] = []  # in the order of the memory's rows
        self._inflight_step: Step | None = None  # of these rows, and of others that have left since
        # Contexts being read, the last of them now: one batch, or a long context and short ones that pass it.
        self._prefills: list[Prefill] = []
        self._is_turn_of_short = False  # a long context, or a piece of one, was read last
        # Admitted, or put back after a failure: to be prefilled, the rows of one context together.
        self._ready: deque[list[Sequence]] = deque()
        self._admitting: deque[SequenceGroup] = deque()  # taken from the queue, and not ready yet
        self._num_left_waiting = 0  # for want of rows
        self._prefill_delay = PrefillDelay()
        self._began_s = 0.0  # the last step, by `time.monotonic()`
        self._thread.start()

    @torch.inference_mode()
    def _turn(self) -> None:
        self._guarded(self._drop_ended, list)
        self._admit()
        self._guarded(self._catch_up, lambda: self._rows)
        self._guarded(self._make_room, list)
        self._guarded(self._advance_prefill, lambda: self._prefills[-1].rows if self._prefills else [])
        self._guarded(self._step, lambda: self._rows)

    def _rest(self) -> None:
        self._memory.release()
        self._decoder.release()
        self._row_limit = self._max_rows

    def load(self) -> EngineLoad:
        """What it has in hand; from any thread, and not quite at one moment."""
        num_running = len(self._rows) + len(self._rows_in_prefill())
        num_waiting = len(self._waiting) + len(self._admitting) + len(self._ready)
        return EngineLoad(num_waiting, num_running, self._num_used(), self._budget.allowed, self._num_free_rows())

    def _num_free_rows(self) -> int:
        num_taken = len(self._admitting) + len(self._ready)
        return max(0, self._max_rows - len(self._rows) - len(self._rows_in_prefill()) - num_taken)

    def _unfinished(self) -> list[SequenceGroup]:
        return [*(job.sequence for job in self._jobs() if not job.is_finished), *self._admitting]

    def _is_busy(self) -> bool:
        return bool(self._rows or self._prefills or self._ready)

    def _all_rows(self) -> Iterable[Sequence]:
        return itertools.chain(self._rows, self._rows_in_prefill(), *self._ready)

    def _rows_in_prefill(self) -> list[Sequence]:
        return [row for prefill in list(self._prefills) for row in prefill.rows]  # `load` asks from other threads

    def _jobs(self) -> list[GroupState]:
        return list({id(row.job): row.job for row in self._all_rows()}.values())

    # --- admit -------------------------------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Let go of texts that nobody waits for any more, and of those whose time is up."""
        for job in self._jobs():
            job.drop_if_ended()
        self._ready = deque(group for rows in self._ready if (group := [row for row in rows if not row.is_done]))
        self._prefills = [prefill for prefill in self._prefills if not all(row.is_done for row in prefill.rows)]
        self._free_slots([index for index, row in enumerate(self._rows) if row.is_done])

    def _admit(self) -> None:
        """Take waiting sequences while there are rows for them, in the queue's order."""
        for sequence, ending in self._take_waiting():
            finish(sequence, ending)
        while self._admitting:  # without the queue's lock: a folder's own code runs in it
            sequence = self._admitting[0]
            try:
                job = GroupState(sequence, self._eos_ids, self._observer.on_admit(sequence), next(self._numbers))
            except Exception as error:
                self._admitting.popleft()
                finish(sequence, error_outcome(error))
            else:
                self._prefill_delay.on_come()
                self._admitting.popleft()
                self._ready.append(job.rows)

    def _take_waiting(self) -> list[tuple[SequenceGroup, HfTritonError]]:
        """Take from the queue those for whom there are rows; gives those who wait in vain, and why."""
        ended: list[tuple[SequenceGroup, HfTritonError]] = []
        room = self._max_rows - sum(1 for _ in self._all_rows())
        is_busy = self._is_busy()
        with self._wake:
            while self._waiting and (self._waiting[0].plan.num_sequences <= room or not (is_busy or self._admitting)):
                sequence = self._waiting.pop(0)
                self._note_leaving(sequence)
                ending = ending_in_queue(sequence)
                if ending is None:
                    self._admitting.append(sequence)
                    room -= sequence.plan.num_sequences
                else:
                    ended.append((sequence, ending))
            self._num_left_waiting = len(self._waiting)
        return ended

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _advance_prefill(self) -> None:
        """Read one more piece of the contexts at hand, or several of them that are no more together.

        After each piece of a long context, short ones that wait are read first.
        """
        if self._inflight_step or self._gathers():
            return
        has_company = bool(self._rows)
        passes = self._is_turn_of_short and self._let_short_ones_pass()
        if self._prefills and not passes:
            self._prefill_chunk(has_company=has_company)
            return
        piece = chunk_sizes_for(self._device).size(has_company=has_company)
        num_passed = len(self._prefills)
        num_read, gathers = 0, not (has_company or num_passed)
        while (
            gathers
            and self._may_others_join(self._num_ready_tokens(), piece)
            and (gap_s := self._prefill_delay.gap_s())
        ):
            self._await_others(gap_s)
        if self._closing.is_set():
            return
        while len(self._prefills) == num_passed and (prefill_requests := self._next_prefill_requests()):
            num_new = num_padded(prefill_requests)
            if num_read and num_read + num_new > piece:
                break
            num_read += num_new
            # Its rows are known as those that wait until it is there.
            self._prefills.append(Prefill(prefill_requests, self._forward, is_whole=self._prefills_whole))
            for reading in prefill_requests:
                self._ready.popleft()
                self._observer.on_prefix_hit(reading.num_cached)
            self._prefill_chunk(has_company=has_company)
            if gathers and not self._ready and self._may_others_join(num_read, piece):
                self._await_others(self._prefill_delay.rest_s())
                gathers = self._prefill_delay.rest_s() > 0
        if num_read:
            self._prefill_delay.on_read()

    def _let_short_ones_pass(self) -> bool:
        """Put the short contexts that wait before the long ones; whether there are any."""
        self._is_turn_of_short = False
        if any(row.is_suspect for row in self._all_rows()):
            return False
        short = [group for group in self._ready if not self._is_long(group)]
        self._ready = deque([*short, *filter(self._is_long, self._ready)])
        return bool(short)

    def _is_long(self, group: list[Sequence]) -> bool:
        """Whether to read a context takes more than one piece, by what it shared when that was first asked."""
        most, job = chunk_sizes_for(self._device).alone, group[0].job
        if group[0].num_tokens <= most:
            return False
        if job.num_cached is None:
            job.num_cached = self._prefill_request(group).num_cached
        return group[0].num_tokens - job.num_cached > most

    def _prefill_chunk(self, *, has_company: bool) -> None:
        """Read some of the contexts at hand; when they are read, their rows join the running ones."""
        prefill = self._prefills[-1]
        logits = prefill.advance(has_company=has_company)
        self._is_turn_of_short = prefill.is_long
        reading = prefill.prefill_requests[0]
        if prefill.num_read == reading.pause:
            self._remember(reading.context[: reading.pause], partial(prefill.read, 0), prefill.states(0))
        if logits is not None:
            self._join(prefill, logits)
            self._prefills.pop()
            self._preempt_outgrown()

    def _gathers(self) -> bool:
        """Whether reading waits for prompts that are on their way, while rows run."""
        if self._prefills or not self._ready:
            return False
        if self._num_ready_tokens() >= chunk_sizes_for(self._device).alone:
            return False
        return self._prefill_delay.waits(len(self._ready), [row.num_left for row in self._rows])

    def _num_ready_tokens(self) -> int:
        return sum(rows[0].num_tokens for rows in self._ready)

    def _may_others_join(self, num_tokens: int, piece: int) -> bool:
        """Whether there is room beside those who are to run first, with contexts of so many tokens."""
        num_rows = sum(1 for _ in self._all_rows())
        return 0 < num_tokens < piece and num_rows < self._row_limit and not self._closing.is_set()

    def _await_others(self, wait_s: float) -> None:
        """Before the first rows run, take those who have come since, or the next to come."""
        with self._wake:
            self._wake.wait_for(lambda: len(self._waiting) > self._num_left_waiting or self._closing.is_set(), wait_s)
        self._admit()

    def _next_prefill_requests(self) -> list[PrefillRequest]:
        """The oldest contexts that are worth one batch; a suspect comes alone, when nobody else runs."""
        prefill_requests: list[PrefillRequest] = []
        for group in self._ready:
            if any(row.is_suspect for row in self._rows) or (
                prefill_requests and prefill_requests[0].rows[0].is_suspect
            ):
                break
            if self._rows or self._prefills or prefill_requests:
                if group[0].is_suspect or not self._has_room_for(prefill_requests, group):
                    break
                together = [*prefill_requests, self._prefill_request(group)]
                if prefill_requests and not are_worth_one_batch(together, self._device, self._forward.switch_length):
                    break
                prefill_requests = together
            elif self._reserve([row.num_tokens for row in group], self._tokens_of(1, group[0].num_tokens)):
                prefill_requests.append(self._prefill_request(group))
            else:
                self._wait_for_memory(group)
                break
        for reading in prefill_requests:
            reading.rows[0].job.no_room_since_s = None
        return prefill_requests

    def _prefill_request(self, group: list[Sequence]) -> PrefillRequest:
        reading = PrefillRequest(group, group[0].context())
        if not self._shares_prefixes or reading.num_top_logprobs is not None or reading.length <= self._prefixes.least:
            return reading
        head = reading.context[: self._prefixes.least]
        alike = (index for index, row in enumerate(self._rows) if row.begins_with(head))
        found = self._prefixes.find(self._named(reading.context), map(self._running_prefix, alike))
        if found and not _is_finite(*found):
            self._prefixes.clear()
            found = None
        num_cached, prefix = found or (0, None)
        pause = self._prefixes.branch(self._named(reading.context), num_cached)
        return replace(reading, num_cached=num_cached, prefix=prefix, pause=pause)

    def _running_prefix(self, index: int) -> Prefix:
        token_ids = self._named(self._rows[index].context()[:-1])
        return Prefix(np.array(token_ids), partial(self._memory.read, index))

    def _named(self, token_ids: list[int]) -> list[int]:
        """A text's tokens, by which its keys and values are found."""
        if len(token_ids) <= self._forward.switch_length:
            return token_ids
        return [OF_LONG_TEXT + token_id for token_id in token_ids]

    def _has_room_for(self, prefill_requests: list[PrefillRequest], group: list[Sequence]) -> bool:
        new = [row.num_tokens for rows in (*(each.rows for each in prefill_requests), group) for row in rows]
        lengths = [*(row.num_tokens for row in self._rows_in_prefill()), *new]
        in_prefill = self._num_in_prefill() + self._tokens_of(len(prefill_requests) + 1, max(new))
        return len(self._rows) + len(lengths) <= self._row_limit and self._reserve(lengths, in_prefill)

    def _join(self, prefill: Prefill, logits: torch.Tensor) -> None:
        """Give every row of the prefill its first token and its place."""
        places = [
            (at, row) for at, reading in enumerate(prefill.prefill_requests) for row in reading.rows if not row.is_done
        ]
        index = to_device([at for at, _ in places], torch.int64, logits.device)
        picks = sample_tokens(logits[index], [row.picker for _, row in places])
        to_keep = set(range(len(prefill.prefill_requests)) if self._forward.has_states else ())
        for (at, row), pick in zip(places, picks, strict=True):
            if row.take(pick):
                to_keep.add(at)
            else:
                self._rows.insert(self._memory.add(prefill.cache, at, prefill.prefill_requests[at].length), row)
        for at in to_keep:
            self._remember(prefill.prefill_requests[at].context, partial(prefill.read, at), prefill.states(at))

    # --- step --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for every running row; on a device that needs no host for it, one step ahead of what rows have."""
        if not self._rows:
            return
        self._began_s = time.monotonic()
        step = self._launch()
        self._see()
        self._inflight_step = step
        self._catch_up()

    def _launch(self) -> Step:
        """Have the device pick the next token of every row."""
        if self._inflight_step:
            newest = self._inflight_step.tokens_of(self._rows)
        else:
            newest = to_device([row.token_ids[-1] for row in self._rows], torch.int64, self._device)
        logits = self._memory.step(self._decoder, newest)
        self._memory.is_corrupt = True  # until what follows is picked: a failure here has everyone read anew
        picks = SampledTokens(
            logits, [row.picker for row in self._rows], num_ahead=int(self._inflight_step is not None)
        )
        self._memory.is_corrupt = False
        return Step(list(self._rows), picks)

    def _see(self) -> None:
        """Give the rows the tokens that were picked for them."""
        step, self._inflight_step = self._inflight_step, None
        if step is None or not self._rows:
            return
        self._memory.is_corrupt = True  # until every row has its own, as above
        picks = step.read()
        self._prefill_delay.on_step(time.monotonic() - self._began_s)
        done = [index for index, row in enumerate(self._rows) if row.take(picks[row])]
        self._memory.is_corrupt = False
        self._observer.on_step(len(self._rows))
        self._prefill_delay.on_leave(len({job for index in done if (job := self._rows[index].job).is_finished}))
        self._free_slots(done)
        self._preempt_outgrown()

    def _catch_up(self) -> None:
        """See the last step's tokens at once where nothing can be done before."""
        if not self._runs_ahead():
            self._see()

    def _runs_ahead(self) -> bool:
        """Whether the next step may begin before the last one's tokens are seen.

        Not where contexts wait to be read, which that step would hold up; where the host has a say in what comes next,
        or knows it; where every text is complete with what it has not seen yet.
        """
        if not self._decoder.is_static or self._prefills or self._ready:
            return False
        if any(row.again or row.sampler.needs_host for row in self._rows):
            return False
        return any(row.num_left > 1 for row in self._rows)

    def _free_slots(self, indices: list[int]) -> None:
        """Free rows; the last one of its lane takes the place of each."""
        for index in reversed(indices):
            row = self._rows[index]
            if row.finish_reason:
                # Not the last token, or those of a closing, which the model has not read.
                computed = row.context()[: self._memory.length(index)]
                if self._is_outgrown(row):  # its last token's keys, where a step ran ahead, are not like the others'
                    computed = computed[: row.num_tokens - 1]
                is_whole = len(computed) == self._memory.length(index)
                if not self._forward.has_states or (is_whole and self._forward.reads_as_it_writes):
                    self._remember(computed, partial(self._memory.read, index), self._memory.states(index))
            last = self._memory.remove(index)
            if row.is_done:
                self._row_limit = min(self._row_limit + 1, self._max_rows)
            self._rows[index] = self._rows[last]
            del self._rows[last]

    def _remember(self, token_ids: list[int], read: Callable[[int], LayerContents], states: list[TextStates]) -> None:
        """Keep what was computed for a text, for one that begins with it."""
        if not self._shares_prefixes or len(token_ids) < self._prefixes.least or self._memory.is_corrupt:
            return
        if self._prefixes.touch(self._named(token_ids)):
            return
        weight = len(token_ids) + self._prefixes.tokens_of_states
        allowed = self._budget.tokens(self._num_used())
        room = min(allowed // PREFIX_PART, allowed - self._num_used() + self._prefixes.num_tokens)
        if weight > room:
            return
        self._prefixes.shrink(room - weight)
        try:
            contents = [(keys.clone(), values.clone()) for keys, values in read(len(token_ids))]
            own = [cloned(each) for each in states]
        except Exception as error:
            if is_fatal(error):
                raise
            self._prefixes.clear()  # there is no memory to spare
        else:
            self._prefixes.add(self._named(token_ids), contents, own)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _new_memory(self) -> KVCacheLanes:
        return KVCacheLanes(self._device, self._max_padding, self._tokens_of_states)

    def _num_used(self) -> int:
        return self._memory.num_tokens + self._prefixes.num_tokens + self._num_in_prefill()

    def _num_in_prefill(self) -> int:
        return sum(self._tokens_of(len(prefill.prefill_requests), prefill.longest) for prefill in list(self._prefills))

    def _tokens_of(self, num_contexts: int, longest: int) -> int:
        """Tokens of key/value memory that contexts take while they are read."""
        return num_contexts * (longest + self._tokens_of_states)

    def _reserve(self, lengths: list[int], num_in_prefill: int) -> bool:
        """Make room for the running rows and new ones, at the cost of past texts' prefixes; whether there is enough."""
        allowed = self._budget.tokens(self._num_used()) - num_in_prefill
        if self._memory.tokens_with(lengths) > allowed:
            return False
        if self._memory.most_with(lengths) > allowed:
            self._memory.trim()
        self._prefixes.shrink(allowed - self._memory.most_with(lengths))
        self._memory.limit(lengths, allowed - self._prefixes.num_tokens)
        return True

    def _make_room(self) -> None:
        """Where the rows outgrow the memory, the youngest go back and wait; those being read are to have room too."""
        while self._rows:
            lengths = [row.num_tokens for row in self._rows_in_prefill()]
            if self._reserve(lengths, self._num_in_prefill()):
                return
            if len(self._rows) > 1 or self._prefills:
                youngest = max((*self._rows, *self._rows_in_prefill()), key=lambda row: row.age)
                self._preempt(next((each.rows for each in self._prefills if youngest in each.rows), [youngest]))
            else:
                self._rows[0].job.finish(self._no_memory(self._memory.width + 1))
                self._preempt(self._rows)

    def _preempt_outgrown(self) -> None:
        """Have texts read anew whose keys are of no use from the token on that they have just got."""
        outgrown = [row for row in self._rows if self._is_outgrown(row)]
        if outgrown:
            self._preempt(outgrown)

    def _is_outgrown(self, row: Sequence) -> bool:
        """Whether a row in memory has just got the token with which its keys are of no more use."""
        return row.num_tokens == self._forward.switch_length + 1

    def _wait_for_memory(self, group: list[Sequence]) -> None:
        """Have the next context wait where nothing runs and there is no room: others may give memory back."""
        if len(group) > 1:
            self._ready.popleft()
            self._ready.extendleft([row] for row in reversed(group))
            return
        job, now = group[0].job, time.monotonic()
        job.no_room_since_s = now if job.no_room_since_s is None else job.no_room_since_s
        if now - job.no_room_since_s < NO_ROOM_S:
            time.sleep(NO_ROOM_POLL_S)
            return
        job.finish(self._no_memory(group[0].num_tokens))
        self._ready.popleft()

    def admission_error(self, sequence: SequenceGroup) -> HfTritonError | None:
        """Why a sequence could never run in this memory; None where it could."""
        num_prompt, num_new = len(sequence.prompt_ids), sequence.plan.max_new_tokens
        # A context is held twice while it is laid into its row.
        needed = 2 * buffer_tokens(1, num_prompt + num_new, self._tokens_of_states)
        if needed <= self._budget.most():
            return None
        return RequestError(
            "memory_exceeded",
            f"a prompt of {num_prompt} tokens and max_new_tokens {num_new}, rounded up and held twice, need "
            f"{self._budget.words(needed)} of key/value memory, and there are "
            f"{self._budget.words(self._budget.most())} (setting max_cache_tokens): ask for fewer tokens",
        )

    def _no_memory(self, num_tokens: int) -> UnavailableError:
        allowed = self._budget.words(self._budget.tokens(self._num_used()))
        return UnavailableError(
            "out_of_memory",
            f"a text of {num_tokens} tokens does not fit the key/value memory that is free now, {allowed} in all: "
            "send it again later, or ask for fewer tokens",
        )

    # --- failure -----------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None], rows_at_work: Callable[[], list[Sequence]]) -> None:
        """Do some work; where it fails, put its rows back, everyone's where it has none, and refuse only the guilty."""
        try:
            work()
        except Exception as error:
            if is_fatal(error):
                raise
            self._recover(list(rows_at_work()), error)

    def _recover(self, rows: list[Sequence], error: Exception) -> None:
        everyone = [*self._rows, *(row for row in self._rows_in_prefill() if row not in self._rows)]
        rows = rows or everyone or list(next(iter(self._ready), ()))
        if not rows:
            raise error  # nobody's fault
        if self._is_guilty(rows, everyone, error):
            rows[0].job.finish(error_outcome(error))
        else:
            logger.warning("%d rows failed together (%s) and are tried again", len(rows), kind(error))
        self._prefixes.clear()
        leaving = self._select_victims(rows, error)
        self._preempt(everyone if self._memory.is_corrupt else leaving)

    def _is_guilty(self, rows: list[Sequence], everyone: list[Sequence], error: Exception) -> bool:
        """Whether nothing else can have been the cause of a failure, or could give memory up."""
        if is_memory(error):
            return len(rows) == 1 and len(everyone) <= 1 and not self._prefixes.num_tokens
        are_running = all(row in self._rows for row in rows)
        num_parts = len(rows) if are_running else len({id(row.job) for row in rows})
        return num_parts == 1 and all(row in rows for row in self._rows)

    def _select_victims(self, rows: list[Sequence], error: Exception) -> list[Sequence]:
        """Which rows leave the memory after a failure, and how many may share it from now on.

        Out of memory makes the contexts that are being read wait, or the younger half of the running rows. Any other
        failure makes every row a suspect, which runs alone.
        """
        if not is_memory(error):
            for row in rows:
                row.is_suspect = True
            return rows
        in_prefill = [row for row in self._rows_in_prefill() if row not in self._rows]
        num_staying = len(self._rows) if in_prefill else (len(self._rows) + 1) // 2
        self._row_limit = max(1, num_staying or len(in_prefill) // 2)
        by_age = sorted(self._rows, key=lambda row: row.age)
        done = [row for row in rows if row.is_done]
        return [*done, *(row for row in in_prefill or by_age[num_staying:] if row not in done)]

    def _preempt(self, rows: list[Sequence]) -> None:
        """Take rows out of memory; those that are not done are prefilled again, with what they have written.

        Where a state would be another if it were read, what they have written is written again.
        """
        rows = list(rows)
        if not self._forward.reads_as_it_writes:
            for row in rows:
                if not row.is_done:
                    row.regenerate()
        self._observer.on_preempt(sum(row in rows and not row.is_done for row in self._rows))
        # First, so that each of them is known to somebody whatever fails below.
        waiting = {id(row) for group in self._ready for row in group}
        self._ready.extendleft([row] for row in reversed(rows) if not row.is_done and id(row) not in waiting)
        self._prefills = [prefill for prefill in self._prefills if not any(row in rows for row in prefill.rows)]
        if self._memory.is_corrupt:
            self._memory, self._rows, self._inflight_step = self._new_memory(), [], None
        else:
            self._free_slots([index for index, row in enumerate(self._rows) if row in rows])
            if not self._rows:
                self._inflight_step = None


def _is_finite(length: int, prefix: Prefix) -> bool:
    """Whether nothing in a text came to nan, which would have spread to the last layer of each kind."""
    tensors = [*itertools.chain(*prefix.read(length)[-1:])]
    tensors += [state for states in prefix.states[-1:] for each in states for state in each.values()]
    return are_finite(tensors)
