# SPDX-License-Identifier: Apache-2.0
"""How long reading waits for prompts that are on their way."""

import pytest

from hf_triton.engine import gathering
from hf_triton.engine.gathering import MAX_WAIT_S, MEMORY_STEPS, Gathering


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


def after_step(step_s: float, num_left: int) -> Gathering:
    gathering = Gathering()
    gathering.on_step(step_s)
    gathering.on_leave(num_left)
    return gathering


def test_nobody_waits_before_anybody_has_left(clock: Clock) -> None:
    first = Gathering()
    first.on_come()
    assert first.wait_s(has_company=False) == 0
    running = after_step(0.01, 0)
    running.on_come()
    assert running.wait_s(has_company=True) == 0


def test_who_comes_back_alone_is_read_at_once(clock: Clock) -> None:
    gathering = after_step(0.01, 1)
    gathering.on_come()
    assert gathering.wait_s(has_company=False) == 0


@pytest.mark.parametrize("has_company", [True, False])
def test_the_first_wait_for_the_others_as_long_as_a_step_takes(has_company: bool, clock: Clock) -> None:
    gathering = after_step(0.01, 3)
    clock.now_s += 0.005
    gathering.on_come()
    assert gathering.wait_s(has_company=has_company) == pytest.approx(0.01)
    clock.now_s += 0.004
    gathering.on_come()
    assert gathering.wait_s(has_company=has_company) == pytest.approx(0.006)
    clock.now_s += 0.007
    assert gathering.wait_s(has_company=has_company) == 0
    gathering.on_come()
    assert gathering.wait_s(has_company=has_company) == 0  # the third has been given up


def test_nobody_waits_once_all_are_back(clock: Clock) -> None:
    gathering = after_step(0.01, 3)
    for _ in range(2):
        gathering.on_come()
    assert gathering.wait_s(has_company=False) > 0
    gathering.on_come()
    assert gathering.wait_s(has_company=False) == 0


def test_who_stays_away_is_not_waited_for(clock: Clock) -> None:
    gathering = after_step(0.01, 16)
    clock.now_s += 0.01 * MEMORY_STEPS + 0.001
    gathering.on_come()
    assert gathering.wait_s(has_company=False) == 0


def test_long_steps_make_nobody_wait_long(clock: Clock) -> None:
    gathering = after_step(1.0, 2)
    assert gathering.wait_s(has_company=False) == pytest.approx(MAX_WAIT_S)
    assert after_step(1.0, 2).wait_s(has_company=True) == 0
