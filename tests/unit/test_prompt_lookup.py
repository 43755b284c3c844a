# SPDX-License-Identifier: Apache-2.0
"""What a sequence proposes, how many tokens of it, and when it proposes none."""

import math
import random

from hf_triton.engine.prompt_lookup import PromptLookup, PromptNgrams, ProposalCosts
from tests.support.scheduling import Simulation

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_what_followed_the_last_tokens_is_proposed() -> None:
    lookup = PromptLookup([*TEXT, 30, 3])
    assert lookup.propose(8, 0.01) == []
    lookup.follow([4])
    assert lookup.propose(3, 0.01) == [5, 6, 7]
    lookup.follow([4, 5, 6])
    assert lookup.propose(3, 0.01) == [7, 8, 9]


def test_a_text_that_repeats_its_end_is_proposed_on_and_on() -> None:
    assert PromptLookup([7, 1, 2, 1, 2, 1]).propose(6, 0.001) == [2, 1, 2, 1, 2, 1]


def test_the_place_that_came_true_goes_on_where_its_last_tokens_stand_elsewhere() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 20, 4, 5, 6, 21, 1, 2, 3])
    lookup.follow([4, 5, 6])
    assert lookup.propose(1, 0.01) == [20], "and not 21, which the last two tokens alone are followed by"


def test_the_dearer_a_token_and_the_less_came_true_the_fewer_are_proposed() -> None:
    lookup = PromptLookup([*TEXT, 1, 2, 3])
    assert [len(lookup.propose(8, cost)) for cost in (0.001, 0.1, 0.3, 0.6)] == [8, 3, 1, 0]
    lookup.follow([4, 5, 6, 7])
    assert len(lookup.propose(8, 0.3)) == 3


def test_a_text_whose_proposals_fail_proposes_none_until_they_come_true_again() -> None:
    source, completion = random.Random(0), [1, 2, 3]
    lookup = PromptLookup(TEXT * 2)
    for _ in range(30):
        completion += [1, 2, 3, source.randrange(100, 200)]
        lookup.follow(completion)
    assert lookup.propose(8, 0.01) == []
    completion += TEXT[:5]
    lookup.follow(completion)
    assert lookup.propose(8, 0.01)[:1] == [6]


def test_a_context_shorter_than_what_is_looked_for_proposes_none() -> None:
    lookup = PromptLookup([1])
    lookup.follow([1])
    assert lookup.propose(8, 0.01) == []


def test_an_n_gram_of_a_prompt_is_found_at_its_last_place() -> None:
    source = random.Random(0)
    for _ in range(200):
        ids = [source.choice([1, 2, 5_000_000]) for _ in range(source.randrange(25))]
        ngrams, ngram = PromptNgrams(ids), tuple(source.choice([1, 2, 5_000_000]) for _ in range(2))
        places = [at for at in range(2, len(ids)) if tuple(ids[at - 2 : at]) == ngram]
        assert ngrams.find(ngram) == max(places, default=None)


def test_costs_between_the_numbers_that_were_timed() -> None:
    costs = ProposalCosts(8, [(1, 0.25), (5, 0.75)])
    assert [costs.cost(number) for number in (1, 3, 5, 6)] == [0.25, 0.5, 0.75, math.inf]


class Wrong:
    """Proposes up to so many tokens, which no sequence takes."""

    def __init__(self, most: int) -> None:
        self._most = most

    def follow(self, completion: list[int]) -> None: ...

    def propose(self, most: int, cost: float) -> list[int]:
        return [9] * min(most, self._most)


def test_no_sequence_is_preempted_for_proposals_of_the_step_in_flight() -> None:
    simulation = Simulation(
        20,
        runs_ahead=True,
        caches_prefixes=False,
        proposals=ProposalCosts(6, [(5, 0.0)]),
        lookup=lambda sequence: Wrong(6 if sequence.group.params.max_new_tokens == 12 else 0),
    )
    groups = [*simulation.submit(5, max_new_tokens=8), *simulation.submit(5, max_new_tokens=12)]
    simulation.finish()
    assert [simulation.lengths(group) for group in groups] == [[8], [12]]
    assert simulation.observer.preempted == []
