# SPDX-License-Identifier: Apache-2.0
"""The door's side: finds the engines of a model in the server's other processes, forwards requests and responses."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from hf_triton.errors import HfTritonError, RequestError, UnavailableError, where
from hf_triton.stream_door.address import Address, find_addresses
from hf_triton.stream_door.connection import Connection, MessageTooLargeError, frame, is_same_user
from hf_triton.stream_door.messages import DoorRequest, Message, pack_request, read_error, read_parameters, read_tensors
from hf_triton.tasks.interface import RequestService, ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest

logger = logging.getLogger(__name__)

CONNECT_S: Final = 2.0


class _Forwarded:
    """A request that is being forwarded; raises RequestError if the request's parameters cannot be read."""

    def __init__(self, request: InferenceRequest, config: ResponseConfig) -> None:
        self.request = request
        self.has_begun = False
        self.tried: set[Address] = set()
        self.cancel: Callable[[], None] = lambda: None
        """Tells the engine that has the request that it is cancelled."""
        self._request = partial(
            DoorRequest,
            inputs=request.inputs(),
            parameters=request.parameters,
            request_id=request.request_id,
            output_names=config.output_names,
            requested_outputs=request.requested_outputs(),
            streams=config.streams,
        )

    def message(self, number: int) -> Message:
        deadline_s = self.request.deadline_s()
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        return {"id": number, "request": pack_request(self._request(timeout_s=left_s))}


class _Link:
    """A connection to one engine.

    Args:
        on_unserved: Called with a request that the engine, unloaded or ended, left without any response; returns
            whether another engine takes it.
    """

    def __init__(
        self,
        model_name: str,
        connected: socket.socket,
        address: Address,
        on_unserved: Callable[[_Forwarded], bool],
        on_close: Callable[[_Link], None],
    ) -> None:
        self.address = address
        self.is_open = True
        self._model_name = model_name
        self._on_unserved = on_unserved
        self._on_close = on_close
        self._lock = threading.Lock()
        self._open: dict[int, _Forwarded] = {}
        self._last_number = 0
        self.connection = Connection(connected, self._on_message, self._close)
        self.connection.start()

    @property
    def num_open(self) -> int:
        """Requests without their final response."""
        return len(self._open)

    def forward(self, forwarded: _Forwarded) -> bool:
        """Send a request. Returns False if the connection has ended."""
        with self._lock:
            if not self.is_open:
                return False
            self._last_number += 1
            number = self._last_number
            self._open[number] = forwarded
            forwarded.cancel = partial(self._cancel, number)
        self.connection.sender.put(partial(self._send, number, forwarded))
        return True

    def _cancel(self, number: int) -> None:
        self.connection.sender.put(partial(self.connection.send, {"id": number, "cancel": True}))

    def _send(self, number: int, forwarded: _Forwarded) -> None:
        try:
            self.connection.send(forwarded.message(number))
            if forwarded.request.is_cancelled():  # before the engine knew the request
                self._cancel(number)
        except MessageTooLargeError as error:
            self._refuse(number, RequestError("invalid_input", f"the request {error}: split it"))
        except Exception as error:  # out of memory; the engine does not know this request
            logger.error("forwarding a request failed: %s", where(error))
            self._refuse(number, HfTritonError("internal", "the request could not be forwarded; see the server's log"))

    def _on_message(self, message: Message) -> None:
        number = message["id"]
        forwarded = self._open.get(number)
        if forwarded is None:  # it was refused on this side
            return
        match message:
            case {"add": outputs}:
                forwarded.has_begun = True
                self._deliver(number, partial(forwarded.request.add, read_tensors(outputs)))
            case {"answer": outputs}:
                parameters = read_parameters(message.get("parameters", {}))
                self._deliver(number, partial(forwarded.request.answer, read_tensors(outputs), parameters))
                self._forget(number)
                forwarded.request.on_ending(None)
            case {"refuse": error}:
                self._refuse(number, read_error(error))

    def _deliver(self, number: int, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:  # Triton's shared memory is full, for example
            logger.error("sending a response failed: %s", where(error))
            self._cancel(number)
            self._refuse(
                number, HfTritonError("internal", "a part of the response could not be sent; the server's log says why")
            )

    def _refuse(self, number: int, error: HfTritonError) -> None:
        forwarded = self._forget(number)
        if forwarded is None:
            return
        try:
            is_unserved = not self.is_open or error.code == "shutting_down"
            if is_unserved and not forwarded.has_begun and self._on_unserved(forwarded):
                return
        except Exception as failure:  # no thread or no socket is available
            logger.error("forwarding a refused request failed: %s", where(failure))
        forwarded.request.on_ending(None)
        try:
            forwarded.request.refuse(error)
        except Exception as failure:  # shared memory is full even for an error; other requests must still be answered
            logger.error("refusing a request failed: %s", where(failure))

    def _forget(self, number: int) -> _Forwarded | None:
        with self._lock:
            return self._open.pop(number, None)

    def _close(self) -> None:
        with self._lock:
            self.is_open = False
            numbers = list(self._open)
        for number in numbers:
            self._refuse(
                number,
                UnavailableError(
                    "engine_failed",
                    f"the process of the model {self._model_name}, which generates, has ended: "
                    "send the request again later",
                ),
            )
        self._on_close(self)


class Engines(RequestService):
    """Has the engines of one model, in any process of this server, answer a folder's requests."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._links: dict[Address, _Link] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        """Forward a request and return at once; it is answered in another thread.

        Raises:
            UnavailableError: There is no engine.
            RequestError: The request's parameters cannot be read.
        """
        forwarded = _Forwarded(request, config)
        request.on_ending(lambda _: forwarded.cancel())
        if not self._forward(forwarded):
            request.on_ending(None)
            raise UnavailableError(
                "not_loaded",
                f"the model {self._model_name}, which this folder streams from, is not loaded (yet): load it, or send "
                "the request again later",
            )

    def is_healthy(self) -> bool:
        return self._choose(set()) is not None

    def close(self) -> None:
        """End the connections; requests in flight are refused."""
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            link.connection.close()

    def _forward(self, forwarded: _Forwarded) -> bool:
        while (link := self._choose(forwarded.tried)) is not None:
            forwarded.tried.add(link.address)
            if link.forward(forwarded):
                return True
        return False

    def _choose(self, tried: set[Address]) -> _Link | None:
        """The least busy engine of the highest version, which is the version that Triton serves."""
        with self._lock:
            links = [
                link for each in find_addresses(self._model_name) if each not in tried and (link := self._link(each))
            ]
        highest = max((link.address.version for link in links), default=0)
        newest = [link for link in links if link.address.version == highest]
        return min(newest, key=lambda link: link.num_open, default=None)

    def _link(self, address: Address) -> _Link | None:
        link = self._links.get(address)
        if link is None and not self._is_closed and (connected := _connect(address)) is not None:
            link = _Link(self._model_name, connected, address, self._forward, self._forget)
            self._links[address] = link
        return link if link is not None and link.is_open else None

    def _forget(self, link: _Link) -> None:
        with self._lock:
            if self._links.get(link.address) is link:
                del self._links[link.address]


def cancel_elsewhere(model_name: str, request_id: str) -> None:
    """Cancel the requests of an id in a model's other processes. Returns when the messages are sent."""
    _tell_elsewhere(model_name, {"id": 0, "cancel_all": request_id})


def sleep_elsewhere(model_name: str, is_sleeping: bool) -> None:
    """Have a model's other processes sleep or wake. Returns when the messages are sent."""
    _tell_elsewhere(model_name, {"id": 0, "sleep": is_sleeping})


def _tell_elsewhere(model_name: str, message: Message) -> None:
    for address in find_addresses(model_name):
        connected = None if address.pid == os.getpid() else _connect(address)
        if connected is not None:
            with connected, contextlib.suppress(OSError):  # an instance that is gone has nothing to do
                connected.settimeout(CONNECT_S)
                connected.sendall(frame(message), socket.MSG_NOSIGNAL)


def _connect(address: Address) -> socket.socket | None:
    """A connection to an address; None if no process of this user listens there."""
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError:  # no more files may be open
        return None
    with contextlib.suppress(OSError):
        connected.settimeout(CONNECT_S)
        connected.connect(str(address.path))
        connected.settimeout(None)
        if is_same_user(connected):
            return connected
    connected.close()
    return None
