# SPDX-License-Identifier: Apache-2.0
"""Calls of Triton that compute. One whose client leaves is ended by a request of its own, not by gRPC.

Triton 24.10 dies of signal 11 if gRPC cancels a call in the moment in which its answer comes (server#7840 and #8078,
mended in 25.04), and may keep a model loaded whose stream is cancelled. A process of this library ends a request for
another one with its id and `cancel` true; the call then comes to its end, which nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from hf_triton.protocol.names import CANCEL
from hf_triton_gateway.triton.model_infos import BYTES as ZEROS

Metadata = tuple[tuple[str, str], ...]

LATE_S: Final = 30.0
"""How long a call may live on when its time is up; then gRPC cancels it."""
CLOSE_S: Final = 2.0
"""How long `close` waits for calls that have been cancelled."""
TIME_IS_UP: Final = object()


class Calls:
    """Inferences of one Triton. Belongs to one event loop."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._prefix = uuid.uuid4().hex[:8]
        self._number = 0
        self._ending: set[asyncio.Future[Any]] = set()

    async def infer(self, message: Any, timeout_s: float, metadata: Metadata, *, takes_cancel: bool) -> Any:
        """The response to a request. Cancelling the task cancels the request.

        Args:
            message: A `ModelInferRequest`.
            timeout_s: Longest time, in seconds.
            metadata: Sent with the call.
            takes_cancel: Whether the model knows the parameter `cancel`.

        Raises:
            grpc.aio.AioRpcError: Triton refuses it, or cannot be reached.
            TimeoutError: The time is up.
        """
        if not takes_cancel:
            return await self._stub.ModelInfer(message, timeout=timeout_s, metadata=metadata)
        self._name(message)
        call = self._stub.ModelInfer(message, timeout=timeout_s + LATE_S, metadata=metadata)
        reading = _started(call)
        try:
            await asyncio.wait({reading}, timeout=timeout_s)
            if not reading.done():
                raise TimeoutError
            return reading.result()
        finally:
            if not reading.done():
                self._end(self._stub.ModelInfer(_cancelling(message), timeout=LATE_S, metadata=metadata), reading)

    async def stream(
        self, message: Any, timeout_s: float, metadata: Metadata, *, takes_cancel: bool
    ) -> AsyncGenerator[Any]:
        """The responses to a request as they come. Closing the generator cancels the request.

        Arguments and errors are those of `infer`.
        """
        if not takes_cancel:
            call = self._stub.ModelStreamInfer(timeout=timeout_s, metadata=metadata)
            try:
                await _send(call, message)
                while (response := await call.read()) is not grpc.aio.EOF:
                    yield response
            finally:
                call.cancel()
            return
        self._name(message)
        responses: asyncio.Queue[Any] = asyncio.Queue()
        call = self._stub.ModelStreamInfer(timeout=timeout_s + LATE_S, metadata=metadata)
        reading = _started(_read(call, message, responses))
        timer = asyncio.get_running_loop().call_later(timeout_s, responses.put_nowait, TIME_IS_UP)
        try:
            while (response := await responses.get()) is not grpc.aio.EOF:
                if response is TIME_IS_UP:
                    raise TimeoutError
                yield response
            await reading
        finally:
            timer.cancel()
            if not reading.done():
                call = self._stub.ModelStreamInfer(timeout=LATE_S, metadata=metadata)
                self._end(_read(call, _cancelling(message), asyncio.Queue()), reading)

    async def close(self) -> None:
        """Wait until calls that have been cancelled are at their end, for a while."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_S)

    def _name(self, message: Any) -> None:
        """Give a request an id that no other has: clients may name two requests alike."""
        self._number += 1
        message.id = f"{message.id}.{self._prefix}.{self._number}"

    def _end(self, *calls: Awaitable[Any]) -> None:
        """Await a call that is cancelled, and the one that cancels it; nobody reads what they give."""
        ending = asyncio.gather(*calls, return_exceptions=True)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


def _started(call: Awaitable[Any]) -> asyncio.Future[Any]:
    """A call whose errors need no reader: its client may leave in the moment in which it fails."""
    reading = asyncio.ensure_future(call)
    reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return reading


async def _read(call: Any, message: Any, responses: asyncio.Queue[Any]) -> None:
    """Send a request, and put its responses into a queue, gRPC's EOF behind them."""
    try:
        await _send(call, message)
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.put_nowait(response)
    finally:
        responses.put_nowait(grpc.aio.EOF)


async def _send(call: Any, message: Any) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # the call has failed; reading says why
        await call.write(message)
        await call.done_writing()


def _cancelling(message: Any) -> Any:
    """The request that cancels another one; an input of each name, since Triton may demand one."""
    cancelling = service_pb2.ModelInferRequest(model_name=message.model_name, id=message.id)
    cancelling.parameters[CANCEL].bool_param = True
    for port in message.inputs:
        cancelling.inputs.add(name=port.name, datatype=port.datatype, shape=[1] * len(port.shape))
        cancelling.raw_input_contents.append(bytes(ZEROS[port.datatype]))
    return cancelling
