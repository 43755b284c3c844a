# SPDX-License-Identifier: Apache-2.0
"""The owner of Triton's sender, beside a stand-in for Triton's module that dies of what kills the real server."""

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import CancelledError, HfTritonError, RequestError, UnavailableError

FINAL = 1


class Sender:
    """Notes what is sent. Triton's own takes the whole server down when it is touched after its final answer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.was_cancelled = False

    def send(self, response: Any, flags: int) -> None:
        assert not self.sent, "a second answer"
        assert flags == FINAL
        self.sent.append(response)

    def is_cancelled(self) -> bool:
        assert not self.sent, "SIGSEGV: asked after the final answer"
        return self.was_cancelled


class Request:
    def __init__(self) -> None:
        self.sender = Sender()

    def get_response_sender(self) -> Sender:
        return self.sender


@pytest.fixture
def make_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Request], Any]]:
    class Error:
        INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = range(4)

        def __init__(self, message: str, code: int) -> None:
            self.message, self.code = message, code

    fake = types.SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        TritonError=Error,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda tensors, error=None: error or tensors,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)
    monkeypatch.delitem(sys.modules, "hf_triton._triton", raising=False)
    from hf_triton._triton import Call

    yield Call
    sys.modules.pop("hf_triton._triton", None)


def test_only_the_first_answer_is_sent(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    call = make_call(request)
    call.answer({"text_output": np.array([b"first"], dtype=np.object_)})
    call.answer({"text_output": np.array([b"second"], dtype=np.object_)})
    call.refuse(HfTritonError("internal", "third"))
    del call
    [[(name, array)]] = request.sender.sent
    assert (name, list(array)) == ("text_output", [b"first"])


@pytest.mark.parametrize("was_cancelled", [False, True])
def test_after_the_answer_the_sender_is_not_asked_again(
    make_call: Callable[[Request], Any], was_cancelled: bool
) -> None:
    request = Request()
    request.sender.was_cancelled = was_cancelled
    call = make_call(request)
    assert call.is_cancelled() is was_cancelled
    call.refuse(CancelledError())
    assert call.is_cancelled() is was_cancelled


def test_a_call_that_is_dropped_answers(make_call: Callable[[Request], Any]) -> None:
    request = Request()
    call = make_call(request)
    del call
    [error] = request.sender.sent
    assert error.message.startswith("internal: ")


def test_many_threads_send_one_answer(make_call: Callable[[Request], Any]) -> None:
    for _ in range(50):
        request = Request()
        call = make_call(request)
        barrier = threading.Barrier(4)

        def race(call: Any = call, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            call.is_cancelled()
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
def test_an_error_keeps_its_code_and_its_words(
    make_call: Callable[[Request], Any], error: HfTritonError, code: int
) -> None:
    request = Request()
    make_call(request).refuse(error)
    [sent] = request.sender.sent
    assert (sent.message, sent.code) == (str(error), code)


def test_an_answer_that_does_not_fit_becomes_a_small_error(make_call: Callable[[Request], Any]) -> None:
    class Full(Sender):
        def send(self, response: Any, flags: int) -> None:
            if not hasattr(response, "message"):
                raise RuntimeError("Failed to increase the shared memory pool size")
            super().send(response, flags)

    request = Request()
    request.sender = Full()
    make_call(request).answer({"text_output": np.array([b"long"], dtype=np.object_)})
    [error] = request.sender.sent
    assert error.message.startswith("out_of_memory: ")
