# SPDX-License-Identifier: Apache-2.0
"""The scheduler with images, without a model: when towers run, what is kept of them, and which blocks are shared.

The device checks that each token's keys are computed with the feature that stands at it, and at its position.
"""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hf_triton.engine.sequence import SequenceGroup
from hf_triton.runner.device import ChunkSizes
from tests.support.scheduling import Simulation

CAT, DOG = b"c" * 8, b"d" * 8


def cancel(group: SequenceGroup) -> None:
    group.listener.is_cancelled = lambda: True  # type: ignore[method-assign]


def fail(simulation: Simulation) -> bool:
    """A step fails, and the device keeps no features."""
    simulation.device.features.clear()
    return True


def ids(text: bytes, count: int) -> Iterator[bytes]:
    """Images of eight tokens that differ."""
    return (text + b"%07d" % number for number in range(count))


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_chunk_waits_for_the_features_of_its_images_one_a_step() -> None:
    simulation = Simulation()
    decoding = simulation.submit(3)
    simulation.step()
    group = simulation.see(2, CAT[:2], 1, DOG[:2], max_new_tokens=2)
    assert simulation.steps(4) == [[1], [1], [1, 7], [1, 1]]
    assert [image.digest[:2] for image in simulation.device.towers] == [b"cc", b"dd"]
    simulation.finish()
    assert simulation.lengths(group) == [2]
    assert simulation.lengths(*decoding) == [20]


def test_a_tower_alone_is_a_step_without_ranges() -> None:
    simulation = Simulation()
    simulation.see(2, CAT, 3, DOG, 2, max_new_tokens=1)
    assert simulation.finish() == [[], [], [16], [7]]


def test_chunks_without_an_image_do_not_wait_and_its_tower_takes_from_the_others() -> None:
    simulation = Simulation()
    simulation.see(20, CAT, 4, max_new_tokens=1)
    simulation.submit(17, max_new_tokens=1)
    assert simulation.finish() == [[16], [8], [16], [9]]


def test_positions_behind_the_prompt_go_on() -> None:
    simulation = Simulation(block_size=4, runs_ahead=True)
    group = simulation.see(3, CAT, 5, has_positions=True, max_new_tokens=6)
    simulation.finish()
    assert simulation.lengths(group) == [6]
    assert simulation.last.ranges[0].positions is not None


def test_an_image_whose_tokens_attend_to_each_other_is_not_cut() -> None:
    simulation = Simulation(joins_images=True)
    simulation.submit(3)
    simulation.step()
    simulation.see(5, b"i" * 30, 10, max_new_tokens=1)
    assert simulation.steps(4) == [[1], [1, 35], [1, 7], [1, 3]]


def test_a_short_prompt_with_an_image_passes_between_the_chunks_of_a_long_one() -> None:
    simulation = Simulation()
    (long,) = simulation.submit(200, max_new_tokens=1)
    simulation.step()
    seeing = simulation.see(2, CAT[:4], 2, max_new_tokens=1)
    simulation.steps(6)
    assert seeing in simulation.outcomes
    assert long not in simulation.outcomes


def test_a_stream_of_images_does_not_stop_a_long_prompt() -> None:
    simulation = Simulation(max_sequences=3)
    (long,) = simulation.submit(100, max_new_tokens=1)
    for _ in range(60):
        simulation.see(2, b"x" * 12, 1, max_new_tokens=1)
        simulation.step()
    assert long in simulation.outcomes


def test_a_short_text_does_not_wait_for_the_images_of_others() -> None:
    simulation = Simulation(max_sequences=20)
    simulation.submit(3, max_new_tokens=200)
    for image in ids(b"i", 12):
        simulation.see(2, image, 1, max_new_tokens=1)
    simulation.steps(3)
    (short,) = simulation.submit(5, max_new_tokens=1)
    simulation.steps(2)
    assert short in simulation.outcomes
    assert len(simulation.device.towers) < 6


def test_states_take_no_chunk_of_one_token() -> None:
    simulation = Simulation(has_states=True)
    group = simulation.see(1, CAT, 1, DOG, 1, max_new_tokens=3)
    simulation.finish()
    assert simulation.lengths(group) == [3]


def test_a_model_without_chunked_prefill_has_all_images_first() -> None:
    simulation = Simulation(prefills_whole=True)
    simulation.see(30, CAT, 3, DOG, 2, max_new_tokens=1)
    assert simulation.finish() == [[], [], [51]]


# --- how long features are kept --------------------------------------------------------------------------------------


def test_features_are_kept_while_a_sequence_may_be_computed_again_and_dropped_then() -> None:
    simulation = Simulation(max_tokens=40)
    (old,) = simulation.submit(4)
    group = simulation.see(2, CAT, 2)
    while not simulation.observer.preempted:
        simulation.step()
    assert simulation.device.features
    simulation.finish()
    assert simulation.lengths(group) == simulation.lengths(old) == [20]
    assert len(simulation.device.towers) == 1
    simulation.rest()


def test_a_group_that_has_ended_is_not_held_while_no_step_follows() -> None:
    simulation = Simulation()
    ended = weakref.ref(simulation.see(2, CAT, 2, max_new_tokens=1))
    simulation.finish()
    simulation.outcomes.clear()
    simulation.device.sequences.clear()
    simulation.device.num_computed.clear()
    gc.collect()
    assert ended() is None
    assert simulation.device.features


def test_sequences_of_a_group_that_start_later_have_the_features() -> None:
    simulation = Simulation(max_sequences=2, block_size=4)
    group = simulation.see(2, CAT, 2, num_return_sequences=5, max_new_tokens=3)
    simulation.finish()
    assert simulation.lengths(group) == [3] * 5
    assert len(simulation.device.towers) == 1
    simulation.rest()


def test_images_of_ended_groups_give_way_to_later_ones() -> None:
    simulation = Simulation(spare_image_tokens=20)
    most = 0
    for image in ids(b"a", 12):
        simulation.see(2, image, 2, max_new_tokens=1)
        simulation.finish()
        most = max(most, len(simulation.device.features))
    assert most <= 3
    simulation.rest()


@pytest.mark.parametrize("is_late", [False, True])
def test_no_tower_runs_for_a_group_that_has_ended(is_late: bool) -> None:
    simulation = Simulation()
    group = simulation.see(1, *ids(b"a", 2), max_new_tokens=1)
    simulation.step()
    if is_late:
        group.deadline_s = 0.0
    else:
        cancel(group)
    simulation.finish()
    assert simulation.error_code(group) == ("deadline_exceeded" if is_late else "cancelled")
    assert len(simulation.device.towers) == 1
    simulation.rest()


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_tower_that_raises_ends_its_own_group_and_nobody_is_computed_again(recomputes: bool) -> None:
    simulation = Simulation(recomputes=recomputes)
    others = simulation.submit(3, 4, max_new_tokens=5)
    simulation.step()
    simulation.device.is_blind = lambda image: image.digest.startswith(DOG)
    blind, seeing = simulation.see(2, DOG, 3), simulation.see(2, CAT, 3, max_new_tokens=5)
    simulation.finish()
    assert simulation.error_code(blind) == "generation_failed"
    assert [simulation.lengths(group) for group in (*others, seeing)] == [[5]] * 3
    assert simulation.observer.preempted == []
    simulation.rest()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_images_of_a_failed_step_are_sent_again(runs_ahead: bool) -> None:
    simulation = Simulation(runs_ahead=runs_ahead)
    groups = [simulation.see(2, image, 3, max_new_tokens=4) for image in (CAT, DOG)]
    simulation.steps(2)
    simulation.device.fails = lambda _: fail(simulation)
    simulation.step()
    simulation.device.fails = lambda _: False
    simulation.finish()
    assert [simulation.lengths(group) for group in groups] == [[4], [4]]
    assert len(simulation.device.towers) > 2


# --- the prefix cache ------------------------------------------------------------------------------------------------


def caching(**traits: Any) -> Simulation:
    return Simulation(block_size=4, caches_prefixes=True, **traits)


def test_the_same_image_asked_again_computes_neither_tower_nor_prefill() -> None:
    simulation = caching()
    for steps in ([[], [16], [3]], [[3]]):
        simulation.see(5, CAT, 6, max_new_tokens=1)
        assert simulation.finish() == steps
    assert len(simulation.device.towers) == 1


def test_another_image_of_the_same_size_shares_the_blocks_before_it_alone() -> None:
    simulation = caching()
    simulation.see(5, CAT, 6, max_new_tokens=1)
    simulation.finish()
    simulation.see(5, DOG, 6, max_new_tokens=1)
    assert simulation.finish() == [[], [15]]  # the second block has the first three features
    assert len(simulation.device.towers) == 2


def test_an_image_that_only_begins_in_a_block_counts() -> None:
    simulation = caching()
    for image in (CAT, DOG):
        simulation.see(7, image, 6, max_new_tokens=1)
    simulation.submit([3] * 8, max_new_tokens=1)
    simulation.finish()
    assert sum(simulation.device.num_computed.values()) == 21 + 17 + 4


def test_the_rest_of_an_image_needs_its_features_if_it_is_the_last_token_alone() -> None:
    simulation = caching()
    for _ in range(2):
        group = simulation.see(5, CAT, max_new_tokens=2)
        simulation.finish()
        simulation.rest()
        assert simulation.lengths(group) == [2]
    assert len(simulation.device.towers) == 2


def test_equal_prompts_with_images_that_arrive_together_are_computed_once() -> None:
    simulation = caching()
    groups = [simulation.see(5, CAT, 8, max_new_tokens=1) for _ in range(3)]
    simulation.finish()
    assert sum(simulation.device.num_computed.values()) == 21 + 2
    assert [simulation.lengths(group) for group in groups] == [[1]] * 3
    assert len(simulation.device.towers) == 1


def test_another_takes_over_a_prefix_whose_tower_has_failed() -> None:
    simulation = caching()
    failures = [True, False]
    simulation.device.is_blind = lambda _: failures.pop(0)
    first, second = (simulation.see(5, CAT, 8, max_new_tokens=1) for _ in range(2))
    simulation.finish()
    assert simulation.error_code(first) == "generation_failed"
    assert simulation.lengths(second) == [1]


def test_a_prefix_does_not_end_within_an_image_whose_tokens_attend_to_each_other() -> None:
    simulation = caching(joins_images=True)
    for steps in ([[], [16]], [[], [16 - 4]]):
        simulation.see(5, CAT, 3, max_new_tokens=1)  # the image ends at 13, the last block of the cache at 12
        assert simulation.finish() == steps
    assert len(simulation.device.towers) == 1  # its features were still there
    simulation.see(5, CAT, 8, max_new_tokens=1)
    assert simulation.finish() == [[21 - 16]]


def test_salts_separate_images_too() -> None:
    simulation = caching()
    for salt in ("a", "b"):
        group = simulation.see(5, CAT, 8, max_new_tokens=1)
        group.cache_salt = salt
        simulation.finish()
    assert sum(simulation.device.num_computed.values()) == 42


# --- random schedules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_computes_every_token_with_its_feature(seed: int) -> None:
    source = random.Random(seed)
    simulation = Simulation(
        max_tokens=source.choice([64, 96, 300]),
        block_size=source.choice([1, 4]),
        max_sequences=source.choice([2, 5]),
        caches_prefixes=source.random() < 0.8,
        runs_ahead=source.random() < 0.5,
        joins_images=source.random() < 0.4,
        recomputes=source.random() < 0.8,
        chunk_sizes=ChunkSizes(source.choice([7, 16]), 6),
        recompute_length=source.choice([float("inf"), 30]),
        eos_ids=frozenset([0]),
    )
    simulation.device.fails = lambda _: source.random() < 0.03 and fail(simulation)
    simulation.device.is_blind = lambda image: image.digest.startswith(b"z") or source.random() < 0.02
    for _ in range(60):
        draw_request(simulation, source)
        for _ in range(source.randrange(4)):
            simulation.step()
        for group in simulation.scheduler.unfinished():
            if source.random() < 0.03:
                cancel(group)
    simulation.finish()
    assert len(simulation.outcomes) == 60
    assert sum(isinstance(outcome, list) for outcome in simulation.outcomes.values()) > 25
    simulation.rest()


def draw_request(simulation: Simulation, source: random.Random) -> None:
    options: Any = {"max_new_tokens": source.randrange(1, 9), "num_return_sequences": source.choice([1, 1, 1, 3])}
    options |= {"prompt_logprobs": 0} if source.random() < 0.1 else {}
    if source.random() < 0.3:
        simulation.submit(source.randrange(1, 30), **options)
        return
    parts: list[int | bytes] = [source.randrange(1, 9)]
    for _ in range(source.randrange(1, 4)):
        parts += [source.choice([b"abc", b"xyz", b"z" * 3, b"hello" * 2]), source.randrange(0, 7)]
    simulation.see(*parts, has_positions=source.random() < 0.5, **options)
