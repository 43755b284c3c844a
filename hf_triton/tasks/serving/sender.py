# SPDX-License-Identifier: Apache-2.0
"""A thread that builds and sends responses, so that the engine waits neither for text nor for Triton."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from hf_triton.errors import panics_as_errors, where

logger = logging.getLogger(__name__)


class ResponseSender:
    """Runs sends one after the other in a thread of its own.

    It takes no lock: a destructor may call it wherever the garbage collector runs.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="hf_triton-sender", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None]) -> None:
        """Queue a send. After `close` it runs in the calling thread, after all queued sends."""
        self._queue.put(send)
        if self._is_closed:  # checked after queueing, so that nothing stays behind the end of the queue
            self._finish()

    def offer(self, send: Callable[[], None]) -> None:
        """Queue a send without ever waiting, from a destructor. After `close` it may not run."""
        self._queue.put(send)

    def close(self) -> None:
        """Run all queued sends, then end the thread."""
        self._queue.put(None)
        self._is_closed = True  # set after queueing: a thread that sees it may wait for the sender's thread
        self._finish()

    def _finish(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._run_queued()

    def _loop(self) -> None:
        while (send := self._queue.get()) is not None:
            self._run(send)
            del send  # a request that is dropped without a response answers when its last reference goes
        self._run_queued()

    def _run_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (send := self._queue.get_nowait()) is not None:
                    self._run(send)

    @staticmethod
    def _run(send: Callable[[], None]) -> None:
        try:
            with panics_as_errors():
                send()
        except Exception as error:  # the thread serves other requests too
            logger.error("sending a response failed: %s", where(error))
