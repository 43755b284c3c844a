# SPDX-License-Identifier: Apache-2.0
"""Events of a response in the background: each comes once, to whoever follows from wherever."""

import asyncio
import json
from contextlib import aclosing

from hf_triton_gateway.agents.agents import named_event
from hf_triton_gateway.agents.event_log import NUM_PACKED, EventLog

NUM_EVENTS = 2 * NUM_PACKED + 3
RESPONSE = {"id": "a", "status": "cancelled"}


def event(number: int) -> bytes:
    return named_event("response.output_text.delta", {"sequence_number": number, "delta": f"\n\n{number}"})


async def follow(log: EventLog, after: int = -1) -> list[int]:
    async with aclosing(log.follow(after)) as events:
        data = b"".join([each async for each in events])
    lines = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]
    assert all(line["delta"] == f"\n\n{line['sequence_number']}" for line in lines[:-1])
    if lines:
        assert (lines[-1]["type"], lines[-1]["response"]) == ("response.incomplete", RESPONSE)
    return [line["sequence_number"] for line in lines]


def test_followers_read_the_same_events_during_and_after() -> None:
    async def run() -> None:
        log = EventLog()
        early = asyncio.ensure_future(follow(log))
        for number in range(0, NUM_EVENTS - 1, 2):
            log.append(event(number) + event(number + 1))
            await asyncio.sleep(0)
        log.append(event(NUM_EVENTS - 1))
        late = asyncio.ensure_future(follow(log, NUM_PACKED))
        await asyncio.sleep(0)
        log.end(RESPONSE, 0)
        assert await early == list(range(NUM_EVENTS + 1))
        assert await late == list(range(NUM_PACKED + 1, NUM_EVENTS + 1))
        for after in (NUM_PACKED - 2, NUM_PACKED - 1, NUM_EVENTS - 1, NUM_EVENTS, NUM_EVENTS + 5):
            assert await follow(log, after) == list(range(after + 1, NUM_EVENTS + 1))
        assert log.num_bytes < NUM_EVENTS * len(event(100)) / 4

    asyncio.run(run())
