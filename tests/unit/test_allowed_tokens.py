# SPDX-License-Identifier: Apache-2.0
"""A list of allowed tokens, alone and beside what else constrains a sequence."""

from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.errors import RequestError
from hf_triton.sampling.allowed_tokens import AllowedTokens
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import sample_tokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.sampling.types import Bits, bits_of

SIZE, EOS = 21, 3


class Other:
    """A constraint that allows these tokens, and takes note of those that come."""

    def __init__(self, *allowed: int, size: int = SIZE) -> None:
        self.is_complete = False
        self.accepted: list[int] = []
        self._bits = bits_of(allowed, size)

    def bitmask(self) -> Bits:
        return self._bits

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def allowed(*token_ids: int, other: Other | None = None) -> AllowedTokens:
    build: Any = None if other is None else lambda: other
    return AllowedTokens(bits_of(token_ids, SIZE), bits_of([EOS], SIZE), build)


def ids_of(bits: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def test_a_token_that_the_model_has_not_has_no_bit() -> None:
    assert ids_of(bits_of([-1, 0, EOS, SIZE, 2**31], SIZE)) == [0, EOS]


def test_a_list_alone_allows_its_tokens_and_never_ends() -> None:
    constraint = allowed(0, 8, 20)
    for _ in range(2):
        assert ids_of(constraint.bitmask()) == [0, 8, 20]
        constraint.accept(8)
    assert not constraint.is_complete


@pytest.mark.parametrize("size", [17, SIZE, 64], ids=["shorter", "equal", "longer"])
def test_beside_another_constraint_both_hold(size: int) -> None:
    other = Other(1, 8, 9, size=size)
    constraint = allowed(0, 8, 9, 20, other=other)
    assert ids_of(constraint.bitmask()) == [8, 9]
    constraint.accept(9)
    assert other.accepted == [9]
    other.is_complete = True
    assert constraint.is_complete


def test_where_nothing_is_left_the_output_ends_if_it_may_and_fails_if_not() -> None:
    assert ids_of(allowed(0, other=Other(1, EOS)).bitmask()) == [EOS]
    assert ids_of(allowed(0, EOS, other=Other(0, 1)).bitmask()) == [0]
    with pytest.raises(RequestError, match="allowed_token_ids has no token that what else constrains") as error:
        allowed(0, other=Other(1)).bitmask()
    assert error.value.code == "invalid_parameter"


def test_every_draw_is_an_allowed_token_and_log_probabilities_are_the_model_s() -> None:
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(8),
        SamplingParams(8, do_sample=True, temperature=5.0, seed=1, logprobs=2),
        SamplingParams(8, bad_words_ids=((5,), (7,)), min_new_tokens=8, logit_bias=((5, -100.0),)),
    ]
    samplers = [SequenceSampler(one, 0, [1], frozenset([EOS]), allowed(5, 7)) for one in params]
    seen = set()
    for _ in range(20):
        sampled = sample_tokens(logits.repeat(len(samplers), 1), samplers)
        seen.update(each.token_id for each in sampled)
        assert sampled[0].token_id == (5 if logits[0, 5] > logits[0, 7] else 7)
        logprobs = sampled[1].logprobs
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(logits.log_softmax(-1)[0, logprobs.token_id].item(), abs=1e-5)
        for sampler, each in zip(samplers, sampled, strict=True):
            sampler.accept(each.token_id)
    assert seen == {5, 7}
