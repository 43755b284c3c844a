# SPDX-License-Identifier: Apache-2.0
"""Several requests as one: their streams, read no faster than it is, or their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from hf_triton_gateway.http.api_errors import ApiError

Item = TypeVar("Item")


async def all_results(works: Iterable[Coroutine[Any, Any, Item]]) -> list[Item]:
    """The results of what is done side by side; the first error cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* ApiError as errors:
        first: Any = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


async def merged(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """The items of all streams as they come, each with its stream's place; the first error ends all streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(1)
    tasks = [asyncio.ensure_future(_forward(place, stream, queue)) for place, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                num_open -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    place: int, stream: AsyncGenerator[Item], queue: asyncio.Queue[tuple[int, Item] | Exception | None]
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((place, item))
    except Exception as error:  # for the reader
        await queue.put(error)
    else:
        await queue.put(None)
