# SPDX-License-Identifier: Apache-2.0
"""Requests on their way to the engine: those that wait in vain are answered, whatever the threads are busy with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hf_triton.engine.interface import RequestTimes
from hf_triton.engine.thread import queue_full, too_late
from hf_triton.errors import CancelledError, HfTritonError
from hf_triton.generation import GenerationParameters
from hf_triton.tasks.answering import Prompt, Reply, fault
from hf_triton.wire import GenerationRequest

SWEEP_S: Final = 0.1
"""How often it is looked whether somebody still waits for them."""


@dataclass(eq=False)
class Preparation:
    """A request whose prompts are being made ready."""

    request: GenerationRequest
    reply: Reply
    is_cancelled: Callable[[], bool]
    timeout_s: float | None
    streams: bool
    times: RequestTimes
    max_time_s: float | None
    """The least of its prompts': an error of one is the answer of all."""
    prompts: list[Prompt] = field(default_factory=list)
    """Those that are ready, the request's first ones."""

    @property
    def is_incomplete(self) -> bool:
        """Whether there are more."""
        return len(self.prompts) < len(self.request.prompts)

    def deadline_s(self, max_time_s: float | None) -> float | None:
        """When the time of a prompt is up, by `time.monotonic()`."""
        times_s = [time_s for time_s in (max_time_s, self.timeout_s) if time_s is not None]
        return self.times.arrival_s + min(times_s) if times_s else None

    def ending(self) -> HfTritonError | None:
        """Why nobody waits for it any more; None while somebody does."""
        if self.is_cancelled():
            return CancelledError()
        deadline_s = self.deadline_s(self.max_time_s)
        return too_late() if deadline_s is not None and time.monotonic() >= deadline_s else None


class Preparations:
    """Those that wait for a thread, or for a hook that one of them has called.

    Each is answered once: by whoever it `leave`s.

    Args:
        max_waiting: Prompts that may be here; one request alone may have any number.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._open: dict[int, Preparation] = {}
        self._num_prompts = 0
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._sweep, name="hf_triton-preparing", daemon=True)
        self._thread.start()

    def enter(self, preparation: Preparation) -> None:
        """Look after a request from now on.

        Raises:
            UnavailableError: Too many wait.
        """
        num_new = len(preparation.request.prompts)
        with self._wake:
            if self._open and self._num_prompts + num_new > self._max_waiting:
                raise queue_full(self._num_prompts, self._max_waiting)
            self._open[id(preparation)] = preparation
            self._num_prompts += num_new
            if len(self._open) == 1:
                self._wake.notify()

    def leave(self, preparation: Preparation) -> bool:
        """Let go of a request; whether it was still here, and is the caller's to answer."""
        with self._wake:
            if self._open.pop(id(preparation), None) is None:
                return False
            self._num_prompts -= len(preparation.request.prompts)
            return True

    def close(self) -> None:
        """End; nothing enters any more."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _sweep(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._open or self._is_closed)
                if self._is_closed:
                    return
                everyone = list(self._open.values())
            for each in everyone:
                self._answer_in_vain(each)
            del everyone
            time.sleep(SWEEP_S)

    def _answer_in_vain(self, preparation: Preparation) -> None:
        try:
            ending = preparation.ending()
        except BaseException as error:  # the thread looks after the others too
            ending = fault("asking whether somebody waits", error)
        if ending is not None and self.leave(preparation):
            preparation.reply.refuse(ending)


def least_max_time_s(request: GenerationRequest, defaults: tuple[GenerationParameters, ...]) -> float | None:
    """The shortest time that a request's parameters give a prompt; None where they give all time."""
    settled = (
        next((layer.max_time for layer in (own, *defaults) if layer.max_time is not None), None)
        for own in request.parameters
    )
    return min((max_time for max_time in settled if max_time is not None), default=None)
