# SPDX-License-Identifier: Apache-2.0
"""The thread that an engine runs in, its queue, and the promise that every group gets exactly one outcome."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_triton.engine.config import EngineConfig
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.engine.types import Observer
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import HfTritonError, ShuttingDownError, UnavailableError, panics_as_errors, where
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.faults import error_outcome, loggable
from hf_triton.sampling.sequence_sampler import SequenceSampler

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EngineThread:
    """Queues sequence groups and calls `step` in a thread of its own, until it is closed or fails.

    A subclass defines `step`, `is_busy` and `unfinished`, and `admission_error` and `release` as it needs, and starts
    `thread` when it is ready.

    Args:
        device: Of the model's input embedding.
        eos_ids: The end-of-sequence tokens of groups that do not name any.
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered every group.
        observer: Observes the engine.
        config: The engine's constants.
    """

    def __init__(
        self,
        device: torch.device,
        eos_ids: frozenset[int],
        on_fatal: Callable[[], None],
        observer: Observer | None,
        config: EngineConfig,
    ) -> None:
        self.device_context = DeviceContext(device)
        self.observer = observer or Observer()
        self.config = config
        self.queue = WaitingQueue(config.queue_sweep_s)
        self.thread = threading.Thread(target=self._loop, name="hf_triton-engine", daemon=True)
        self._eos_ids = eos_ids
        self._on_fatal = on_fatal
        self._closing = threading.Event()
        self._failed = threading.Event()

    def step(self) -> None:
        """Compute one step. Called if a group is queued or the engine is busy."""
        raise NotImplementedError

    def admission_error(self, group: SequenceGroup) -> HfTritonError | None:
        """The error of a group that can never run here; None: it can. From any thread."""
        return None

    def release(self) -> None:
        """Free memory. Called after `idle_release_s` without work."""

    def wait(self, seconds: float) -> None:
        """Wait in place of a step, until a group is queued at most."""
        with self.queue.changed:
            self.queue.changed.wait(seconds)

    def is_busy(self) -> bool:
        """Whether admitted groups have no outcome yet."""
        raise NotImplementedError

    def unfinished(self) -> list[SequenceGroup]:
        """The admitted groups that have no outcome yet."""
        raise NotImplementedError

    # --- the interface -----------------------------------------------------------------------------------------------

    def submit(self, groups: list[SequenceGroup]) -> None:
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
        """Whether the engine can still generate."""
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

    def start(self, group: SequenceGroup, *, arrival_number: int = 0, context_ids: list[int] | None = None) -> None:
        """Create the sequences of a group, or finish it with an error if that fails.

        Args:
            group: Leaves the queue.
            arrival_number: The higher, the younger.
            context_ids: What penalties look at; None: the prompt.
        """
        params = group.params
        eos_ids = self._eos_ids if params.eos_ids is None else params.eos_ids
        context = group.prompt_ids if context_ids is None else context_ids

        def new_sampler(index: int) -> SequenceSampler:
            constraint = group.constraint() if group.constraint else None
            return SequenceSampler(params, index, context, eos_ids, constraint, group.logits_processor())

        try:
            with panics_as_errors():
                group.start(new_sampler, eos_ids, self.observer.on_admit(group), arrival_number)
        except Exception as error:  # one request's mistake must not end the loop that serves the others
            group.finish(error_outcome(error))

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
        changed = self.queue.changed
        with changed:
            has_work = self._has_work()
            if not has_work:
                self.device_context.idle()
                has_work = changed.wait_for(self._has_work, self.config.idle_release_s)
        if not has_work:
            self.release()  # without the lock: `submit` does not wait for it
            with changed:
                changed.wait_for(self._has_work)
        return not self._closing.is_set()

    def _has_work(self) -> bool:
        return bool(self.queue) or self.is_busy() or self._closing.is_set()

    def _answer_all(self) -> None:
        with self.queue.changed:
            groups = [*self.unfinished(), *self.queue.clear()]
        rejection = self.rejection()
        assert rejection is not None  # the loop ends for no other reason
        for group in groups:
            group.finish(rejection)
