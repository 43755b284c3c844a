# SPDX-License-Identifier: Apache-2.0
"""How long prefill waits for clients that send their next prompts together."""

import time

from hf_triton.engine.arrival_delay import ArrivalDelay


def delay_after(num_finished: int, step_s: float = 10.0, max_delay_s: float = 60.0) -> ArrivalDelay:
    delay = ArrivalDelay(max_delay_s)
    delay.on_step(step_s, num_finished)
    return delay


def test_prompts_do_not_wait_if_nothing_has_finished() -> None:
    assert delay_after(0).rest_s() == 0


def test_prompts_wait_until_as_many_arrived_as_finished() -> None:
    delay = delay_after(3)
    delay.on_arrival(2)
    assert 0 < delay.rest_s() <= 20
    delay.on_arrival(1)
    assert delay.rest_s() == 0


def test_delay_ends_after_two_steps() -> None:
    delay = delay_after(2, step_s=0.01)
    delay.on_arrival(1)
    assert delay.rest_s() > 0
    time.sleep(0.03)
    assert delay.rest_s() == 0


def test_delay_ends_after_its_limit_however_long_a_step_takes() -> None:
    delay = delay_after(2, max_delay_s=0.01)
    time.sleep(0.02)
    assert delay.rest_s() == 0


def test_further_finished_sequences_do_not_prolong_a_delay() -> None:
    delay = delay_after(2, step_s=0.01)
    assert delay.rest_s() > 0
    time.sleep(0.03)
    delay.on_step(0.01, 1)
    assert delay.rest_s() == 0


def test_a_new_delay_begins_after_a_prefill() -> None:
    delay = delay_after(2, step_s=0.01)
    delay.rest_s()
    delay.on_prefill()
    time.sleep(0.03)
    delay.on_step(0.01, 1)
    assert delay.rest_s() > 0
