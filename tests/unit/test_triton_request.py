# SPDX-License-Identifier: Apache-2.0
"""The owner of Triton's sender, beside a stand-in for Triton's module that dies of what kills the real server."""

import gc
import importlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hf_triton.errors import CancelledError, HfTritonError, RequestError, UnavailableError
from hf_triton.triton_backend import shared_memory
from hf_triton.triton_backend.cancellation import RequestPoller
from tests.support.triton_stand_in import FINAL, Request, Response, Sender, response_before_25_02, stand_in
from tests.support.waiting import wait_until


@pytest.fixture
def poller() -> RequestPoller:
    return RequestPoller(interval_s=0.001)


@pytest.fixture
def make_call(poller: RequestPoller) -> Iterator[Callable[..., Any]]:
    with stand_in(response_before_25_02) as module:
        yield lambda request, *arguments: module.TritonRequest(request, poller, *arguments)


def text(value: bytes) -> dict[str, Any]:
    return {"text_output": np.array([value], dtype=np.object_)}


def texts_of(responses: list[Any]) -> list[bytes]:
    return [array[0] for [(_, array)] in responses]


def test_responses_are_in_order_and_none_follows_the_final_one(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    call = make_call(request)
    for part in (b"one", b"two"):
        call.add(text(part))
    call.answer(text(b"three"))
    call.add(text(b"four"))
    call.answer(text(b"five"))
    call.refuse(HfTritonError("internal", "six"))
    assert texts_of(request.sender.parts) == [b"one", b"two"]
    assert texts_of(request.sender.sent) == [b"three"]


def test_an_error_may_be_the_final_response_of_a_stream(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    call = make_call(request)
    call.add(text(b"one"))
    call.refuse(HfTritonError("internal", "two"))
    assert texts_of(request.sender.parts) == [b"one"]
    assert [error.message for error in request.sender.sent] == ["internal: two"]


def test_a_cancellation_is_noticed_while_the_request_is_open(make_call: Callable[[Request], Any]) -> None:
    requests = [Request() for _ in range(3)]
    calls = [make_call(request) for request in requests]
    wait_until(lambda: all(request.sender.num_asked > 2 for request in requests))
    assert not any(call.is_cancelled() for call in calls)
    requests[1].sender.was_cancelled = True
    wait_until(calls[1].is_cancelled)
    assert [call.is_cancelled() for call in calls] == [False, True, False]
    calls[1].refuse(CancelledError())
    assert calls[1].is_cancelled()


def test_is_cancelled_makes_no_round_trip(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Sender):
        def is_cancelled(self) -> bool:
            asked.set()
            assert go_on.wait(10)
            return super().is_cancelled()

    request.sender = Slow()
    call = make_call(request)
    assert asked.wait(10)
    assert not call.is_cancelled()
    go_on.set()


def test_requests_are_cancelled_by_id(make_call: Callable[[Request], Any], poller: RequestPoller) -> None:
    calls = [make_call(Request(name)) for name in ("one", "two", "two", "")]
    poller.cancel("two")
    assert [call.is_cancelled() for call in calls] == [False, True, True, False]
    poller.cancel("nobody")
    assert [call.is_cancelled() for call in calls] == [False, True, True, False]


def test_a_cancel_during_a_poll_is_kept(make_call: Callable[[Request], Any]) -> None:
    request, may_ask = Request("one"), threading.Event()

    class Slow(Sender):
        def is_cancelled(self) -> bool:
            assert may_ask.wait(10)
            call.cancel()
            return super().is_cancelled()

    request.sender = Slow()
    call = make_call(request)
    may_ask.set()
    wait_until(lambda: request.sender.num_asked > 0)
    assert call.is_cancelled()


def test_an_id_that_is_not_utf8_is_empty(make_call: Callable[[Request], Any]) -> None:
    class Unnamed(Request):
        def request_id(self) -> str:
            return b"\xff".decode()

    assert make_call(Unnamed()).request_id == ""


def test_an_answered_request_cannot_be_cancelled(make_call: Callable[[Request], Any], poller: RequestPoller) -> None:
    request = Request("one")
    call = make_call(request)
    call.answer(text(b"done"))
    poller.cancel("one")
    assert texts_of(request.sender.sent) == [b"done"]


def test_after_the_answer_the_sender_is_not_asked_again(make_call: Callable[[Request], Any]) -> None:
    request, other = Request(), Request()
    call, other_call = make_call(request), make_call(other)
    wait_until(lambda: request.sender.num_asked > 0)
    call.refuse(HfTritonError("internal", "x"))
    num_asked, start = request.sender.num_asked, other.sender.num_asked
    wait_until(lambda: other.sender.num_asked > start + 5)
    assert request.sender.num_asked == num_asked
    assert not call.is_cancelled()
    del other_call


def test_the_poller_rests_while_no_request_is_open(make_call: Callable[[Request], Any], poller: RequestPoller) -> None:
    for _ in range(3):
        call = make_call(Request())
        call.refuse(CancelledError())
    wait_until(lambda: not poller.num_open)
    request = Request()
    call = make_call(request)  # and it wakes up again
    wait_until(lambda: request.sender.num_asked > 0)
    del call


def test_the_poller_keeps_no_request_alive(make_call: Callable[[Request], Any]) -> None:
    requests = [Request() for _ in range(20)]
    calls = [make_call(request) for request in requests]
    wait_until(lambda: all(request.sender.num_asked > 0 for request in requests))
    gc.disable()  # the last reference lets go, not the collector
    try:
        del calls
        wait_until(lambda: all(request.sender.sent for request in requests))
    finally:
        gc.enable()
    assert {request.sender.sent[0].message.split(":")[0] for request in requests} == {"internal"}


def test_a_failing_sender_does_not_stop_the_poller(make_call: Callable[[Request], Any]) -> None:
    broken, sound = Request(), Request()
    broken.sender.is_broken = True
    calls = [make_call(broken), make_call(sound)]
    wait_until(lambda: broken.sender.num_asked > 0 and sound.sender.num_asked > 3)
    sound.sender.was_cancelled = True
    wait_until(calls[1].is_cancelled)
    assert broken.sender.num_asked == 1


def test_outputs_that_were_not_asked_for_are_not_sent(make_call: Callable[[Request], Any]) -> None:
    outputs = {name: np.array([1]) for name in ("text_output", "finish_reason", "num_output_tokens")}
    request = Request(requested_outputs=["num_output_tokens", "finish_reason"])
    call = make_call(request)
    call.add(outputs)
    call.add(text(b"alone"))
    call.answer(outputs)
    [first, empty], [last] = request.sender.parts, request.sender.sent
    assert [[name for name, _ in sent] for sent in (first, empty, last)] == [
        ["finish_reason", "num_output_tokens"],
        [],
        ["finish_reason", "num_output_tokens"],
    ]


@pytest.mark.parametrize(("timeout_us", "expected"), [(0, None), (1_500_000, 1.5)])
def test_the_request_s_timeout_is_in_seconds(
    make_call: Callable[[Request], Any], timeout_us: int, expected: float | None
) -> None:
    request = Request()
    request.timeout_us = timeout_us
    assert make_call(request).timeout_s == expected


def test_a_dropped_request_answers_itself(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    call = make_call(request)
    del call
    [error] = request.sender.sent
    assert error.message.startswith("internal: ")


def test_many_threads_send_one_final_response(make_call: Callable[[Request], Any]) -> None:
    for _ in range(50):
        request = Request()
        call = make_call(request)
        barrier = threading.Barrier(4)

        def race(call: Any = call, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            call.poll()
            call.refuse(HfTritonError("internal", "race"))

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(request.sender.sent) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("invalid_input", "x"), 0),
        (UnavailableError("out_of_memory", "x"), 1),
        (CancelledError(), 2),
        (HfTritonError("internal", "x"), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_keeps_its_code_and_message(
    make_call: Callable[[Request], Any], error: HfTritonError, code: int
) -> None:
    request = Request()
    make_call(request).refuse(error)
    [sent] = request.sender.sent
    assert (sent.message, sent.code) == (str(error), code)


# --- scarce shared memory --------------------------------------------------------------------------------------------


class Full(Sender):
    """One that cannot send what is not small, and nothing at all after what was to be the last.

    As src/response_sender.cc of the Python backend.
    """

    def __init__(self, fits: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_closed = False
        self._fits = fits

    def send(self, response: Any, flags: int = 0) -> None:
        assert not self._is_closed, "Response sender has been closed."
        self._is_closed = flags == FINAL
        if not self._fits(response):
            raise RuntimeError("Failed to increase the shared memory pool size")
        super().send(response, flags)


def has_message(response: Any) -> bool:
    return hasattr(response, "message")


MIB = 1 << 20


def scarce(monkeypatch: pytest.MonkeyPatch, free: int | Callable[[], int], in_pool: int | Callable[[], int]) -> None:
    monkeypatch.setattr(shared_memory, "free_shared_memory", free if callable(free) else lambda: free)
    monkeypatch.setattr(shared_memory, "_free_in_pool", in_pool if callable(in_pool) else lambda: in_pool)


@pytest.mark.parametrize(
    ("free", "in_pool", "num_bytes", "fits"),
    [
        (64 * MIB, 0, 20 * MIB, True),
        (30 * MIB, 0, 20 * MIB, True),  # Triton's pool grows
        (21 * MIB, 0, 20 * MIB, False),  # by whole MiB, beside other models
        (4 * MIB, 0, 10, True),
        (0, 0, 10, False),
        (0, MIB, 10, True),
        (0, MIB, 400_000, True),
        (0, MIB, 900_000, False),  # in one piece, which the pool may not have
    ],
)
def test_a_response_is_one_send_or_an_error_in_one_send(
    make_call: Callable[[Request], Any],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    in_pool: int,
    num_bytes: int,
    fits: bool,
) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE_S", 0.0)
    scarce(monkeypatch, free, in_pool)
    outcomes = list[str]()
    request = Request()
    request.sender = Full(lambda response: fits or has_message(response))
    answer = b"a" * (num_bytes - 4)
    make_call(request, lambda outcome, adapter: outcomes.append(outcome)).answer(text(answer))
    assert not request.sender.parts, "Triton dies of a cancellation between two sends"
    if fits:
        assert (texts_of(request.sender.sent), outcomes) == ([answer], ["ok"])
    else:
        [error] = request.sender.sent
        assert error.message.startswith("out_of_memory: ")
        assert outcomes == ["out_of_memory"]


def test_an_error_keeps_its_words_in_scarce_memory(
    make_call: Callable[[Request], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, 0, MIB)
    request = Request()
    make_call(request).refuse(RequestError("invalid_parameter", "x"))
    assert [error.message for error in request.sender.sent] == ["invalid_parameter: x"]


def test_an_error_waits_until_requests_have_left_the_pool(
    make_call: Callable[[Request], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = iter([0, 0, 0, MIB])
    scarce(monkeypatch, 0, lambda: next(rounds))
    request = Request()
    make_call(request).refuse(RequestError("invalid_parameter", "x"))
    assert [error.message for error in request.sender.sent] == ["invalid_parameter: x"]
    assert not list(rounds)


def test_a_request_dropped_while_another_is_sent_is_answered(
    make_call: Callable[[Request], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs anywhere, so a destructor may find its own thread within a send."""
    scarce(monkeypatch, 8 * MIB, 0)
    request, dropped = Request(), Request()
    calls = [make_call(dropped)]
    request.sender = Full(lambda response: calls.clear() is None)
    make_call(request).answer(text(b"long"))
    assert texts_of(request.sender.sent) == [b"long"]
    assert dropped.sender.sent[0].message.startswith("internal: ")


def test_nothing_is_raised_if_nothing_can_be_sent(make_call: Callable[[Request], Any]) -> None:
    outcomes = list[str]()
    request = Request()
    request.sender = Full(lambda response: False)
    make_call(request, lambda outcome, adapter: outcomes.append(outcome)).answer(text(b"long"))
    assert (request.sender.sent, outcomes) == ([], ["out_of_memory"])


def test_a_delta_too_large_ends_the_stream_with_an_error(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    request.sender = Full(lambda part: has_message(part) or not request.sender.parts)
    call = make_call(request)
    for part in (b"one", b"two", b"three"):
        call.add(text(part))
    call.answer(text(b"four"))
    assert call.is_cancelled(), "what is still being written is given up"
    assert texts_of(request.sender.parts) == [b"one"]
    assert [error.message.split(":")[0] for error in request.sender.sent] == ["out_of_memory"]


def test_a_malformed_log_line_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in(response_before_25_02):
        handler = importlib.import_module(
            "hf_triton.triton_backend.process"
        ).TritonLogHandler()  # and Triton's log is not there either
        for line, arguments in (("fine", ()), ("%d rows", ("no number",))):
            handler.emit(logging.LogRecord("folder", logging.INFO, __file__, 1, line, arguments, None))
    assert "Logging error" in capsys.readouterr().err


def test_a_record_of_no_line_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with stand_in(response_before_25_02):
        process = importlib.import_module("hf_triton.triton_backend.process")
        monkeypatch.setattr(process.pb_utils, "Logger", SimpleNamespace(log_info=lines.append), raising=False)
        process.TritonLogHandler().emit(logging.LogRecord("folder", logging.INFO, "", 0, "fine", (), None))
    assert lines == ["fine"]


def test_parameters_are_parsed_once(poller: RequestPoller) -> None:
    with stand_in(Response) as door:
        own: Any = Request()
        own.parameters = Mock(return_value='{"seed": 1}')
        request = door.TritonRequest(own, poller)
        assert [dict(request.parameters) for _ in range(2)] == [{"seed": 1}] * 2
        own.parameters.assert_called_once()
        request.answer(text(b""))


# --- parameters of a response ----------------------------------------------------------------------------------------


def test_support_for_response_parameters_is_detected() -> None:
    for response, takes_them in ((response_before_25_02, False), (Response, True)):
        with stand_in(response) as door:
            assert door.takes_response_parameters() == takes_them
            assert door.takes_response_parameters() == takes_them


def test_parameters_come_with_the_final_response_alone(poller: RequestPoller) -> None:
    with stand_in(Response) as door:
        request = Request()
        call = door.TritonRequest(request, poller)
        call.add(text(b"one"))
        call.answer(text(b"two"), {"queue_time_us": 2**40})
        [part], [last] = request.sender.parts, request.sender.sent
    assert (json.loads(part.parameters()), json.loads(last.parameters())) == ({}, {"queue_time_us": 2**40})
    assert list(last.tensors["text_output"]) == [b"two"]
    assert last.error is None


def test_an_error_has_no_parameters(poller: RequestPoller) -> None:
    with stand_in(Response) as door:
        request = Request()
        door.TritonRequest(request, poller).refuse(UnavailableError("queue_full", "x"))
    [sent] = request.sender.sent
    assert (sent.error.message, sent.error.code, sent.parameters()) == ("queue_full: x", 1, "{}")


@pytest.mark.parametrize("parameters", [None, {}])
def test_an_older_server_gets_no_parameters(
    make_call: Callable[[Request], Any], parameters: dict[str, int] | None
) -> None:
    request = Request()
    make_call(request).answer(text(b"done"), parameters)
    assert texts_of(request.sender.sent) == [b"done"]
