# SPDX-License-Identifier: Apache-2.0
"""The blocks of a KV cache: who holds them, which prefixes they keep, and any schedule of sequences in them."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.block_pool import BlockPool, next_digest
from hf_triton.engine.prompt_lookup import ProposalCosts
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.runner.device import ChunkSizes
from tests.support.scheduling import VOCABULARY, FakeBudget, FakeLookup, Simulation, next_token


def allocate(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def keep(pool: BlockPool, *names: str) -> list[int]:
    """Publish and release a block for each name, the first least recently used."""
    blocks = allocate(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name.encode())
        pool.release([block])
    return blocks


def test_blocks_are_given_until_none_is_free() -> None:
    pool = BlockPool(3, max_kept=3)
    assert sorted(allocate(pool, 3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_shared_block_is_free_once_all_have_released_it() -> None:
    pool = BlockPool(1, max_kept=1)
    [block] = allocate(pool, 1)
    pool.share(block)
    pool.release([block])
    assert (pool.num_free, pool.is_held(block)) == (0, True)
    pool.release([block])
    assert (pool.num_free, pool.is_held(block)) == (1, False)


def test_released_blocks_without_a_prefix_are_taken_before_memory_grows() -> None:
    pool = BlockPool(10, max_kept=10)
    blocks = allocate(pool, 4)
    pool.release(blocks)
    assert sorted(allocate(pool, 4)) == sorted(blocks)
    assert pool.num_touched == 4


def test_kept_blocks_are_found_until_they_are_taken_the_least_recently_used_first() -> None:
    pool = BlockPool(3, max_kept=3)
    first, second, third = keep(pool, "first", "second", "third")
    pool.share(first)  # used again
    pool.release([first])
    assert allocate(pool, 2) == [second, third]
    assert [pool.find(name) for name in (b"first", b"second", b"third")] == [first, None, None]


def test_fresh_blocks_are_taken_until_enough_are_kept() -> None:
    pool = BlockPool(10, max_kept=2)
    first, second = keep(pool, "first", "second")
    assert allocate(pool, 1) == [first]
    assert allocate(pool, 1) == [2]  # one is kept now
    assert pool.find(b"second") == second


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(2, max_kept=2)
    table = allocate(pool, 2)
    for block, name in zip(table, (b"beginning", b"end"), strict=True):
        pool.publish(block, name)
    pool.release(table)
    pool.allocate()
    assert (pool.find(b"beginning"), pool.find(b"end")) == (table[0], None)


def test_of_two_equal_blocks_one_is_kept() -> None:
    pool = BlockPool(2, max_kept=2)
    one, other = allocate(pool, 2)
    pool.publish(one, b"equal")
    pool.publish(other, b"equal")
    pool.release([one, other])
    assert (pool.find(b"equal"), pool.num_kept) == (one, 1)
    assert allocate(pool, 1) == [other]


def test_cleared_prefixes_are_not_found() -> None:
    pool = BlockPool(3, max_kept=3)
    keep(pool, "kept")
    [held] = allocate(pool, 1)
    pool.publish(held, b"held")
    pool.clear()
    assert (pool.find(b"kept"), pool.find(b"held"), pool.num_kept) == (None, None, 0)
    pool.release([held])
    assert pool.num_free == 3


def test_digests_depend_on_every_token_before_and_on_the_salt() -> None:
    digests = {
        next_digest(next_digest(salt, [first, 1]), [2, last])
        for salt in (b"", b"a")
        for first in (1, 2)
        for last in (1, 2)
    }
    assert len(digests) == 8


def memory_of(allowed: int, **options: Any) -> tuple[BlockMemory, Any, list[int]]:
    """A memory of 10 blocks of 4 tokens, its budget, and the blocks given back."""
    budget: Any = FakeBudget(allowed)
    given_back: list[int] = []
    return BlockMemory(budget, 10, 4, max_kept=10, give_back=given_back.extend, **options), budget, given_back


def test_a_smaller_budget_takes_blocks_that_nobody_holds() -> None:
    memory, budget, given_back = memory_of(40)
    kept = keep(memory.pool, "old", "new")
    held = allocate(memory.pool, 3)
    memory.pool.release(held[2:])
    budget.allowed = 15
    memory.refresh(0)
    assert given_back == [held[2], kept[0]]
    assert (memory.pool.num_touched, memory.pool.num_free) == (3, 1)
    budget.allowed = 0
    memory.refresh(0)
    assert given_back == [held[2], *kept]
    assert (memory.pool.num_touched, memory.pool.num_free) == (2, 0)  # the rest is held
    budget.allowed = 40
    memory.refresh(0)
    assert len(set(allocate(memory.pool, 8)) - set(held[:2])) == 8


def test_states_take_the_memory_of_blocks() -> None:
    memory, _, _ = memory_of(40, slot_tokens=10)
    memory.refresh(2)
    assert memory.pool.num_free == 5
    assert memory.has_room(5, 2)
    assert not memory.has_room(3, 3)
    assert memory.has_room(2, 3)


def test_a_fixed_memory_keeps_its_blocks() -> None:
    memory, budget, given_back = memory_of(40, is_fixed=True)
    keep(memory.pool, "kept")
    budget.allowed = 0
    memory.refresh(0)
    memory.rest()
    assert (memory.pool.num_free, given_back) == (10, [])


def test_an_idle_engine_keeps_no_more_prefixes_than_its_share() -> None:
    memory, _, given_back = memory_of(40)
    kept = keep(memory.pool, "old", "new", "newest")
    memory.pool.max_kept = 2
    memory.rest()
    assert given_back == kept[:1]
    assert (memory.pool.num_kept, memory.pool.num_touched) == (2, 2)


def test_an_idle_engine_keeps_prefixes_alone() -> None:
    memory, _, given_back = memory_of(40)
    [kept] = keep(memory.pool, "kept")
    blocks = allocate(memory.pool, 3)
    memory.pool.release(blocks)
    memory.rest()
    assert sorted(given_back) == blocks
    assert memory.pool.find(b"kept") == kept


class RandomSchedule:
    """Random requests with common prefixes on random models and memories, of which some are cancelled and some fail."""

    def __init__(self, seed: int) -> None:
        self.source = source = random.Random(seed)
        self.has_failed = False
        has_states = source.random() < 0.5
        runs_ahead = source.random() < 0.5
        host_rate = source.choice([0.0, 0.2, 0.6])
        self.max_tokens = source.randint(24, 60)
        self.simulation = Simulation(
            self.max_tokens,
            source.randint(1, 5),
            block_size=source.randint(2 if has_states else 1, 5),
            num_kept_states=source.randrange(8) if has_states else 0,
            kept_state_tokens=source.choice([4, 8, 4096]),
            max_kept=source.randrange(12),
            slot_tokens=source.choice([0, 4]) if has_states else 0,
            needs_host=lambda _: source.random() < host_rate,
            eos_ids=frozenset(source.choice([[], [0]])),
            chunk_sizes=ChunkSizes(source.randint(4, 20), source.randint(2, 8)),
            has_states=has_states,
            lookup=lambda sequence: FakeLookup(sequence, source),
            proposals=None if has_states or source.random() < 0.5 else ProposalCosts(source.randint(1, 6), [(5, 0.0)]),
            caches_prefixes=True,
            runs_ahead=runs_ahead,
            **source.choice([{}, {}, {"recomputes": False}, {"recompute_length": 12}]),
        )
        self.simulation.device.fails = lambda _: self._fails()
        self._failure_rate = source.choice([0.0, 0.0, 0.05])
        self._stems = [[source.randrange(VOCABULARY) for _ in range(20)] for _ in range(2)]
        self.groups: list[SequenceGroup] = []
        self.cancelled: set[SequenceGroup] = set()

    def _fails(self) -> bool:
        is_failing = self.source.random() < self._failure_rate
        self.has_failed = self.has_failed or is_failing
        return is_failing

    def run(self) -> None:
        source, simulation = self.source, self.simulation
        shrinks = source.random() < 0.3
        for _ in range(source.randint(1, 6)):
            self._submit()
            for _ in range(source.randrange(8)):
                simulation.step()
            if shrinks:
                simulation.budget.allowed = source.randint(12, self.max_tokens)
            if source.random() < 0.2:
                self._cancel(source.choice(self.groups))
        simulation.budget.allowed = self.max_tokens
        simulation.finish()
        for group in self.groups:
            self._check(group)

    def _submit(self) -> None:
        source = self.source
        end = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 4))]
        prompt = [*source.choice(self._stems)[: source.choice([0, 8, 14])], *end]
        self.groups += self.simulation.submit(
            prompt,
            max_new_tokens=source.randint(1, 8),
            num_return_sequences=source.choice([1, 1, 1, 2, 4]),
            prompt_logprobs=source.choice([None, None, None, 1]),
            adapter=source.choice([None, None, SimpleNamespace(key="a")]),
        )

    def _cancel(self, group: SequenceGroup) -> None:
        group.listener.is_cancelled = lambda: True  # type: ignore[method-assign]
        self.cancelled.add(group)

    def _check(self, group: SequenceGroup) -> None:
        """Its tokens are those of each sequence alone, unless there is a reason for an error."""
        outcome = self.simulation.outcomes[group]
        if not isinstance(outcome, list):
            assert outcome.code == "out_of_memory" or group in self.cancelled or self.has_failed
            return
        for index, completion in enumerate(outcome):
            assert completion.token_ids == self._expected(group, index)
            if group.params.prompt_logprobs is not None:
                assert completion.prompt_logprobs == list(range(len(group.prompt_ids) - 1))

    def _expected(self, group: SequenceGroup, index: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < group.params.max_new_tokens:
            token = next_token(group.prompt_ids + tokens, index)
            if token in group.eos_ids:
                break
            tokens.append(token)
        return tokens


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_any_schedule_loses_no_block_and_shares_none_wrongly(first: int) -> None:
    """`Simulation` checks every block after every step, and that every token attends to its own sequence."""
    for seed in range(first, first + 100):
        RandomSchedule(seed).run()


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_thousands_of_schedules_lose_no_block(first: int) -> None:
    for seed in range(first, first + 1000):
        RandomSchedule(seed).run()
