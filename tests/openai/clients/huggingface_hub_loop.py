# SPDX-License-Identifier: Apache-2.0
"""A loop with Hugging Face's client; the results of a turn's calls go back as they come, the last one first."""

import asyncio
import json
from typing import Any

from huggingface_hub import AsyncInferenceClient
from noting import API, MAX_TURNS, MODEL, TASK, URL, note, report

FIELDS = {"turn": "integer", "number": "integer", "text": "string", "seen": "string"}
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in FIELDS.items()},
    "required": list(FIELDS),
}
TOOL = {"type": "function", "function": {"name": "note", "description": "Take a note.", "parameters": PARAMETERS}}


async def answer(client: AsyncInferenceClient, messages: list[Any]) -> tuple[str, list[Any]]:
    """The text of a turn, and its calls."""
    asked = {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 4000}
    if API == "chat":
        message = (await client.chat_completion(**asked)).choices[0].message
        return message.content or "", message.tool_calls or []
    text, calls = "", {}
    async for chunk in await client.chat_completion(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.index in calls:
                    calls[piece.index].function.arguments += piece.function.arguments
                else:
                    calls[piece.index] = piece
    return text, list(calls.values())


async def main() -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    async with AsyncInferenceClient(base_url=f"{URL}/v1", api_key="none") as client:
        for _ in range(MAX_TURNS):
            text, calls = await answer(client, messages)
            if not calls:
                break
            functions = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls]
            made = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
            messages.append({"role": "assistant", "content": text, "tool_calls": made})
            for call in reversed(calls):
                result = await note(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    report(text)


asyncio.run(main())
