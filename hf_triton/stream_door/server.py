# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a stream door: listens, and hands requests to the model as if Triton had brought them.

A model's other instances, and doors, call there too to have requests given up that have come to this one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Final

from hf_triton.errors import CancelledError, HfTritonError, ShuttingDownError, UnavailableError, where
from hf_triton.stream_door.address import Address, new_address, remove
from hf_triton.stream_door.connection import MAX_MESSAGE_BYTES, Connection, MessageTooLargeError, frame, is_same_user
from hf_triton.stream_door.messages import (
    Array,
    DoorRequest,
    Message,
    ProtocolError,
    pack_error,
    pack_tensors,
    read_request,
)
from hf_triton.tasks.text_generation.sender import ResponseConfig

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
BACKLOG: Final = 16
BIND_ATTEMPTS: Final = 5
DRAIN_S: Final = 30.0
"""How long the requests of doors may go on when the model is unloaded; a stopping server waits as long for others."""
DRAIN_POLL_S: Final = 0.05
RETRY_S: Final = 0.5

Take = Callable[["RemoteRequest", ResponseConfig], None]


class RemoteRequest:
    """One request of a door, to be answered as a `TritonRequest` is. Safe from any thread."""

    def __init__(self, number: int, request: DoorRequest, peer: _Peer, on_answer: Callable[[str], None]) -> None:
        self._number = number
        self._request = request
        self._peer = peer
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._is_answered = False
        self._is_cancelled = False
        self.request_id = request.request_id

    def inputs(self) -> dict[str, Array]:
        """The request's tensors by name."""
        return dict(self._request.inputs)

    def parameters(self) -> dict[str, object]:
        """The request's parameters by name."""
        return dict(self._request.parameters)

    def requested_outputs(self) -> list[str]:
        """The outputs that the client is to have."""
        return self._request.requested_outputs

    def timeout_s(self) -> float | None:
        """The time that is left of what the client gives the request."""
        return self._request.timeout_s

    def is_cancelled(self) -> bool:
        """Whether the client gave up, or the door is gone."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Give the request up."""
        self._is_cancelled = True

    def abandon(self) -> None:
        """Give the request up where nobody is left to be answered."""
        self._is_cancelled = True
        with self._lock:
            was_answered, self._is_answered = self._is_answered, True
        if not was_answered:
            self._on_answer(CancelledError().code)

    def add(self, outputs: Mapping[str, Array]) -> None:
        """Send a response with more to come."""
        if self._is_answered:
            return
        try:
            self._peer.connection.send({"id": self._number, "add": pack_tensors(outputs)})
        except MessageTooLargeError:  # a text with a hole in it would look like a good one
            self._is_cancelled = True
            self.refuse(_too_large())

    def answer(self, outputs: Mapping[str, Array], parameters: Mapping[str, int] | None = None) -> None:
        """Send the one answer, or the last part of it; `parameters` are the response's own."""
        message = {"id": self._number, "answer": pack_tensors(outputs), "parameters": dict(parameters or {})}
        try:
            framed = frame(message)
        except MessageTooLargeError:
            self.refuse(_too_large())
        else:
            self._finish(framed, "ok")

    def refuse(self, error: HfTritonError) -> None:
        """Send an error as the one answer."""
        self._finish(frame({"id": self._number, "refuse": pack_error(error)}), error.code)

    def _finish(self, framed: bytes, outcome: str) -> None:
        """Send the last response, once."""
        with self._lock:
            was_answered, self._is_answered = self._is_answered, True
        if not was_answered:
            self._peer.forget(self._number)
            self._on_answer(outcome)
            self._peer.connection.send_framed(framed)

    def __del__(self) -> None:  # wherever the garbage collector runs, so it must not wait
        if not self._is_answered:
            self._peer.refuse(
                self._number, HfTritonError("internal", "the request was dropped; the server's log may say why")
            )
            self._on_answer("internal")


class _Peer:
    """One door."""

    def __init__(self, connected: socket.socket, server: DoorServer) -> None:
        self._server = server
        self._calls: dict[int, weakref.ref[RemoteRequest]] = {}  # each of its operations is one step of the interpreter
        self.connection = Connection(connected, self._on_message, self._on_close)

    @property
    def num_open(self) -> int:
        """Requests without their last answer."""
        return len(self._calls)

    def forget(self, number: int) -> None:
        """A request has its last answer."""
        self._calls.pop(number, None)

    def refuse(self, number: int, error: HfTritonError) -> None:
        """Refuse a request that nobody holds any more, without waiting."""
        self.forget(number)
        self.connection.outbox.offer(lambda: self.connection.send({"id": number, "refuse": pack_error(error)}))

    def _on_message(self, message: Message) -> None:
        match message:
            case {"id": int() as number, "request": request}:
                self._begin(number, read_request(request))
            case {"id": int() as number, "cancel": True}:
                self._cancel(number)
            case {"cancel_all": str() as request_id}:
                self._server.cancel_requests(request_id)
            case _:
                raise ProtocolError("the message is neither a request nor its end")

    def _begin(self, number: int, request: DoorRequest) -> None:
        if number in self._calls:
            raise ProtocolError("two requests have one id")
        call = RemoteRequest(number, request, self, self._server.begin_request())
        self._calls[number] = weakref.ref(call)
        if self._server.is_draining:
            call.refuse(ShuttingDownError())
        else:
            outlet = ResponseConfig(
                request.output_names, is_decoupled=True, streams=request.streams, outbox=self.connection.outbox
            )
            self._server.take(call, outlet)

    def _cancel(self, number: int) -> None:
        reference = self._calls.get(number)
        call = None if reference is None else reference()
        if call is not None:  # it may be answered by now
            call.cancel()

    def cancel_requests(self, request_id: str) -> None:
        """Give up the requests of an id."""
        for reference in list(self._calls.values()):
            call = reference()
            if call is not None and call.request_id == request_id:
                call.cancel()

    def _on_close(self) -> None:
        for reference in list(self._calls.values()):
            if call := reference():
                call.abandon()
        self._calls.clear()
        self._server.forget(self)


class DoorServer:
    """Takes the requests of stream doors for one instance of a model.

    Args:
        model_name: What the doors know it by.
        version: Its version.
        take: Starts on a request; must answer it, and raise nothing.
        begin_request: Counts a request; what it returns is told the outcome.
        cancel_own_requests: Gives up the requests of an id that Triton has brought to this instance.
    """

    def __init__(
        self,
        model_name: str,
        version: int,
        *,
        take: Take,
        begin_request: Callable[[], Callable[[str], None]],
        cancel_own_requests: Callable[[str], None],
    ) -> None:
        self.take = take
        self.begin_request = begin_request
        self.is_draining = False
        self._cancel_own_calls = cancel_own_requests
        self._model_name = model_name
        self._version = version
        self._peers: set[_Peer] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._address: Address | None = None

    def open(self) -> None:
        """Begin to listen. Where that cannot be, the model serves without doors, and a warning says so."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._address = _bind(listener, self._model_name, self._version)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            logger.warning("no stream door can reach this model: %s", error)
            return
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="hf_triton-door", daemon=True).start()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Take no more requests, and let those that are there go on for a time."""
        if self._listener is None or self._address is None:
            return
        self.is_draining = True
        remove(self._address)
        self._listener.shutdown(socket.SHUT_RDWR)
        deadline_s = time.monotonic() + timeout_s
        while any(peer.num_open for peer in self._all_peers()) and time.monotonic() < deadline_s:
            time.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Send the last answers and end the connections; after `drain`."""
        for peer in self._all_peers():
            peer.connection.close()
        if self._listener is not None:
            self._listener.close()

    def cancel_requests(self, request_id: str) -> None:
        """Give up the requests of an id, whether Triton or a door has brought them."""
        self._cancel_own_calls(request_id)
        for peer in self._all_peers():
            peer.cancel_requests(request_id)

    def forget(self, peer: _Peer) -> None:
        """A connection has ended."""
        with self._lock:
            self._peers.discard(peer)

    def _all_peers(self) -> list[_Peer]:
        with self._lock:
            return list(self._peers)

    def _accept(self, listener: socket.socket) -> None:
        while not self.is_draining:
            try:
                connected, _ = listener.accept()
            except OSError:  # it was shut down, or the process has no file descriptor left just now
                time.sleep(0 if self.is_draining else RETRY_S)
                continue
            try:
                self._welcome(connected)
            except Exception as error:  # such as no thread left just now: the doors that come later are taken
                logger.warning("a stream door could not be taken: %s", where(error))
                connected.close()

    def _welcome(self, connected: socket.socket) -> None:
        with self._lock:
            if not is_same_user(connected) or len(self._peers) >= MAX_CONNECTIONS:
                connected.close()
                return
            peer = _Peer(connected, self)
            self._peers.add(peer)
        try:
            peer.connection.start()
        except BaseException:
            self.forget(peer)
            raise


def _too_large() -> UnavailableError:
    return UnavailableError(
        "out_of_memory", f"the answer has more than the {MAX_MESSAGE_BYTES} bytes that a stream door takes"
    )


def _bind(listener: socket.socket, model_name: str, version: int) -> Address:
    for _ in range(BIND_ATTEMPTS):
        address = new_address(model_name, version)
        address.path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a model that was unloaded has just taken the folder away
            listener.bind(str(address.path))
            return address
    raise FileNotFoundError(f"{address.path.parent} is taken away again and again")
