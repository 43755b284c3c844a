# SPDX-License-Identifier: Apache-2.0
"""From texts to responses: a thread that writes and sends, so that the engine waits neither for it nor for Triton.

What a stream writes faster than it can be sent goes out together. Answers that take long to write or to send have a
thread of their own, so that the streams do not wait for them. Knows Triton only by its `InferenceRequest`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt

from hf_triton.engine.types import RequestTimes
from hf_triton.errors import HfTritonError, where
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.responses import GeneratedOutput, encode_deltas, encode_outputs, encode_timings

logger = logging.getLogger(__name__)


class InferenceRequest(Protocol):
    """A request to be answered once, Triton's own (`_triton.TritonRequest`) or one that came through a stream door."""

    request_id: str

    def inputs(self) -> dict[str, npt.NDArray[Any]]: ...

    def parameters(self) -> dict[str, object]: ...

    def requested_outputs(self) -> list[str]: ...

    def timeout_s(self) -> float | None: ...

    def is_cancelled(self) -> bool: ...

    def add(self, outputs: Mapping[str, npt.NDArray[Any]]) -> None: ...

    def answer(self, outputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, int] | None = None) -> None: ...

    def refuse(self, error: HfTritonError) -> None: ...


class SenderThread:
    """Does one thing after the other, in a thread of its own.

    It has no lock: the garbage collector may run, and put something, wherever a thread is.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None]) -> None:
        """Have something done; behind `close` in the caller's thread, after what it and the lane's thread had put."""
        self._queue.put(send)
        if self._is_closed:  # looked at behind the putting: nothing stays behind the end of the queue
            self._end()

    def offer(self, send: Callable[[], None]) -> None:
        """The same, never waiting; behind `close` it may not be done."""
        self._queue.put(send)

    def close(self) -> None:
        """Do what is there, then end."""
        self._queue.put(None)
        self._is_closed = True  # behind the putting: whoever sees this may wait for the thread
        self._end()

    def _end(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._do_all()

    def _loop(self) -> None:
        while (send := self._queue.get()) is not None:
            self._do(send)
            del send  # a call that was dropped answers when nobody holds it any more
        self._do_all()

    def _do_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (send := self._queue.get_nowait()) is not None:
                    self._do(send)

    @staticmethod
    def _do(send: Callable[[], None]) -> None:
        try:
            send()
        except BaseException as error:  # the thread serves the other calls too
            logger.error("sending a response failed: %s", where(error))


class ResponseSender:
    """Sends in a thread of its own, in order; what takes long in a second one, so that the streams go on meanwhile."""

    def __init__(self) -> None:
        self._is_closed = False
        self._lane = SenderThread("hf_triton-outbox")
        self._long_lane: SenderThread | None = None

    def put(self, send: Callable[[], None]) -> None:
        """Have something sent."""
        self._lane.put(send)

    def offer(self, send: Callable[[], None]) -> None:
        """Have something sent without waiting, from a destructor; behind `close` it may not be."""
        self._lane.offer(send)

    def put_long(self, send: Callable[[], None]) -> None:
        """Have something sent that takes a while: behind all that was put before; what is put later does not wait."""
        self._lane.put(partial(self._hand_over, send))

    def close(self) -> None:
        """Send what is there, then end."""
        self._is_closed = True
        self._lane.close()
        if self._long_lane is not None:
            self._long_lane.close()

    def _hand_over(self, send: Callable[[], None]) -> None:
        if self._long_lane is None and self._is_closed:
            send()
            return
        if self._long_lane is None:
            self._long_lane = SenderThread("hf_triton-long-answers")
        self._long_lane.put(send)


@dataclass(frozen=True)
class ResponseConfig:
    """How the calls of a folder are answered."""

    output_names: list[str]
    """The outputs that it declares."""
    is_decoupled: bool
    """Whether an answer may come in parts."""
    streams: bool
    """Whether it does where the request does not say."""
    outbox: ResponseSender
    """What sends it."""


class StreamReply:
    """The answer to one call.

    Args:
        call: Where it goes.
        request: What is answered.
        output_names: The outputs that the folder declares.
        outbox: What sends it.
        times: The request's own.
    """

    def __init__(
        self,
        call: InferenceRequest,
        request: GenerationRequest,
        output_names: Sequence[str],
        outbox: ResponseSender,
        times: RequestTimes,
    ) -> None:
        self._call = call
        self._request = request
        self._output_names = output_names
        self._outbox = outbox
        self._times = times
        self._pieces: list[str] = []
        self._is_due = False
        self._lock = threading.Lock()

    def start(self, num_texts: int) -> None:
        """A stream of so many texts begins."""
        self._pieces = [""] * num_texts

    def add(self, text: int, piece: str) -> None:
        """A text goes on."""
        with self._lock:
            self._pieces[text] += piece
            was_due, self._is_due = self._is_due, True
        if not was_due:
            self._outbox.put(self._send_pieces)

    def finish(self, make_texts: Callable[[], list[GeneratedOutput]], *, takes_long: bool) -> None:
        """The texts, or what is left of them; made where they are sent."""
        put = self._outbox.put_long if takes_long else self._outbox.put
        put(partial(self._finish, make_texts))

    def refuse(self, error: HfTritonError) -> None:
        """An error, after what the stream has."""
        self._outbox.put(partial(self._refuse, error))

    def _take_pieces(self) -> list[str]:
        with self._lock:
            pieces, self._pieces, self._is_due = self._pieces, [""] * len(self._pieces), False
        return pieces

    def _send_pieces(self) -> None:
        pieces = self._take_pieces()
        if any(pieces):
            self._call.add(encode_deltas(pieces, self._request, self._output_names))

    def _finish(self, make_texts: Callable[[], list[GeneratedOutput]]) -> None:
        try:
            self._send_pieces()
            outputs = encode_outputs(make_texts(), self._request, self._output_names)
            self._call.answer(outputs, self._parameters())
        except HfTritonError as error:
            self._call.refuse(error)
        except BaseException:  # want of memory, for a long answer
            self._call.refuse(HfTritonError("internal", "the answer could not be sent; the server's log says where"))
            raise

    def _refuse(self, error: HfTritonError) -> None:
        try:
            self._send_pieces()
        finally:
            self._call.refuse(error)

    def _parameters(self) -> dict[str, int]:
        """Those of the last response."""
        if not self._request.options.return_timings:
            return {}
        times = self._times
        return encode_timings(
            times.arrival_s,
            admitted_s=times.admitted_s,
            first_token_s=times.first_token_s,
            answered_s=time.monotonic(),
        )
