# SPDX-License-Identifier: Apache-2.0
"""Several streams as one, read no faster than it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


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
