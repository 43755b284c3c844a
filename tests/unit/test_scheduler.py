# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: what it admits, computes, preempts and drops. A block has one token here."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.runner.device import ChunkSizes
from tests.support.scheduling import VOCABULARY, Simulation

# --- admission -------------------------------------------------------------------------------------------------------


def test_admission_is_bounded_by_slots() -> None:
    simulation = Simulation(max_sequences=2)
    simulation.submit(3, 3, 3)
    assert simulation.step() == [3, 3]
    assert simulation.scheduler.load().num_waiting == 1


def test_a_prompt_that_does_not_fit_waits_until_another_finishes() -> None:
    simulation = Simulation(max_tokens=24)
    simulation.submit(12, 12, max_new_tokens=3)
    assert simulation.finish() == [[12], [1], [1]] * 2


def test_a_prompt_waits_for_what_others_have_yet_to_compute() -> None:
    simulation = Simulation(max_tokens=60)
    long, other = simulation.submit(40, 30, max_new_tokens=3)
    simulation.finish()
    assert simulation.computed == [long, other]
    assert simulation.observer.preempted == []


def test_short_prompts_do_not_overtake_one_that_waits_for_memory() -> None:
    simulation = Simulation(max_tokens=40)
    groups = simulation.submit(12, 24, 2, max_new_tokens=14)
    simulation.finish()
    assert simulation.computed == groups


def test_a_prompt_waits_for_memory_that_others_on_the_device_free() -> None:
    simulation = Simulation(max_tokens=20, max_memory_wait_s=3600)
    simulation.budget.allowed = 10
    (group,) = simulation.submit(12, max_new_tokens=3)
    for _ in range(3):
        assert simulation.step() == []
        assert simulation.last.wait_s > 0
    assert not simulation.outcomes
    simulation.budget.allowed = 20
    assert simulation.step() == [12]
    simulation.finish()
    assert simulation.lengths(group) == [3]


def test_a_lowered_slot_limit_rises_with_every_finished_sequence() -> None:
    simulation = Simulation()
    simulation.submit(3, 3, 3, 3, 3, 3, max_new_tokens=2)
    simulation.scheduler.admission.slot_limit = 1
    assert simulation.finish() == [[3], [1], [3, 3], [1, 1], [3, 3, 3], [1, 1, 1]]


def test_reset_limit_allows_all_slots_again() -> None:
    simulation = Simulation()
    simulation.submit(3, 3, 3, 3)
    simulation.scheduler.admission.slot_limit = 1
    simulation.scheduler.admission.reset_limit()
    assert simulation.step() == [3, 3, 3, 3]


def test_group_that_the_engine_refuses_takes_no_slot() -> None:
    simulation = Simulation(max_sequences=1, refuses=lambda group: len(group.prompt_ids) == 9)
    refused, admitted = simulation.submit(9, 3)
    simulation.finish()
    assert simulation.error_code(refused) == "invalid_parameter"
    assert simulation.lengths(admitted) == [20]
    assert simulation.computed == [admitted]


# --- sequence groups -------------------------------------------------------------------------------------------------


def test_sequences_of_a_group_share_the_blocks_of_its_prompt() -> None:
    simulation = Simulation(block_size=4)
    (group,) = simulation.submit(10, num_return_sequences=3, max_new_tokens=2)
    assert simulation.step() == [10]
    assert simulation.memory.pool.num_held == 2 + 3  # the last block, with two tokens, is copied for each
    assert simulation.finish() == [[1, 1, 1]]
    assert len(simulation.last.block_copies) == 2
    assert simulation.lengths(group) == [2, 2, 2]


@pytest.mark.parametrize("params", [{"num_return_sequences": 6}, {"num_return_sequences": 1, "best_of": 6}], ids=str)
def test_a_group_with_more_sequences_than_slots_runs_in_parts(params: dict[str, int]) -> None:
    simulation = Simulation(max_sequences=4)
    (before,) = simulation.submit(3, max_new_tokens=2)
    (large,) = simulation.submit(3, max_new_tokens=2, **params)
    (after,) = simulation.submit(3, max_new_tokens=2)
    assert simulation.steps(4) == [[3], [1], [3], [1, 1, 1, 1]]
    assert simulation.computed == [before, large]
    assert simulation.finish() == [[3, 3, 3], [1, 1, 1]]
    assert len(simulation.lengths(large)) == params["num_return_sequences"]
    assert simulation.lengths(after) == [2]


def test_sequences_of_a_group_for_which_no_block_is_left_start_later() -> None:
    simulation = Simulation(max_tokens=16, block_size=4)
    (group,) = simulation.submit(6, num_return_sequences=4, max_new_tokens=2)
    assert simulation.finish() == [[6], [1, 1, 1], [6], [1]]
    assert simulation.lengths(group) == [2] * 4


def test_a_group_that_cannot_be_recomputed_is_split_to_fit_to_its_end() -> None:
    simulation = Simulation(max_tokens=16, recomputes=False)
    (group,) = simulation.submit(5, num_return_sequences=4, max_new_tokens=2)
    assert simulation.finish() == [[], [5, 5], [1, 1], [5, 5], [1, 1]]
    assert simulation.lengths(group) == [2] * 4
    assert simulation.observer.preempted == []


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_a_step_computes_many_prompts_beside_every_decoding_sequence() -> None:
    simulation = Simulation()
    simulation.submit(5, 4)
    assert simulation.step() == [5, 4]
    simulation.submit(3, 20)
    assert simulation.steps(3) == [[1, 1, 3, 3], [1, 1, 1, 5], [1, 1, 1, 5]]


def test_short_prompts_pass_between_the_chunks_of_a_long_one() -> None:
    simulation = Simulation()
    long, short = simulation.submit(60, 5)
    assert simulation.steps(4) == [[16], [5], [1, 7], [1, 7]]
    (later,) = simulation.submit(6)
    assert simulation.steps(3) == [[1, 6], [1, 1, 6], [1, 1, 6]]
    simulation.finish()
    assert simulation.computed == [long, short, later]


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    simulation = Simulation(max_sequences=3)
    (long,) = simulation.submit(100, max_new_tokens=1)
    for _ in range(40):
        simulation.submit(15, max_new_tokens=1)
        simulation.step()
    assert long in simulation.outcomes


def test_chunks_beside_decoding_sequences_shrink_with_the_context() -> None:
    simulation = Simulation(chunk_sizes=ChunkSizes(16, 8, long_context=16))
    simulation.submit(3)
    simulation.step()
    simulation.submit(40)
    assert simulation.steps(6) == [[1, 7], [1, 7], [1, 7], [1, 3], [1, 3], [1, 3]]


def test_a_model_without_chunked_prefill_gets_whole_prompts() -> None:
    simulation = Simulation(prefills_whole=True)
    simulation.submit(3)
    simulation.step()
    simulation.submit(40, 30, 4)
    assert simulation.steps(4) == [[1, 40], [1, 1, 30], [1, 1, 1, 4], [1, 1, 1, 1]]


def test_states_take_a_slot_each_and_no_chunk_of_one_token_behind_others() -> None:
    simulation = Simulation(has_states=True)
    groups = simulation.submit(17, 3, max_new_tokens=4)
    assert simulation.steps(3) == [[15], [2, 3], [1, 1]]
    (third,) = simulation.submit(9, num_return_sequences=2, max_new_tokens=4)
    assert simulation.steps(2) == [[1, 1, 6], [1, 1, 3]]
    simulation.finish()
    assert [simulation.lengths(group) for group in (*groups, third)] == [[4], [4], [4, 4]]


def test_states_count_as_memory() -> None:
    simulation = Simulation(max_tokens=40, has_states=True, slot_tokens=15)
    simulation.submit(3, 3, 3, max_new_tokens=2)
    assert simulation.finish() == [[3, 3], [1, 1], [3], [1]]


def test_only_sequences_of_one_trial_run_together() -> None:
    simulation = Simulation()
    groups = simulation.submit(3, 3, max_new_tokens=4)
    simulation.steps(2)
    simulation.scheduler.preempt([suspect := groups[0].sequences[0], groups[1].sequences[0]])
    suspect.trial, suspect.failed_length = 1, 99
    simulation.submit(6, max_new_tokens=4)
    assert simulation.finish() == [[5], [1], [5, 6], [1, 1], [1], [1]]


def test_after_a_trial_the_next_one_has_its_turn_and_then_all_run_together() -> None:
    simulation = Simulation()
    groups = simulation.submit(3, 3, 3, max_new_tokens=20)
    simulation.steps(2)
    suspects = [group.sequences[0] for group in groups]
    simulation.scheduler.preempt(suspects)
    for trial, sequence in zip((1, 1, 2), suspects, strict=True):
        sequence.trial, sequence.failed_length = trial, 5
    simulation.submit(3)
    assert simulation.steps(3) == [[5, 5], [5], [1, 6, 1]]  # as many as the step's budget has room for
    simulation.steps(2)
    assert len(simulation.scheduler.running) == 4
    simulation.finish()
    assert [simulation.lengths(group) for group in groups] == [[20]] * 3


def test_the_oldest_waits_for_memory_too_when_others_take_it() -> None:
    simulation = Simulation(max_tokens=20, max_memory_wait_s=3600)
    older, younger = simulation.submit(5, 5, max_new_tokens=5)
    simulation.step()
    simulation.budget.allowed = 4
    for _ in range(3):
        assert simulation.step() == []
    assert not simulation.outcomes
    simulation.budget.allowed = 20
    simulation.finish()
    assert simulation.lengths(older) == simulation.lengths(younger) == [5]


def test_a_sequence_that_ends_with_its_first_token_leaves_nothing_behind() -> None:
    simulation = Simulation()
    simulation.submit(3, num_return_sequences=3, max_new_tokens=1)
    simulation.finish()
    simulation.submit(3, max_new_tokens=3)
    simulation.step()
    assert set(simulation.device._adapters) == {sequence.id for sequence in simulation.scheduler.running}


@pytest.mark.parametrize("has_states", [False, True])
def test_a_chunk_behind_a_very_long_prefix_is_computed_beside_decoding(has_states: bool) -> None:
    simulation = Simulation(max_tokens=2000, chunk_sizes=ChunkSizes(16, 8, long_context=10), has_states=has_states)
    simulation.submit(3, max_new_tokens=200)
    simulation.step()
    (long,) = simulation.submit(400, max_new_tokens=1)
    while long not in simulation.outcomes:
        simulation.step()
    assert simulation.scheduler.running


def test_a_group_that_waits_counts_with_all_its_sequences() -> None:
    simulation = Simulation(max_sequences=4)
    simulation.submit(3, num_return_sequences=3)
    simulation.step()
    simulation.submit(3)
    (waiting,) = simulation.scheduler.admission.start_groups(3)
    simulation.scheduler._add(waiting)
    assert simulation.scheduler.load().num_free_slots == 0


def test_a_prefix_in_a_lost_step_ahead_is_computed_by_another() -> None:
    """The failed step has no tokens of the sequence whose block is lost with the step before."""
    simulation = Simulation(
        block_size=4, caches_prefixes=True, runs_ahead=True, chunk_sizes=ChunkSizes(16, 8, long_context=4)
    )
    decoding = simulation.submit(3, max_new_tokens=60)
    simulation.step()
    (long,) = simulation.submit([*PROMPT, 8], max_new_tokens=60)
    simulation.step()
    simulation.submit(7, max_new_tokens=1)
    simulation.device.fails = lambda _: True
    assert simulation.step() == [1, 7]
    simulation.device.fails = lambda _: False
    (again,) = simulation.submit([*PROMPT, 7], max_new_tokens=1)
    while again not in simulation.outcomes:
        simulation.step()
    assert long not in simulation.outcomes
    simulation.finish()
    assert [simulation.lengths(group) for group in (*decoding, long, again)] == [[60], [60], [1]]
    assert not simulation.scheduler._prefixes._computing


# --- the prefix cache ------------------------------------------------------------------------------------------------

PROMPT = [number % 5 for number in range(40)]


def test_cached_tokens_are_not_computed() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    simulation.submit(PROMPT, max_new_tokens=1)
    simulation.finish()
    simulation.submit([*PROMPT[:30], 9, 9], max_new_tokens=1)
    assert simulation.finish() == [[4]]  # 28 tokens are full blocks
    simulation.submit(PROMPT, max_new_tokens=1)
    assert simulation.finish() == [[4]]  # one token at least is computed, and so its block


def test_a_long_prompt_with_a_cached_prefix_counts_as_short() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    simulation.submit(PROMPT, max_new_tokens=1)
    simulation.finish()
    simulation.submit(100)
    simulation.step()
    (cached,) = simulation.submit([*PROMPT, 9, 9])
    assert simulation.step() == [2]
    assert simulation.computed[-1] is cached


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    simulation.submit(PROMPT, PROMPT, [*PROMPT[:20], 9], max_new_tokens=1)
    simulation.finish()
    assert sum(simulation.device.num_computed.values()) == 40 + 4 + 1


def hybrid(**options: Any) -> Simulation:
    traits = {"has_states": True, "caches_prefixes": True, "num_kept_states": 8} | options
    return Simulation(block_size=4, **traits)


def test_states_are_kept_at_the_last_block_of_a_prompt_and_of_its_answer() -> None:
    simulation = hybrid()
    (group,) = simulation.submit(PROMPT[:15], max_new_tokens=6)
    assert simulation.finish() == [[12], [3], *[[1]] * 5]
    answer = simulation.token_ids(group)[0]
    simulation.submit([*PROMPT[:15], *answer, 1, 2, 3], max_new_tokens=1)
    assert simulation.finish() == [[24 - 20]]
    simulation.submit([*PROMPT[:15], 4, 4], max_new_tokens=1)
    assert simulation.finish() == [[17 - 12]]


def test_states_are_kept_every_so_many_tokens() -> None:
    simulation = hybrid(kept_state_tokens=8)
    simulation.submit(PROMPT[:30], max_new_tokens=1)
    assert simulation.finish() == [[8], [8], [8], [4], [2]]
    simulation.submit([*PROMPT[:22], 4, 4], max_new_tokens=1)
    assert simulation.finish() == [[4], [4]]  # behind 16; the cut at 20 is where it parts from the first


def test_a_prefix_that_two_prompts_share_is_computed_no_third_time() -> None:
    simulation = hybrid()
    for end, steps in ((0, [[16], [4]]), (1, [[12], [4], [4]]), (2, [[4], [4]])):
        simulation.submit([*PROMPT[:14], *[end] * 6], max_new_tokens=1)
        assert simulation.finish() == steps


def test_no_states_of_a_failed_step_are_kept() -> None:
    simulation = hybrid()
    simulation.submit(PROMPT[:15], max_new_tokens=1)
    simulation.device.fails = lambda _: True
    simulation.step()
    simulation.device.fails = lambda _: False
    assert not simulation.memory.pool.states._kept
    simulation.submit(PROMPT[:15], max_new_tokens=1)
    assert simulation.finish() == [[12], [3]]


def test_states_without_a_free_slot_are_not_kept() -> None:
    simulation = hybrid(num_kept_states=0)
    simulation.submit(PROMPT[:15], PROMPT[:15], max_new_tokens=6)
    simulation.finish()
    assert simulation.memory.pool.states.num_touched == 0


def test_sequences_come_before_kept_states() -> None:
    simulation = hybrid(max_tokens=60, slot_tokens=12)
    for number in range(3):
        simulation.submit([number] * 9, max_new_tokens=1)
        simulation.finish()
    assert simulation.memory.pool.states.num_touched == 2  # half of the memory
    simulation.submit([4] * 40, max_new_tokens=2)
    simulation.finish()
    assert simulation.observer.preempted == []


@pytest.mark.parametrize("is_published", [False, True])
def test_a_sequence_whose_last_token_is_lost_with_an_output_is_computed_again(is_published: bool) -> None:
    """It is in the step before the one that runs ahead, and in that one no more."""
    simulation = Simulation(runs_ahead=True, block_size=4, caches_prefixes=True)
    (last,) = simulation.submit(8, max_new_tokens=1)
    (other,) = simulation.submit(4, max_new_tokens=5)
    owner, place = (simulation.scheduler, "_append") if is_published else (simulation.scheduler._prefixes, "publish")
    take, failures = getattr(owner, place), [True]

    def fail_once(sequence: Sequence, *arguments: object) -> None:
        if sequence.group is last and failures:
            failures.clear()
            raise torch.OutOfMemoryError("out of memory")
        take(sequence, *arguments)

    setattr(owner, place, fail_once)
    simulation.finish(max_steps=100)
    assert [simulation.lengths(group) for group in (last, other)] == [[1], [5]]
    assert not failures


def test_steps_whose_outputs_are_lost_at_rest_do_not_pile_up() -> None:
    simulation = Simulation(runs_ahead=True, eos_ids=frozenset(range(VOCABULARY)))
    for _ in range(5):
        simulation.submit(3)
        simulation.finish()
        simulation.device.lose_inflight()
    assert len(simulation.scheduler._unread) <= 1


def test_another_takes_over_the_prefix_of_a_cancelled_prompt() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    first, second = simulation.submit(PROMPT, PROMPT, max_new_tokens=1)
    simulation.step()
    cancel(first)
    assert simulation.step() == [16]
    simulation.finish()
    assert simulation.lengths(second) == [1]


def test_prompts_with_logprobs_fill_the_prefix_cache_and_do_not_read_it() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    for _ in range(2):
        (scored,) = simulation.submit(PROMPT, max_new_tokens=1, prompt_logprobs=0)
        assert simulation.finish() == [[16], [16], [8]]
        outcome = simulation.outcomes[scored]
        assert isinstance(outcome, list)
        assert outcome[0].prompt_logprobs == list(range(39))
    simulation.submit(PROMPT, max_new_tokens=1)
    assert simulation.finish() == [[4]]


def test_blocks_with_nan_are_not_shared_and_nobody_waits_for_them() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    simulation.device.is_nan = lambda tokens: any(token == 9 for token, *_ in tokens)
    prompt = [*PROMPT[:6], 9, *PROMPT[7:20]]
    simulation.submit(prompt, prompt, max_new_tokens=1)
    simulation.finish()
    assert sum(simulation.device.num_computed.values()) == 20 + 16  # the first block is finite


def test_adapters_share_no_prefix() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True)
    for key in ("a", None, "b"):
        simulation.submit(PROMPT, max_new_tokens=1, adapter=key and SimpleNamespace(key=key))
        assert simulation.finish() == [[16], [16], [8]]


# --- preemption ------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_finishes_later() -> None:
    simulation = Simulation(max_tokens=30)
    old, young = simulation.submit(4, 4)
    simulation.steps(13)
    assert [sequence.group for sequence in simulation.scheduler.running] == [old]
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
    assert num_tokens == 4 + 12  # two have 15 tokens in blocks, and no block is left
    assert [num_tokens] in simulation.finish()


def test_the_youngest_sequence_of_a_group_is_preempted_first() -> None:
    simulation = Simulation(max_tokens=30)
    (group,) = simulation.submit(4, num_return_sequences=3, max_new_tokens=12)
    while not simulation.observer.preempted:
        simulation.step()
    assert [sequence.index for sequence in simulation.scheduler.running] == [0, 1]
    simulation.finish()
    assert simulation.lengths(group) == [12] * 3


def test_a_sequence_that_outgrows_the_whole_memory_is_refused() -> None:
    simulation = Simulation(max_tokens=12)
    large, small = simulation.submit(4, 4)
    (other,) = simulation.submit(4, max_new_tokens=3)
    simulation.finish()
    assert [simulation.error_code(group) for group in (large, small)] == ["out_of_memory"] * 2
    assert simulation.lengths(other) == [3]


def test_sequences_that_cannot_be_recomputed_are_admitted_only_if_they_fit_to_their_end() -> None:
    simulation = Simulation(max_tokens=40, recomputes=False)
    old, young = simulation.submit(4, 4)
    simulation.finish()
    assert [simulation.lengths(group) for group in (old, young)] == [[20]] * 2
    assert simulation.observer.preempted == []


def test_unrecomputable_sequences_with_tokens_are_refused_not_preempted() -> None:
    simulation = Simulation(recomputes=False)
    (started,) = simulation.submit(3)
    simulation.steps(2)
    (computing,) = simulation.submit(40)
    simulation.step()
    simulation.scheduler.preempt([started.sequences[0], computing.sequences[0]])
    simulation.finish()
    assert simulation.error_code(started) == "generation_failed"
    assert simulation.lengths(computing) == [20]


def test_a_sequence_is_recomputed_once_at_the_recompute_length() -> None:
    simulation = Simulation(recompute_length=8, caches_prefixes=True)
    (group,) = simulation.submit(5, max_new_tokens=6)
    assert simulation.finish() == [[5], [1], [1], [8], [1], [1]]
    assert simulation.lengths(group) == [6]


def test_sequences_of_a_failed_step_are_recomputed() -> None:
    simulation = Simulation(caches_prefixes=True)
    groups = simulation.submit(3, 3, max_new_tokens=4)
    simulation.steps(2)
    simulation.device.fails = lambda _: True
    simulation.step()
    simulation.device.fails = lambda _: False
    assert simulation.scheduler.running == []
    assert simulation.finish() == [[5], [5], [1, 1]]  # both are suspects, until each has passed
    assert [simulation.lengths(group) for group in groups] == [[4], [4]]


# --- one step ahead --------------------------------------------------------------------------------------------------


def test_a_step_is_scheduled_before_the_tokens_of_the_last_one_are_known() -> None:
    simulation = Simulation(runs_ahead=True)
    (group,) = simulation.submit(3, max_new_tokens=4)
    num_known = []
    for _ in range(4):
        simulation.step()
        num_known.append(0 if group.is_finished else group.sequences[0].num_tokens - 3)
    assert num_known == [0, 1, 2, 0]
    assert simulation.lengths(group) == [4]


def needs_host(group: SequenceGroup) -> bool:
    return len(group.prompt_ids) == 4


def test_a_sequence_whose_tokens_the_host_must_see_takes_part_in_every_second_step() -> None:
    simulation = Simulation(runs_ahead=True, needs_host=needs_host)
    (ahead,) = simulation.submit(3, max_new_tokens=9)
    simulation.steps(2)
    (behind,) = simulation.submit(4, max_new_tokens=3)
    steps = []
    for _ in range(5):
        steps.append(simulation.step())
        assert simulation.last.stays_inflight
    assert steps == [[1, 4], [1], [1, 1], [1], [1, 1]]
    simulation.finish()
    assert [simulation.lengths(group) for group in (ahead, behind)] == [[9], [3]]


def test_tokens_that_the_host_must_see_of_more_than_half_are_read_at_once() -> None:
    simulation = Simulation(runs_ahead=True, needs_host=needs_host)
    groups = simulation.submit(3, 4, 4, max_new_tokens=3)
    assert simulation.step() == [3, 4, 4]
    assert not simulation.last.stays_inflight
    assert simulation.finish() == [[1, 1, 1], [1, 1, 1]]
    assert [simulation.lengths(group) for group in groups] == [[3]] * 3


def test_a_running_sequence_does_not_sit_out_beside_chunks_alone() -> None:
    simulation = Simulation(runs_ahead=True, needs_host=needs_host)
    simulation.submit(4)
    simulation.step()
    simulation.submit(40)
    for _ in range(3):
        assert simulation.step() == [1, 7]
        assert not simulation.last.stays_inflight


def test_chunks_need_no_tokens_and_stay_in_flight() -> None:
    simulation = Simulation(block_size=4, caches_prefixes=True, runs_ahead=True)
    (group,) = simulation.submit(PROMPT, max_new_tokens=2)
    for num_tokens in (16, 16, 8):
        assert simulation.step() == [num_tokens]
        assert simulation.last.stays_inflight
    assert simulation.steps(2) == [[1], []]
    assert simulation.lengths(group) == [2]
    simulation.submit(PROMPT, max_new_tokens=1)
    assert simulation.finish() == [[4]]


def test_nothing_is_left_of_chunks_in_flight_whose_prompt_is_cancelled() -> None:
    simulation = Simulation(runs_ahead=True)
    (group,) = simulation.submit(40)
    simulation.step()
    cancel(group)
    assert simulation.finish() == [[]]
    assert simulation.error_code(group) == "cancelled"


def test_a_group_is_shared_out_before_the_next_step() -> None:
    simulation = Simulation(block_size=4, runs_ahead=True)
    simulation.submit(3)
    simulation.steps(2)
    (group,) = simulation.submit(6, num_return_sequences=3, max_new_tokens=5)
    assert simulation.steps(2) == [[1, 6], [1, 1, 1, 1]]
    simulation.finish()
    assert simulation.lengths(group) == [5] * 3


def test_no_step_runs_ahead_of_the_recompute_length() -> None:
    simulation = Simulation(recompute_length=8, runs_ahead=True)
    (group,) = simulation.submit(5, max_new_tokens=6)
    assert simulation.finish() == [[5], [1], [1], [8], [1], [1]]
    assert simulation.lengths(group) == [6]


def test_a_sequence_at_the_recompute_length_sits_out_one_step() -> None:
    simulation = Simulation(recompute_length=8, runs_ahead=True)
    short, long = simulation.submit(5, 9, max_new_tokens=6)
    assert simulation.steps(6) == [[5, 9], [1, 1], [1, 1], [1], [1, 7], [1, 1]]
    simulation.finish()
    assert [simulation.lengths(group) for group in (short, long)] == [[6], [6]]


def test_a_failure_loses_the_step_in_flight_too() -> None:
    simulation = Simulation(runs_ahead=True)
    (last,) = simulation.submit(3, max_new_tokens=2)
    (other,) = simulation.submit(3, max_new_tokens=3)
    simulation.steps(2)
    simulation.device.fails = lambda _: True
    assert simulation.step() == [1]  # both had tokens in flight
    simulation.device.fails = lambda _: False
    simulation.finish()
    assert [simulation.lengths(group) for group in (last, other)] == [[2], [3]]


# --- fairness --------------------------------------------------------------------------------------------------------


def test_priority_does_not_preempt_running_sequences() -> None:
    simulation = Simulation(max_sequences=1)
    (running,) = simulation.submit(3)
    simulation.step()
    (urgent,) = simulation.submit(3, priority=-1)
    simulation.finish()
    assert list(simulation.outcomes) == [running, urgent]
    assert simulation.observer.preempted == []


# --- cancellation and deadlines --------------------------------------------------------------------------------------


def cancel(group: SequenceGroup) -> None:
    group.listener.is_cancelled = lambda: True  # type: ignore[method-assign]


def expire(group: SequenceGroup) -> None:
    group.deadline_s = 0.0


ENDINGS = pytest.mark.parametrize(("end", "code"), [(cancel, "cancelled"), (expire, "deadline_exceeded")])
End = Callable[[SequenceGroup], None]


@ENDINGS
@pytest.mark.parametrize(
    ("options", "length", "is_queued"),
    [({"max_sequences": 1}, 3, True), ({"max_tokens": 30}, 29, False), ({}, 60, False)],
    ids=["queued", "waiting", "computing"],
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
    assert simulation.step() == [1]
    assert simulation.error_code(ended) == code
    assert (len(simulation.queue), len(simulation.scheduler.waiting), len(simulation.scheduler.running)) == (0, 0, 1)
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
