# SPDX-License-Identifier: Apache-2.0
"""The slots of kept states; `test_block_pool.py` has any schedule of sequences in them."""

from hf_triton.engine.block_pool import BlockPool
from hf_triton.engine.state_pool import NOT_KEPT, StatePool


def keep(states: StatePool, *names: bytes, is_passing: bool = False) -> None:
    for name in names:
        assert states.keep(name, states.reserve(), is_passing=is_passing)


def test_the_least_recently_used_state_makes_room() -> None:
    states = StatePool(5, 2)
    keep(states, b"first", b"second")
    assert states.use(b"first") == 5
    keep(states, b"third")
    assert [states.find(name) for name in (b"first", b"second", b"third")] == [5, None, 6]


def test_no_slot_is_taken_that_a_step_in_flight_writes() -> None:
    states = StatePool(0, 1)
    slot = states.reserve()
    assert states.reserve() == NOT_KEPT
    states.free(slot)
    states.free(slot)  # a second time changes nothing
    assert (states.reserve(), states.reserve()) == (slot, NOT_KEPT)


def test_a_decoding_sequence_replaces_its_states_until_another_uses_them() -> None:
    states = StatePool(0, 3)
    keep(states, b"own", b"used", is_passing=True)
    states.use(b"used")
    assert states.reserve_again(b"own") == 0
    assert states.find(b"own") is None
    assert [states.reserve_again(name) for name in (b"used", b"own", None)] == [NOT_KEPT] * 3


def test_of_two_equal_states_one_is_kept() -> None:
    states = StatePool(0, 2)
    keep(states, b"equal")
    assert not states.keep(b"equal", states.reserve())
    assert (states.find(b"equal"), states.reserve()) == (0, 1)


def test_states_go_with_their_block() -> None:
    pool = BlockPool(1, max_kept=1, states=StatePool(0, 2))
    block = pool.allocate()
    pool.publish(block, b"digest")
    keep(pool.states, b"digest")
    pool.release([block])
    pool.allocate()
    assert pool.states.find(b"digest") is None


def test_what_a_lost_step_was_to_write_is_not_kept() -> None:
    states = StatePool(0, 2)
    slot = states.reserve()
    states.clear()
    assert not states.keep(b"lost", slot)
    assert states.find(b"lost") is None


def test_memory_is_given_back_once_no_step_writes_to_it() -> None:
    states = StatePool(0, 2)
    slot = states.reserve()
    assert not states.give_back()
    states.keep(b"kept", slot)
    assert states.give_back()
    assert (states.num_touched, states.find(b"kept"), states.give_back()) == (0, None, False)
