# SPDX-License-Identifier: Apache-2.0
"""The engine answers every group once: in order, within its tokens, and with its own outputs or its own error."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.engine.protocols import EngineLoad
from hf_triton.errors import HfTritonError
from tests.support.encoders import Answer, ObservedForward, StartEncoder, random_inputs

BAD = 99
"""Inputs with this token fail."""


def fail_on_bad(error: Exception) -> Any:
    def fail(inputs: list[EncoderInput]) -> None:
        if any(BAD in each.ids for each in inputs):
            raise error

    return fail


def bad_input() -> EncoderInput:
    return EncoderInput([0, BAD, 5, 2])


def good_inputs(lengths: list[int], seed: int = 0) -> list[EncoderInput]:
    inputs = random_inputs(lengths, seed)
    return [EncoderInput([3 if token == BAD else token for token in each.ids]) for each in inputs]


def alone(forward: ObservedForward, inputs: list[EncoderInput]) -> list[Any]:
    return [forward([each])[0].numpy() for each in inputs]


def is_rounding(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    return np.allclose(one, other, rtol=1e-6, atol=3e-6)


def lengths(calls: list[list[EncoderInput]]) -> list[list[int]]:
    return [[len(each.ids) for each in call] for call in calls]


def test_a_request_is_answered_in_its_order_with_its_own_outputs(forward: ObservedForward, start: StartEncoder) -> None:
    inputs = good_inputs([30, 4, 17, 4, 60])
    expected = alone(forward, inputs)
    answer = Answer(inputs)
    start(forward, max_batch_tokens=50).submit([answer.group])
    outputs = answer.wait()
    assert all(is_rounding(one, other) for one, other in zip(outputs, expected, strict=True))


def test_what_waits_is_computed_in_order_of_arrival_within_the_cap(
    forward: ObservedForward, start: StartEncoder
) -> None:
    engine = start(forward, max_batch_tokens=40)
    forward.hold()
    answers = [Answer(good_inputs([length])) for length in (10, 11, 12, 13, 60, 14)]
    engine.submit([answers[0].group])
    assert forward.has_begun.wait(60)
    for answer in answers[1:]:
        engine.submit([answer.group])
    assert engine.load() == EngineLoad(num_waiting=5, num_running=1)
    forward.gate.set()
    for answer in answers:
        answer.wait()
    assert lengths(forward.calls) == [[10], [11, 12, 13], [60], [14]]


def test_a_newcomer_passes_by_the_rest_of_a_long_request(forward: ObservedForward, start: StartEncoder) -> None:
    engine = start(forward, max_batch_tokens=1500)
    forward.hold()
    bulk, newcomer = Answer(good_inputs([100] * 60)), Answer(good_inputs([7]))
    engine.submit([bulk.group])
    assert forward.has_begun.wait(60)
    engine.submit([newcomer.group])
    forward.gate.set()
    assert len(bulk.wait()) == 60
    newcomer.wait()
    assert 7 in lengths(forward.calls)[1]
    assert [sum(call) for call in lengths(forward.calls)][:3] == [1500, 1407, 1500]
    assert lengths(forward.calls)[1].index(7) == 5  # behind a turn of the other request


def test_cancelled_and_expired_groups_are_not_computed(forward: ObservedForward, start: StartEncoder) -> None:
    engine = start(forward)
    forward.hold()
    first, cancelled, last = (Answer(good_inputs([length])) for length in (5, 6, 7))
    expired = Answer(good_inputs([8]), deadline_s=time.monotonic())
    engine.submit([first.group])
    assert forward.has_begun.wait(60)
    for answer in (cancelled, expired, last):
        engine.submit([answer.group])
    cancelled.is_cancelled = True
    forward.gate.set()
    assert cancelled.wait().code == "cancelled"
    assert expired.wait().code == "deadline_exceeded"
    last.wait()
    assert lengths(forward.calls) == [[5], [7]]


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("no"), "generation_failed"), (torch.OutOfMemoryError("no"), "out_of_memory")]
)
def test_a_failure_is_the_one_request_s_own(
    forward: ObservedForward, start: StartEncoder, error: Exception, code: str
) -> None:
    inputs = good_inputs([9, 20, 3, 15])
    expected = alone(forward, inputs)
    engine = start(forward)
    forward.hold()
    forward.before = fail_on_bad(error)
    engine.submit([Answer(good_inputs([4])).group])
    assert forward.has_begun.wait(60)
    answers = [Answer([each]) for each in inputs]
    bad = Answer([inputs[0], bad_input(), inputs[1]])
    for answer in [*answers[:2], bad, *answers[2:]]:
        engine.submit([answer.group])
    forward.gate.set()
    assert bad.wait().code == code
    assert all(is_rounding(answer.wait()[0], own) for answer, own in zip(answers, expected, strict=True))
    assert engine.is_healthy()


def test_a_text_that_never_fits_the_memory_leaves_large_batches(forward: ObservedForward, start: StartEncoder) -> None:
    engine = start(forward, max_batch_tokens=2000)
    forward.before = fail_on_bad(torch.OutOfMemoryError("no"))
    for _ in range(3):
        bad = Answer([bad_input(), *good_inputs([5] * 6)])
        engine.submit([bad.group])
        assert bad.wait().code == "out_of_memory"
    bulk = Answer(good_inputs([100] * 60))
    engine.submit([bulk.group])
    assert len(bulk.wait()) == 60
    assert sum(lengths(forward.calls)[-2]) >= 500


def test_outputs_that_are_not_finite_are_an_error(bert: Any, start: StartEncoder) -> None:
    forward = ObservedForward(
        bert,
        ("last_hidden_state",),
        per_token=True,
        reduce=lambda states: states.sum() / (len(states) - 4),
        way="packed",
    )
    answers = [Answer(good_inputs([length])) for length in (4, 5, 6)]
    engine = start(forward)
    for answer in answers:
        engine.submit([answer.group])
    assert answers[0].wait().code == "not_finite"
    assert all(np.isfinite(answer.wait()[0]).all() for answer in answers[1:])


@pytest.mark.parametrize(
    ("ids", "code"),
    [([], "invalid_input"), ([3] * 131, "context_exceeded"), ([3, 200], "invalid_input"), ([-1, 3], "invalid_input")],
)
def test_inputs_without_embeddings_are_refused(
    forward: ObservedForward, start: StartEncoder, ids: list[int], code: str
) -> None:
    answer = Answer([EncoderInput([3, 4]), EncoderInput(ids)])
    start(forward).submit([answer.group])
    assert answer.wait().code == code
    assert not forward.calls


def test_a_request_without_inputs_is_answered(forward: ObservedForward, start: StartEncoder) -> None:
    answer = Answer([])
    start(forward).submit([answer.group])
    assert answer.wait() == []


def test_close_answers_all(forward: ObservedForward, start: StartEncoder) -> None:
    engine = start(forward, max_batch_tokens=20)
    forward.hold()
    answers = [Answer(good_inputs([10, 10, 10])) for _ in range(5)]
    for answer in answers:
        engine.submit([answer.group])
    assert forward.has_begun.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    forward.gate.set()
    closing.join()
    late = Answer(good_inputs([3]))
    engine.submit([late.group])
    assert [answer.wait().code for answer in [*answers, late]] == ["shutting_down"] * 6
    assert not engine.is_healthy()


def test_what_was_taken_before_a_close_is_answered(
    forward: ObservedForward, start: StartEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(forward)
    take = engine.queue.take

    def close_behind(*budget: Any, **options: Any) -> Any:
        groups = take(*budget, **options)
        if groups:
            engine._closing.set()
        return groups

    monkeypatch.setattr(engine.queue, "take", close_behind)
    answer = Answer(good_inputs([5]))
    engine.submit([answer.group])
    assert answer.wait().code == "shutting_down"


def test_a_lost_device_answers_all_and_is_told(forward: ObservedForward, start: StartEncoder) -> None:
    told = threading.Event()
    engine = start(forward, on_fatal=told.set)
    forward.before = fail_on_bad(RuntimeError("CUDA error: an illegal memory access was encountered"))
    answer = Answer([bad_input()])
    engine.submit([answer.group])
    assert answer.wait().code == "engine_failed"
    assert told.wait(60)
    assert not engine.is_healthy()


@pytest.mark.full
def test_thousands_of_requests_lose_nothing(forward: ObservedForward, start: StartEncoder) -> None:
    inputs = good_inputs([3 + number % 6 for number in range(40)])
    expected = alone(forward, inputs)
    engine = start(forward)

    def ask(number: int) -> bool:
        answer = Answer([inputs[number % 40]])
        engine.submit([answer.group])
        output = answer.wait()
        return not isinstance(output, HfTritonError) and is_rounding(output[0], expected[number % 40])

    with ThreadPoolExecutor(128) as pool:
        assert all(pool.map(ask, range(8000)))
    assert engine.load() == EngineLoad()
