# SPDX-License-Identifier: Apache-2.0
"""Loops of agent frameworks, as `make test-clients` installs them: 30 turns of three calls at a time, and an answer."""

import json
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients import CLIENTS, has, run
from tests.support.gateway import GatewayThread
from tests.support.writing_model import RESULTS, call, write_script

pytestmark = pytest.mark.full

SCRIPTS: Final = Path(__file__).parent / "clients"
APIS: Final = {
    "openai_agents": ("chat", "responses-stream"),
    "pydantic_ai": ("chat", "responses", "messages"),
    "langgraph": ("chat-stream", "responses"),
    "huggingface_hub": ("chat", "chat-stream"),
    "instructor": ("chat",),
}
ENVIRONMENTS: Final = {"instructor": "instructor"}
NUM_TURNS: Final = 30
NUM_CALLS: Final = 3
TEXT: Final = '"ß"\n\t\\n ☕ {}</p>'


def arguments(turn: int, number: int, results: str) -> dict[str, object]:
    """Of a call: the first of a turn tells the results of the turn before, the second a text."""
    return {"turn": turn, "number": number, "seen": results * (number == 0), "text": TEXT * (number == 1)}


@pytest.mark.parametrize(("client", "api"), [(client, api) for client, apis in APIS.items() for api in apis])
def test_loop_ends(agents: GatewayThread, tmp_path: Path, client: str, api: str) -> None:
    """Each call has its arguments as they were written, and the model reads the results in the order of the calls."""
    python = has(CLIENTS / ENVIRONMENTS.get(client, "agents") / "bin" / "python")
    name = "Note" if client == "instructor" else "note"
    turns = [
        "\n".join(call(name, **arguments(turn, number, RESULTS)) for number in range(NUM_CALLS))
        for turn in range(NUM_TURNS)
    ]
    turns[1] = f"Two.\n{turns[1]}"
    task = write_script(tmp_path / "script.json", [*turns, f"Done: {RESULTS}"], "Hm.")
    printed = run([str(python), str(SCRIPTS / f"{client}_loop.py"), agents.url, task, api], tmp_path, timeout_s=600)
    found = json.loads(printed.splitlines()[-1])
    results = [" ".join(f"{turn}.{number}" for number in range(NUM_CALLS)) for turn in range(NUM_TURNS)]
    assert sorted(found["calls"], key=lambda made: (made["turn"], made["number"])) == [
        arguments(turn, number, seen) for turn, seen in enumerate(["", *results[:-1]]) for number in range(NUM_CALLS)
    ]
    assert found["answer"] == f"Done: {results[-1]}"
