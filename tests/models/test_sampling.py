# SPDX-License-Identifier: Apache-2.0
"""The sampler beside transformers' own processors, on random logits, alone and mixed with other rows."""

import random

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_triton.engine.sampling import RowSampler, pick_tokens
from hf_triton.generation import SamplingPlan

VOCABULARY = 200
NUM_DRAWS = 4000


def transformers_distribution(logits: torch.Tensor, plan: SamplingPlan, seen: list[int]) -> torch.Tensor:
    """The probabilities that transformers would draw from, `[vocabulary]`."""
    ids, scores = torch.tensor([seen]), logits.unsqueeze(0).clone()
    if plan.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(plan.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(plan.temperature)(ids, scores)
    if plan.top_k:
        scores = TopKLogitsWarper(plan.top_k)(ids, scores)
    if plan.top_p < 1.0:
        scores = TopPLogitsWarper(plan.top_p)(ids, scores)
    return scores.softmax(-1)[0]


def random_plan(source: random.Random, **fixed: object) -> SamplingPlan:
    choices = {
        "temperature": source.choice([0.3, 0.7, 1.0, 1.7]),
        "top_p": source.choice([0.2, 0.7, 0.95, 1.0]),
        "top_k": source.choice([0, 1, 3, 40]),
        "repetition_penalty": source.choice([1.0, 1.3, 0.8]),
        "seed": source.randrange(2**63),
    }
    return SamplingPlan(8, do_sample=True, **(choices | fixed))  # type: ignore[arg-type]


def sampler(plan: SamplingPlan, seen: list[int]) -> RowSampler:
    return RowSampler(plan, 0, seen)


@pytest.mark.parametrize("seed", range(12))
def test_draws_follow_transformers_distribution(seed: int) -> None:
    source = random.Random(seed)
    plan, seen = random_plan(source), [source.randrange(VOCABULARY) for _ in range(30)]
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = transformers_distribution(logits, plan, seen)
    row = sampler(plan, seen)
    drawn = torch.tensor([pick_tokens(logits.unsqueeze(0), [row])[0] for _ in range(NUM_DRAWS)])
    found = torch.bincount(drawn, minlength=VOCABULARY) / NUM_DRAWS
    assert set(drawn.tolist()) <= set(wanted.nonzero().flatten().tolist())  # nothing outside the kept tokens
    # A frequency of 4000 draws strays from its probability by more than 5 sigma once in 1.7 million.
    sigma = (wanted * (1 - wanted) / NUM_DRAWS).sqrt()
    assert bool(((found - wanted).abs() <= 5 * sigma + 1e-3).all())


def test_a_rows_draws_do_not_depend_on_the_other_rows() -> None:
    source = random.Random(0)
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    rows = [(random_plan(source), [source.randrange(VOCABULARY) for _ in range(9)]) for _ in range(39)]
    rows.append((SamplingPlan(8), []))
    together = pick_tokens(logits, [sampler(*row) for row in rows])
    alone = [pick_tokens(logits[index : index + 1], [sampler(*row)])[0] for index, row in enumerate(rows)]
    assert together == alone


def test_greedy_rows_take_the_likeliest_token_after_the_penalty() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0], [1.0, 4.0, 3.0], [-1.0, -4.0, -0.9]])
    rows = [
        sampler(SamplingPlan(1), []),
        sampler(SamplingPlan(1, repetition_penalty=2.0), [1]),
        sampler(SamplingPlan(1, repetition_penalty=2.0), [2]),
    ]
    assert pick_tokens(logits, rows) == [1, 2, 0]


def test_copies_of_one_seed_have_streams_of_their_own() -> None:
    logits = torch.zeros(1, VOCABULARY)
    plan = SamplingPlan(1, do_sample=True, seed=3)
    picks = [pick_tokens(logits, [RowSampler(plan, copy, [])])[0] for copy in range(8)]
    assert len(set(picks)) > 4
    assert picks == [pick_tokens(logits, [RowSampler(plan, copy, [])])[0] for copy in range(8)]
