# SPDX-License-Identifier: Apache-2.0
"""The queue of every engine: turns between requests, priorities, budgets, and groups that end while they wait."""

import time
from collections.abc import Callable

import pytest

from hf_triton.engine.waiting_queue import WaitingQueue
from tests.support.groups import Work


def request(name: str, count: int, **options: int) -> list[Work]:
    return [Work(f"{name}{at}", **options) for at in range(count)]


def names(groups: list[Work]) -> list[str]:
    return [group.name for group in groups]


def order(queue: WaitingQueue[Work]) -> list[str]:
    return names(queue.take(1000, takes_any=False))


def queue_of(*requests: list[Work]) -> WaitingQueue[Work]:
    queue: WaitingQueue[Work] = WaitingQueue(0.0)
    for groups in requests:
        queue.add(groups)
    return queue


def test_requests_take_turns() -> None:
    assert order(queue_of(request("a", 4), request("b", 2), request("c", 1))) == [
        "a0",
        "b0",
        "c0",
        "a1",
        "b1",
        "a2",
        "a3",
    ]


def test_later_requests_join_no_turn_that_has_begun() -> None:
    queue = queue_of(request("a", 3))
    assert names(queue.take(1, takes_any=False)) == ["a0"]
    queue.add(request("b", 2))
    assert order(queue) == ["a1", "b0", "a2", "b1"]


def test_lower_priority_numbers_go_first_then_earlier_requests() -> None:
    queue = queue_of(*(request(name, 2, priority=at) for name, at in zip("lhum", (5, 0, -1, 0), strict=True)))
    assert order(queue) == ["u0", "u1", "h0", "m0", "h1", "m1", "l0", "l1"]


def test_what_a_group_leaves_over_takes_the_next_turn() -> None:
    large = Work("large", num_turns=3, cost=5)
    queue = queue_of([large])
    assert names(queue.take(5, takes_any=False)) == ["large"]
    queue.add([Work("small")])
    assert len(queue) == 3
    assert order(queue) == ["large", "small", "large"]
    assert len(queue) == 0


def test_groups_are_taken_in_order_within_the_budget() -> None:
    queue = queue_of([Work("a", cost=3)], [Work("b", cost=3)], [Work("c", cost=1)])
    assert names(queue.take(5, takes_any=False)) == ["a"]
    assert queue.take(2, takes_any=False) == []
    assert names(queue.take(2, takes_any=True)) == ["b"]  # too large, alone
    assert len(queue) == 1


def cancel(group: Work) -> None:
    group.listener.is_cancelled = lambda: True  # type: ignore[method-assign]


def expire(group: Work) -> None:
    group.deadline_s = time.monotonic()


def fail_to_answer(group: Work) -> None:
    def fail() -> bool:
        raise SystemExit(1)

    group.listener.is_cancelled = fail  # type: ignore[method-assign]


def expire_and_cancel(group: Work) -> None:
    expire(group)
    cancel(group)


ENDINGS = pytest.mark.parametrize(
    ("end", "code"),
    [
        (cancel, "cancelled"),
        (expire, "deadline_exceeded"),
        (expire_and_cancel, "deadline_exceeded"),
        (fail_to_answer, "internal"),
    ],
)


@ENDINGS
def test_ended_groups_are_refused_wherever_they_wait(end: Callable[[Work], None], code: str) -> None:
    groups = request("a", 5)
    queue = queue_of(groups)
    for at in (0, 3):
        end(groups[at])
    queue.sweep()
    assert [groups[at].result() for at in (0, 3)] == [code, code]
    assert len(queue) == 3
    assert order(queue) == ["a1", "a2", "a4"]


@ENDINGS
def test_ended_groups_are_not_taken_between_two_sweeps(end: Callable[[Work], None], code: str) -> None:
    queue: WaitingQueue[Work] = WaitingQueue(1000.0)
    queue.sweep()
    groups = request("a", 3)
    queue.add(groups)
    end(groups[1])
    assert order(queue) == ["a0", "a2"]
    assert groups[1].result() == code
    assert len(queue) == 0


def test_finished_groups_are_dropped() -> None:
    large = Work("large", num_turns=3)
    queue = queue_of([large, Work("other")])
    queue.take(1, takes_any=False)
    large.finish("failed")
    queue.drop_finished()
    assert len(queue) == 1
    assert order(queue) == ["other"]


def test_groups_that_may_join_the_first_are_taken_together() -> None:
    queue = queue_of([Work(name, cost=cost) for name, cost in (("a", 1), ("b", 2), ("c", 1), ("d", 1))])
    matching = queue.take_matching(lambda group, taken: group.cost == taken[0].cost and len(taken) < 2)
    assert names(matching) == ["a", "c"]
    queue.add([Work("next"), Work("last")])
    assert order(queue) == ["b", "next", "last", "d"]


def test_a_stream_of_new_requests_starves_no_large_one() -> None:
    large = request("large", 8)
    queue = queue_of(large)
    taken: list[Work] = []
    for _ in range(40):
        queue.add(request("new", 1))
        taken += queue.take(1, takes_any=False)
    assert set(large) < set(taken)
