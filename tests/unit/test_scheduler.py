# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: what it admits, prefills, preempts and drops."""

import random
from collections.abc import Callable

import pytest

from hf_triton.engine.sequence import SequenceGroup
from tests.support.scheduling import Simulation

# --- admission -------------------------------------------------------------------------------------------------------


def test_admission_is_bounded_by_slots() -> None:
    simulation = Simulation(max_sequences=2)
    simulation.submit(3, 3, 3)
    simulation.step()
    assert len(simulation.memory.running) == 2
    assert simulation.scheduler.load(0, 0).num_waiting == 1


def test_a_prompt_that_does_not_fit_waits_until_another_finishes() -> None:
    simulation = Simulation(max_tokens=24)
    simulation.submit(12, 12, max_new_tokens=3)
    assert simulation.finish() == ["prefill 12", "decode 1", "decode 1"] * 2


def test_short_prompts_do_not_overtake_one_that_waits_for_memory() -> None:
    simulation = Simulation(max_tokens=40)
    groups = simulation.submit(12, 12, 2, max_new_tokens=14)
    simulation.finish()
    large, small = (simulation.prefilled.index([group]) for group in groups[1:])
    assert large < small


def test_a_prompt_waits_for_memory_that_others_on_the_device_free() -> None:
    simulation = Simulation(max_tokens=10, max_memory_wait_s=3600)
    (group,) = simulation.submit(12, max_new_tokens=3)
    steps = [simulation.scheduler.schedule() for _ in range(3)]
    assert all(step.wait_s > 0 and step.prefill is None for step in steps)
    assert not simulation.outcomes
    simulation.memory.max_tokens = 20
    assert simulation.step() == "prefill 12"
    simulation.finish()
    assert simulation.lengths(group) == [3]


def test_a_lowered_slot_limit_rises_with_every_finished_sequence() -> None:
    simulation = Simulation()
    simulation.submit(3, 3, 3, 3, 3, 3, max_new_tokens=2)
    simulation.scheduler.slot_limit = 1
    decodes = [step for step in simulation.finish() if step.startswith("decode")]
    assert decodes == ["decode 1", "decode 2", "decode 3"]


def test_reset_limits_allows_all_slots_again() -> None:
    simulation = Simulation()
    simulation.submit(3, 3, 3, 3)
    simulation.scheduler.slot_limit = 1
    simulation.scheduler.reset_limits()
    assert simulation.steps(2) == ["prefill 3", "decode 4"]


def test_group_that_the_engine_refuses_takes_no_slot() -> None:
    simulation = Simulation(max_sequences=1, refuses=lambda group: len(group.prompt_ids) == 9)
    refused, admitted = simulation.submit(9, 3)
    simulation.finish()
    assert simulation.error_code(refused) == "invalid_parameter"
    assert simulation.lengths(admitted) == [20]
    assert simulation.prefilled == [[admitted]]


# --- sequence groups -------------------------------------------------------------------------------------------------


def test_sequences_of_a_group_share_its_prefill() -> None:
    simulation = Simulation()
    (group,) = simulation.submit(5, num_return_sequences=3, max_new_tokens=2)
    assert simulation.finish() == ["prefill 5", "decode 3"]
    assert simulation.lengths(group) == [2, 2, 2]


@pytest.mark.parametrize("params", [{"num_return_sequences": 6}, {"num_return_sequences": 1, "best_of": 6}], ids=str)
def test_a_group_with_more_sequences_than_slots_runs_alone(params: dict[str, int]) -> None:
    simulation = Simulation(max_sequences=4)
    (before,) = simulation.submit(3, max_new_tokens=2)
    (large,) = simulation.submit(3, max_new_tokens=2, **params)
    (after,) = simulation.submit(3, max_new_tokens=2)
    steps = simulation.finish()
    assert simulation.prefilled == [[before], [large], [after]]
    assert steps == ["prefill 3", "decode 1", "prefill 3", "decode 6", "prefill 3", "decode 1"]


def test_a_group_that_does_not_fit_at_once_is_split() -> None:
    simulation = Simulation(max_tokens=14)
    (group,) = simulation.submit(5, num_return_sequences=4, max_new_tokens=2)
    assert simulation.finish() == ["prefill 5", "decode 2"] * 2
    assert simulation.lengths(group) == [2] * 4


# --- prefill ---------------------------------------------------------------------------------------------------------


def test_similar_prompts_share_a_prefill_batch() -> None:
    simulation = Simulation()
    simulation.submit(5, 4)
    assert simulation.steps(2) == ["prefill 5", "decode 2"]


def test_short_prompts_overtake_a_long_one_after_each_chunk() -> None:
    simulation = Simulation()
    simulation.submit(40, 5)
    assert simulation.steps(4) == ["prefill 16", "decode 0", "prefill 5", "decode 1"]
    assert simulation.steps(4) == ["prefill 8", "decode 1", "prefill 8", "decode 1"]


def test_short_prompts_overtake_long_ones_that_wait() -> None:
    simulation = Simulation()
    simulation.submit(3)
    simulation.step()
    simulation.submit(32)
    simulation.steps(2)
    simulation.submit(20, 2)
    simulation.finish()
    assert [[len(group.prompt_ids) for group in batch] for batch in simulation.prefilled] == [[3], [32], [2], [20]]


def test_short_prompts_beside_running_sequences_take_turns_of_one_chunk() -> None:
    simulation = Simulation()
    simulation.submit(3)
    simulation.step()
    simulation.submit(1, 7, 1)
    assert simulation.steps(6) == ["decode 1", "prefill 1", "prefill 7", "decode 3", "prefill 1", "decode 4"]


def test_a_model_without_chunked_prefill_gets_whole_prompts() -> None:
    simulation = Simulation(prefills_whole=True)
    simulation.submit(3)
    simulation.step()
    simulation.submit(40)
    assert simulation.steps(3) == ["decode 1", "prefill 40", "decode 2"]


def test_cached_tokens_are_not_prefilled() -> None:
    simulation = Simulation()
    simulation.submit(40)
    simulation.memory.num_cached = 30
    assert simulation.steps(2) == ["prefill 10", "decode 1"]


def test_a_long_prompt_with_a_cached_prefix_counts_as_short() -> None:
    simulation = Simulation()
    (long,) = simulation.submit(100)
    simulation.steps(2)
    simulation.memory.num_cached = 30
    (cached,) = simulation.submit(40)
    assert simulation.steps(2) == ["prefill 10", "decode 1"]
    assert simulation.prefilled == [[long], [cached]]


def test_a_suspect_sequence_runs_alone() -> None:
    simulation = Simulation()
    groups = simulation.submit(3, 3, max_new_tokens=4)
    simulation.steps(2)
    simulation.scheduler.preempt([suspect := groups[0].sequences[0], groups[1].sequences[0]])
    suspect.is_suspect = True
    (later,) = simulation.submit(5, max_new_tokens=4)
    assert simulation.finish() == ["prefill 5", "decode 1", "prefill 5", "decode 2", "decode 1", "decode 1"]
    assert simulation.prefilled == [groups, groups[:1], [groups[1], later]]


# --- preemption ------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_finishes_later() -> None:
    simulation = Simulation(max_tokens=30)
    old, young = simulation.submit(4, 4)
    simulation.steps(12)
    assert [sequence.group for sequence in simulation.memory.running] == [old]
    simulation.finish()
    assert simulation.lengths(old) == simulation.lengths(young) == [20]
    assert list(simulation.outcomes) == [old, young]
    assert simulation.observer.preempted == [1]


def test_a_preempted_sequence_is_recomputed_with_its_tokens() -> None:
    simulation = Simulation(max_tokens=30)
    _, young = simulation.submit(4, 4)
    while not simulation.observer.preempted:
        simulation.step()
    num_tokens = young.sequences[0].num_tokens
    assert num_tokens == 4 + 11  # two of 15 tokens have no room for another one each
    prefills = [step for step in simulation.finish() if step.startswith("prefill")]
    assert prefills == [f"prefill {num_tokens}"]


def test_the_youngest_sequence_of_a_group_is_preempted_first() -> None:
    simulation = Simulation(max_tokens=30)
    (group,) = simulation.submit(4, num_return_sequences=3, max_new_tokens=12)
    while not simulation.observer.preempted:
        simulation.step()
    assert [sequence.index for sequence in simulation.memory.running] == [0, 1]
    simulation.finish()
    assert simulation.lengths(group) == [12] * 3


def test_a_sequence_that_outgrows_the_whole_memory_is_refused() -> None:
    simulation = Simulation(max_tokens=12)
    large, small = simulation.submit(4, 4)
    (other,) = simulation.submit(4, max_new_tokens=3)
    simulation.finish()
    assert [simulation.error_code(group) for group in (large, small)] == ["out_of_memory"] * 2
    assert simulation.lengths(other) == [3]


def test_unrecomputable_sequences_with_tokens_are_refused_not_preempted() -> None:
    simulation = Simulation(max_tokens=30, recomputes=False)
    old, young = simulation.submit(4, 4)
    simulation.finish()
    assert simulation.lengths(old) == [20]
    assert simulation.error_code(young) == "out_of_memory"


def test_unrecomputable_sequences_without_tokens_are_prefilled_again() -> None:
    simulation = Simulation(recomputes=False)
    (started,) = simulation.submit(3)
    simulation.steps(2)
    (prefilling,) = simulation.submit(40)
    simulation.step()
    simulation.scheduler.preempt([started.sequences[0], prefilling.sequences[0]])
    simulation.finish()
    assert simulation.error_code(started) == "generation_failed"
    assert simulation.lengths(prefilling) == [20]


def test_a_sequence_is_recomputed_once_at_the_recompute_length() -> None:
    simulation = Simulation(recompute_length=8)
    (group,) = simulation.submit(5, max_new_tokens=6)
    assert simulation.finish() == ["prefill 5", "decode 1", "decode 1", "prefill 8", "decode 1", "decode 1"]
    assert simulation.lengths(group) == [6]


def test_corrupt_memory_is_reset_and_its_sequences_recomputed() -> None:
    simulation = Simulation()
    groups = simulation.submit(3, 3, max_new_tokens=4)
    simulation.steps(2)
    simulation.memory.is_corrupt = True
    simulation.scheduler.preempt(simulation.memory.running)
    assert simulation.memory.running == []
    simulation.memory.is_corrupt = False
    assert simulation.finish() == ["prefill 5", "decode 2"]
    assert [simulation.lengths(group) for group in groups] == [[4], [4]]


# --- fairness --------------------------------------------------------------------------------------------------------


def prefill_order(simulation: Simulation, names: dict[SequenceGroup, str]) -> list[str]:
    simulation.finish()
    return [names[group] for batch in simulation.prefilled for group in batch]


def name_groups(**requests: list[SequenceGroup]) -> dict[SequenceGroup, str]:
    return {group: f"{name}{at}" for name, groups in requests.items() for at, group in enumerate(groups)}


def test_requests_take_turns() -> None:
    simulation = Simulation(max_sequences=1)
    names = name_groups(a=simulation.submit(3, 3, 3, 3), b=simulation.submit(3, 3), c=simulation.submit(3))
    assert prefill_order(simulation, names) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_later_requests_join_no_turn_that_has_begun() -> None:
    simulation = Simulation(max_sequences=1)
    first = simulation.submit(3, 3, 3)
    simulation.step()
    names = name_groups(a=first, b=simulation.submit(3, 3))
    assert prefill_order(simulation, names) == ["a0", "a1", "b0", "a2", "b1"]


def test_lower_priority_numbers_go_first() -> None:
    simulation = Simulation(max_sequences=1)
    low, high, urgent = (simulation.submit(3, 3, priority=priority) for priority in (5, 0, -1))
    names = name_groups(low=low, high=high, urgent=urgent)
    assert prefill_order(simulation, names) == ["urgent0", "urgent1", "high0", "high1", "low0", "low1"]


def test_priority_does_not_preempt_running_sequences() -> None:
    simulation = Simulation(max_sequences=1)
    (running,) = simulation.submit(3)
    simulation.step()
    (urgent,) = simulation.submit(3, priority=-1)
    simulation.finish()
    assert list(simulation.outcomes) == [running, urgent]
    assert simulation.observer.preempted == []


def test_a_stream_of_new_requests_starves_no_large_one() -> None:
    simulation = Simulation(max_sequences=2)
    large = simulation.submit(*[3] * 8, max_new_tokens=2)
    for _ in range(60):
        simulation.submit(3, max_new_tokens=2)
        simulation.step()
    assert all(group in simulation.outcomes for group in large)


# --- cancellation and deadlines --------------------------------------------------------------------------------------


def cancel(group: SequenceGroup) -> None:
    group.is_cancelled = lambda: True


def expire(group: SequenceGroup) -> None:
    group.deadline_s = 0.0


ENDINGS = pytest.mark.parametrize(("end", "code"), [(cancel, "cancelled"), (expire, "deadline_exceeded")])
End = Callable[[SequenceGroup], None]


@ENDINGS
@pytest.mark.parametrize(
    ("options", "length", "is_queued"),
    [
        ({"max_sequences": 1}, 3, True),
        ({"max_tokens": 30}, 25, False),
        ({}, 40, False),
    ],
    ids=["queued", "ready", "prefilling"],
)
def test_ended_groups_without_tokens_leave_and_others_continue(
    options: dict[str, int], length: int, is_queued: bool, end: End, code: str
) -> None:
    simulation = Simulation(**options)
    (running,) = simulation.submit(3)
    simulation.step()
    (ended,) = simulation.submit(length)
    simulation.steps(2)
    assert (len(simulation.queue) == 1) == is_queued
    end(ended)
    assert simulation.step() == "decode 1"
    assert simulation.error_code(ended) == code
    assert (len(simulation.queue), len(simulation.scheduler.stages.ready), simulation.memory.prefills) == (0, 0, [])
    simulation.finish()
    assert simulation.lengths(running) == [20]


def test_an_expired_running_group_finishes_with_its_tokens() -> None:
    simulation = Simulation()
    late, other = simulation.submit(3, 3)
    simulation.steps(4)
    expire(late)
    simulation.finish()
    outcome = simulation.outcomes[late]
    assert isinstance(outcome, list)
    assert [completion.finish_reason for completion in outcome] == ["deadline"]
    assert simulation.lengths(late) == [4]
    assert simulation.lengths(other) == [20]


# --- any load --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_group_gets_its_completions_under_any_load(seed: int) -> None:
    """The memory is small enough to preempt. `Simulation.step` checks that every step fits."""
    source = random.Random(seed)
    simulation = Simulation(source.randint(80, 160), max_sequences=source.randint(2, 6))
    groups: dict[SequenceGroup, list[int]] = {}
    for _ in range(30):
        num_sequences, max_new_tokens = source.choice([1, 1, 1, 2]), source.randint(1, 25)
        lengths = [source.choice([2, 5, 9, 40]) for _ in range(source.randint(1, 3))]
        for group in simulation.submit(
            *lengths, max_new_tokens=max_new_tokens, num_return_sequences=num_sequences, priority=source.choice([0, 1])
        ):
            groups[group] = [max_new_tokens] * num_sequences
        simulation.steps(source.randint(0, 20))
    simulation.finish(max_steps=20_000)
    assert {group: simulation.lengths(group) for group in groups} == groups
    assert simulation.memory.running == simulation.memory.prefills == []
