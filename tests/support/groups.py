# SPDX-License-Identifier: Apache-2.0
"""A group without a model, for the queue and the worker."""

import threading
from typing import Any

from hf_triton.engine.group import Group
from hf_triton.errors import HfTritonError
from tests.support.listener import CALLBACKS, Functions


class Work(Group[str]):
    """Keeps its outcome; a second one fails."""

    def __init__(self, name: str = "", num_turns: int = 1, cost: int = 1, **options: Any) -> None:
        functions = {"on_finish": self._keep} | {name: options.pop(name) for name in CALLBACKS if name in options}
        super().__init__(listener=Functions(**functions), **options)
        self.name, self.cost, self.num_waiting = name, cost, num_turns
        self.outcomes: list[str | HfTritonError] = []
        self.is_answered = threading.Event()

    def take_turn(self, budget: int, *, takes_any: bool) -> int:
        if self.cost > budget and not takes_any:
            return 0
        self.num_waiting -= 1
        return self.cost

    def _keep(self, outcome: str | HfTritonError) -> None:
        self.outcomes.append(outcome)
        self.is_answered.set()

    def result(self) -> str:
        """The result, or the error's code."""
        assert self.is_answered.wait(60)
        [outcome] = self.outcomes
        return outcome.code if isinstance(outcome, HfTritonError) else outcome
