# SPDX-License-Identifier: Apache-2.0
"""The typed events of OpenAI's Responses API, numbered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_triton.openai.agents import named_event
from hf_triton.openai.blocks import REASONING, TEXT, Block, Step
from hf_triton.openai.response_items import item_id, output_item, text_part


class ResponseEvents:
    """Numbers the events of one response."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.number = 0
        """Of the next event."""

    def event(self, kind: str, data: Mapping[str, Any]) -> bytes:
        self.number += 1
        return named_event(kind, {"sequence_number": self.number - 1, **data})

    def of(self, step: Step, status: str = "completed") -> bytes:
        """The events of a step; `status` is that of an item which ends."""
        action, block, piece = step
        place = {"output_index": block.index}
        inner = {"item_id": item_id(self._request_id, block), **place}
        if action == "delta":
            return self._text("delta", block, inner, {"delta": piece})
        if action == "start":
            added = {**place, "item": output_item(self._request_id, block, "in_progress", "")}
            return self.event("response.output_item.added", added) + self._part("added", block, inner, "")
        done = {"arguments" if block.kind not in (TEXT, REASONING) else "text": block.text}
        if block.kind not in (TEXT, REASONING):
            done["name"] = block.name
        return b"".join(
            (
                self._text("done", block, inner, done),
                self._part("done", block, inner, block.text),
                self.event(
                    "response.output_item.done", {**place, "item": output_item(self._request_id, block, status)}
                ),
            )
        )

    def _text(self, kind: str, block: Block, inner: Mapping[str, Any], data: Mapping[str, Any]) -> bytes:
        if block.kind == TEXT:
            return self.event(f"response.output_text.{kind}", {**inner, "content_index": 0, **data, "logprobs": []})
        if block.kind == REASONING:
            return self.event(f"response.reasoning_text.{kind}", {**inner, "content_index": 0, **data})
        return self.event(f"response.function_call_arguments.{kind}", {**inner, **data})

    def _part(self, kind: str, block: Block, inner: Mapping[str, Any], text: str) -> bytes:
        """The event of a content part; tool calls have none."""
        if block.kind not in (TEXT, REASONING):
            return b""
        part = text_part(text) if block.kind == TEXT else {"type": "reasoning_text", "text": text}
        return self.event(f"response.content_part.{kind}", {**inner, "content_index": 0, "part": part})
