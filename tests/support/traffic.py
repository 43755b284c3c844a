# SPDX-License-Identifier: Apache-2.0
"""Requests that never stop while a test changes the server, and what came of each of them."""

from __future__ import annotations

import abc
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.support.client import HttpServer, Reply, post

PAUSE_S = 0.02
"""Of a client between two requests, or the models that are loaded beside would wait for a core."""
LIMIT_S = 60.0
"""A request that takes longer is lost."""


@dataclass(frozen=True)
class Questions:
    """What clients send to one model."""

    path: str
    bodies: Sequence[Mapping[str, Any]]
    read: Callable[[int, Reply], str]


@dataclass(frozen=True)
class Outcome:
    sent_s: float
    took_s: float
    answer: str
    """As the clients call it: a revision, a status, ...; `lost: ...` if no reply came, or a part of one."""


class Clients(abc.ABC):
    """Clients that each send one request after the other while it is entered."""

    limit_s = LIMIT_S

    def __init__(self, num_clients: int) -> None:
        self.outcomes: list[Outcome] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(client,), daemon=True) for client in range(num_clients)
        ]

    @abc.abstractmethod
    def ask(self, client: int) -> str:
        """Send a request; returns what its answer is called."""

    def pause_s(self, client: int) -> float:
        """Of a client between two requests."""
        return PAUSE_S

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * self.limit_s)

    def _run(self, client: int) -> None:
        while not self._is_over.is_set():
            sent_s = time.monotonic()
            try:
                answer = self.ask(client)
            except Exception as error:
                answer = f"lost: {error!r}"
            self.outcomes.append(Outcome(sent_s, time.monotonic() - sent_s, answer))
            self._is_over.wait(self.pause_s(client))

    def answers(self, since_s: float = 0.0) -> Counter[str]:
        """How often each answer came, to requests that were sent since a time."""
        return Counter(outcome.answer for outcome in list(self.outcomes) if outcome.sent_s >= since_s)

    def slowest_s(self, since_s: float) -> float:
        """The longest time of a request that was sent since a time."""
        return max(outcome.took_s for outcome in list(self.outcomes) if outcome.sent_s >= since_s)

    def wait_for(self, answer: str, limit_s: float = 120.0, num_answers: int = 8) -> None:
        """Wait until the last answers are all the same one."""
        deadline_s = time.monotonic() + limit_s
        while [outcome.answer for outcome in self.outcomes[-num_answers:]] != [answer] * num_answers:
            assert time.monotonic() < deadline_s, self.answers()
            time.sleep(0.05)


class Traffic(Clients):
    """A client for each body, which asks the same all the time."""

    def __init__(self, server: HttpServer, questions: Questions) -> None:
        super().__init__(len(questions.bodies))
        self._server, self._questions = server, questions

    def ask(self, client: int) -> str:
        reply = post(self._server, self._questions.path, self._questions.bodies[client], LIMIT_S)
        return self._questions.read(client, reply)
