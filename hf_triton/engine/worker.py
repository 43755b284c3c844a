# SPDX-License-Identifier: Apache-2.0
"""The thread that an engine runs in, its queue, and the promise that every group gets exactly one outcome."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic

from hf_triton.engine.waiting_queue import AnyGroup, WaitingQueue
from hf_triton.errors import HfTritonError, ShuttingDownError, UnavailableError, where
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.faults import loggable

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Worker(Generic[AnyGroup]):
    """Queues groups and calls `step` in a thread of its own, until it is closed or fails.

    A subclass defines `step` and `unfinished`, and `is_busy`, `admission_error` and `release` as it needs, and starts
    `thread` when it is ready.

    Args:
        device: Has the model's input embedding.
        on_fatal: Called once, in the worker's thread, after it has failed for good and answered every group.
        linger_s: How long the CPU cores are kept without work.
        idle_release_s: How long there is no work before `release` is called; None: it is not.
    """

    def __init__(
        self,
        device: torch.device,
        on_fatal: Callable[[], None],
        *,
        linger_s: float = 0.0,
        idle_release_s: float | None = None,
    ) -> None:
        self.device_context = DeviceContext(device)
        self.queue: WaitingQueue[AnyGroup] = WaitingQueue()
        self.thread = threading.Thread(target=self._loop, name="hf_triton-engine", daemon=True)
        self.slower: list[str] = []
        """Why it runs slower than it could, what was measured, what it costs: a sentence each, without subject."""
        self._on_fatal = on_fatal
        self._linger_s = linger_s
        self._idle_release_s = idle_release_s
        self._closing = threading.Event()
        self._failed = threading.Event()

    def step(self) -> None:
        """Compute one step. Called if a group is queued or the worker is busy."""
        raise NotImplementedError

    def unfinished(self) -> list[AnyGroup]:
        """The groups that have left the queue and have no outcome yet."""
        raise NotImplementedError

    def is_busy(self) -> bool:
        """Whether `step` has work without a queued group."""
        return False

    def admission_error(self, group: AnyGroup) -> HfTritonError | None:
        """The error of a group that can never run here; None: it can. From any thread."""
        return None

    def release(self) -> None:
        """Free memory. Called after `idle_release_s` without work."""

    def wait(self, seconds: float) -> None:
        """Wait in place of a step, until a group is queued at most."""
        with self.queue.changed:
            self.queue.changed.wait(seconds)

    # --- the interface -----------------------------------------------------------------------------------------------

    def submit(self, groups: list[AnyGroup]) -> None:
        """Queue the groups of one request and return at once; all of them, or none."""
        error = next((error for group in groups if (error := self.admission_error(group))), None)
        with self.queue.changed:
            error = error or self.rejection()
            if error is None:
                self.queue.add(groups)
                return
        for group in groups:
            group.finish(error)

    def is_healthy(self) -> bool:
        """Whether the engine can still compute."""
        return self.rejection() is None and self.thread.is_alive()

    def close(self) -> None:
        """Finish every group with an error and end the thread."""
        self._closing.set()
        with self.queue.changed:
            self.queue.changed.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def rejection(self) -> HfTritonError | None:
        """Why the engine accepts no group; None: it does."""
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
            self.device_context.begin()
            while self._wait_for_work():
                self.device_context.busy()
                self.step()
        except BaseException as error:  # the thread's last resort: every group must be answered
            self._failed.set()
            with contextlib.suppress(Exception):  # a log that takes no line either
                logger.error("the engine failed and stops (%s): %s", loggable(error), where(error))
        self._answer_all()
        self.device_context.idle()
        if self._failed.is_set():
            self._on_fatal()

    def _wait_for_work(self) -> bool:
        """Wait until a step has something to compute; false: the worker is closed."""
        changed = self.queue.changed
        with changed:
            has_work = changed.wait_for(self._has_work, self._linger_s)
            if not has_work:
                self.device_context.idle()
                has_work = changed.wait_for(self._has_work, self._idle_release_s)
        if not has_work:
            self.release()  # without the lock: `submit` does not wait for it
            with changed:
                changed.wait_for(self._has_work)
        return not self._closing.is_set()

    def _has_work(self) -> bool:
        return self.is_busy() or bool(self.queue) or self._closing.is_set()

    def _answer_all(self) -> None:
        with self.queue.changed:
            groups = [*self.unfinished(), *self.queue.clear()]
        rejection = self.rejection()
        assert rejection is not None  # the loop ends for no other reason
        for group in groups:
            group.finish(rejection)
