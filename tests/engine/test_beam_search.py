# SPDX-License-Identifier: Apache-2.0
"""Beam search gives what `model.generate` gives for each prompt alone, in any batch."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_triton.engine.beam_search import BeamSearch
from hf_triton.engine.protocols import Observer
from hf_triton.engine.sequence import Completion
from hf_triton.errors import CancelledError, RequestError
from hf_triton.sampling.params import SamplingParams
from tests.support.batch_engine import (
    FailingForward,
    FilledEngine,
    GenerateSpy,
    Submission,
    draw_prompts,
    mixed_submissions,
)
from tests.support.engine import LoadModel, start_engine
from tests.support.marks import full
from tests.support.reference import beam_ids

ENDS = [1, *range(100, 160)]
"""End-of-sequence tokens, many, so that hypotheses end at different lengths."""
SEARCHES: dict[str, tuple[str, SamplingParams]] = {
    "t5": ("t5", SamplingParams(12, num_beams=4)),
    "bart": ("bart", SamplingParams(9, num_beams=3, num_return_sequences=3, length_penalty=2.0, early_stopping=True)),
    "llama": ("llama", SamplingParams(10, num_beams=5, num_return_sequences=2, length_penalty=-1.0)),
    "mamba": ("mamba", SamplingParams(6, num_beams=2, early_stopping=True)),
    "minimum": ("bart", SamplingParams(10, num_beams=2, min_new_tokens=6)),
    "repetition": ("llama", SamplingParams(10, num_beams=3, repetition_penalty=1.7)),
    "n-grams": ("t5", SamplingParams(16, num_beams=3, no_repeat_ngram_size=2)),
    "bad words": ("llama", SamplingParams(10, num_beams=3, bad_words_ids=((7,), (50, 60)))),
}


def native(params: SamplingParams) -> dict[str, Any]:
    """The same as arguments of `generate`."""
    own = {name: value for name in ("length_penalty", "early_stopping") if (value := getattr(params, name)) is not None}
    words = {"bad_words_ids": [list(word) for word in params.bad_words_ids]} if params.bad_words_ids else {}
    return {
        **own,
        **words,
        "num_beams": params.num_beams,
        "num_return_sequences": params.num_return_sequences,
        "min_new_tokens": params.min_new_tokens or None,
        "repetition_penalty": params.repetition_penalty,
        "no_repeat_ngram_size": params.no_repeat_ngram_size or None,
    }


def expected_ids(model: Any, submission: Submission, **arguments: Any) -> list[list[int]]:
    params = submission.params
    return beam_ids(model, submission.prompt_ids, params.max_new_tokens, **native(params), **arguments)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, model_of: LoadModel) -> Any:
    """Loads a tiny model with many end-of-sequence tokens."""

    def load(architecture: str) -> Any:
        model = model_of(architecture)
        monkeypatch.setattr(model.generation_config, "eos_token_id", ENDS)
        return model

    return load


@pytest.mark.parametrize("case", [*list(SEARCHES)[:4], *full(*list(SEARCHES)[4:])])
def test_hypotheses_are_those_of_generate_in_any_batch(case: str, ending: Any) -> None:
    architecture, params = SEARCHES[case]
    model = ending(architecture)
    submissions = [Submission(ids, params) for ids in draw_prompts(6)]
    expected = [expected_ids(model, each) for each in submissions]
    spy = GenerateSpy(model)
    with FilledEngine(spy) as filled:
        filled.run(submissions)
    assert [each.token_ids for each in submissions] == expected
    assert max(spy.batch_sizes) > 1
    assert len({len(ids[0]) for ids in expected}) > 1  # the prompts do not end together


def test_other_prompts_are_in_other_batches(ending: Any) -> None:
    model = ending("llama")
    searches = [
        Submission(ids, SamplingParams(length, num_beams=beams))
        for ids, length, beams in zip(draw_prompts(6, seed=1), [8, 8, 6, 8, 6, 8], [4, 2, 4, 2, 4, 4], strict=True)
    ]
    greedy = mixed_submissions(6)
    expected = [each.expected_ids(model) for each in greedy]
    spy = GenerateSpy(model)
    with FilledEngine(spy) as filled:
        filled.run([each for pair in zip(searches, greedy, strict=True) for each in pair])
    assert [each.token_ids for each in searches] == [expected_ids(model, each) for each in searches]
    assert [each.token_ids for each in greedy] == expected
    assert sorted(spy.batch_sizes) == [2, 2, 2, 6]


def test_beams_count_as_sequences(llama: Any) -> None:
    spy = GenerateSpy(llama)
    with FilledEngine(spy, max_num_seqs=8) as filled:
        filled.run([Submission(ids, SamplingParams(4, num_beams=3)) for ids in draw_prompts(5)])
    assert spy.batch_sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("bart", {"length_penalty": 3.0, "early_stopping": True, "no_repeat_ngram_size": None, "min_length": 8}),
        ("bart", {"early_stopping": "never", "forced_bos_token_id": 9, "forced_eos_token_id": 1}),
        ("t5", {"renormalize_logits": True, "bad_words_ids": [[2], [30]], "num_beams": 6}),  # as Marian has
        ("llama", {"suppress_tokens": list(range(3, 200)), "max_length": 5}),
    ],
)
def test_the_checkpoints_own_settings_hold(
    architecture: str, config: dict[str, Any], ending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ending(architecture)
    for name, value in config.items():
        monkeypatch.setattr(model.generation_config, name, value)
    submissions = [Submission(ids, SamplingParams(10, num_beams=3)) for ids in draw_prompts(6)]
    expected = [expected_ids(model, each) for each in submissions]
    with FilledEngine(model) as filled:
        filled.run(submissions)
    assert [each.token_ids for each in submissions] == expected


def test_no_token_ends_a_search_without_end_tokens(llama: Any) -> None:
    submission = Submission([5, 6, 7], SamplingParams(40, num_beams=3, eos_ids=frozenset()))
    expected = expected_ids(llama, submission, eos_token_id=None)
    with FilledEngine(llama) as filled:
        filled.run([submission])
    assert submission.outcome == [Completion(expected[0], "length")]
    assert len(expected[0]) == 40


class _Ends(StoppingCriteria):
    def __init__(self, token_ids: set[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.tensor([ids[-1] in self._token_ids for ids in input_ids.tolist()])


def test_a_rule_of_the_group_ends_hypotheses(llama: Any) -> None:
    ends = set(range(100, 200))
    submissions = [Submission(ids, SamplingParams(12, num_beams=3)) for ids in draw_prompts(6)]
    criteria = StoppingCriteriaList([_Ends(ends)])
    expected = [expected_ids(llama, each, stopping_criteria=criteria) for each in submissions]
    with FilledEngine(llama) as filled:
        filled.submit(*(each.group(is_complete=lambda ids: ids[-1] in ends) for each in submissions))
        assert [each.token_ids for each in submissions] == expected
    reasons = {each.completions[0].finish_reason for each in submissions}
    assert "stop_string" in reasons


def test_a_deadline_ends_one_search_with_what_it_has(ending: Any) -> None:
    model = ending("t5")
    params = SamplingParams(30, num_beams=3, eos_ids=frozenset())
    late, *others = [Submission(ids, params) for ids in draw_prompts(4)]
    expected = [expected_ids(model, each, eos_token_id=None) for each in (late, *others)]

    def slow(_: torch.Tensor) -> bool:
        time.sleep(0.02)
        return False

    with FailingForward(model.decoder, slow, ValueError()), FilledEngine(model) as filled:
        deadline_s = time.monotonic() + 0.2
        filled.submit(late.group(deadline_s=deadline_s), *(each.group() for each in others))
        assert [each.token_ids for each in others] == expected[1:]
    [completion] = late.completions
    assert completion.finish_reason == "deadline"
    assert 0 < len(completion.token_ids) < 30


def test_a_cancelled_search_ends_alone(ending: Any) -> None:
    model = ending("t5")
    cancelled = threading.Event()
    leaver, stayer = [Submission(ids, SamplingParams(20, num_beams=3)) for ids in draw_prompts(2)]

    def cancel(_: torch.Tensor) -> bool:
        cancelled.set()
        return False

    expected = expected_ids(model, stayer)
    with FailingForward(model.decoder, cancel, ValueError()), FilledEngine(spy := GenerateSpy(model)) as filled:
        filled.submit(leaver.group(is_cancelled=cancelled.is_set), stayer.group())
        assert stayer.token_ids == expected
    assert isinstance(leaver.outcome, CancelledError)
    assert spy.batch_sizes == [2]


def test_a_search_that_failed_begins_anew_in_smaller_batches(ending: Any) -> None:
    model = ending("llama")
    submissions = [Submission(ids, SamplingParams(8, num_beams=2)) for ids in draw_prompts(4)]
    expected = [expected_ids(model, each) for each in submissions]

    def is_wrong(input_ids: torch.Tensor) -> bool:
        return input_ids.shape[1] == 1 and len(input_ids) > 4

    failing = FailingForward(model, is_wrong, torch.OutOfMemoryError("CUDA out of memory"))
    with failing, FilledEngine(spy := GenerateSpy(model)) as filled:
        filled.run(submissions)
    assert [each.token_ids for each in submissions] == expected
    assert spy.batch_sizes == [4, 2, 2]


def test_the_continuous_engine_refuses_beams(llama: Any) -> None:
    engine = start_engine(llama, max_num_seqs=4, context_length=256)
    submission = Submission([5], SamplingParams(4, num_beams=2))
    try:
        engine.submit([submission.group()])
        error = submission.outcome
    finally:
        engine.close()
    assert isinstance(error, RequestError)
    assert error.sentence.endswith("leave it out, or set the folder's setting engine to batch")


def test_a_model_whose_states_cannot_be_reordered_refuses_beams(model_of: LoadModel) -> None:
    submission = Submission([5], SamplingParams(4, num_beams=2))
    with FilledEngine(model_of("rwkv"), "alone") as filled:
        filled.submit(submission.group())
        error = submission.outcome
    assert isinstance(error, RequestError)
    assert error.sentence.startswith("num_beams 2 cannot be searched by this model")


def test_a_search_is_freed_without_the_garbage_collector() -> None:
    """Its groups hold their requests."""
    sequence = cast(Any, SimpleNamespace(group=None, sampler=None))
    search = BeamSearch([sequence], 3, lambda _: False, Observer())
    is_freed = weakref.ref(search)
    gc.disable()
    try:
        del search
        assert is_freed() is None
    finally:
        gc.enable()
