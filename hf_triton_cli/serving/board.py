# SPDX-License-Identifier: Apache-2.0
"""One line a model on the terminal. Knows neither server nor log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal

import click

from hf_triton_cli.say import say
from hf_triton_cli.tables import printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

State = Literal["loading", "ready", "failed", "unloaded"]
COLOURS: Final = {"loading": "yellow", "ready": "green", "failed": "red", "unloaded": "yellow"}


class Board:
    """Shows the models' states, as a context manager: on a terminal in place, elsewhere a line for each change.

    A line that a model has failed goes to standard error. Once it is closed, when all is loaded, each change
    is a line, and that a model begins to load is none.

    Args:
        may_be_live: Whether a terminal is this board's alone until it is closed.
    """

    def __init__(self, *, may_be_live: bool = False) -> None:
        self._states: dict[str, tuple[State, str]] = {}
        self._lines: dict[str, str] = {}
        self._since_s: dict[str, float] = {}
        self._is_starting = True
        self._live = _start_live(self._table) if may_be_live and sys.stdout.isatty() else None

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal: from now on, each change is a line of its own."""
        self._is_starting = False
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        """Show what has changed, and how long models have been loading, on a terminal that is not closed yet."""
        if self._is_starting and self._live is not None:
            self._live.refresh()

    def state(self, name: str) -> State | None:
        """The state of a model that is shown; None: none is."""
        return self._states[name][0] if name in self._states else None

    def show(self, name: str, state: State, text: str = "") -> None:
        """Show a model's state, unless it is shown already, and its facts, or why it has failed."""
        if self._states.get(name) == (state, text):
            return
        self._states[name] = (state, text)
        duration = ""
        if state == "loading":
            self._since_s[name] = time.monotonic()
        elif state == "ready" and (since_s := self._since_s.pop(name, None)) is not None:
            duration = f" in {max(1, round(time.monotonic() - since_s))} s"
        self._lines[name] = click.style(state, fg=COLOURS[state]) + duration + (f": {printable(text)}" if text else "")
        if self._is_starting and self._live is not None:
            return  # `refresh` shows it
        if self._is_starting or state != "loading":
            say(f"{name}: {self._lines[name]}", err=state == "failed")

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, line in sorted(self._lines.items()):
            is_loading = self._states[name][0] == "loading"
            seconds = f", {time.monotonic() - self._since_s[name]:.0f} s" if is_loading else ""
            table.add_row(name, Text.from_ansi(line + seconds))
        return table


def _start_live(table: Callable[[], Table]) -> Live:
    from rich.live import Live

    live = Live(get_renderable=table, auto_refresh=False)  # a thread would read what `show` changes
    live.start()
    return live
