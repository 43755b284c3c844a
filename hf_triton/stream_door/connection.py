# SPDX-License-Identifier: Apache-2.0
"""Messages over a connected Unix socket: length-prefixed JSON. One thread reads, one sends.

An error of a connection ends this connection and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from hf_triton.errors import where
from hf_triton.stream_door.messages import Message, ProtocolError
from hf_triton.tasks.serving.sender import ResponseSender

logger = logging.getLogger(__name__)

LENGTH: Final = struct.Struct("!I")
MAX_MESSAGE_BYTES: Final = 64 << 20
"""The default of Triton's HTTP endpoint since 25.10."""
STALL_S: Final = 30
"""Send timeout: the other side must read something within this time, or the connection ends."""


class MessageTooLargeError(ValueError):
    """A message has more than `MAX_MESSAGE_BYTES`; its text is the end of a sentence."""

    def __init__(self) -> None:
        super().__init__(f"has more than the {MAX_MESSAGE_BYTES} bytes that a stream door takes")


class Connection:
    """One connection.

    Args:
        connected: The socket.
        on_message: Called with each message, in the reading thread. What it raises ends the connection.
        on_close: Called once, in the reading thread, after the last message.
    """

    def __init__(
        self, connected: socket.socket, on_message: Callable[[Message], None], on_close: Callable[[], None]
    ) -> None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", STALL_S, 0))
        self._socket = connected
        self._on_message = on_message
        self._on_close = on_close
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="hf_triton-door-reader", daemon=True)
        self.sender = ResponseSender()
        """Sends messages, so that the caller need not wait for the other side."""

    def start(self) -> None:
        """Begin to read. If that fails, the connection has ended."""
        try:
            self._reader.start()
        except Exception:
            self.sender.close()
            self._socket.close()
            raise

    def send(self, message: Message) -> None:
        """Send a message, waiting for the other side if necessary. Does nothing if the connection has ended.

        Raises:
            MessageTooLargeError: It does not fit; nothing was sent.
        """
        self.send_framed(frame(message))

    def send_framed(self, framed: bytes) -> None:
        """Send a message that `frame` has encoded, as `send` does."""
        with self._lock:
            try:
                self._socket.sendall(framed, socket.MSG_NOSIGNAL)
            except OSError:  # the other side is gone, or reads nothing
                self.end()

    def end(self) -> None:
        """End the connection at once, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Send the queued messages, then end the connection and wait for its end."""
        self.sender.close()
        self.end()
        if self._reader.is_alive():  # else it has ended, or is about to start and finds the end
            self._reader.join()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while (body := _read_frame(stream.read)) is not None:
                    self._on_message(_parse(body))
        except OSError:
            pass  # the same as the end of the stream
        except Exception as error:  # a bad message of the other side must not end this process
            logger.warning("a stream door's connection was ended: %s", where(error))
        self.end()
        try:
            self._on_close()
        except Exception as error:
            logger.error("closing a stream door's connection failed: %s", where(error))
        self.sender.close()
        with self._lock:
            self._socket.close()


def frame(message: Message) -> bytes:
    """Encode a message; raises MessageTooLargeError if it does not fit."""
    # Bytes of a tensor that are not UTF-8 are lone surrogates here.
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageTooLargeError
    return LENGTH.pack(len(body)) + body


def _read_frame(read: Callable[[int], bytes]) -> bytes | None:
    header = read(LENGTH.size)
    if not header:
        return None
    if len(header) < LENGTH.size:
        raise ProtocolError("the stream ends within a length")
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError("the message is too long")
    body = read(length)
    if len(body) < length:
        raise ProtocolError("the stream ends within a message")
    return body


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise ProtocolError("the message is no JSON") from None
    if not (isinstance(message, dict) and type(message.get("id")) is int):
        raise ProtocolError("the message has no id")
    return message


def is_same_user(connected: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user (unix(7), SO_PEERCRED)."""
    credentials = struct.Struct("@3i")
    _, uid, _ = credentials.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(uid == os.geteuid())
