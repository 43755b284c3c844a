# SPDX-License-Identifier: Apache-2.0
"""Deadlines, cancellation, priorities and shutdown of the batch engine."""

import time
from typing import Any

import pytest

from hf_triton.engine.sequence import Completion
from hf_triton.errors import CancelledError, HfTritonError, UnavailableError
from hf_triton.sampling.params import SamplingParams
from tests.support.batch_engine import FilledEngine, Submission, draw_prompts
from tests.support.reference import solo_ids


class Clock:
    """`time.monotonic`, which a test can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        read = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: read() + self._ahead_s)

    def advance(self) -> None:
        self._ahead_s += 100_000.0

    def deadline_s(self) -> float:
        """Passed by the next `advance` and not before."""
        return time.monotonic() + 50_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_sequence_finishes_at_its_deadline_with_its_tokens(model: Any, clock: Clock) -> None:
    def listen(submission: Submission) -> bool:
        if len(submission.heard) == 3:
            clock.advance()
        assert len(others[0].heard) < 4 or late.is_done.is_set(), "answered at once, not with the batch"
        return False

    late = Submission([5, 6, 7], SamplingParams(500), listen)
    others = [Submission(ids, SamplingParams(8)) for ids in draw_prompts(3)]
    others[0].on_token = listen
    with FilledEngine(model) as filled:
        filled.submit(late.group(deadline_s=clock.deadline_s()), *(each.group() for each in others))
        assert late.completions == [Completion(solo_ids(model, [5, 6, 7], 3), "deadline")]
        assert [each.token_ids for each in others] == [each.expected_ids(model) for each in others]


def test_a_queued_prompt_is_refused_at_its_deadline_while_others_run(model: Any, clock: Clock) -> None:
    is_answered: list[bool] = []

    def listen(submission: Submission) -> bool:
        if len(submission.heard) == 3:
            clock.advance()
        is_answered.append(waiting.is_done.is_set())
        return False

    running, waiting = Submission([5, 6, 7], SamplingParams(5), listen), Submission([5, 6], SamplingParams(5))
    with FilledEngine(model, max_num_seqs=1) as filled:
        filled.submit(running.group(), waiting.group(deadline_s=clock.deadline_s()))
        assert len(running.token_ids[0]) == 5
    assert isinstance(waiting.outcome, UnavailableError)
    assert waiting.outcome.code == "deadline_exceeded"
    assert is_answered == [False, False, False, True, True]


@pytest.mark.parametrize("failure", [None, OSError("the pipe is gone")])
def test_cancellation_is_noticed_within_one_step(failure: Exception | None, model: Any) -> None:
    def is_cancelled() -> bool:
        if failure and len(cancelled.heard) >= 4:
            raise failure
        return len(cancelled.heard) >= 4

    cancelled, other = Submission([5, 6, 7], SamplingParams(100_000)), Submission([5, 6], SamplingParams(20))
    with FilledEngine(model, context_length=200_000) as filled:
        filled.submit(cancelled.group(is_cancelled), other.group())
        assert isinstance(cancelled.outcome, HfTritonError if failure else CancelledError)
        assert other.token_ids == other.expected_ids(model)
    assert len(cancelled.heard) == 4


def test_max_time_of_the_checkpoint_finishes_sequences(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.generation_config, "max_time", 1e-9)
    submissions = [Submission(ids, SamplingParams(8)) for ids in draw_prompts(3)]
    with FilledEngine(model) as filled:
        filled.run(submissions)
    assert [each.completions[0].finish_reason for each in submissions] == ["deadline"] * 3
    assert [len(each.token_ids[0]) for each in submissions] == [1] * 3


def test_a_running_sequence_does_not_delay_the_close(model: Any) -> None:
    def listen(submission: Submission) -> bool:
        if len(submission.heard) == 3:
            filled.engine.close()
        return False

    running, waiting = Submission([5, 6, 7], SamplingParams(500), listen), Submission([5, 6], SamplingParams(5))
    with FilledEngine(model, max_num_seqs=1) as filled:
        filled.run([running, waiting])
    for submission in (running, waiting):
        assert isinstance(submission.outcome, UnavailableError)
        assert submission.outcome.code == "shutting_down"
    assert len(running.heard) == 3
