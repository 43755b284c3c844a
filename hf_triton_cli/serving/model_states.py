# SPDX-License-Identifier: Apache-2.0
"""Shows on the board what the server's log, and once it answers the server itself, say of the models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hf_triton.folders.folders import with_remedy
from hf_triton_cli.serving.board import Board
from hf_triton_cli.serving.server_log import Event, ServerLog


class ModelStates:
    """Follows the log of a server (None: it is shown itself); `hidden` folders, stream doors, are not shown."""

    def __init__(self, board: Board, log: ServerLog | None, hidden: Collection[str]) -> None:
        self._board = board
        self._log = log
        self._hidden = hidden
        self._facts: dict[str, str] = {}
        self._loaded: set[str] = set()
        self._num_former: Counter[str] = Counter()
        """Former ones of models that load again, which Triton unloads some time after the new one is ready."""
        self._is_stopping = False

    @property
    def log_place(self) -> str:
        """Triton's log, for a sentence."""
        return "above" if self._log is None else str(self._log.path)

    def update(self) -> None:
        """Show what has changed since the last call."""
        for event in () if self._log is None else self._log.events():
            if event.model not in self._hidden and not self._is_stopping:
                self._show(event.model, event)
        self._board.refresh()

    def settle(self, ready: Collection[str], failed: Mapping[str, str]) -> None:
        """Show the states that the log does not tell: the models that are ready, and why others are not."""
        self.update()
        for name in ready:
            if self._board.state(name) != "ready":
                self._board.show(name, "ready", self._facts.get(name, ""))
        for name, reason in failed.items():
            if self._board.state(name) != "failed":
                self._board.show(name, "failed", reason)

    def _show(self, name: str, event: Event) -> None:
        match event.state:
            case "told":
                self._facts[name] = event.text
            case "loading":
                self._board.show(name, "loading")
                self._num_former[name] += name in self._loaded
            case "ready":
                self._board.show(name, "ready", self._facts.get(name, ""))
                self._loaded.add(name)
            case "failed":
                former = " (the former one goes on)" if name in self._loaded else ""
                self._board.show(name, "failed", with_remedy(event.text) + former)
                self._num_former[name] -= name in self._loaded
            case "unloaded" if self._num_former[name] > 0:
                self._num_former[name] -= 1
            case "unloaded":
                self._board.show(name, "unloaded")
                self._loaded.discard(name)
            case "stopping":
                self._board.show(name, "failed", f"{event.text}; the server stops")
                self._is_stopping = True
