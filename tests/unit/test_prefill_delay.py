# SPDX-License-Identifier: Apache-2.0
"""How long reading waits for prompts that are on their way."""

import pytest

from hf_triton.engine import prefill_delay as gathering
from hf_triton.engine.prefill_delay import MAX_GAP_S, MAX_WAIT_S, MEMORY_STEPS, SOON_STEPS, PrefillDelay

ALONE: list[int] = []
COMPANY = [50, 60]  # far from their end


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gathering, "time", clock)
    return clock


def after_step(step_s: float, num_left: int) -> PrefillDelay:
    gathering = PrefillDelay()
    gathering.on_step(step_s)
    gathering.on_leave(num_left)
    return gathering


def test_nobody_waits_before_anybody_has_left(clock: Clock) -> None:
    first = PrefillDelay()
    first.on_come()
    assert not first.waits(1, ALONE)
    running = after_step(0.01, 0)
    running.on_come()
    assert not running.waits(1, COMPANY)


def test_who_comes_back_alone_is_read_at_once(clock: Clock) -> None:
    gathering = after_step(0.01, 1)
    gathering.on_come()
    assert not gathering.waits(1, ALONE)


def test_the_first_wait_for_the_others_as_long_as_two_steps_take(clock: Clock) -> None:
    gathering = after_step(0.01, 3)
    clock.now_s += 0.005
    gathering.on_come()
    assert gathering.waits(1, COMPANY)
    assert gathering.rest_s() == pytest.approx(0.02)
    clock.now_s += 0.004
    gathering.on_come()
    assert gathering.waits(1, COMPANY)
    assert gathering.rest_s() == pytest.approx(0.016)
    clock.now_s += 0.017
    assert not gathering.waits(1, COMPANY)
    gathering.on_come()
    assert not gathering.waits(1, COMPANY)  # the third has been given up


def test_where_nothing_runs_the_first_are_read_at_once_and_step_with_the_others(clock: Clock) -> None:
    gathering = after_step(0.01, 3)
    clock.now_s += 0.005
    gathering.on_come()
    assert not gathering.waits(1, ALONE)
    clock.now_s += 0.008
    assert gathering.rest_s() == pytest.approx(0.012)
    gathering.on_come()
    clock.now_s += 0.013
    assert gathering.rest_s() == 0
    gathering.on_read()
    assert not gathering.waits(1, COMPANY)  # the third has been given up


def test_where_nothing_runs_the_first_wait_for_those_who_come_closely_after_them(clock: Clock) -> None:
    gathering = after_step(0.01, 3)
    clock.now_s += 0.005
    gathering.on_come()
    gathering.waits(1, ALONE)
    assert gathering.gap_s() == pytest.approx(MAX_GAP_S)
    clock.now_s += 0.75 * MAX_GAP_S
    gathering.on_come()
    assert gathering.gap_s() == pytest.approx(MAX_GAP_S)
    clock.now_s += 1.25 * MAX_GAP_S
    assert gathering.gap_s() == 0
    gathering.on_come()
    assert gathering.gap_s() == 0  # all are back


def test_who_comes_for_the_first_time_waits_for_nobody(clock: Clock) -> None:
    gathering = after_step(0.01, 0)
    gathering.on_come()
    gathering.waits(1, ALONE)
    assert gathering.gap_s() == 0


def test_closely_after_each_other_is_no_longer_than_others_are_waited_for(clock: Clock) -> None:
    gathering = after_step(MAX_GAP_S / 4, 9)
    gathering.on_come()
    gathering.waits(1, ALONE)
    assert gathering.gap_s() == pytest.approx(MAX_GAP_S / 2)


def test_nobody_waits_once_all_are_back(clock: Clock) -> None:
    gathering = after_step(0.01, 3)
    for _ in range(2):
        gathering.on_come()
    assert gathering.waits(1, COMPANY)
    gathering.on_come()
    assert not gathering.waits(1, COMPANY)
    assert gathering.rest_s() == 0


def test_who_stays_away_is_not_waited_for(clock: Clock) -> None:
    gathering = after_step(0.01, 16)
    clock.now_s += 0.01 * MEMORY_STEPS + 0.001
    gathering.on_come()
    assert not gathering.waits(1, COMPANY)
    assert gathering.rest_s() == 0


def test_long_steps_make_nobody_wait_long(clock: Clock) -> None:
    gathering = after_step(1.0, 2)
    assert not gathering.waits(1, ALONE)
    assert gathering.rest_s() == pytest.approx(MAX_WAIT_S)
    assert not after_step(1.0, 2).waits(1, COMPANY)


def test_reading_waits_for_texts_that_are_about_to_end(clock: Clock) -> None:
    gathering = after_step(0.01, 0)
    assert gathering.waits(1, [SOON_STEPS, SOON_STEPS, 50])
    assert gathering.waits(1, [SOON_STEPS - 1, SOON_STEPS - 1, 49])
    assert gathering.waits(1, [1, 1, 48])
    gathering.on_leave(2)
    assert gathering.waits(1, [47])  # who has left now is on the way
    gathering.on_come()
    gathering.on_come()
    assert not gathering.waits(3, [47])


@pytest.mark.parametrize("nums_left", [[SOON_STEPS + 1, 4], [1, 2, 50, 60], [2, 2]], ids=["later", "few", "too few"])
def test_other_texts_hold_nobody_up(nums_left: list[int], clock: Clock) -> None:
    assert not after_step(0.01, 0).waits(3, nums_left)


def test_nobody_waits_again_and_again(clock: Clock) -> None:
    gathering = after_step(0.01, 0)
    for _ in range(2):
        waits = [gathering.waits(1, [1, 1, 1]) for _ in range(SOON_STEPS + 1)]
        assert waits == [True] * SOON_STEPS + [False]
        gathering.on_read()


def test_who_is_read_sooner_leaves_the_next_their_time(clock: Clock) -> None:
    gathering = after_step(0.01, 2)
    gathering.on_come()
    assert gathering.waits(1, COMPANY)
    gathering.on_come()
    gathering.on_read()  # as many as are read at a time
    clock.now_s += 5
    gathering.on_leave(2)
    gathering.on_come()
    assert gathering.waits(1, COMPANY)


def test_steps_that_take_long_are_not_waited_for(clock: Clock) -> None:
    assert not after_step(0.5, 0).waits(1, [1, 1, 1])
