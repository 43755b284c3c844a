# SPDX-License-Identifier: Apache-2.0
"""Failures of `generate` in the batch engine: retries, out of memory, fatal errors, and who is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_triton.errors import GenerationError, UnavailableError
from hf_triton.sampling.params import SamplingParams
from tests.support.batch_engine import (
    FailingForward,
    FilledEngine,
    GenerateSpy,
    Submission,
    draw_prompts,
    mixed_submissions,
    sampled_submissions,
)
from tests.support.engine import error_code
from tests.support.reference import solo_ids

POISON = 2
ERRORS = {"memory": torch.OutOfMemoryError("CUDA out of memory"), "other": ValueError("shapes do not match")}


def poisoned(error: BaseException) -> Any:
    """Raises if a prompt ends with `POISON`."""

    def look(input_ids: torch.Tensor) -> None:
        if (input_ids[:, -1] == POISON).any():
            raise error

    return look


@pytest.mark.parametrize("kind", ERRORS)
def test_retried_batch_continues_where_it_failed(kind: str, llama: Any) -> None:
    """Tokens, random streams, logprobs and what the listeners get, all as without the failures."""
    submissions, calm = (
        [Submission(each.prompt_ids, replace(each.params, logprobs=1)) for each in sampled_submissions()]
        for _ in range(2)
    )
    num_calls: dict[int, int] = {}

    def is_wrong(input_ids: torch.Tensor) -> bool:
        batch_size, columns = input_ids.shape
        num_calls[batch_size] = num_calls.get(batch_size, 0) + 1
        return columns == 1 and batch_size > 3 and num_calls[batch_size] % 4 == 0

    with FilledEngine(spy := GenerateSpy(llama)) as filled:
        filled.run(calm)
        with FailingForward(llama, is_wrong, ERRORS[kind]):
            filled.run(submissions)
    assert len(spy.batch_sizes) > 3
    for submission, other in zip(submissions, calm, strict=True):
        assert submission.token_ids == other.token_ids == submission.heard_ids
        for completion, expected in zip(submission.completions, other.completions, strict=True):
            assert completion.finish_reason == expected.finish_reason
            logprobs, wanted = ([one.logprob for one in each.logprobs or []] for each in (completion, expected))
            assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_sequence_that_makes_a_later_step_fail_is_refused_alone(model: Any) -> None:
    prompts = draw_prompts(8)
    outputs = [solo_ids(model, ids, 10) for ids in prompts]
    guilty, poison = next(
        (at, token)
        for at, ids in enumerate(outputs)
        for token in ids[2:8]
        if not any(token in other for other in outputs if other is not ids) and token not in ids[:2]
    )

    def is_wrong(input_ids: torch.Tensor) -> bool:
        return input_ids.shape[1] == 1 and bool((input_ids == poison).any())

    submissions = [Submission(ids, SamplingParams(10)) for ids in prompts]
    with FailingForward(model, is_wrong, ValueError("secret")), FilledEngine(model) as filled:
        filled.run(submissions)
    assert isinstance(submissions.pop(guilty).outcome, GenerationError)
    del outputs[guilty]
    assert [submission.token_ids for submission in submissions] == [[ids] for ids in outputs]
    assert [submission.heard_ids for submission in submissions] == [[ids] for ids in outputs]


def raise_beyond_three(input_ids: torch.Tensor) -> None:
    if len(input_ids) > 3:
        raise ERRORS["memory"]


@pytest.mark.parametrize(
    ("look", "batch_sizes"),
    [(poisoned(ValueError("poison")), [12, 6, 3, 2, 1, 1, 1, 3, 6]), (raise_beyond_three, [12, 6, 3, 3, 6, 3, 3])],
    ids=["poison", "memory"],
)
def test_a_failed_batch_is_generated_in_halves(look: Any, batch_sizes: list[int], llama: Any) -> None:
    spy = GenerateSpy(llama, look)
    with FilledEngine(spy) as filled:
        filled.run([Submission([5, 6 if at else POISON], SamplingParams(2)) for at in range(12)])
    assert spy.batch_sizes == batch_sizes


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_out_of_memory_splits_the_batch_and_changes_no_output(limit: int, llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        if len(input_ids) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    submissions = mixed_submissions(12)
    expected = [submission.expected_ids(llama) for submission in submissions]
    with FilledEngine(GenerateSpy(llama, look)) as filled:
        filled.run(submissions)
        assert filled.engine.is_healthy()
    assert [submission.token_ids for submission in submissions] == expected


OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 18014398509481984 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    "python": MemoryError(),
    "cuda outside the allocator": torch.AcceleratorError("CUDA error: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_prompt_that_never_fits_is_refused_as_out_of_memory(kind: str, llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        if input_ids.shape[1] > 40:
            raise OUT_OF_MEMORY[kind]

    large, small = Submission([5] * 41, SamplingParams(4)), Submission([5, 6], SamplingParams(4))
    with FilledEngine(GenerateSpy(llama, look)) as filled:
        filled.run([large, small])
    assert isinstance(large.outcome, UnavailableError)
    assert large.outcome.code == "out_of_memory"
    assert small.token_ids == small.expected_ids(llama)


def test_a_real_allocation_failure_is_out_of_memory(llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        torch.empty(1 << 52)

    submission = Submission([5, 6], SamplingParams(4))
    with FilledEngine(GenerateSpy(llama, look)) as filled:
        filled.run([submission])
    assert isinstance(submission.outcome, UnavailableError)


@pytest.mark.parametrize("guilty", [0, 5, 11])
def test_a_prompt_that_makes_the_model_raise_is_refused_alone(guilty: int, llama: Any) -> None:
    submissions = mixed_submissions(12)
    submissions[guilty].prompt_ids = [5, POISON]
    expected = [submission.expected_ids(llama) for submission in submissions]
    with FilledEngine(GenerateSpy(llama, poisoned(ValueError("secret prompt")))) as filled:
        filled.run(submissions)
        assert filled.engine.is_healthy()
    refused = submissions.pop(guilty).outcome
    assert isinstance(refused, GenerationError)
    assert "secret" not in str(refused)
    del expected[guilty]
    assert [submission.token_ids for submission in submissions] == expected


FATAL = {
    "cuda error": RuntimeError("CUDA error: device-side assert triggered"),
    "accelerator": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "interpreter": SystemExit(1),
}


@pytest.mark.parametrize("kind", FATAL)
def test_a_fatal_error_answers_all_requests_and_is_reported_once(kind: str, llama: Any) -> None:
    num_answered: list[int] = []
    before, waiting, late = mixed_submissions(4), mixed_submissions(8), Submission([5], SamplingParams(1))
    running = [Submission([5, POISON], SamplingParams(4)), *mixed_submissions(3)]

    def on_fatal() -> None:
        num_answered.append(sum(each.is_done.is_set() for each in [*before, *running, *waiting]))

    spy = GenerateSpy(llama, poisoned(FATAL[kind]))
    with FilledEngine(spy, max_num_seqs=4, on_fatal=on_fatal) as filled:
        filled.run(before)
        filled.run([*running, *waiting])
        assert not filled.engine.is_healthy()
        filled.run([late])
    assert all(isinstance(submission.outcome, list) for submission in before)
    for submission in [*running, *waiting, late]:
        assert isinstance(submission.outcome, UnavailableError)
        assert error_code(submission.outcome) == "engine_failed"
    assert num_answered == [4 + 4 + 8], "reported once, after every outcome"
