# SPDX-License-Identifier: Apache-2.0
"""Requests on their way to the engine: those that wait in vain are answered, whatever the threads are busy with."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hf_triton.engine.types import RequestTimes
from hf_triton.engine.worker import queue_full, too_late
from hf_triton.errors import CancelledError, HfTritonError, ShuttingDownError, where
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.tasks.text_generation.response import Prompt, Reply, fault

logger = logging.getLogger(__name__)

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
    """Those that have been read, the request's first ones."""

    def deadline_s(self, max_time_s: float | None) -> float | None:
        """When the time of a prompt with this `max_time` is up, by `time.monotonic()`."""
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
        max_rows: Prompts that are taken to be at work, and not to wait.
        max_waiting: Prompts that may wait; one request alone may have any number.
    """

    def __init__(self, max_rows: int, max_waiting: int) -> None:
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._open: set[Preparation] = set()
        self._held: set[Preparation] = set()  # those too that have been answered, and that a thread is not done with
        self._num_prompts = 0  # of those held
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._sweep, name="hf_triton-preparing", daemon=True)
        self._thread.start()

    def enter(self, preparation: Preparation) -> None:
        """Look after a request from now on; a thread is to be `done` with it.

        Raises:
            UnavailableError: Too many wait, or this is closed.
        """
        num_new = len(preparation.request.prompts)
        with self._wake:
            if self._is_closed:
                raise ShuttingDownError
            num_waiting = self._num_prompts - self._max_rows
            if num_waiting > 0 and num_waiting + num_new > self._max_waiting:
                raise queue_full(num_waiting, self._max_waiting)
            self._open.add(preparation)
            self._held.add(preparation)
            self._num_prompts += num_new
            if len(self._open) == 1:
                self._wake.notify()

    @property
    def num_prompts(self) -> int:
        """Those that a thread has to do with, or will have."""
        return self._num_prompts

    def has(self, preparation: Preparation) -> bool:
        """Whether a request is still to be answered."""
        return preparation in self._open

    def leave(self, preparation: Preparation) -> bool:
        """Let go of a request; whether it was still here, and is the caller's to answer."""
        with self._wake:
            was_here = preparation in self._open
            self._open.discard(preparation)
            return was_here

    def done(self, preparation: Preparation) -> None:
        """No thread has to do with a request any more; said more than once, it changes nothing."""
        with self._wake:
            if preparation in self._held:
                self._held.discard(preparation)
                self._num_prompts -= len(preparation.request.prompts)

    def close(self) -> None:
        """Refuse everyone, and whoever comes."""
        with self._wake:
            self._is_closed = True
            everyone = list(self._open)
            self._wake.notify()
        for each in everyone:
            self.refuse(each, ShuttingDownError())
        self._thread.join()

    def _sweep(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._open or self._is_closed)
                if self._is_closed:
                    return
                everyone = list(self._open)
            for each in everyone:
                self._refuse_in_vain(each)
            del each, everyone
            time.sleep(SWEEP_S)

    def _refuse_in_vain(self, preparation: Preparation) -> None:
        try:
            ending = preparation.ending()
        except BaseException as error:  # the thread looks after the others too
            ending = fault("asking whether somebody waits", error)
        if ending is not None:
            self.refuse(preparation, ending)

    def refuse(self, preparation: Preparation, error: HfTritonError) -> None:
        """Answer a request that is still here with an error."""
        try:
            if self.leave(preparation):
                preparation.reply.refuse(error)
        except BaseException as failure:  # the others are to be looked after all the same
            logger.error("refusing a request failed: %s", where(failure))


def least_max_time_s(request: GenerationRequest, defaults: tuple[GenerationParameters, ...]) -> float | None:
    """The shortest time that a request's parameters give a prompt; None where they give all time."""
    settled = (
        next((layer.max_time for layer in (own, *defaults) if layer.max_time is not None), None)
        for own in request.parameters
    )
    return min((max_time for max_time in settled if max_time is not None), default=None)
