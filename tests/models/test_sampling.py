# SPDX-License-Identifier: Apache-2.0
"""The sampler beside transformers' own processors, on random logits, alone and mixed with other settings."""

import dataclasses
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from hf_triton.sampling.draw import gumbel_noise
from hf_triton.sampling.logits_edits import edit_logits
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.row_params import RowParams
from hf_triton.sampling.sampler import SampledToken, sample_tokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.sampling.types import TokenLogprobs
from hf_triton.sampling.warp import warp_scores
from tests.support.sampling import EOS_IDS, ONE_BY_ONE, VOCABULARY, RandomSequence

NUM_DRAWS = 4000
GREEDY = SamplingParams(8)


def random_params(source: random.Random, **fixed: Any) -> SamplingParams:
    params = SamplingParams(
        8,
        min_new_tokens=source.choice([0, 0, 1000]),
        do_sample=True,
        temperature=source.choice([0.3, 0.7, 1.0, 1.7]),
        top_p=source.choice([0.2, 0.7, 0.95, 1.0]),
        top_k=source.choice([0, 1, 3, 40, 199, 200, 5000]),
        min_p=source.choice([0.0, 0.0, 0.05, 0.5]),
        typical_p=source.choice([1.0, 1.0, 0.3, 0.9]),
        seed=source.randrange(2**63),
        repetition_penalty=source.choice([1.0, 1.3, 0.8]),
        presence_penalty=source.choice([0.0, 1.5, -2.0]),
        frequency_penalty=source.choice([0.0, 0.4, -0.1]),
        no_repeat_ngram_size=source.choice([0, 0, 1, 2, 4]),
        bad_words_ids=source.choice([(), ONE_BY_ONE["bad_words_ids"]["bad_words_ids"]]),
        logit_bias=source.choice([(), ((5, 4.0), (7, -100.0))]),
    )
    return dataclasses.replace(params, **fixed)


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def transformers_scores(logits: torch.Tensor, params: SamplingParams, sequence: RandomSequence) -> torch.Tensor:
    """The scores of transformers, `[vocabulary]`; processors that it has are its own, in its own order."""
    config = GenerationConfig(
        do_sample=params.do_sample,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        bad_words_ids=[list(word) for word in params.bad_words_ids] or None,
        sequence_bias={(token_id,): bias for token_id, bias in params.logit_bias} or None,
        min_new_tokens=params.min_new_tokens,
    )
    config._eos_token_tensor = torch.tensor(sorted(EOS_IDS))
    model: Any = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False), _merge_criteria_processor_list=lambda ours, theirs: ours
    )
    processors = GenerationMixin._get_logits_processor(model, config, len(sequence.prompt), device="cpu")
    names = [type(each).__name__.removesuffix("LogitsProcessor") for each in processors]
    places = [names.index(name) + 1 for name in ("SequenceBias", "RepetitionPenalty") if name in names]
    processors.insert(max(places, default=0), CountPenalties(params, sequence.new))
    ids = torch.tensor([sequence.prompt + sequence.new])
    scores: torch.Tensor = processors(ids, logits.unsqueeze(0).clone())[0]
    return scores


class CountPenalties:
    """Presence and frequency penalties as OpenAI's API writes them down."""

    def __init__(self, params: SamplingParams, new: list[int]) -> None:
        self.params, self.counts = params, Counter(new)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token_id, count in self.counts.items():
            scores[0, token_id] -= self.params.frequency_penalty * count + self.params.presence_penalty * (count > 0)
        return scores


def warped(scores: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return warp_scores(scores, RowParams.build(params, [0] * len(params)))


def our_scores(logits: torch.Tensor, samplers: list[SequenceSampler]) -> torch.Tensor:
    return warped(edit_logits(logits, samplers), [sampler.params for sampler in samplers])


def sample(logits: torch.Tensor, samplers: list[SequenceSampler]) -> list[int]:
    return [pick.token_id for pick in sample_tokens(logits, samplers)]


# --- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_setting_gives_the_scores_of_transformers(name: str) -> None:
    source = random.Random(name)
    for seed in range(20):
        params, sequence, logits = (
            SamplingParams(8, do_sample=True, **ONE_BY_ONE[name]),
            RandomSequence(source),
            random_logits(VOCABULARY),
        )
        ours = our_scores(logits.unsqueeze(0), [sequence.sampler(params)])[0]
        torch.testing.assert_close(
            ours, transformers_scores(logits, params, sequence), rtol=1e-5, atol=1e-5, msg=str(seed)
        )


def test_every_setting_is_tried_alone_and_changes_something() -> None:
    tried = {setting for settings in ONE_BY_ONE.values() for setting in settings}
    shaping = {field.name for field in dataclasses.fields(SamplingParams)}
    shaping -= {"max_new_tokens", "do_sample", "seed", "eos_ids", "num_return_sequences", "best_of"}
    shaping -= {"num_beams", "length_penalty", "early_stopping", "first_id"}  # of beam search and translation
    assert tried == shaping - {"logprobs", "prompt_logprobs"}
    without_effect = {"top_k of all", "min_new_tokens reached", "no_repeat_ngram_size beyond the sequence"}
    sequence, logits = RandomSequence(random.Random(0)), random_logits(1, VOCABULARY)
    sequence.prompt, sequence.new = [0, 1, 2, 0, 1], [4, 0, 1]
    for name, settings in ONE_BY_ONE.items():
        scores = our_scores(logits, [sequence.sampler(SamplingParams(8, do_sample=True, **settings))])
        assert torch.equal(scores, logits) == (name in without_effect), name


@pytest.mark.parametrize("seed", range(10))
def test_mixed_settings_give_the_distributions_of_transformers(seed: int) -> None:
    source = random.Random(seed)
    cases = [(random_params(source), RandomSequence(source)) for _ in range(40)]
    logits = random_logits(len(cases), VOCABULARY, seed=seed)
    ours = our_scores(logits, [sequence.sampler(params) for params, sequence in cases])
    for index, (params, sequence) in enumerate(cases):
        expected = transformers_scores(logits[index], params, sequence)
        if bool((expected == -torch.inf).all()):
            continue  # transformers fails on it; what we do is tested below
        assert torch.equal(ours[index] == -torch.inf, expected == -torch.inf), params
        torch.testing.assert_close(ours[index].softmax(-1), expected.softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_a_nucleus_of_any_size_is_found(top_p: float, spread: float) -> None:
    logits = random_logits(4, 20_000) * spread
    params = SamplingParams(8, do_sample=True, top_p=top_p)
    ours = warped(logits, [params] * 4)
    sizes = (ours > -torch.inf).sum(-1)
    mass = logits.double().softmax(-1).where(ours > -torch.inf, 0).sum(-1)
    least = logits.double().softmax(-1).where(ours > -torch.inf, 1).amin(-1)
    assert bool((mass >= top_p - 1e-6).all()), sizes
    assert bool((mass - least < top_p + 1e-6).all()), sizes  # without its least likely token it would be too small


def test_tokens_of_the_lowest_kept_score_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    for settings in ({"top_k": 2}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 2, "top_p": 0.7}):
        kept = warped(logits, [SamplingParams(8, do_sample=True, **settings)])[0] > -torch.inf
        assert kept.tolist() == [True, False, True, True, True, False], settings


def test_a_prompt_may_hold_tokens_beyond_the_logits() -> None:
    params = SamplingParams(8, repetition_penalty=2.0, no_repeat_ngram_size=1, logit_bias=((9, 1.0),), min_new_tokens=9)
    sampler = SequenceSampler(params, 0, [0, 5, 4], frozenset([3, 8]))
    scores = edit_logits(torch.ones(1, 5), [sampler])
    assert scores.tolist() == [[-math.inf, 1.0, 1.0, -math.inf, -math.inf]]


def test_the_models_logits_stay_as_they_are() -> None:
    source = random.Random(0)
    logits = random_logits(8, VOCABULARY)
    before = logits.clone()
    sample_tokens(logits, [RandomSequence(source).sampler(random_params(source, logprobs=2)) for _ in range(8)])
    assert torch.equal(logits, before)


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_follow_the_distribution(seed: int) -> None:
    source = random.Random(seed)
    constant = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "no_repeat_ngram_size": 0}
    params, sequence = random_params(source, bad_words_ids=((3,), (9,)), **constant), RandomSequence(source)
    logits = random_logits(VOCABULARY, seed=seed)
    expected = transformers_scores(logits, params, sequence).softmax(-1)
    sampler, sampled = sequence.sampler(params), []
    for _ in range(NUM_DRAWS):
        sampled += sample(logits.unsqueeze(0), [sampler])
        sampler.accept(sampled[-1])
    frequency = torch.bincount(torch.tensor(sampled), minlength=VOCABULARY) / NUM_DRAWS
    assert set(sampled) <= set(expected.nonzero().flatten().tolist())  # nothing outside the allowed tokens
    # A frequency of 4000 draws strays from its probability by more than 5 sigma once in 1.7 million.
    sigma = (expected * (1 - expected) / NUM_DRAWS).sqrt()
    assert bool(((frequency - expected).abs() <= 5 * sigma + 1e-3).all())


def test_tokens_of_probability_zero_are_never_sampled() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -200.0, -math.inf]]).expand(NUM_DRAWS, -1)
    samplers = [SequenceSampler(SamplingParams(8, do_sample=True, seed=seed), 0, []) for seed in range(NUM_DRAWS)]
    sampled = Counter(sample(logits, samplers))
    assert set(sampled) == {1, 3}
    assert abs(sampled[1] - NUM_DRAWS / 2) < 5 * math.sqrt(NUM_DRAWS) / 2


def test_noise_is_gumbel_s() -> None:
    """Its mean is Euler's constant, its variance pi^2 / 6; adjacent values and successive keys are uncorrelated."""
    source = np.random.default_rng(0)
    for keys in (
        source.integers(2**64, size=2000, dtype=np.uint64),
        np.array([2**64 - 1, 0, *range(1, 1999)], np.uint64),
    ):
        noise = gumbel_noise(keys.view(np.int64), 1000, torch.device("cpu")).double()
        assert noise.isfinite().all()
        assert noise.mean().item() == pytest.approx(0.577216, abs=0.02)
        assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.1)
    noise = gumbel_noise(source.integers(2**64, size=2000, dtype=np.uint64).view(np.int64), 1000, torch.device("cpu"))
    noise = (noise - noise.mean()) / noise.std()
    for product in (noise[1:] * noise[:-1], noise[:, 1:] * noise[:, :-1], noise[:, 16:] * noise[:, :-16]):
        assert abs(product.mean().item()) < 5 / math.sqrt(product.numel())


@pytest.mark.parametrize(("error", "most"), [(2e-6, 0.001), (1e-2, 0.02)], ids=["float32", "bfloat16"])
def test_rounding_changes_few_sampled_tokens(error: float, most: float) -> None:
    """As the shape of a batch changes scores; along cumulative probabilities it was 0.3 % and 39 % of such draws."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(32000, generator=generator) for _ in range(200)]) + 1
    scores = -1.1 * ranks.log()  # as often as words of a language
    rounded = scores + error * torch.randn(scores.shape, generator=generator)

    def sampled(logits: torch.Tensor) -> torch.Tensor:
        samplers = [SequenceSampler(SamplingParams(8, do_sample=True, seed=seed), 0, []) for seed in range(len(logits))]
        return torch.tensor(sample(logits, samplers))

    assert (sampled(scores) != sampled(rounded)).float().mean() <= most


def test_a_sequence_does_not_depend_on_the_others_in_its_batch() -> None:
    source = random.Random(0)
    cases = [(random_params(source, logprobs=source.choice([None, 0, 4])), RandomSequence(source)) for _ in range(39)]
    cases.append((SamplingParams(8), RandomSequence(source)))
    together = [sequence.sampler(params) for params, sequence in cases]
    alone = [sequence.sampler(params) for params, sequence in cases]
    for step in range(12):
        logits = random_logits(len(cases), VOCABULARY, seed=step)
        picks = sample_tokens(logits, together)
        for index, sampler in enumerate(alone):
            (pick,) = sample_tokens(logits[index : index + 1], [sampler])
            assert pick.token_id == picks[index].token_id
            sampler.accept(pick.token_id)
            together[index].accept(pick.token_id)


def test_sampling_changes_no_state_so_that_a_failed_step_can_be_retried() -> None:
    source = random.Random(1)
    samplers = [RandomSequence(source).sampler(random_params(source)) for _ in range(10)]
    logits = random_logits(10, VOCABULARY)
    assert sample(logits, samplers) == sample(logits, samplers)


def test_the_random_stream_advances_with_the_tokens() -> None:
    """A new sampler that accepts the same tokens continues as the first would have."""
    params = SamplingParams(99, do_sample=True, seed=5)
    sampler, logits, new = SequenceSampler(params, 0, [1]), random_logits(20, VOCABULARY), []
    for step in range(20):
        again = SequenceSampler(params, 0, [1])
        for token_id in new:
            again.accept(token_id)
        assert sample(logits[step : step + 1], [again]) == sample(logits[step : step + 1], [sampler])
        new += sample(logits[step : step + 1], [sampler])
        sampler.accept(new[-1])
    assert len(set(new)) > 10


def test_sequences_of_one_seed_have_random_streams_of_their_own() -> None:
    logits = torch.zeros(1, VOCABULARY)
    params = SamplingParams(1, do_sample=True, seed=3)
    picks = [sample(logits, [SequenceSampler(params, copy, [])]) for copy in range(8)]
    assert len({pick for (pick,) in picks}) > 4
    assert picks == [sample(logits, [SequenceSampler(params, copy, [])]) for copy in range(8)]


@pytest.mark.parametrize(
    ("seed", "key"), [(0, 15023647771317767168), (1, 5705853004827290377), (2**63 - 1, 15586116291310964194)]
)
def test_a_seed_gives_the_same_random_stream_after_a_restart(seed: int, key: int) -> None:
    assert SequenceSampler(SamplingParams(1, do_sample=True, seed=seed), 2, []).draw_key() == key


def test_a_key_gives_the_same_noise_on_every_machine() -> None:
    noise = gumbel_noise(np.array([0, -1]), 3, torch.device("cpu")).tolist()
    assert noise == [
        pytest.approx([22.18071, -0.528639, 0.933809], abs=1e-5),
        pytest.approx([22.18071, 22.18071, -0.528639], abs=1e-5),
    ]


def test_without_a_seed_sequences_differ() -> None:
    logits, params = torch.zeros(1, VOCABULARY), SamplingParams(1, do_sample=True)
    assert len({sample(logits, [SequenceSampler(params, 0, [])])[0] for _ in range(40)}) > 4


# --- greedy sampling, bans and invalid logits ------------------------------------------------------------------------


def test_greedy_sequences_take_the_likeliest_token_after_the_penalty() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0], [1.0, 4.0, 3.0], [-1.0, -4.0, -0.9]])
    samplers = [
        SequenceSampler(SamplingParams(1), 0, []),
        SequenceSampler(SamplingParams(1, repetition_penalty=2.0), 0, [1]),
        SequenceSampler(SamplingParams(1, repetition_penalty=2.0), 0, [2]),
    ]
    assert sample(logits, samplers) == [1, 2, 0]


def test_greedy_sequences_ignore_warpers() -> None:
    params = SamplingParams(1, typical_p=0.2, top_p=0.1, temperature=0.5)
    logits = random_logits(1, VOCABULARY)
    assert sample(logits, [SequenceSampler(params, 0, [])]) == [int(logits.argmax())]


def test_eos_is_banned_below_min_new_tokens() -> None:
    logits = torch.zeros(1, 5)
    logits[0, 3] = 9.0
    sampler = SequenceSampler(SamplingParams(9, min_new_tokens=2), 0, [1], frozenset([3]))
    token_ids = []
    for _ in range(3):
        token_ids += sample(logits, [sampler])
        sampler.accept(token_ids[-1])
    assert token_ids == [0, 0, 3]


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_with_all_tokens_banned_ends_or_takes_the_likeliest(do_sample: bool, dtype: torch.dtype) -> None:
    everything = tuple((token_id,) for token_id in range(6))
    params = SamplingParams(
        9, do_sample=do_sample, bad_words_ids=everything, min_new_tokens=5, top_p=0.5, top_k=3, seed=1
    )
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5]] * 4, dtype=dtype)
    samplers = [
        SequenceSampler(params, 0, [1], frozenset([4, 2])),
        SequenceSampler(params, 0, [1]),
        SequenceSampler(params, 0, [1], frozenset([600])),
        SequenceSampler(SamplingParams(9), 0, [1]),
    ]
    assert sample(logits, samplers) == [2, 5, 5, 5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_logits_give_some_token(value: float) -> None:
    source = random.Random(0)
    samplers = [RandomSequence(source).sampler(random_params(source, logprobs=3)) for _ in range(30)] + [
        SequenceSampler(SamplingParams(1), 0, [])
    ]
    assert all(0 <= token_id < VOCABULARY for token_id in sample(torch.full((31, VOCABULARY), value), samplers))
    mixed = random_logits(31, VOCABULARY)
    mixed[:, ::7] = value
    assert all(0 <= token_id < VOCABULARY for token_id in sample(mixed, samplers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_computed_in_float32(dtype: torch.dtype) -> None:
    source = random.Random(0)
    logits = random_logits(30, VOCABULARY).to(dtype)
    samplers = [RandomSequence(source).sampler(random_params(source)) for _ in range(30)]
    assert sample(logits, samplers) == sample(logits.float(), samplers)


def test_logits_may_be_a_slice() -> None:
    source = random.Random(0)
    samplers = [RandomSequence(source).sampler(random_params(source, logprobs=1)) for _ in range(5)]
    block = random_logits(5, 3, VOCABULARY)
    assert sample_tokens(block[:, -1], samplers) == sample_tokens(block[:, -1].contiguous(), samplers)


# --- log probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = random_logits(3, VOCABULARY)
    expected = logits.log_softmax(-1)
    params = SamplingParams(8, do_sample=True, temperature=0.1, repetition_penalty=9.0, logit_bias=((4, 100.0),))
    all_params = [
        dataclasses.replace(params, logprobs=3),
        dataclasses.replace(params, num_return_sequences=2, best_of=4),
        params,
    ]
    picks = sample_tokens(logits, [SequenceSampler(each, 0, [1, 2]) for each in all_params])
    assert [pick.token_id for pick in picks] == [4, 4, 4]
    for sampler, (pick, num_top) in enumerate(zip(picks[:2], (3, 0), strict=True)):
        assert pick.logprobs is not None
        assert pick.logprobs.token_id == 4
        assert pick.logprobs.logprob == pytest.approx(expected[sampler, 4].item())
        values, ids = expected[sampler].topk(num_top)
        assert [token_id for token_id, _ in pick.logprobs.top] == ids.tolist()
        assert [logprob for _, logprob in pick.logprobs.top] == pytest.approx(values.tolist())
    assert picks[2] == SampledToken(4)


def test_logprobs_do_not_change_a_greedy_token() -> None:
    logits = random_logits(1, VOCABULARY)
    (pick,) = sample_tokens(logits, [SequenceSampler(SamplingParams(8, logprobs=1), 0, [])])
    assert pick.logprobs is not None
    assert pick.logprobs.top == ((pick.token_id, pick.logprobs.logprob),)


def test_logprobs_of_a_long_prompt_are_computed_in_parts() -> None:
    logits, token_ids = random_logits(50, VOCABULARY), list(range(50))
    whole = token_logprobs(logits, token_ids, 2)
    assert token_logprobs(logits, token_ids, 2, max_scores=3 * VOCABULARY) == whole
    assert [each.token_id for each in whole] == token_ids


def test_logprobs_of_extreme_parameters() -> None:
    logits = torch.zeros(2, 4)
    half, nothing = token_logprobs(logits, [1, 9], 99)
    assert half == TokenLogprobs(1, pytest.approx(-math.log(4)), half.top)
    assert sorted(token_id for token_id, _ in half.top) == [0, 1, 2, 3]
    assert nothing.logprob == -math.inf
    assert token_logprobs(torch.zeros(0, 4), [], 5) == []


# --- constraints -----------------------------------------------------------------------------------------------------


class Fenced:
    """Allows some tokens."""

    is_complete = False

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed
        self.accepted: list[int] = []

    def bitmask(self) -> npt.NDArray[np.uint8]:
        bits = np.zeros(max(self.allowed, default=0) + 1, np.uint8)
        bits[sorted(self.allowed)] = 1
        return np.packbits(bits, bitorder="little")

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def fenced(allowed: set[int], params: SamplingParams = GREEDY) -> SequenceSampler:
    return SequenceSampler(params, 0, [1], EOS_IDS, Fenced(allowed))


def test_greedy_takes_the_likeliest_allowed_token() -> None:
    source = random.Random(0)
    for size in (VOCABULARY, VOCABULARY - 3):
        allowed = [set(source.sample(range(VOCABULARY), 5)) | {4} for _ in range(20)]
        logits = random_logits(20, size)
        expected = [
            max((each for each in ids if each < size), key=sampler.__getitem__)
            for ids, sampler in zip(allowed, logits, strict=True)
        ]
        assert sample(logits, [fenced(ids) for ids in allowed]) == expected


def test_a_constraint_applies_to_its_own_sequence_only() -> None:
    source = random.Random(0)
    for _ in range(20):
        all_params, sequences = [random_params(source) for _ in range(6)], [RandomSequence(source) for _ in range(6)]
        logits = random_logits(6, VOCABULARY, seed=source.randrange(1000))
        samplers = [sequence.sampler(params) for params, sequence in zip(all_params, sequences, strict=True)]
        alone = sample(logits, samplers)
        mixed = [sampler if index % 2 else fenced({5, 9}) for index, sampler in enumerate(samplers)]
        together = sample(logits, mixed)
        assert together[1::2] == alone[1::2]
        assert set(together[::2]) <= {5, 9}


def test_sampling_is_among_the_allowed_tokens_only() -> None:
    logits, allowed = random_logits(VOCABULARY), [2, 50, 51, 120]
    samplers = [fenced(set(allowed), SamplingParams(8, do_sample=True, seed=seed)) for seed in range(NUM_DRAWS)]
    counts = Counter(sample(logits.expand(NUM_DRAWS, -1), samplers))
    for token_id, probability in zip(allowed, logits[allowed].softmax(-1).tolist(), strict=True):
        deviation = math.sqrt(NUM_DRAWS * probability * (1 - probability))
        assert abs(counts[token_id] - NUM_DRAWS * probability) < 5 * deviation
    assert set(counts) <= set(allowed)


@pytest.mark.parametrize("do_sample", [False, True])
def test_bans_give_way_to_the_constraint(do_sample: bool) -> None:
    logits = random_logits(1, VOCABULARY)
    likeliest = max((4, 5), key=logits[0].__getitem__)
    banned = SamplingParams(8, bad_words_ids=((4,), (5,)), do_sample=do_sample, top_k=int(do_sample))
    without_eos = SamplingParams(8, min_new_tokens=5, do_sample=do_sample)
    assert sample(logits, [fenced({4, 5}, banned)]) == [likeliest]
    assert sample(logits, [fenced({7}, without_eos)]) == [7]
    nothing = torch.full((1, VOCABULARY), -torch.inf)
    assert sample(nothing, [fenced({4, 5}, SamplingParams(8, do_sample=do_sample, temperature=0.5))])[0] in (4, 5)


def test_nan_logits_stay_within_the_constraint() -> None:
    assert sample(torch.full((1, VOCABULARY), torch.nan), [fenced({4, 5})])[0] in (4, 5)


def test_a_constraint_accepts_each_token_once() -> None:
    sampler = fenced({4, 5})
    for _ in range(3):
        sample(random_logits(1, VOCABULARY), [sampler])
    sampler.accept(4)
    sampler.accept(7)
    assert isinstance(sampler.constraint, Fenced)
    assert sampler.constraint.accepted == [4, 7]
