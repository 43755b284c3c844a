# SPDX-License-Identifier: Apache-2.0
"""The memory of past texts: what it finds is the longest common prefix, and what it holds is what it says."""

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
    """Two layers whose keys and values tell every token and its place; the second has another shape of values."""
    tokens, places = torch.tensor(token_ids), torch.arange(len(token_ids))
    pairs = torch.stack([tokens, places], -1).expand(3, -1, -1)
    return CacheContents([(pairs.clone(), -pairs), (2 * pairs, -pairs.repeat(1, 1, 2))], states)


def running(token_ids: list[int]) -> Prefix:
    return Prefix(np.array(token_ids), contents_of(token_ids).first)


def num_common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def has_same_contents(found: CacheContents, wanted: CacheContents) -> bool:
    pairs = zip(found.layers, wanted.layers, strict=True)
    return all(torch.equal(*each) for one, other in pairs for each in zip(one, other, strict=True))


def held_texts(texts: list[list[int]], store: PrefixCache) -> list[list[int]]:
    """Those of `texts` that are held in full, by what can be found. Each lookup counts as a use."""
    found = [(text, store.find([*text, 2**40], [])) for text in texts]
    return [text for text, match in found if match is not None and match[0] == len(text)]


def text(number: int, length: int = MIN_PREFIX) -> list[int]:
    """Texts of different numbers have no beginning in common."""
    return [number] * length


def filled(*numbers: int, length: int = MIN_PREFIX) -> PrefixCache:
    store = PrefixCache()
    for number in numbers:
        store.add(text(number, length), contents_of(text(number, length)))
    return store


@pytest.mark.parametrize("seed", range(30))
def test_find_returns_the_longest_common_prefix(seed: int) -> None:
    source = random.Random(seed)
    # Two tokens only: many texts with long beginnings in common. Large ones: no order by bytes but the numbers' own.
    alphabet = source.sample([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1], 2)
    stems = [[source.choice(alphabet) for _ in range(60)] for _ in range(3)]

    def random_text() -> list[int]:
        stem = source.choice(stems)[: source.randrange(61)]
        return [*stem, *(source.choice(alphabet) for _ in range(source.randrange(1, 30)))]

    store, added = PrefixCache(), []
    for _ in range(80):
        added.append(random_text())
        store.add(added[-1], contents_of(added[-1]))
        context = random_text()
        rows = [random_text() for _ in range(source.randrange(4))]
        # A text that goes on from another one replaces it: whatever was added can still be found.
        longest = max(
            num_common(context[:-1], each) for each in (*(each for each in added if len(each) >= MIN_PREFIX), *rows, [])
        )
        found = store.find(context, map(running, rows))
        if longest < MIN_PREFIX:
            assert found is None
            continue
        assert found is not None
        num_cached, prefix = found
        assert num_cached == longest
        assert prefix.token_ids[:num_cached].tolist() == context[:num_cached]
        assert has_same_contents(prefix.read(num_cached), contents_of(context[:num_cached]))


def test_one_token_is_left_to_compute() -> None:
    store = filled(7, length=40)
    for length in (MIN_PREFIX + 1, 40, 41, 50):
        found = store.find(text(7, length), [])
        assert found is not None
        assert found[0] == min(length - 1, 40)
    assert store.find(text(7, MIN_PREFIX), []) is None


@pytest.mark.parametrize("context", [[], [1], [1] * 100])
def test_an_empty_store_finds_nothing(context: list[int]) -> None:
    assert PrefixCache().find(context, []) is None


def test_a_beginning_that_differs_is_not_shared_whatever_follows() -> None:
    store = filled(7, length=100)
    assert store.find([8, *text(7, 99)], [running([9, *text(7, 99)])]) is None
    assert store.find([*text(7, MIN_PREFIX - 1), 8, *text(7, 99)], []) is None


def test_a_text_shorter_than_the_least_worth_sharing_is_not_kept() -> None:
    store = filled(7, length=MIN_PREFIX - 1)
    assert store.num_tokens == 0


def test_a_running_text_is_found_where_it_shares_more() -> None:
    store = filled(7, length=20)
    longer, shorter = running(text(7, 30)), running(text(7, 18))
    assert store.find(text(7, 50), [shorter, longer]) == (30, longer)
    found = store.find(text(7, 50), [shorter])
    assert found is not None
    assert found[0] == 20


def test_a_text_replaces_the_one_that_it_goes_on_from() -> None:
    store = filled(1, 2)
    store.add([*text(1), 5, 6], contents_of([*text(1), 5, 6]))
    assert store.num_tokens == 2 * MIN_PREFIX + 2
    assert held_texts([text(1), [*text(1), 5, 6], text(2)], store) == [text(1), [*text(1), 5, 6], text(2)]


def test_a_text_that_another_goes_on_from_is_not_kept_twice() -> None:
    store = filled(1, length=30)
    for length in (MIN_PREFIX, 29, 30):
        store.add(text(1, length), contents_of(text(1, length)))
    assert store.num_tokens == 30


def test_texts_that_part_are_kept_both() -> None:
    store = PrefixCache()
    texts = [[*text(1), 2], [*text(1), 3], [*text(1), 256], [*text(1), 2**31]]
    for each in texts:
        store.add(each, contents_of(each))
    assert store.num_tokens == 4 * (MIN_PREFIX + 1)
    assert held_texts(texts, store) == texts


def test_the_least_recently_used_texts_leave_first() -> None:
    store = filled(1, 2, 3, 4)
    assert store.find(text(1, 50), []) is not None  # used by a lookup
    store.add(text(2), contents_of(text(2)))  # by being added again
    store.add(text(3)[:-1], contents_of(text(3)[:-1]))  # too short to count
    store.shrink(2 * MIN_PREFIX)
    assert store.num_tokens == 2 * MIN_PREFIX
    assert held_texts([text(number) for number in (1, 2, 3, 4)], store) == [text(1), text(2)]


def test_a_lookup_that_a_running_text_answers_uses_no_stored_one() -> None:
    store = filled(1, 2)
    store.find(text(1, 50), [running(text(1, 40))])
    store.shrink(MIN_PREFIX)
    assert held_texts([text(1), text(2)], store) == [text(2)]


@pytest.mark.parametrize(("to_tokens", "num_left"), [(1000, 4), (64, 4), (63, 3), (32, 2), (15, 0), (0, 0)])
def test_shrinking_drops_no_more_than_it_must(to_tokens: int, num_left: int) -> None:
    store = filled(1, 2, 3, 4)
    store.shrink(to_tokens)
    assert store.num_tokens == num_left * MIN_PREFIX
    assert len(held_texts([text(number) for number in (1, 2, 3, 4)], store)) == num_left


def test_clearing_drops_everything() -> None:
    store = filled(1, 2, 3)
    store.clear()
    assert store.num_tokens == 0
    assert store.find(text(1, 50), []) is None
    store.add(text(1), contents_of(text(1)))
    assert store.num_tokens == MIN_PREFIX


def test_a_text_that_was_found_can_be_read_after_it_was_dropped() -> None:
    store = filled(7, length=40)
    found = store.find(text(7, 30), [])
    store.clear()
    assert found is not None
    assert has_same_contents(found[1].read(29), contents_of(text(7, 29)))


@pytest.mark.parametrize("seed", range(10))
def test_the_count_of_tokens_is_that_of_the_texts_held(seed: int) -> None:
    source = random.Random(seed)
    store, stem = PrefixCache(), text(5, 80)
    texts: list[list[int]] = []
    for _ in range(200):
        end = [source.randrange(3) for _ in range(source.randrange(4))]
        texts.append([*stem[: source.randrange(MIN_PREFIX, 81)], *end])
        store.add(texts[-1], contents_of(texts[-1]))
        if source.random() < 0.1:
            store.shrink(source.randrange(store.num_tokens + 1))
        held = {tuple(each) for each in held_texts(texts, store)}
        ends = [one for one in held if not any(one != other and other[: len(one)] == one for other in held)]
        assert sum(map(len, ends)) == store.num_tokens


def test_contents_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="those of 20 tokens"):
        PrefixCache().add(text(7, 20), contents_of(text(7, 19)))


# --- whole texts -----------------------------------------------------------------------------------------------------

LEAST = 5
WEIGHT = 7


def states_of(token_ids: list[int]) -> list[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]]:
    return [({0: torch.tensor([token_ids])}, {})]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_whole_text_is_found_with_its_own_states(seed: int) -> None:
    source = random.Random(seed)
    stems = [[source.randrange(2) for _ in range(40)] for _ in range(3)]

    def random_text() -> list[int]:
        return [
            *source.choice(stems)[: source.randrange(41)],
            *(source.randrange(2) for _ in range(source.randrange(4))),
        ]

    store, added = HybridPrefixCache(LEAST, WEIGHT), list[list[int]]()
    for _ in range(60):
        new, context = random_text(), [*random_text(), 1, 0]
        store.add(new, contents_of(new, states_of(new)))
        added += [new] if len(new) >= LEAST and new not in added else []
        assert store.num_tokens == sum(len(each) + WEIGHT for each in added)
        whole = max(
            (each for each in added if context[: len(each)] == each and len(each) < len(context) - 1),
            key=len,
            default=[],
        )
        found = store.find(context, [])
        assert (found[0] if found else 0) == len(whole)
        if found:
            assert has_same_contents(found[1].read(len(whole)), contents_of(whole))
            assert found[1].read(len(whole)).states[0][0][0].tolist() == [whole]
        most = max((num_common(context[:-2], each) for each in added), default=0)
        assert store.pause(context, len(whole)) == (most if most - len(whole) >= LEAST else None)


def test_the_least_recently_used_whole_texts_are_dropped_first() -> None:
    store = HybridPrefixCache(LEAST, WEIGHT)
    for number in (1, 2, 3):
        store.add(text(number, 10), contents_of(text(number, 10), states_of(text(number, 10))))
    store.add(text(1, 10), contents_of(text(1, 10), states_of(text(1, 10))))  # known, and used by that
    assert store.find([*text(2, 10), 9, 9], []) is not None
    store.shrink(2 * (10 + WEIGHT))
    assert [store.find([*text(number, 10), 9, 9], []) is not None for number in (1, 2, 3)] == [True, True, False]
    store.clear()
    assert store.num_tokens == 0


def test_what_texts_have_in_common_outlives_them() -> None:
    store, common = HybridPrefixCache(LEAST, WEIGHT), text(1, 10)
    for last in (2, 3, 4):
        for each in ([*common, last], common):
            if not store.touch(each):
                store.shrink(2 * (11 + WEIGHT) - len(each) - WEIGHT)
                store.add(each, contents_of(each, states_of(each)))
        found = store.find([*common, 9, 9, 9], [])
        assert found is not None
        assert found[0] == len(common)
