# SPDX-License-Identifier: Apache-2.0
"""The poller of open requests: asks Triton whether their clients cancelled them. Imports nothing of Triton's."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Final

from hf_triton.errors import panics_as_errors, where
from hf_triton.tasks.serving.inference_request import InferenceRequest

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.05
POLL_REST: Final = 4
"""Pause between two rounds, as a multiple of the time that a round takes: 50 ms with a hundred open requests."""


class RequestPoller:
    """Polls all open requests from one thread, because asking Triton is a round trip between processes.

    It holds weak references: a request that is dropped without a response answers in its destructor.
    """

    def __init__(self, interval_s: float = POLL_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._open: set[weakref.ref[InferenceRequest]] = set()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, request: InferenceRequest) -> None:
        """Poll a request until it is answered or gone."""
        with self._wake:
            self._open.add(weakref.ref(request))
            self._wake.notify()
            if self._thread is None:
                self._start()

    def cancel(self, request_id: str) -> None:
        with self._wake:
            requests = [reference() for reference in self._open]
        for request in requests:
            if request is not None and request.request_id == request_id:
                request.cancel()

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name="hf_triton-request-poller", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is available; the next request tries again
            logger.error("cancelled requests are not noticed: %s", where(error))
        else:
            self._thread = thread

    def _loop(self) -> None:
        took_s = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._open)
            time.sleep(max(self._interval_s, POLL_REST * took_s))
            began_s = time.monotonic()
            with self._wake:
                references = list(self._open)
            closed = {reference for reference in references if not self._is_open(reference)}
            with self._wake:
                self._open -= closed
            took_s = time.monotonic() - began_s

    @staticmethod
    def _is_open(reference: weakref.ref[InferenceRequest]) -> bool:
        request = reference()
        try:
            with panics_as_errors():
                return request is not None and request.poll()
        except Exception as error:  # the thread polls other requests too
            logger.error("polling a request failed: %s", where(error))
            return False
