# SPDX-License-Identifier: Apache-2.0
"""The groups that wait for an engine: by priority, and in turns between requests. Knows no engine."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from hf_triton.engine.group import Group
from hf_triton.errors import HfTritonError

SWEEP_INTERVAL_S: Final = 0.1

AnyGroup = TypeVar("AnyGroup", bound=Group[Any])


class WaitingQueue(Generic[AnyGroup]):
    """A thread-safe queue.

    The first group of a request joins the first turn that has not begun, each further group the turn after, and so does
    what a group leaves over. So a request that arrives behind one of hundreds of texts does not wait for all of them,
    and those texts do not wait for all that arrive later: no group joins a turn of which some have left.

    Args:
        sweep_interval_s: How often `sweep` looks through the whole queue for cancelled and expired groups.
    """

    def __init__(self, sweep_interval_s: float = SWEEP_INTERVAL_S) -> None:
        self.changed = threading.Condition()
        """Its lock, notified when groups are added; hold it to keep the engine from taking groups."""
        self._groups: list[AnyGroup] = []  # by `_rank`
        self._num_waiting = 0
        self._turns_begun: dict[int, int] = {}  # by priority, the last turn of which some group has left
        self._sweep_interval_s = sweep_interval_s
        self._next_sweep_s = 0.0

    def __len__(self) -> int:
        """Prompts or inputs of all groups that have not been taken."""
        return self._num_waiting

    def add(self, groups: list[AnyGroup]) -> None:
        with self.changed:
            priorities = {group.priority for group in groups}
            turns = {priority: itertools.count(self._next_turn(priority)) for priority in priorities}
            for group in groups:
                self._insert(group, next(turns[group.priority]))
            self.changed.notify()

    def take(self, budget: int, *, takes_any: bool) -> list[AnyGroup]:
        """Let the first groups take their turns; those that were cancelled or are late are refused instead.

        Args:
            budget: What they may cost together, see `Group.take_turn`.
            takes_any: Whether the first sequence may cost more.

        Returns:
            The groups in order; one that has taken several turns, as often.
        """
        self.sweep()
        taken: list[AnyGroup] = []
        refused: list[tuple[AnyGroup, HfTritonError]] = []
        with self.changed:
            while self._groups:
                group = self._groups[0]
                num_waiting, error = group.num_waiting, group.queue_error()
                cost = 0 if error else group.take_turn(budget, takes_any=takes_any and not taken)
                if not cost and not error:
                    break
                self._turns_begun[group.priority] = group.turn
                self._num_waiting -= num_waiting
                del self._groups[0]
                if error:
                    refused.append((group, error))
                    continue
                budget -= cost
                taken.append(group)
                if group.num_waiting:
                    self._insert(group, group.turn + 1)
        for group, error in refused:
            group.finish(error)
        return taken

    def take_matching(self, joins: Callable[[AnyGroup, list[AnyGroup]], bool]) -> list[AnyGroup]:
        """Remove the first group, and each group behind it that may join those taken before."""
        with self.changed:
            taken = self._groups[:1]
            others: list[AnyGroup] = []
            for group in self._groups[1:]:
                (taken if joins(group, taken) else others).append(group)
            if taken:
                self._turns_begun[taken[0].priority] = taken[0].turn
            self._keep(others)
        return taken

    def sweep(self) -> None:
        """Refuse groups that were cancelled or have passed their deadline; at most once an interval."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + self._sweep_interval_s
        with self.changed:
            groups = list(self._groups)
        num_ended = sum(group.refuse_if_ended() for group in groups)
        if num_ended:
            self.drop_finished()

    def drop_finished(self) -> None:
        """Remove groups that have their outcome."""
        with self.changed:
            self._keep([group for group in self._groups if not group.is_finished])

    def clear(self) -> list[AnyGroup]:
        with self.changed:
            groups = self._groups
            self._keep([])
        return groups

    def _insert(self, group: AnyGroup, turn: int) -> None:
        group.turn = turn
        bisect.insort(self._groups, group, key=_rank)
        self._num_waiting += group.num_waiting

    def _keep(self, groups: list[AnyGroup]) -> None:
        self._groups = groups
        self._num_waiting = sum(group.num_waiting for group in groups)

    def _next_turn(self, priority: int) -> int:
        """The first turn of a priority of which no group has left."""
        next_turn = self._turns_begun.get(priority, -1) + 1
        at = bisect.bisect_left(self._groups, (priority, next_turn), key=_rank)
        is_queued = at < len(self._groups) and self._groups[at].priority == priority
        return self._groups[at].turn if is_queued else next_turn


def _rank(group: Group[Any]) -> tuple[int, int]:
    """Sort key; equal ranks are in order of arrival."""
    return group.priority, group.turn
