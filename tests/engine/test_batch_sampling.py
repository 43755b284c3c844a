# SPDX-License-Identifier: Apache-2.0
"""Sampling, listeners, end-of-sequence tokens and logprobs in the batch engine, different in each sequence."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Completion
from hf_triton.errors import RequestError
from hf_triton.runner.batch_probe import Sharing, probe_batching
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import TokenLogprobs
from tests.support.batch_engine import (
    FilledEngine,
    GenerateSpy,
    Submission,
    draw_prompts,
    mixed_submissions,
    sampled_submissions,
)
from tests.support.engine import LoadModel, error_code
from tests.support.marks import full
from tests.support.reference import solo_ids


@pytest.mark.parametrize("architecture", ["llama", "rwkv", "t5", *full("falcon", "mamba", "bart")])
def test_settings_and_seed_decide_the_output_in_any_batch(architecture: str, model_of: LoadModel) -> None:
    model = model_of(architecture)
    sharing = probe_batching(model)
    together, alone = sampled_submissions(), sampled_submissions()
    spy = GenerateSpy(model)
    before = torch.random.get_rng_state()
    with FilledEngine(spy, sharing) as filled:
        filled.run(together)
        assert (len(spy.batch_sizes) == 1) == (sharing == "padded"), "prompts that can share a batch do"
        for submission in alone:
            filled.run([submission])
    outputs = [submission.token_ids for submission in together]
    assert outputs == [submission.token_ids for submission in alone]
    assert len({tuple(ids) for output in outputs for ids in output}) > len(together), "sequences of a group differ"
    assert torch.equal(before, torch.random.get_rng_state()), "torch's global random state is unchanged"


@pytest.mark.parametrize("architecture", ["falcon", "llama"])
def test_both_engines_generate_the_same(architecture: str, model_of: LoadModel) -> None:
    model = model_of(architecture)
    in_batch, continuous = sampled_submissions(), sampled_submissions()
    with FilledEngine(model) as filled:
        filled.run(in_batch)
    way = find_way(model).way
    assert way is not None
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=8), way)
    engine.submit([submission.group() for submission in continuous])
    assert [each.completions for each in in_batch] == [each.completions for each in continuous]
    engine.close()


def test_unseeded_sequences_differ(llama: Any) -> None:
    params = SamplingParams(12, do_sample=True, temperature=5.0)
    first, second = [Submission([5, 6], params) for _ in range(2)]
    with FilledEngine(llama) as filled:
        filled.run([first, second])
    assert first.token_ids != second.token_ids  # equal once in 10^20 times


@pytest.mark.parametrize("sharp", [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_each_sequence_is_sampled_with_its_own_settings(sharp: dict[str, Any], llama: Any) -> None:
    """Sequences that are greedy in effect beside sequences that sample any of 384 tokens."""
    hot = SamplingParams(12, do_sample=True, temperature=100.0)
    prompts = draw_prompts(8)
    submissions = [Submission(ids, params) for ids in prompts for params in (hot, replace(hot, **sharp))]
    with FilledEngine(llama) as filled:
        filled.run(submissions)
    greedy = [[solo_ids(llama, ids, 12)] for ids in prompts]
    assert [submission.token_ids for submission in submissions[1::2]] == greedy
    assert all(each.token_ids != ids for each, ids in zip(submissions[::2], greedy, strict=True))


@pytest.mark.parametrize(("sharing", "batch_sizes"), [("padded", [3, 1, 3, 1]), ("alone", [1] * 8)])
def test_sequences_of_a_group_differ_and_repeat_with_the_seed(
    sharing: Sharing, batch_sizes: list[int], llama: Any
) -> None:
    params = SamplingParams(8, do_sample=True, temperature=2.0, seed=5, num_return_sequences=4)
    first, second = Submission([9, 10, 11], params), Submission([9, 10, 11], params)
    spy = GenerateSpy(llama)
    with FilledEngine(spy, sharing, max_num_seqs=3) as filled:  # fewer than the group has: it is not refused
        filled.run([first, second])
    assert spy.batch_sizes == batch_sizes
    assert first.token_ids == second.token_ids
    assert len({tuple(ids) for ids in first.token_ids}) == 4


def test_best_of_returns_the_likeliest_sequences(llama: Any) -> None:
    sampled = {"do_sample": True, "temperature": 3.0, "seed": 1, "logprobs": 0}
    every = Submission([9, 10, 11], SamplingParams(6, num_return_sequences=5, **sampled))
    best = Submission([9, 10, 11], SamplingParams(6, num_return_sequences=2, best_of=5, **sampled))
    with FilledEngine(llama) as filled:
        filled.run([every, best])

    def likelihood(completion: Completion) -> float:
        return sum(each.logprob for each in completion.logprobs or []) / max(1, len(completion.token_ids))

    assert best.completions == sorted(every.completions, key=likelihood, reverse=True)[:2]


def test_listeners_get_every_token_of_every_sequence_once(llama: Any) -> None:
    submissions = sampled_submissions()
    with FilledEngine(llama, max_num_seqs=4) as filled:
        filled.run(submissions)
    assert [each.heard_ids for each in submissions] == [each.token_ids for each in submissions]


def test_a_listener_stops_its_own_sequence_only(model: Any) -> None:
    params = SamplingParams(9, do_sample=True, seed=4, num_return_sequences=3)
    stopped = Submission([5, 6, 7], params, lambda each: each.heard[-1][0] == 1 and len(each.heard_ids[1]) == 4)
    free = Submission([5, 6, 7], params)
    with FilledEngine(model) as filled:
        filled.run([stopped, free])
    assert [each.finish_reason for each in stopped.completions] == ["length", "stop_string", "length"]
    expected = free.token_ids
    assert stopped.token_ids == [expected[0], expected[1][:4], expected[2]]


@pytest.mark.parametrize("bad_words_ids", [None, [[300, 301]]])
def test_sequences_of_a_batch_have_their_own_eos_tokens(
    bad_words_ids: list[list[int]] | None, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own, another one, none at all; also if `generate` must know them."""
    ids = solo_ids(llama, [5, 6, 7], 12)
    assert len(ids) == 12
    own, other = ids[3], next(token for token in ids[5:] if token not in ids[:5])
    monkeypatch.setattr(llama.generation_config, "eos_token_id", own)
    monkeypatch.setattr(llama.generation_config, "bad_words_ids", bad_words_ids)
    eos_ids = [None, frozenset([other]), frozenset[int](), frozenset([own, other])]
    submissions = [Submission([5, 6, 7], SamplingParams(12, eos_ids=each)) for each in eos_ids]
    spy = GenerateSpy(llama)
    with FilledEngine(spy) as filled:
        filled.run(submissions)
    lengths = [ids.index(own), ids.index(other), 12, ids.index(own)]
    assert [submission.token_ids for submission in submissions] == [[ids[:length]] for length in lengths]
    assert [each.completions[0].finish_reason for each in submissions] == ["eos", "eos", "length", "eos"]
    assert (len(spy.batch_sizes) == 1) == (bad_words_ids is None)


def log_softmax(model: Any, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]`: after each token that the decoder gets, the logprobs of the next one."""
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            start = model.generation_config.decoder_start_token_id
            decoder_ids = torch.tensor([[start, *token_ids[:-1]]])
            logits = model(input_ids=torch.tensor([prompt_ids]), decoder_input_ids=decoder_ids).logits
        else:
            logits = model(input_ids=torch.tensor([[*prompt_ids, *token_ids]])).logits
    return torch.as_tensor(logits[0].log_softmax(-1))


def check_logprobs(
    logprobs: list[TokenLogprobs] | None, expected: torch.Tensor, token_ids: list[int], num_top: int
) -> None:
    assert logprobs is not None
    assert [each.token_id for each in logprobs] == token_ids
    for each, row in zip(logprobs, expected, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id].item(), abs=1e-4)
        top = [logprob for _, logprob in each.top]
        assert top == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert top == pytest.approx([row[at].item() for at, _ in each.top], abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mamba", "rwkv", "t5"])
def test_logprobs_are_those_of_the_model_alone(architecture: str, model_of: LoadModel) -> None:
    model = model_of(architecture)
    is_encoder_decoder = model.config.is_encoder_decoder
    params = SamplingParams(7, do_sample=True, seed=3, temperature=2.0, top_k=9, repetition_penalty=1.3, logprobs=3)
    submissions = [
        Submission(ids, replace(params, prompt_logprobs=None if is_encoder_decoder or at % 2 else 2))
        for at, ids in enumerate(draw_prompts(4))
    ]
    with FilledEngine(model, probe_batching(model)) as filled:
        filled.run([*submissions, *(quiet := mixed_submissions(3))])
    for submission in submissions:
        (completion,) = submission.completions
        expected = log_softmax(model, submission.prompt_ids, completion.token_ids)
        first = 0 if is_encoder_decoder else len(submission.prompt_ids) - 1
        new = expected[first : first + len(completion.token_ids)]
        check_logprobs(completion.logprobs, new, completion.token_ids, 3)
        if submission.params.prompt_logprobs is None:
            assert completion.prompt_logprobs is None
        else:
            check_logprobs(completion.prompt_logprobs, expected[:first], submission.prompt_ids[1:], 2)
    assert all(completion.logprobs is None for each in quiet for completion in each.completions)


def test_an_encoder_decoder_has_no_prompt_logprobs(model_of: LoadModel) -> None:
    submission = Submission([5, 6], SamplingParams(4, prompt_logprobs=0))
    with FilledEngine(model_of("t5")) as filled:
        filled.run([submission])
    assert isinstance(submission.outcome, RequestError)
    assert error_code(submission.outcome) == "invalid_parameter"
