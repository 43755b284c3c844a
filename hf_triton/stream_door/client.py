# SPDX-License-Identifier: Apache-2.0
"""The door's side: finds the engines of a model in the server's other processes, passes requests and answers on."""

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
from hf_triton.stream_door.connection import MAX_MESSAGE_BYTES, Connection, MessageTooLargeError, frame, is_same_user
from hf_triton.stream_door.messages import DoorRequest, Message, pack_request, read_error, read_parameters, read_tensors
from hf_triton.tasks.text_generation.sender import InferenceRequest

logger = logging.getLogger(__name__)

CONNECT_S: Final = 2.0
CANCEL_POLL_S: Final = 0.05


class _Forwarded:
    """A request on its way.

    Args:
        call: What is to be answered.
        output_names: The outputs that the door's folder declares.
        streams: Whether the text comes piece by piece where the request does not say.

    Raises:
        RequestError: The request's parameters cannot be read.
    """

    def __init__(self, call: InferenceRequest, output_names: list[str], streams: bool) -> None:
        timeout_s = call.timeout_s()
        self.call = call
        self.has_begun = False
        self.tried: set[Address] = set()
        self._request = partial(
            DoorRequest,
            inputs=call.inputs(),
            parameters=call.parameters(),
            request_id=call.request_id,
            output_names=output_names,
            requested_outputs=call.requested_outputs(),
            streams=streams,
        )
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def message(self, number: int) -> Message:
        """What the engine is told."""
        left_s = None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)
        return {"id": number, "request": pack_request(self._request(timeout_s=left_s))}


class _Link:
    """A connection to one engine.

    Args:
        model_name: The engine's model, for messages.
        connected: The socket.
        address: Where it leads.
        on_shutting_down: Offered a request that the engine, being unloaded, refused; whether another one takes it.
        on_close: Called when the connection has ended.
    """

    def __init__(
        self,
        model_name: str,
        connected: socket.socket,
        address: Address,
        on_shutting_down: Callable[[_Forwarded], bool],
        on_close: Callable[[_Link], None],
    ) -> None:
        self.address = address
        self.is_open = True
        self._model_name = model_name
        self._on_shutting_down = on_shutting_down
        self._on_close = on_close
        self._lock = threading.Lock()
        self._open: dict[int, _Forwarded] = {}
        self._cancelled: set[int] = set()  # of them
        self._last_number = 0
        self.connection = Connection(connected, self._on_message, self._close)
        self.connection.start()

    @property
    def num_open(self) -> int:
        """Requests without their last answer."""
        return len(self._open)

    def forward(self, forwarded: _Forwarded) -> bool:
        """Send a request; false where the connection has ended."""
        with self._lock:
            if not self.is_open:
                return False
            self._last_number += 1
            number = self._last_number
            self._open[number] = forwarded
        self.connection.outbox.put(partial(self._send, number, forwarded))
        return True

    def cancel_given_up(self) -> None:
        """Tell the engine which requests nobody waits for any more."""
        with self._lock:
            given_up = [
                number
                for number, each in self._open.items()
                if number not in self._cancelled and each.call.is_cancelled()
            ]
            self._cancelled.update(given_up)
        for number in given_up:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        self.connection.outbox.put(partial(self.connection.send, {"id": number, "cancel": True}))

    def _send(self, number: int, forwarded: _Forwarded) -> None:
        try:
            self.connection.send(forwarded.message(number))
        except MessageTooLargeError:
            self._refuse(
                number,
                RequestError(
                    "invalid_input",
                    f"the request has more than the {MAX_MESSAGE_BYTES} bytes that a stream door takes: split it",
                ),
            )
        except Exception as error:  # want of memory; the engine does not know this request
            logger.error("forwarding a request failed: %s", where(error))
            self._refuse(number, HfTritonError("internal", "the request could not be forwarded; see the server's log"))

    def _on_message(self, message: Message) -> None:
        number = message["id"]
        forwarded = self._open.get(number)
        if forwarded is None:  # it was refused here
            return
        match message:
            case {"add": outputs}:
                forwarded.has_begun = True
                self._deliver(number, partial(forwarded.call.add, read_tensors(outputs)))
            case {"answer": outputs}:
                parameters = read_parameters(message.get("parameters", {}))
                self._deliver(number, partial(forwarded.call.answer, read_tensors(outputs), parameters))
                self._forget(number)
            case {"refuse": error}:
                self._refuse(number, read_error(error))

    def _deliver(self, number: int, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:  # Triton's shared memory is full, for example
            logger.error("sending a response failed: %s", where(error))
            self._cancel(number)
            self._refuse(
                number, HfTritonError("internal", "a part of the text could not be sent; the server's log says why")
            )

    def _refuse(self, number: int, error: HfTritonError) -> None:
        forwarded = self._forget(number)
        if forwarded is None:
            return
        try:
            if error.code == "shutting_down" and not forwarded.has_begun and self._on_shutting_down(forwarded):
                return
        except Exception as failure:  # no thread or no socket is to be had
            logger.error("passing a request on failed: %s", where(failure))
        try:
            forwarded.call.refuse(error)
        except Exception as failure:  # Triton's shared memory is full even for an error; the others have answers coming
            logger.error("refusing a request failed: %s", where(failure))

    def _forget(self, number: int) -> _Forwarded | None:
        with self._lock:
            self._cancelled.discard(number)
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
                    f"the process of the model {self._model_name}, which writes the text, has ended: "
                    "send the request again later",
                ),
            )
        self._on_close(self)


class Engines:
    """The engines of one model, wherever in this server they are, coming and going.

    Args:
        model_name: The model.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._links: dict[Address, _Link] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_cancels, name="hf_triton-door-cancel", daemon=True)
        self._watch.start()

    def submit(self, call: InferenceRequest, output_names: list[str], *, streams: bool) -> None:
        """Pass a request on and return at once; it is answered in another thread.

        Args:
            call: The request.
            output_names: The outputs to fill.
            streams: Whether the text comes piece by piece where the request does not say.

        Raises:
            UnavailableError: No engine is there.
            RequestError: The request's parameters cannot be read.
        """
        if not self._forward(_Forwarded(call, output_names, streams)):
            raise UnavailableError(
                "not_loaded",
                f"the model {self._model_name}, which this folder streams from, is not loaded (yet): load it, or send "
                "the request again later",
            )

    def is_ready(self) -> bool:
        """Whether an engine is there."""
        return self._choose(set()) is not None

    def close(self) -> None:
        """End the connections; what is in flight is refused."""
        self._closing.set()
        self._watch.join()
        for link in self._all_links():
            link.connection.close()

    def _forward(self, forwarded: _Forwarded) -> bool:
        while (link := self._choose(forwarded.tried)) is not None:
            forwarded.tried.add(link.address)
            if link.forward(forwarded):
                return True
        return False

    def _choose(self, tried: set[Address]) -> _Link | None:
        """The engine with least to do among those of the highest version, which is the one that Triton serves."""
        with self._lock:
            links = [
                link for each in find_addresses(self._model_name) if each not in tried and (link := self._link(each))
            ]
        highest = max((link.address.version for link in links), default=0)
        newest = [link for link in links if link.address.version == highest]
        return min(newest, key=lambda link: link.num_open, default=None)

    def _link(self, address: Address) -> _Link | None:
        link = self._links.get(address)
        if link is None and (connected := _connect(address)) is not None:
            link = _Link(self._model_name, connected, address, self._forward, self._forget)
            self._links[address] = link
        return link if link is not None and link.is_open else None

    def _forget(self, link: _Link) -> None:
        with self._lock:
            if self._links.get(link.address) is link:
                del self._links[link.address]

    def _all_links(self) -> list[_Link]:
        with self._lock:
            return list(self._links.values())

    def _watch_cancels(self) -> None:
        while not self._closing.wait(CANCEL_POLL_S):
            for link in self._all_links():
                link.cancel_given_up()


def cancel_elsewhere(model_name: str, request_id: str) -> None:
    """Have a model's instances in other processes give up their requests of an id; returns when they are told."""
    for address in find_addresses(model_name):
        connected = None if address.pid == os.getpid() else _connect(address)
        if connected is not None:
            with connected, contextlib.suppress(OSError):  # an instance that is gone has nothing to give up
                connected.settimeout(CONNECT_S)
                connected.sendall(frame({"id": 0, "cancel_all": request_id}), socket.MSG_NOSIGNAL)


def _connect(address: Address) -> socket.socket | None:
    """A connection to an address, None where nobody of this user's listens."""
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
