# SPDX-License-Identifier: Apache-2.0
"""The prefix cache finds the longest common prefix, and counts what it stores."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hf_triton.engine.hybrid_prefix_cache import HybridPrefixCache
from hf_triton.engine.prefix_cache import MIN_PREFIX, Prefix, PrefixCache
from hf_triton.runner.contents import CacheContents
from hf_triton.runner.states import SequenceStates


def contents_of(token_ids: list[int], states: Sequence[SequenceStates] = ()) -> CacheContents:
    """Two layers whose keys and values show every token and its position; the second has another shape of values."""
    tokens, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
    pairs = torch.stack([tokens, positions], -1).expand(3, -1, -1)
    return CacheContents([(pairs.clone(), -pairs), (2 * pairs, -pairs.repeat(1, 1, 2))], states)


def running(token_ids: list[int]) -> Prefix:
    return Prefix(np.array(token_ids), contents_of(token_ids).first)


def num_common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def has_same_contents(match: CacheContents, expected: CacheContents) -> bool:
    pairs = zip(match.layers, expected.layers, strict=True)
    return all(torch.equal(*each) for one, other in pairs for each in zip(one, other, strict=True))


def stored_contexts(contexts: list[list[int]], store: PrefixCache) -> list[list[int]]:
    """Those of `contexts` that are stored in full, by what can be found. Each lookup counts as a use."""
    matches = [(context, store.find([*context, 2**40], [])) for context in contexts]
    return [context for context, match in matches if match is not None and match[0] == len(context)]


def tokens_of(number: int, length: int = MIN_PREFIX) -> list[int]:
    """Contexts of different numbers have no common prefix."""
    return [number] * length


def filled(*numbers: int, length: int = MIN_PREFIX) -> PrefixCache:
    store = PrefixCache()
    for number in numbers:
        store.add(tokens_of(number, length), contents_of(tokens_of(number, length)))
    return store


@pytest.mark.parametrize("seed", range(30))
def test_find_returns_the_longest_common_prefix(seed: int) -> None:
    source = random.Random(seed)
    # Only two tokens, so that many contexts have long common prefixes; large ones, whose bytes sort otherwise.
    alphabet = source.sample([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1], 2)
    stems = [[source.choice(alphabet) for _ in range(60)] for _ in range(3)]

    def random_context() -> list[int]:
        stem = source.choice(stems)[: source.randrange(61)]
        return [*stem, *(source.choice(alphabet) for _ in range(source.randrange(1, 30)))]

    store, added = PrefixCache(), []
    for _ in range(80):
        added.append(random_context())
        store.add(added[-1], contents_of(added[-1]))
        context = random_context()
        running_contexts = [random_context() for _ in range(source.randrange(4))]
        # A context that continues a stored one replaces it, so all that were added can still be found.
        longest = max(
            num_common(context[:-1], each)
            for each in (*(each for each in added if len(each) >= MIN_PREFIX), *running_contexts, [])
        )
        match = store.find(context, map(running, running_contexts))
        if longest < MIN_PREFIX:
            assert match is None
            continue
        assert match is not None
        num_cached, prefix = match
        assert num_cached == longest
        assert prefix.token_ids[:num_cached].tolist() == context[:num_cached]
        assert has_same_contents(prefix.read(num_cached), contents_of(context[:num_cached]))


def test_one_token_is_left_to_compute() -> None:
    store = filled(7, length=40)
    for length in (MIN_PREFIX + 1, 40, 41, 50):
        match = store.find(tokens_of(7, length), [])
        assert match is not None
        assert match[0] == min(length - 1, 40)
    assert store.find(tokens_of(7, MIN_PREFIX), []) is None


@pytest.mark.parametrize("context", [[], [1], [1] * 100])
def test_an_empty_cache_finds_nothing(context: list[int]) -> None:
    assert PrefixCache().find(context, []) is None


def test_contexts_with_another_first_token_share_nothing() -> None:
    store = filled(7, length=100)
    assert store.find([8, *tokens_of(7, 99)], [running([9, *tokens_of(7, 99)])]) is None
    assert store.find([*tokens_of(7, MIN_PREFIX - 1), 8, *tokens_of(7, 99)], []) is None


def test_a_context_below_the_least_length_is_not_stored() -> None:
    store = filled(7, length=MIN_PREFIX - 1)
    assert store.num_tokens == 0


def test_a_running_sequence_is_found_if_it_shares_more() -> None:
    store = filled(7, length=20)
    longer, shorter = running(tokens_of(7, 30)), running(tokens_of(7, 18))
    assert store.find(tokens_of(7, 50), [shorter, longer]) == (30, longer)
    match = store.find(tokens_of(7, 50), [shorter])
    assert match is not None
    assert match[0] == 20


def test_a_context_replaces_the_one_that_it_continues() -> None:
    store = filled(1, 2)
    store.add([*tokens_of(1), 5, 6], contents_of([*tokens_of(1), 5, 6]))
    assert store.num_tokens == 2 * MIN_PREFIX + 2
    assert stored_contexts([tokens_of(1), [*tokens_of(1), 5, 6], tokens_of(2)], store) == [
        tokens_of(1),
        [*tokens_of(1), 5, 6],
        tokens_of(2),
    ]


def test_a_context_that_a_stored_one_continues_is_not_stored() -> None:
    store = filled(1, length=30)
    for length in (MIN_PREFIX, 29, 30):
        store.add(tokens_of(1, length), contents_of(tokens_of(1, length)))
    assert store.num_tokens == 30


def test_contexts_that_diverge_are_all_stored() -> None:
    store = PrefixCache()
    contexts = [[*tokens_of(1), 2], [*tokens_of(1), 3], [*tokens_of(1), 256], [*tokens_of(1), 2**31]]
    for each in contexts:
        store.add(each, contents_of(each))
    assert store.num_tokens == 4 * (MIN_PREFIX + 1)
    assert stored_contexts(contexts, store) == contexts


def test_the_least_recently_used_contexts_are_dropped_first() -> None:
    store = filled(1, 2, 3, 4)
    assert store.find(tokens_of(1, 50), []) is not None  # used by a lookup
    store.add(tokens_of(2), contents_of(tokens_of(2)))  # by being added again
    store.add(tokens_of(3)[:-1], contents_of(tokens_of(3)[:-1]))  # too short to count
    store.shrink(2 * MIN_PREFIX)
    assert store.num_tokens == 2 * MIN_PREFIX
    assert stored_contexts([tokens_of(number) for number in (1, 2, 3, 4)], store) == [tokens_of(1), tokens_of(2)]


def test_a_lookup_answered_by_a_running_sequence_uses_no_stored_one() -> None:
    store = filled(1, 2)
    store.find(tokens_of(1, 50), [running(tokens_of(1, 40))])
    store.shrink(MIN_PREFIX)
    assert stored_contexts([tokens_of(1), tokens_of(2)], store) == [tokens_of(2)]


@pytest.mark.parametrize(("to_tokens", "num_left"), [(1000, 4), (64, 4), (63, 3), (32, 2), (15, 0), (0, 0)])
def test_shrinking_drops_no_more_than_it_must(to_tokens: int, num_left: int) -> None:
    store = filled(1, 2, 3, 4)
    store.shrink(to_tokens)
    assert store.num_tokens == num_left * MIN_PREFIX
    assert len(stored_contexts([tokens_of(number) for number in (1, 2, 3, 4)], store)) == num_left


def test_clearing_drops_everything() -> None:
    store = filled(1, 2, 3)
    store.clear()
    assert store.num_tokens == 0
    assert store.find(tokens_of(1, 50), []) is None
    store.add(tokens_of(1), contents_of(tokens_of(1)))
    assert store.num_tokens == MIN_PREFIX


def test_a_prefix_can_be_read_after_it_was_dropped() -> None:
    store = filled(7, length=40)
    match = store.find(tokens_of(7, 30), [])
    store.clear()
    assert match is not None
    assert has_same_contents(match[1].read(29), contents_of(tokens_of(7, 29)))


@pytest.mark.parametrize("seed", range(10))
def test_the_token_count_is_that_of_the_stored_contexts(seed: int) -> None:
    source = random.Random(seed)
    store, stem = PrefixCache(), tokens_of(5, 80)
    contexts: list[list[int]] = []
    for _ in range(200):
        end = [source.randrange(3) for _ in range(source.randrange(4))]
        contexts.append([*stem[: source.randrange(MIN_PREFIX, 81)], *end])
        store.add(contexts[-1], contents_of(contexts[-1]))
        if source.random() < 0.1:
            store.shrink(source.randrange(store.num_tokens + 1))
        stored = {tuple(each) for each in stored_contexts(contexts, store)}
        ends = [one for one in stored if not any(one != other and other[: len(one)] == one for other in stored)]
        assert sum(map(len, ends)) == store.num_tokens


def test_contents_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="those of 20 tokens"):
        PrefixCache().add(tokens_of(7, 20), contents_of(tokens_of(7, 19)))


# --- whole contexts --------------------------------------------------------------------------------------------------

LEAST = 5
WEIGHT = 7


def states_of(token_ids: list[int]) -> list[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]]:
    return [({0: torch.tensor([token_ids])}, {})]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_whole_context_is_found_with_its_states(seed: int) -> None:
    source = random.Random(seed)
    stems = [[source.randrange(2) for _ in range(40)] for _ in range(3)]

    def random_context() -> list[int]:
        return [
            *source.choice(stems)[: source.randrange(41)],
            *(source.randrange(2) for _ in range(source.randrange(4))),
        ]

    store, added = HybridPrefixCache(LEAST, WEIGHT), list[list[int]]()
    for _ in range(60):
        new, context = random_context(), [*random_context(), 1, 0]
        store.add(new, contents_of(new, states_of(new)))
        added += [new] if len(new) >= LEAST and new not in added else []
        assert store.num_tokens == sum(len(each) + WEIGHT for each in added)
        whole = max(
            (each for each in added if context[: len(each)] == each and len(each) < len(context) - 1),
            key=len,
            default=[],
        )
        match = store.find(context, [])
        assert (match[0] if match else 0) == len(whole)
        if match:
            assert has_same_contents(match[1].read(len(whole)), contents_of(whole))
            assert match[1].read(len(whole)).states[0][0][0].tolist() == [whole]
        most = max((num_common(context[:-2], each) for each in added), default=0)
        assert store.pause(context, len(whole)) == (most if most - len(whole) >= LEAST else None)


def test_the_least_recently_used_whole_contexts_are_dropped_first() -> None:
    store = HybridPrefixCache(LEAST, WEIGHT)
    for number in (1, 2, 3):
        store.add(tokens_of(number, 10), contents_of(tokens_of(number, 10), states_of(tokens_of(number, 10))))
    store.add(tokens_of(1, 10), contents_of(tokens_of(1, 10), states_of(tokens_of(1, 10))))  # known, and used by that
    assert store.find([*tokens_of(2, 10), 9, 9], []) is not None
    store.shrink(2 * (10 + WEIGHT))
    assert [store.find([*tokens_of(number, 10), 9, 9], []) is not None for number in (1, 2, 3)] == [True, True, False]
    store.clear()
    assert store.num_tokens == 0


def test_a_common_prefix_outlives_its_contexts() -> None:
    store, common = HybridPrefixCache(LEAST, WEIGHT), tokens_of(1, 10)
    for last in (2, 3, 4):
        for each in ([*common, last], common):
            if not store.touch(each):
                store.shrink(2 * (11 + WEIGHT) - len(each) - WEIGHT)
                store.add(each, contents_of(each, states_of(each)))
        match = store.find([*common, 9, 9, 9], [])
        assert match is not None
        assert match[0] == len(common)
