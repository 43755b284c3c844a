# SPDX-License-Identifier: Apache-2.0
"""Sampling settings one by one, and random sequences to apply them to."""

import random
from typing import Any

from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sequence_sampler import SequenceSampler

VOCABULARY = 200
EOS_IDS = frozenset([7, 11])
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": VOCABULARY + 1},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "typical_p": {"typical_p": 0.7},
    "top_k and top_p": {"top_k": 20, "top_p": 0.6},
    "all warpers": {"temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "no_repeat_ngram_size beyond the sequence": {"no_repeat_ngram_size": 120},
    "bad_words_ids": {"bad_words_ids": ((3,), (7,), (1, 2), (2, 1), (0, 1, 2), (0, 1, 3), (1, 0))},
    "logit_bias": {"logit_bias": ((0, 50.0), (1, -3.5), (199, 2.0))},
    "min_new_tokens": {"min_new_tokens": 1000},
    "min_new_tokens reached": {"min_new_tokens": 3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.7},
}


class RandomSequence:
    """A random prompt and its continuation, of few tokens or of many."""

    def __init__(self, source: random.Random) -> None:
        vocabulary = source.choice([3, 12, VOCABULARY])
        self.prompt = [source.randrange(vocabulary) for _ in range(source.randrange(1, 40))]
        self.new = [source.randrange(vocabulary) for _ in range(source.randrange(4, 30))]

    def sampler(self, params: SamplingParams) -> SequenceSampler:
        sampler = SequenceSampler(params, 0, self.prompt, EOS_IDS)
        for token_id in self.new:
            sampler.accept(token_id)
        return sampler
