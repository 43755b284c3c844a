# SPDX-License-Identifier: Apache-2.0
"""The thread that an engine runs in: a queue, and the promise that everyone in it gets exactly one outcome."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from hf_triton.engine.types import Observer, Outcome, SequenceGroup
from hf_triton.errors import CancelledError, HfTritonError, ShuttingDownError, UnavailableError, where
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.faults import loggable

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.1
"""How often the queue is looked through for sequences that were cancelled or came too late."""
REST_S: Final = 10.0
"""How long an engine has nothing to do before it gives its memory back."""


class EngineThread:
    """Queues sequences and calls `_turn` in a thread of its own, until it is closed or fails.

    A subclass writes `_turn`, `_is_busy` and `_unfinished`, and `admission_error` and `_rest` as it needs.
    It takes sequences from `_waiting` under the lock `_wake`, tells `_note_leaving` which was the first of them, and
    starts `_thread` when it is ready to.

    Args:
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered everyone.
        observer: Is told what the engine does.
        device: Where the model's embedding is.
    """

    def __init__(self, on_fatal: Callable[[], None], observer: Observer | None, device: torch.device) -> None:
        self._on_fatal = on_fatal
        self._observer = observer or Observer()
        self._device = device
        self._device_context = DeviceContext(device)
        self._waiting: list[SequenceGroup] = []  # by `_rank`
        self._turns_begun: dict[int, int] = {}  # the last of each priority, some of which has left
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._next_sweep_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="hf_triton-engine", daemon=True)

    def _turn(self) -> None:
        """Do a piece of work. Called when a sequence waits, or the engine is busy."""
        raise NotImplementedError

    def admission_error(self, sequence: SequenceGroup) -> HfTritonError | None:
        """Why a sequence could never run here; None where it could. From any thread."""
        return None

    def _rest(self) -> None:
        """Give memory back. Called when there has been nothing to do for `REST_S`."""

    def _is_busy(self) -> bool:
        """Whether sequences were taken from the queue and have no outcome yet."""
        raise NotImplementedError

    def _unfinished(self) -> list[SequenceGroup]:
        """Those sequences."""
        raise NotImplementedError

    # --- the interface -----------------------------------------------------------------------------------------------

    def submit(self, sequences: list[SequenceGroup]) -> None:
        """Queue the sequences of one request and return at once; all of them, or none."""
        admission_error = next((error for sequence in sequences if (error := self.admission_error(sequence))), None)
        with self._wake:
            rejection = admission_error or self.rejection()
            if rejection is None:
                for sequence in self._with_turns(sequences):
                    bisect.insort(self._waiting, sequence, key=_rank)
                self._wake.notify()
        if rejection is not None:
            for sequence in sequences:
                finish(sequence, rejection)

    def _with_turns(self, sequences: list[SequenceGroup]) -> list[SequenceGroup]:
        """The sequences of one request, the first for the next turn to begin, each other for one later.

        So requests that come after one of hundreds of prompts need not wait for all of them, and its prompts do not
        wait for all that come later: nobody joins a turn of which some have left.
        """
        turns = {each.priority: itertools.count(self._next_turn(each.priority)) for each in sequences}
        return [replace(each, turn=next(turns[each.priority])) for each in sequences]

    def _next_turn(self, priority: int) -> int:
        """The first turn of a priority of which nobody has left."""
        next_turn = self._turns_begun.get(priority, -1) + 1
        place = bisect.bisect_left(self._waiting, (priority, next_turn), key=_rank)
        is_there = place < len(self._waiting) and self._waiting[place].priority == priority
        return self._waiting[place].turn if is_there else next_turn

    def _note_leaving(self, first: SequenceGroup) -> None:
        """The first of those that wait leaves the queue. Called under the lock."""
        self._turns_begun[first.priority] = first.turn

    def is_healthy(self) -> bool:
        """Whether the engine can still run sequences."""
        return self.rejection() is None and self._thread.is_alive()

    def close(self) -> None:
        """Finish everything with an error and end the thread."""
        self._closing.set()
        with self._wake:
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def rejection(self) -> HfTritonError | None:
        """Why the engine takes nothing more; None while it does."""
        if self._failed.is_set():
            return UnavailableError(
                "engine_failed", "the engine stopped after a fatal error, and the server is restarting"
            )
        if self._closing.is_set():
            return ShuttingDownError()
        return None

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._device_context.begin()
            while self._wait_for_work():
                self._device_context.busy()
                self._sweep_queue()
                self._turn()
        except BaseException as error:  # the thread's last resort: whatever it was, nobody may be left waiting
            self._failed.set()
            with contextlib.suppress(Exception):  # a log that takes no line either
                logger.error("the engine failed and stops (%s): %s", loggable(error), where(error))
        self._answer_everyone()
        self._device_context.close()
        if self._failed.is_set():
            self._on_fatal()

    def _wait_for_work(self) -> bool:
        with self._wake:
            if not self._has_work():
                self._device_context.idle()
            has_work = self._wake.wait_for(self._has_work, REST_S)
        if not has_work:
            self._rest()  # without the lock: `submit` does not wait for it
            with self._wake:
                self._wake.wait_for(self._has_work)
        return not self._closing.is_set()

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._is_busy() or self._closing.is_set()

    def _sweep_queue(self) -> None:
        """Answer those who wait in vain."""
        now = time.monotonic()
        if now < self._next_sweep_s:
            return
        self._next_sweep_s = now + SWEEP_S
        with self._wake:
            endings = [(sequence, ending_in_queue(sequence)) for sequence in self._waiting]
            self._waiting = [sequence for sequence, ending in endings if ending is None]
        for sequence, ending in endings:
            if ending is not None:
                finish(sequence, ending)

    def _answer_everyone(self) -> None:
        with self._wake:
            everyone = [*self._unfinished(), *self._waiting]
            self._waiting.clear()
        rejection = self.rejection()
        assert rejection is not None  # the loop ends for no other reason
        for sequence in everyone:
            finish(sequence, rejection)


def _rank(sequence: SequenceGroup) -> tuple[int, int]:
    """Where a sequence has its place in the queue; equals are in order of arrival."""
    return sequence.priority, sequence.turn


def ending_in_queue(sequence: SequenceGroup) -> HfTritonError | None:
    """Why a sequence waits in vain: its client has gone, or its time is up; None while it does not."""
    return cancellation(sequence) or (too_late() if is_late(sequence) else None)


def cancellation(sequence: SequenceGroup) -> HfTritonError | None:
    """Why nobody wants a sequence any more; None while somebody does."""
    try:
        return CancelledError() if sequence.is_cancelled() else None
    except BaseException as error:  # one request's mistake, a panic in Rust code too, must not end the loop
        logger.error("asking whether a request was cancelled failed: %s", where(error))
        return HfTritonError("internal", "the request could not be followed; the server's log says why")


def is_late(sequence: SequenceGroup) -> bool:
    """Whether a sequence is past its deadline."""
    return sequence.deadline_s is not None and time.monotonic() >= sequence.deadline_s


def too_late() -> UnavailableError:
    """What to answer to a sequence whose time was up before its first token."""
    return UnavailableError(
        "deadline_exceeded",
        "the time was up before the first token: give more (max_time, or the client's timeout), or send it again later",
    )


def queue_full(num_waiting: int, max_waiting: int) -> UnavailableError:
    """What to answer to a request for which there is no room in the queue."""
    return UnavailableError(
        "queue_full",
        f"{num_waiting} prompts are waiting and {max_waiting} may (setting max_waiting_prompts): "
        "send the request again later",
    )


def finish(sequence: SequenceGroup, outcome: Outcome) -> None:
    """Tell a sequence's listener its outcome."""
    try:
        sequence.on_finish(outcome)
    except BaseException as error:  # one listener's mistake, a panic in Rust code too, must not end the loop for others
        logger.error("delivering a sequence failed: %s", where(error))
