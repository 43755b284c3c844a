# SPDX-License-Identifier: Apache-2.0
"""BackgroundResponse: makes a response in a task of its own, whether or not a client waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from typing import Final

from hf_triton.errors import where
from hf_triton_gateway.agents.event_log import EventLog
from hf_triton_gateway.agents.response_run import CANCELLED, ResponseRun, failure
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.keys.accounts import CURRENT
from hf_triton_gateway.triton.triton_messages import Outputs

LOG: Final = logging.getLogger("hf_triton_gateway")


class BackgroundResponse:
    """Runs from its making on, on the account of the current request.

    Args:
        run: Makes the response.
        responses: The outputs of a model.
        events: Takes the response's events, if clients may follow it.
    """

    def __init__(self, run: ResponseRun, responses: AsyncGenerator[Outputs], events: EventLog | None) -> None:
        self._run = run
        self._events = events
        self._task = asyncio.create_task(self._make(responses))
        self._is_stopped = False

    async def stop(self) -> None:
        """Cancel the response, and wait until it has ended."""
        if not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()
        await asyncio.wait([self._task])
        await self._run.end(CANCELLED)  # the task may not have begun

    async def _make(self, responses: AsyncGenerator[Outputs]) -> None:
        account = CURRENT.get()
        with nullcontext() if account is None else account.in_flight():
            try:
                async with aclosing(self._run.events(responses)) as events:
                    async for data in events:
                        if self._events is not None:
                            self._events.append(data)
            except Exception as error:  # no client is there to be answered
                LOG.error("a response in the background failed: %s", where(error))
                await self._run.end(failure(ApiError(500, "the gateway failed")))
