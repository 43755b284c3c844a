# SPDX-License-Identifier: Apache-2.0
"""ResponseRun: makes one response of OpenAI's Responses API, event by event, and has it kept as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from hf_triton_gateway.agents.agents import steps_of
from hf_triton_gateway.agents.answer_blocks import Block, Blocks, Step
from hf_triton_gateway.agents.response_events import ResponseEvents
from hf_triton_gateway.agents.response_items import ResponseItems
from hf_triton_gateway.chat.answers import finish_reason_of, usage_of
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import beside
from hf_triton_gateway.triton.triton_messages import Outputs, StreamSize

if TYPE_CHECKING:
    from hf_triton_gateway.agents.response_store import Keeper

CLIENT_LEFT: Final = {"status": "incomplete", "incomplete_details": {"reason": "client_disconnected"}}
CANCELLED: Final = {"status": "cancelled"}


class ResponseRun:
    """Makes one response, which has ended when `events` has.

    Args:
        keeper: Keeps it.
        head: The response in progress.
        items: Writes its output.
        num_bytes: Of the request, as JSON.
    """

    def __init__(self, keeper: Keeper, head: dict[str, Any], items: ResponseItems, num_bytes: int) -> None:
        self.response = head
        """The response, as a whole once it has ended."""
        self._keeper = keeper
        self._kept: asyncio.Future[None] | None = None  # None: it has not ended
        self._head = head
        self._items = items
        self._blocks, self._events, self._size = Blocks(), ResponseEvents(items), StreamSize()
        self._num_request_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Of the request and what has come, about."""
        return self._num_request_bytes + self._size.total

    @property
    def num_events(self) -> int:
        return self._events.number

    async def events(self, responses: AsyncGenerator[Outputs]) -> AsyncGenerator[bytes]:
        """The typed events of a response, all but the last, from the outputs of a model.

        Closing the iterator ends the response as far as it has got.

        Raises:
            ApiError: The model failed before it began; a response in the background is failed then.
        """
        is_begun = is_in_background = self._head["background"]
        try:
            if is_in_background:
                yield await beside(self._num_request_bytes, self._status_events, "created", "queued")
            async with aclosing(steps_of(responses, self._blocks)) as steps_and_outputs:
                async for steps, outputs in steps_and_outputs:
                    if self._head["status"] == "queued" or not is_begun:
                        self._head["status"], is_begun = "in_progress", True
                        kinds = ("in_progress",) if is_in_background else ("created", "in_progress")
                        yield await beside(self._num_request_bytes, self._status_events, *kinds)
                    num_new = self._size.of(outputs, is_whole=any(action == "end" for action, _, _ in steps))
                    if data := await beside(num_new, self._go_on, steps, outputs):
                        yield data
                        self._size.sent()
                    if "finish_reason" in outputs:
                        data, ending = await beside(num_new, self._finish, outputs)
                        yield data
                        await self.end(ending)
            await self.end(failure(ApiError(500, "the model ended its stream without a finish reason")))
        except ApiError as error:
            if not is_begun:
                raise
            await self.end(failure(error))
        except (GeneratorExit, asyncio.CancelledError):  # the client has left, or cancels
            if is_begun:
                await self.end(CANCELLED if is_in_background else CLIENT_LEFT)
            raise

    async def end(self, ending: Mapping[str, Any]) -> None:
        """End the response with these fields, and the output so far if they have none; a second call only waits."""
        if self._kept is None:
            output = ending.get("output") or output_of(self._items, self._blocks.blocks, "incomplete")
            self.response = {**self._head, **ending, "output": output}
            self._kept = asyncio.ensure_future(self._keeper.keep(self.response, self.num_bytes))
        await asyncio.shield(self._kept)  # also if this caller is cancelled meanwhile

    def _status_events(self, *kinds: str) -> bytes:
        return b"".join(self._events.event(f"response.{kind}", {"response": self._head}) for kind in kinds)

    def _go_on(self, steps: Sequence[Step], outputs: Outputs) -> bytes:
        self._items.read_logprobs(outputs)
        return b"".join(self._events.of(step) for step in steps)

    def _finish(self, outputs: Outputs) -> tuple[bytes, dict[str, Any]]:
        data = b"".join(self._events.of(step, status_of(outputs)) for step in self._blocks.end())
        return data, ending_of(self._items, self._blocks.blocks, outputs)


def failure(error: ApiError) -> dict[str, Any]:
    """What changes in a response that an error ends, in OpenAI's codes."""
    is_refused = error.status_code < 500 and error.status_code != 499
    code = "rate_limit_exceeded" if error.status_code == 429 else "invalid_prompt" if is_refused else "server_error"
    return {"status": "failed", "error": {"code": code, "message": error.message}}


def status_of(outputs: Outputs) -> str:
    return "incomplete" if finish_reason_of(outputs, 0) == "length" else "completed"


def output_of(items: ResponseItems, blocks: Sequence[Block], last_status: str) -> list[dict[str, Any]]:
    statuses = ["completed"] * (len(blocks) - 1) + [last_status]
    return [items.item(block, status) for block, status in zip(blocks, statuses, strict=False)]


def ending_of(items: ResponseItems, blocks: Sequence[Block], outputs: Outputs) -> dict[str, Any]:
    """What changes in a response when its model has ended it."""
    status, usage = status_of(outputs), usage_of(outputs)
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output_of(items, blocks, status),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            },
            "total_tokens": usage["total_tokens"],
        },
    }
