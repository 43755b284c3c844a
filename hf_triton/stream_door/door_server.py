# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a stream door: listens, and hands requests to the dispatcher as if Triton had brought them.

A model's other instances, and doors, connect here too to cancel requests of this instance, or to have it sleep.
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
from hf_triton.stream_door.connection import Connection, MessageTooLargeError, frame, is_same_user
from hf_triton.stream_door.messages import (
    Array,
    DoorRequest,
    Message,
    ProtocolError,
    pack_error,
    pack_tensors,
    read_request,
)
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.metrics import OK
from hf_triton.triton_backend.cancellation import RequestPoller

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
BACKLOG: Final = 16
BIND_ATTEMPTS: Final = 5
DRAIN_S: Final = 30.0
"""How long the requests of doors may continue when the model is unloaded: as long as a stopping server waits."""
DRAIN_POLL_S: Final = 0.05
ACCEPT_RETRY_S: Final = 0.5


class RemoteRequest(InferenceRequest):
    """A request that came through a door.

    Args:
        number: The door's number for it.
        on_answer: Called once, with `ok` or the error's code, and the adapter.
    """

    def __init__(self, number: int, request: DoorRequest, peer: _Peer, on_answer: Callable[[str, str], None]) -> None:
        super().__init__(request.request_id, request.timeout_s)
        self._number = number
        self._request = request
        self._peer = peer
        self._on_answer = on_answer

    def inputs(self) -> dict[str, Array]:
        """The request's tensors by name."""
        return dict(self._request.inputs)

    @property
    def parameters(self) -> Mapping[str, object]:
        return self._request.parameters

    def requested_outputs(self) -> list[str]:
        return self._request.requested_outputs

    def abandon(self) -> None:
        """Cancel a request whose door is gone: no response can be sent."""
        self._is_cancelled = True
        if self._end():
            self._note_answer(CancelledError().code)

    def add(self, outputs: Mapping[str, Array]) -> None:
        """Send a response with more to follow."""
        if self._is_answered:
            return
        try:
            self._peer.connection.send({"id": self._number, "add": pack_tensors(outputs)})
        except MessageTooLargeError as error:  # a stream with a gap would look complete
            self._is_cancelled = True
            self.refuse(UnavailableError("out_of_memory", f"the answer {error}"))

    def answer(self, outputs: Mapping[str, Array], parameters: Mapping[str, int] | None = None) -> None:
        """Send the final response; `parameters` are the response's own."""
        message = {"id": self._number, "answer": pack_tensors(outputs), "parameters": dict(parameters or {})}
        try:
            framed = frame(message)
        except MessageTooLargeError as error:
            self.refuse(UnavailableError("out_of_memory", f"the answer {error}"))
        else:
            self._finish(framed, OK)

    def refuse(self, error: HfTritonError) -> None:
        """Send an error as the final response."""
        self._finish(frame({"id": self._number, "refuse": pack_error(error, self.error_sentence(error))}), error.code)

    def _finish(self, framed: bytes, outcome: str) -> None:
        """Send the final response, once. Until it is sent, the request is open: `DoorServer.drain` waits for it."""
        if self._end():
            self._peer.connection.send_framed(framed)
            self._peer.forget(self._number)
            self._note_answer(outcome)

    def _end(self) -> bool:
        """Claim the final response; only the first caller may send it."""
        with self._lock:
            was_answered, self._is_answered = self._is_answered, True
        return not was_answered

    def __del__(self) -> None:  # runs wherever the garbage collector does, so it must not wait
        if not self._is_answered:
            self._peer.refuse(
                self._number, HfTritonError("internal", "the request was dropped; the server's log may say why")
            )
            self._note_answer("internal")


class _Peer:
    def __init__(self, connected: socket.socket, server: DoorServer) -> None:
        self._server = server
        self._requests: dict[int, weakref.ref[RemoteRequest]] = {}  # safe from any thread: each operation is atomic
        self.connection = Connection(connected, self._on_message, self._on_close)

    @property
    def num_open(self) -> int:
        """Requests without their final response."""
        return len(self._requests)

    def forget(self, number: int) -> None:
        """A request has its final response."""
        self._requests.pop(number, None)

    def refuse(self, number: int, error: HfTritonError) -> None:
        """Refuse a request from its destructor, without waiting."""
        self.forget(number)
        self.connection.sender.offer(lambda: self.connection.send({"id": number, "refuse": pack_error(error)}))

    def _on_message(self, message: Message) -> None:
        match message:
            case {"id": int() as number, "request": request}:
                self._begin(number, read_request(request))
            case {"id": int() as number, "cancel": True}:
                self._cancel(number)
            case {"cancel_all": str() as request_id}:
                self._server.poller.cancel(request_id)
            case {"sleep": bool() as is_sleeping}:
                self._server.set_sleeping(is_sleeping)
            case _:
                raise ProtocolError("the message is neither a request nor its end")

    def _begin(self, number: int, request: DoorRequest) -> None:
        if number in self._requests:
            raise ProtocolError("two requests have one id")
        call = RemoteRequest(number, request, self, self._server.begin_request())
        self._requests[number] = weakref.ref(call)
        self._server.poller.add(call)
        if self._server.is_draining:
            call.refuse(ShuttingDownError())
        else:
            config = ResponseConfig(
                request.output_names, is_decoupled=True, streams=request.streams, sender=self.connection.sender
            )
            self._server.take(call, config)

    def _cancel(self, number: int) -> None:
        reference = self._requests.get(number)
        call = None if reference is None else reference()
        if call is not None:  # it may be answered
            call.cancel()

    def _on_close(self) -> None:
        for reference in list(self._requests.values()):
            if call := reference():
                call.abandon()
        self._requests.clear()
        self._server.forget(self)


class DoorServer:
    """Takes the requests of stream doors for one instance of a model.

    Args:
        take: Starts a request; must see that it is answered, and raise nothing.
        begin_request: Counts a request; the function that it returns is called with the outcome and the adapter.
        set_sleeping: Has the instance sleep or wake; returns at once.
    """

    def __init__(
        self,
        model_name: str,
        version: int,
        *,
        take: Callable[[InferenceRequest, ResponseConfig], None],
        begin_request: Callable[[], Callable[[str, str], None]],
        poller: RequestPoller,
        set_sleeping: Callable[[bool], object] = lambda _: None,
    ) -> None:
        self.take = take
        self.set_sleeping = set_sleeping
        self.begin_request = begin_request
        self.is_draining = False
        self.poller = poller
        self._model_name = model_name
        self._version = version
        self._peers: set[_Peer] = set()
        self._lock = threading.Lock()
        self.listener: socket.socket | None = None
        self._address: Address | None = None

    def open(self) -> None:
        """Begin to listen. If that fails, the model serves without doors, and the log says so."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._address = _bind(listener, self._model_name, self._version)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            logger.warning("no stream door can reach this model: %s", error)
            return
        self.listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="hf_triton-door", daemon=True).start()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Take no more requests, and give the running ones time to finish."""
        if self.listener is None or self._address is None:
            return
        self.is_draining = True
        remove(self._address)
        self.listener.shutdown(socket.SHUT_RDWR)
        deadline_s = time.monotonic() + timeout_s
        while any(peer.num_open for peer in self.all_peers()) and time.monotonic() < deadline_s:
            time.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Send the queued responses and end the connections; after `drain`."""
        for peer in self.all_peers():
            peer.connection.close()
        if self.listener is not None:
            self.listener.close()

    def forget(self, peer: _Peer) -> None:
        """A connection has ended."""
        with self._lock:
            self._peers.discard(peer)

    def all_peers(self) -> list[_Peer]:
        with self._lock:
            return list(self._peers)

    def _accept(self, listener: socket.socket) -> None:
        while not self.is_draining:
            try:
                connected, _ = listener.accept()
            except OSError:  # it was shut down, or no file descriptor is available
                time.sleep(0 if self.is_draining else ACCEPT_RETRY_S)
                continue
            try:
                self._welcome(connected)
            except Exception as error:  # such as no thread available: later doors are accepted
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
        except Exception:
            self.forget(peer)
            raise


def _bind(listener: socket.socket, model_name: str, version: int) -> Address:
    for _ in range(BIND_ATTEMPTS):
        address = new_address(model_name, version)
        address.path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a model that was unloaded has just removed the folder
            listener.bind(str(address.path))
            return address
    raise FileNotFoundError(f"{address.path.parent} is removed again and again")
