# SPDX-License-Identifier: Apache-2.0
"""One inference request: cancellation, deadline, times and its one final response. Knows no Triton and no task."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from hf_triton.engine.sequence import RequestTimes
from hf_triton.errors import CancelledError, DeadlineExceededError, HfTritonError
from hf_triton.tasks.serving.metrics import UNCOUNTED


class InferenceRequest(ABC):
    """A request from its arrival to its final response. Safe from any thread.

    Subclasses carry the tensors: `TritonRequest` over Triton's sender, `RemoteRequest` over a stream door's socket.
    Exactly one final response is sent; a second one is ignored, and a request that is dropped without one is refused
    by its destructor.

    Args:
        request_id: The client's name for the request; empty for none.
        timeout_s: The client's timeout, in seconds from now; None for none.
    """

    def __init__(self, request_id: str = "", timeout_s: float | None = None) -> None:
        self.request_id = request_id
        self.timeout_s = timeout_s
        self.times = RequestTimes()
        self.on_traced: Callable[[str], None] | None = None
        """Called once, with the outcome, if the request is traced."""
        self.is_counted = True
        """Whether it is a request in the metrics."""
        self.wants_error_data = False
        """Whether the client reads errors as data, see `ERROR_FORM`."""
        self.adapter = ""
        """Name of its LoRA adapter, once that is known to exist."""
        self._on_answer: Callable[[str, str], None] = lambda outcome, adapter: None
        self._lock = threading.Lock()
        self._is_answered = False
        self._is_cancelled = False
        self._on_ending: Callable[[HfTritonError], None] | None = None
        self._ends_s: float | None = None

    def deadline_s(self, max_time_s: float | None = None) -> float | None:
        """The earlier end of the client's timeout and `max_time_s`, by `time.monotonic()`; None without either."""
        limits_s = [limit_s for limit_s in (max_time_s, self.timeout_s) if limit_s is not None]
        return self.times.arrival_s + min(limits_s) if limits_s else None

    def is_cancelled(self) -> bool:
        """Whether the request is cancelled, as of the last poll."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Cancel the request, as if its client had."""
        self._is_cancelled = True

    def on_ending(self, callback: Callable[[HfTritonError], None] | None, deadline_s: float | None = None) -> None:
        """Have the poller call `callback` once if the request is cancelled or its deadline passes; None: no longer."""
        self._ends_s, self._on_ending = deadline_s, callback

    def ending(self) -> HfTritonError | None:
        """Why the request is not worth preparing any more; None while it is."""
        if self.is_cancelled():
            return CancelledError()
        return DeadlineExceededError() if self._ends_s is not None and time.monotonic() >= self._ends_s else None

    def poll(self) -> bool:
        """Call the callback of a request that has ended. Returns whether to poll it again."""
        callback = self._on_ending
        if callback is not None and (error := self.ending()) is not None:
            self._on_ending = None
            callback(error)
        return not self._is_answered

    def _note_answer(self, outcome: str) -> None:
        """Count the final response: `ok`, or the error's code."""
        self._on_answer(outcome if self.is_counted else UNCOUNTED, self.adapter)
        if self.on_traced is not None:
            self.on_traced(outcome)

    @abstractmethod
    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """The request's tensors by name; copies."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, object]:
        """The request's parameters by name; raises RequestError if they cannot be read."""

    @abstractmethod
    def requested_outputs(self) -> list[str]:
        """The outputs that the client names; all of them if it names none."""

    @abstractmethod
    def add(self, outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Send a response with more to follow. The folder must be decoupled."""

    @abstractmethod
    def answer(self, outputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, int] | None = None) -> None:
        """Send the final response; `parameters` are the response's own."""

    def error_sentence(self, error: HfTritonError) -> str:
        """What the client reads of an error behind its code."""
        return error.to_json() if self.wants_error_data else error.sentence

    @abstractmethod
    def refuse(self, error: HfTritonError) -> None:
        """Send an error as the final response."""
