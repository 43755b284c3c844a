# SPDX-License-Identifier: Apache-2.0
"""The thread that an engine runs in, its queue, and the promise that every group gets exactly one outcome."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic

from hf_triton.engine.protocols import Nap
from hf_triton.engine.waiting_queue import AnyGroup, WaitingQueue
from hf_triton.errors import HfTritonError, ShuttingDownError, UnavailableError, as_own_error, where
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.faults import is_fatal, is_memory, loggable
from hf_triton.runner.offload import OffloadedWeights, held_bytes, release_freed

if TYPE_CHECKING:
    import torch

    from hf_triton.runner.lora.model_adapters import Adapters

logger = logging.getLogger(__name__)


class Worker(Generic[AnyGroup]):
    """Queues groups and calls `step` in a thread of its own, until it is closed or fails.

    A subclass defines `step` and `unfinished`, and `is_busy`, `admission_error`, `release`, `sleep` and `wake` as it
    needs, and starts `thread` when it is ready.

    Args:
        device: Has the model's input embedding.
        model: Its weights leave a GPU while the worker sleeps; None: there are none.
        adapters: Those of the model; None: it takes none.
        on_fatal: Called once, in the worker's thread, after it has failed for good and answered every group.
        linger_s: How long the CPU cores are kept without work.
        idle_release_s: How long there is no work before `release` is called; None: it is not.
    """

    def __init__(
        self,
        device: torch.device,
        on_fatal: Callable[[], None],
        *,
        model: Any = None,
        adapters: Adapters | None = None,
        linger_s: float = 0.0,
        idle_release_s: float | None = None,
    ) -> None:
        self._device = device
        self.device_context = DeviceContext(device)
        self.queue: WaitingQueue[AnyGroup] = WaitingQueue()
        self.thread = threading.Thread(target=self._loop, name="hf_triton-engine", daemon=True)
        self.slower: list[str] = []
        """Why it runs slower than it could, what was measured, what it costs: a sentence each, without subject."""
        self.is_sleeping = False
        """Whether memory is given back until there is work; only the worker's thread changes it."""
        self._sleep_calls: list[tuple[bool, Future[Nap]]] = []  # to sleep, or to wake
        self._num_keeping_awake = 0
        self._model, self._weights, self._adapters = model, OffloadedWeights(), adapters
        if adapters is not None and device.type == "cuda":
            adapters.kept_awake = self.kept_awake
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

    def sleep(self) -> None:
        """Give back the memory that `wake` takes again. Called without work, and once more if `wake` fails."""
        if self._device.type == "cuda" and self._model is not None:
            with nullcontext() if self._adapters is None else self._adapters.choose(None):  # none comes or goes
                slots = () if self._adapters is None else self._adapters.slot_tensors()
                self._weights.offload([*self._model.parameters(), *self._model.buffers(), *slots])

    def wake(self) -> None:
        """Take the memory again that `sleep`, which may have failed, has given back."""
        self._weights.restore()

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
        if error is None:
            if self._sleep_calls:
                self._withdraw_calls()
            return
        for group in groups:
            group.finish(error)

    def set_sleeping(self, is_sleeping: bool) -> Future[Nap]:
        """Sleep once there is no work, or wake. Work that is submitted before it sleeps keeps it awake.

        Cancelling the future withdraws the call.
        """
        done: Future[Nap] = Future()
        with self.queue.changed:
            error = self.rejection()
            if error is None and (is_sleeping or self.is_sleeping):
                wanted = [call for call in self._sleep_calls if not call[1].cancelled()]
                self._sleep_calls = [*wanted, (is_sleeping, done)]
                self.queue.changed.notify()
                return done
        if error is not None:
            done.set_exception(error)
        else:
            self._withdraw_calls()
            done.set_result(Nap(is_sleeping=False))
        return done

    @contextlib.contextmanager
    def kept_awake(self) -> Iterator[None]:
        """For another thread, which needs the memory that `sleep` gives back; not in the worker's."""
        with self.queue.changed:
            self._num_keeping_awake += 1
        try:
            self.set_sleeping(False).result()
            yield
        finally:
            with self.queue.changed:
                self._num_keeping_awake -= 1
                self.queue.changed.notify()

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

    def fail(self, grace_s: float) -> None:
        """Answer every group with an error and stop for good; from any thread, if what this one computes with is lost.

        Args:
            grace_s: How long the step that runs may take to end; its groups are answered then, and the process ends.
        """
        self._failed.set()
        with self.queue.changed:
            self.queue.changed.notify_all()
        self.thread.join(grace_s)
        if self.thread.is_alive():
            self._answer_all()
            self._on_fatal()
            self.thread.join(grace_s)
            if self.thread.is_alive():
                os._exit(1)  # the server would wait for it

    def rejection(self) -> HfTritonError | None:
        """Why the engine accepts no group; None: it does."""
        if self._failed.is_set():
            return UnavailableError(
                "engine_failed", "the engine stopped after a fatal error; the server restarts or must be restarted"
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
        while True:
            with changed:
                is_called = changed.wait_for(self._is_called, self._linger_s)
                if not is_called:
                    self.device_context.idle()
                    is_called = changed.wait_for(self._is_called, self._idle_release_s)
            if not is_called:
                self.release()  # without the lock: `submit` does not wait for it
                with changed:
                    changed.wait_for(self._is_called)
            if self._has_work():
                return not self._must_end()
            self._nap()

    def _has_work(self) -> bool:
        return self.is_busy() or bool(self.queue) or self._must_end()

    def _must_end(self) -> bool:
        return self._closing.is_set() or self._failed.is_set()

    def _is_called(self) -> bool:
        is_told = any(not done.cancelled() for _, done in self._sleep_calls)
        return self._has_work() or (is_told and not self._num_keeping_awake)

    def _nap(self) -> None:
        """Sleep until work or a call wakes it, or at once if it cannot fall asleep."""
        changed = self.queue.changed
        with changed:
            if self._has_work() or not self._is_called():  # a call was withdrawn
                return
            self.is_sleeping = True
        started_s, num_bytes = time.monotonic(), held_bytes(self._device)
        error = self._fall_asleep()
        given_back = max(0, num_bytes - held_bytes(self._device))
        self._answer_calls(error or Nap(True, time.monotonic() - started_s, given_back), to_sleep=True)
        if error is not None and self._woke_up():
            return
        while not self._must_end():
            with changed:
                changed.wait_for(lambda: self._has_work() or bool(self._sleep_calls))
            self._answer_calls(Nap(is_sleeping=True), to_sleep=True)
            is_needed = self._has_work() or not all(to_sleep for to_sleep, _ in self._sleep_calls)
            if is_needed and not self._must_end() and self._woke_up():
                return

    def _fall_asleep(self) -> HfTritonError | None:
        error = self._attempt("falling asleep", self.sleep)
        release_freed(self._device)
        return error

    def _woke_up(self) -> bool:
        """Wake; a failure refuses the work that waits, and the worker sleeps on: the next request tries again."""
        started_s = time.monotonic()
        error = self._attempt("waking", self.wake)
        if error is None:
            with self.queue.changed:
                self.is_sleeping = False
            self._answer_calls(Nap(False, time.monotonic() - started_s), to_sleep=False)
            return True
        self._fall_asleep()
        for group in self.queue.clear():
            group.finish(error)
        self._answer_calls(error, to_sleep=False)
        return False

    def _attempt(self, doing: str, change: Callable[[], None]) -> HfTritonError | None:
        """Fall asleep or wake; the error of a failure after which the worker goes on."""
        try:
            change()
        except Exception as error:
            if is_fatal(error):
                raise
            if is_memory(error):
                logger.warning("%s: out of memory", doing)
                return UnavailableError(
                    "out_of_memory", f"the device has too little memory for {doing}: send the request again later"
                )
            return as_own_error(doing, error)
        return None

    def _answer_calls(self, outcome: Nap | HfTritonError, *, to_sleep: bool) -> None:
        """Answer the calls to sleep, or those to wake."""
        with self.queue.changed:
            calls = [call for call in self._sleep_calls if call[0] is to_sleep]
            self._sleep_calls = [call for call in self._sleep_calls if call not in calls]
        for _, done in calls:
            if not done.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Nap):
                done.set_result(outcome)
            else:
                done.set_exception(outcome)

    def _withdraw_calls(self) -> None:
        """Answer the calls to sleep of a worker that has work."""
        with self.queue.changed:
            calls = [] if self.is_sleeping else self._sleep_calls
            self._sleep_calls = self._sleep_calls if self.is_sleeping else []
        for _, done in calls:
            if done.set_running_or_notify_cancel():
                done.set_result(Nap(is_sleeping=False))

    def _answer_all(self) -> None:
        with self.queue.changed:
            groups = [*self.unfinished(), *self.queue.clear()]
        rejection = self.rejection()
        assert rejection is not None  # the loop ends for no other reason
        for group in groups:
            group.finish(rejection)
        for to_sleep in (True, False):
            self._answer_calls(rejection, to_sleep=to_sleep)
