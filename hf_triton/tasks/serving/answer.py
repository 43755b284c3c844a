# SPDX-License-Identifier: Apache-2.0
"""The answer to one request of an encoder, or of a model of speech: all of its outputs at once. Knows no task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from hf_triton.engine.group import Listener
from hf_triton.errors import HfTritonError, ShuttingDownError, as_own_error, panics_as_errors
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.meter import Meter

Outputs = Mapping[str, npt.NDArray[Any]]


class Answer(Listener[Any]):
    """Collects the outcomes of a request's groups and sends one final response: with the last, or the first error."""

    def __init__(self, request: InferenceRequest, pool: ThreadPoolExecutor, meter: Meter) -> None:
        self.request = request
        self._pool = pool
        self._meter = meter
        self._num_groups = 0
        self._make_outputs: Callable[[list[Any]], Outputs] = lambda outcomes: {}
        self._outcomes: dict[int, Any] = {}
        self._has_begun = False
        self._ended = threading.Event()

    def expect(self, num_groups: int, make_outputs: Callable[[list[Any]], Outputs]) -> None:
        """Say how many groups the engine gets, and what makes outputs of their outcomes, before it gets them."""
        self._num_groups, self._make_outputs = num_groups, make_outputs

    def is_cancelled(self) -> bool:
        return self._ended.is_set() or self.request.is_cancelled()

    def check_wanted(self) -> None:
        """Check that the request is still to be prepared.

        Raises:
            HfTritonError: It was cancelled or has expired, or the model is being unloaded.
        """
        error = self.request.ending()
        if error or self._ended.is_set():
            raise error or ShuttingDownError()

    def on_begin(self) -> None:
        """Note how long the request has waited."""
        if not self._has_begun:
            self._has_begun = True
            self._meter.on_begin(self.request.times)

    def on_finish(self, row: int, outcome: Any) -> None:
        """Take the outcome of a group; with the last one the request is answered, in a thread of the pool."""
        if isinstance(outcome, HfTritonError):
            self.refuse(outcome)
            return
        self._outcomes[row] = outcome
        if len(self._outcomes) == self._num_groups:
            try:
                self._pool.submit(self._send)
            except RuntimeError as error:  # the pool is shut down, or no thread is available; a later one may run it
                self.refuse(as_own_error("answering the request", error))

    def _send(self) -> None:
        """Make the outputs and send the final response."""
        try:
            with panics_as_errors():
                self.request.answer(self._make_outputs([self._outcomes[row] for row in range(self._num_groups)]))
        except Exception as error:
            self.refuse(as_own_error("answering the request", error))

    def refuse(self, error: HfTritonError) -> None:
        """End the request with an error, unless it has ended."""
        self._ended.set()
        self.request.refuse(error)
