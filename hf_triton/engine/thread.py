# SPDX-License-Identifier: Apache-2.0
"""The thread that an engine runs in: a queue, and the promise that whoever is in it gets exactly one outcome."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from hf_triton.engine.interface import Outcome, Sequence
from hf_triton.errors import HfTritonError, UnavailableError, where

logger = logging.getLogger(__name__)


class EngineThread:
    """Queues sequences and calls `_turn` in a thread of its own, until it is closed or fails.

    A subclass writes `_turn`, `_is_busy` and `_unfinished`, takes sequences from `_waiting` under the lock `_wake`, and
    starts `_thread` when it is ready to.

    Args:
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered everyone.
    """

    def __init__(self, on_fatal: Callable[[], None]) -> None:
        self._on_fatal = on_fatal
        self._waiting: deque[Sequence] = deque()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hf_triton-engine", daemon=True)

    def _turn(self) -> None:
        """Do a piece of work. Called when a sequence waits, or the engine is busy."""
        raise NotImplementedError

    def _is_busy(self) -> bool:
        """Whether sequences were taken from the queue and have no outcome yet."""
        raise NotImplementedError

    def _unfinished(self) -> list[Sequence]:
        """Those sequences."""
        raise NotImplementedError

    # --- the interface -----------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence and return at once."""
        with self._wake:
            refusal = self.refusal()
            if refusal is None:
                self._waiting.append(sequence)
                self._wake.notify()
        if refusal is not None:
            finish(sequence, refusal)

    def is_healthy(self) -> bool:
        """Whether the engine can still run sequences."""
        return self.refusal() is None and self._thread.is_alive()

    def close(self) -> None:
        """Finish everything with an error and end the thread."""
        self._closing.set()
        with self._wake:
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def refusal(self) -> HfTritonError | None:
        """Why the engine takes nothing more; None while it does."""
        if self._failed.is_set():
            return UnavailableError(
                "engine_failed", "the engine stopped after a fatal error, and the server is restarting"
            )
        if self._closing.is_set():
            return UnavailableError("shutting_down", "the model is being unloaded: send the request again later")
        return None

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException:  # the thread's last resort: whatever it was, nobody may be left waiting
            logger.exception("the engine failed and stops")
            self._failed.set()
        self._answer_everyone()
        if self._failed.is_set():
            self._on_fatal()

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._is_busy() or self._closing.is_set())
        return not self._closing.is_set()

    def _answer_everyone(self) -> None:
        with self._wake:
            everyone = [*self._unfinished(), *self._waiting]
            self._waiting.clear()
        refusal = self.refusal()
        assert refusal is not None  # the loop ends for no other reason
        for sequence in everyone:
            finish(sequence, refusal)


def finish(sequence: Sequence, outcome: Outcome) -> None:
    """Tell a sequence's listener its outcome."""
    try:
        sequence.on_finish(outcome)
    except BaseException as error:  # one listener's mistake, a panic in Rust code too, must not end the loop for others
        logger.error("delivering a sequence failed: %s", where(error))
