# SPDX-License-Identifier: Apache-2.0
"""A loop with instructor, which reads the calls of a turn; their results go back as they come, the last one first."""

import asyncio
from collections.abc import Iterable
from typing import Any

import instructor
from instructor.core import InstructorRetryException
from noting import MAX_TURNS, MODEL, TASK, URL, note, report
from openai import AsyncOpenAI
from pydantic import BaseModel


class Note(BaseModel):
    """Take a note."""

    turn: int
    number: int
    text: str
    seen: str


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    answers = []
    client_of_notes = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    client_of_notes.on("completion:response", answers.append)
    for _ in range(MAX_TURNS):
        try:
            notes = list(
                await client_of_notes.create(
                    model=MODEL, messages=list(messages), response_model=Iterable[Note], max_retries=0
                )
            )
        except InstructorRetryException:  # a turn without calls
            break
        said = answers[-1].choices[0].message
        messages.append(said.model_dump(include={"role", "content", "tool_calls"}))
        for call, taken in reversed(list(zip(said.tool_calls, notes, strict=True))):
            result = await note(**taken.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    report(answers[-1].choices[0].message.content)


asyncio.run(main())
