# SPDX-License-Identifier: Apache-2.0
"""The log file of `hf-triton serve`, and what it says of models. Knows Triton's words for loading, and no server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hf_triton.protocol.load_reasons import first_sentence
from hf_triton_cli.say import say

MAX_BYTES: Final = 100_000_000
State = Literal["loading", "told", "ready", "failed", "unloaded", "stopping"]
"""`told`: the process says what it has loaded; `stopping`: it has died or cannot go on, and ends the server."""

_MESSAGE: Final = re.compile(r"(?:[IWEF]\d{4} |\d{4}-\d\d-\d\dT)[^\]]*\] (.*)")
"""A line of Triton's, in both of its formats."""
_SAYINGS: Final[tuple[tuple[State, re.Pattern[str]], ...]] = (
    ("loading", re.compile(r"loading: (.+):\d+()")),
    ("told", re.compile(r"([^ :]+): loaded: (.*)")),
    ("ready", re.compile(r"successfully loaded '([^']+)'().*")),
    ("failed", re.compile(r"failed to load '([^']+)' version \d+: (.*)", re.DOTALL)),
    ("unloaded", re.compile(r"successfully unloaded '([^']+)' version \d+()")),
    ("stopping", re.compile(r"([^ :]+): stopping the server: (.*)")),
)
_DIED: Final = re.compile(r"hf_triton: the process of the model ([^ ]+) has died; stopping the server")


@dataclass(frozen=True)
class Event:
    """What a line says of a model."""

    model: str
    state: State
    text: str = ""


class ServerLog:
    """A new log file in the temporary folder, which tritonserver and the gateway append to; it stays there."""

    def __init__(self) -> None:
        self._descriptor, name = tempfile.mkstemp(prefix="hf_triton_serve_", suffix=".log")
        self.path = Path(name)
        self._offset = 0
        self._was_removed = False

    def events(self) -> Iterator[Event]:
        """What the lines say that have come since the last call.

        A file of `MAX_BYTES` becomes NAME.1, if the disk has room for it, and goes on empty. Both programs append to
        it, so that it is copied and truncated, not renamed: a line between the last read and the truncation is lost.
        They also append to a removed file, which is said once.
        """
        if not self._was_removed and os.fstat(self._descriptor).st_nlink == 0:
            self._was_removed = True
            say(
                f"The log {self.path} was removed: what Triton and the gateway write cannot be read any more.", err=True
            )
        yield from self._read()
        if self._offset > MAX_BYTES:
            if not self._was_removed:
                self._copy()
            yield from self._read()  # what came while it was copied
            os.truncate(self._descriptor, 0)
            self._offset = 0

    def _read(self) -> Iterator[Event]:
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                if event := parse_line(line.decode(errors="replace").rstrip()):
                    yield event

    def _copy(self) -> None:
        former = Path(f"{self.path}.1")
        try:
            with open(self._descriptor, "rb", closefd=False) as file, former.open("wb") as copy:
                file.seek(0)
                shutil.copyfileobj(file, copy)
        except OSError:
            with contextlib.suppress(OSError):
                former.unlink()


def parse_line(line: str) -> Event | None:
    """What a line says of a model, if it says something."""
    if died := _DIED.fullmatch(line):
        return Event(died[1], "stopping", "its process has died")
    matched = _MESSAGE.fullmatch(line)
    if matched is None:
        return None
    message = _unquote(matched[1])
    for state, saying in _SAYINGS:
        if said := saying.fullmatch(message):
            return Event(said[1], state, first_sentence(said[2]) if state == "failed" else said[2])
    return None


def _unquote(message: str) -> str:
    """Triton's message without the quotes and escapes that recent releases write."""
    try:
        text = json.loads(message) if message.startswith('"') else message
    except ValueError:
        return message
    return str(text)
