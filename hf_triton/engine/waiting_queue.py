# SPDX-License-Identifier: Apache-2.0
"""The sequence groups that wait for admission: by priority, and in turns between requests. Knows no engine."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable

from hf_triton.engine.sequence import SequenceGroup


class WaitingQueue:
    """A thread-safe queue.

    The first prompt of a request joins the first turn that has not begun, each further prompt the turn after. So a
    request that arrives behind one of hundreds of prompts does not wait for all of them, and those prompts do not wait
    for all that arrive later: no group joins a turn of which some have left.

    Args:
        sweep_interval_s: How often `take` looks through the whole queue for cancelled and expired groups.
    """

    def __init__(self, sweep_interval_s: float) -> None:
        self.changed = threading.Condition()
        """Its lock, notified when groups are added; hold it to keep the engine from taking groups."""
        self._groups: list[SequenceGroup] = []  # by `_rank`
        self._turns_begun: dict[int, int] = {}  # by priority, the last turn of which some group has left
        self._sweep_interval_s = sweep_interval_s
        self._next_sweep_s = 0.0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: list[SequenceGroup]) -> None:
        """Queue the groups of one request."""
        with self.changed:
            priorities = {group.priority for group in groups}
            turns = {priority: itertools.count(self._next_turn(priority)) for priority in priorities}
            for group in groups:
                group.turn = next(turns[group.priority])
                bisect.insort(self._groups, group, key=_rank)
            self.changed.notify()

    def take(self, max_sequences: int, *, takes_any: bool) -> list[SequenceGroup]:
        """Remove groups from the head; those that were cancelled or have passed their deadline are finished instead.

        Args:
            max_sequences: How many sequences the groups may have together.
            takes_any: Whether to take the first group even if it has more.
        """
        self.sweep()
        taken: list[SequenceGroup] = []
        refused = []
        with self.changed:
            while self._groups:
                group = self._groups[0]
                if group.params.num_sequences > max_sequences and not (takes_any and not taken):
                    break
                self._turns_begun[group.priority] = group.turn
                error = group.queue_error()
                if error is None:
                    taken.append(group)
                    max_sequences -= group.params.num_sequences
                else:
                    refused.append((group, error))
                del self._groups[0]
        for group, error in refused:
            group.finish(error)
        return taken

    def take_matching(self, joins: Callable[[SequenceGroup, list[SequenceGroup]], bool]) -> list[SequenceGroup]:
        """Remove the first group, and each group behind it that may join those taken before."""
        with self.changed:
            taken = self._groups[:1]
            others: list[SequenceGroup] = []
            for group in self._groups[1:]:
                (taken if joins(group, taken) else others).append(group)
            if taken:
                self._turns_begun[taken[0].priority] = taken[0].turn
            self._groups = others
        return taken

    def sweep(self) -> None:
        """Finish groups that were cancelled or have passed their deadline; at most once an interval."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + self._sweep_interval_s
        with self.changed:
            errors = [(group, group.queue_error()) for group in self._groups]
            self._groups = [group for group, error in errors if error is None]
        for group, error in errors:
            if error is not None:
                group.finish(error)

    def clear(self) -> list[SequenceGroup]:
        """Remove and return all groups."""
        with self.changed:
            groups, self._groups = self._groups, []
        return groups

    def _next_turn(self, priority: int) -> int:
        """The first turn of a priority of which no group has left."""
        next_turn = self._turns_begun.get(priority, -1) + 1
        at = bisect.bisect_left(self._groups, (priority, next_turn), key=_rank)
        is_queued = at < len(self._groups) and self._groups[at].priority == priority
        return self._groups[at].turn if is_queued else next_turn


def _rank(group: SequenceGroup) -> tuple[int, int]:
    """Sort key; equal ranks are in order of arrival."""
    return group.priority, group.turn
