# SPDX-License-Identifier: Apache-2.0
"""What the loops of all clients share: a tool, and a report of its calls. Arguments: gateway's address, task, API."""

import asyncio
import json
import sys

URL, TASK, API = sys.argv[1:]
MODEL = "writes"
MAX_TURNS = 40
_calls: list[dict[str, object]] = []


async def note(turn: int, number: int, text: str, seen: str) -> str:
    """Take a note. The later of a turn's calls are done first."""
    await asyncio.sleep(0.02 * (3 - number))
    _calls.append({"turn": turn, "number": number, "text": text, "seen": seen})
    return f"{turn}.{number}"


def report(answer: str | None) -> None:
    """Print the calls and the last answer."""
    print(json.dumps({"calls": _calls, "answer": answer}))
