# SPDX-License-Identifier: Apache-2.0
"""The typed events of OpenAI's Responses API, numbered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_triton_gateway.agents.agents import named_event
from hf_triton_gateway.agents.answer_blocks import CUSTOM_CALL, REASONING, TEXT, TOOL_CALL, Block, Step
from hf_triton_gateway.agents.response_items import ResponseItems

PIECES: Final[Mapping[str, tuple[str, str]]] = {
    REASONING: ("response.reasoning_text", "text"),
    TEXT: ("response.output_text", "text"),
    TOOL_CALL: ("response.function_call_arguments", "arguments"),
    CUSTOM_CALL: ("response.custom_tool_call_input", "input"),
}
"""The events of a block's pieces, and the field that has them all in the last of them."""


def last_event(response: Mapping[str, Any], number: int) -> bytes:
    """The event that ends a stream; OpenAI's API has none for a response that is cancelled."""
    status = response["status"]
    kind = "incomplete" if status == "cancelled" else status
    return named_event(f"response.{kind}", {"sequence_number": number, "response": response})


class ResponseEvents:
    """Numbers the events of one response."""

    def __init__(self, items: ResponseItems) -> None:
        self._items = items
        self.number = 0
        """The next event has this number."""

    def event(self, kind: str, data: Mapping[str, Any]) -> bytes:
        self.number += 1
        return named_event(kind, {"sequence_number": self.number - 1, **data})

    def of(self, step: Step, status: str = "completed") -> bytes:
        """The events of a step; `status` is that of an item which ends."""
        action, block, piece = step
        place = {"output_index": block.index}
        if action == "delta":
            return self._piece("delta", block, {"delta": piece}, self._items.take_logprobs(block, piece))
        if action == "start":
            added = {**place, "item": self._items.item(block, "in_progress", "")}
            return self.event("response.output_item.added", added) + self._part("added", block, "")
        logprobs = self._items.end_logprobs(block)
        name = {"name": self._items.name_of(block)} if block.kind == TOOL_CALL else {}
        done = self._piece("done", block, {PIECES[block.kind][1]: block.text, **name}, logprobs)
        ended = {**place, "item": self._items.item(block, status)}
        return done + self._part("done", block, block.text) + self.event("response.output_item.done", ended)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._items.id_of(block), "output_index": block.index}
        return place | ({"content_index": 0} if block.kind in (TEXT, REASONING) else {})

    def _piece(self, kind: str, block: Block, data: Mapping[str, Any], logprobs: list[dict[str, Any]]) -> bytes:
        of_text = {"logprobs": logprobs} if block.kind == TEXT else {}
        return self.event(f"{PIECES[block.kind][0]}.{kind}", {**self._place(block), **data, **of_text})

    def _part(self, kind: str, block: Block, text: str) -> bytes:
        """The event of a content part; tool calls have none."""
        if block.kind not in (TEXT, REASONING):
            return b""
        part = self._items.part(block, text) if block.kind == TEXT else {"type": "reasoning_text", "text": text}
        return self.event(f"response.content_part.{kind}", {**self._place(block), "part": part})
