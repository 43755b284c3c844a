# SPDX-License-Identifier: Apache-2.0
"""What goes out, and in which order, beside a call that notes what it is told."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from hf_triton.engine.types import RequestTimes
from hf_triton.errors import CancelledError, HfTritonError
from hf_triton.protocol.options import RequestOptions
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.responses import GeneratedOutput
from hf_triton.tasks.text_generation.sender import ResponseSender, StreamReply

TEXT = "text_output"
TIMES = RequestTimes(arrival_s=100.0, admitted_s=100.5, first_token_s=102.000_000_6)


class InferenceRequest:
    """Notes every part and the one end; `may_send` holds it up."""

    def __init__(self) -> None:
        self.parts: list[list[str]] = []
        self.ends: list[Any] = []
        self.may_send = threading.Event()
        self.may_send.set()
        self.is_broken = False
        self.takes_no_answer = False
        self.parameters: dict[str, int] | None = None

    def add(self, outputs: dict[str, Any]) -> None:
        assert self.may_send.wait(10)
        assert not self.ends, "a part behind the end"
        if self.is_broken:
            raise KeyboardInterrupt
        self.parts.append(texts_of(outputs))

    def answer(self, outputs: dict[str, Any], parameters: dict[str, int]) -> None:
        if self.takes_no_answer:
            raise MemoryError
        self.ends.append(outputs)
        self.parameters = parameters

    def refuse(self, error: HfTritonError) -> None:
        self.ends.append(error)


def texts_of(outputs: dict[str, Any]) -> list[str]:
    return [element.decode() for element in outputs[TEXT]]


@pytest.fixture
def outbox() -> Iterator[ResponseSender]:
    outbox = ResponseSender()
    yield outbox
    outbox.close()


def reply_to(call: InferenceRequest, outbox: ResponseSender, num_texts: int = 1, **options: bool) -> StreamReply:
    request = GenerationRequest([], [], RequestOptions(**options), (num_texts,))
    reply = StreamReply(call, request, [TEXT, "num_output_tokens"], outbox, TIMES)  # type: ignore[arg-type]
    reply.start(num_texts)
    return reply


def rest(*texts: str) -> Callable[[], list[GeneratedOutput]]:
    return lambda: [GeneratedOutput(text, "length", 1, 2, 0.0, "") for text in texts]


def joined(call: InferenceRequest) -> list[str]:
    [end] = call.ends
    return ["".join(pieces) for pieces in zip(*call.parts, texts_of(end), strict=True)]


def test_pieces_go_out_before_the_rest_and_a_text_that_does_not_go_on_is_empty() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    reply = reply_to(call, outbox, num_texts=2)
    reply.add(1, "ba")
    while not call.parts:
        time.sleep(0.001)
    reply.add(0, "a")
    reply.finish(rest("b", "r"), takes_long=False)
    outbox.close()
    assert call.parts[0] == ["", "ba"]
    assert call.parts[1] == ["a", ""]
    assert joined(call) == ["ab", "bar"]


def test_what_comes_while_the_outbox_ends_is_sent_behind_what_is_there() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    call.may_send.clear()
    reply = reply_to(call, outbox)
    reply.add(0, "a")
    with ThreadPoolExecutor(2) as pool:
        closing = pool.submit(outbox.close)
        while not outbox._lane._is_closed:
            time.sleep(0.001)
        ending = pool.submit(reply.finish, rest("b"), takes_long=False)
        time.sleep(0.1)
        assert [closing.done(), ending.done()] == [False, False]
        call.may_send.set()
    assert joined(call) == ["ab"]


def test_what_the_garbage_collector_has_sent_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is dropped in a cycle is refused wherever the collector runs, be it in the middle of a putting."""
    sent: list[str] = []

    class Collecting(queue.SimpleQueue[Any]):
        is_first = True

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            was_first, self.is_first = self.is_first, False
            if was_first:
                outbox.put(lambda: sent.append("the collector's"))

    with monkeypatch.context() as patch:
        patch.setattr(queue, "SimpleQueue", Collecting)
        outbox = ResponseSender()
    putting = threading.Thread(target=outbox.put, args=[lambda: sent.append("its own")], daemon=True)
    putting.start()
    putting.join(10)
    assert not putting.is_alive()
    outbox.close()
    assert sent == ["its own", "the collector's"]


@pytest.mark.parametrize("takes_long", [False, True])
def test_an_outbox_that_has_ended_makes_no_thread(takes_long: bool) -> None:
    outbox, threads = ResponseSender(), threading.active_count()
    outbox.close()
    call = InferenceRequest()
    reply_to(call, outbox).finish(rest("a"), takes_long=takes_long)
    assert joined(call) == ["a"]
    assert threading.active_count() == threads - 1


def test_what_is_put_while_the_last_is_sent_comes_behind_what_is_there() -> None:
    outbox, sent, is_closing = ResponseSender(), list[str](), threading.Event()

    def first() -> None:
        assert is_closing.wait(10)
        while not outbox._lane._is_closed:
            time.sleep(0.001)
        outbox.put(lambda: sent.append("third"))

    outbox.put(first)
    outbox.put(lambda: sent.append("second"))
    is_closing.set()
    outbox.close()
    assert sent == ["second", "third"]


def test_what_comes_behind_the_outbox_s_end_is_sent_all_the_same() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    reply = reply_to(call, outbox)
    outbox.close()
    reply.add(0, "a")
    reply.finish(rest("b"), takes_long=False)
    assert joined(call) == ["ab"]


@pytest.mark.parametrize("is_broken", [True, False])
def test_an_error_goes_out_whether_the_pieces_before_it_do(is_broken: bool) -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    call.is_broken = is_broken
    reply = reply_to(call, outbox)
    reply.add(0, "a")
    reply.refuse(CancelledError())
    outbox.close()
    [end] = call.ends
    assert isinstance(end, CancelledError)


def test_what_is_told_beside_the_text_comes_with_the_last_response_alone() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    reply = reply_to(call, outbox, return_num_output_tokens=True)
    reply.add(0, "a")
    reply.finish(rest(""), takes_long=False)
    outbox.close()
    [end] = call.ends
    assert end["num_output_tokens"].tolist() == [2]
    assert call.parts == [["a"]]


def test_the_request_s_times_come_with_the_last_response_where_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asks, does_not = InferenceRequest(), InferenceRequest()
    monkeypatch.setattr("hf_triton.tasks.text_generation.sender.time.monotonic", lambda: 103.25)
    outbox = ResponseSender()
    for call, wants in ((asks, True), (does_not, False)):
        reply = reply_to(call, outbox, return_timings=wants)
        reply.add(0, "a")
        reply.finish(rest("b"), takes_long=False)
    outbox.close()
    assert asks.parameters == {
        "queue_time_us": 500_000,
        "time_to_first_token_us": 2_000_001,
        "e2e_request_latency_us": 3_250_000,
    }
    assert not does_not.parameters
    assert joined(asks) == joined(does_not) == ["ab"]


def test_what_is_written_while_nothing_can_be_sent_goes_out_together() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    call.may_send.clear()
    reply = reply_to(call, outbox)
    for letter in "abcdef":
        reply.add(0, letter)
    call.may_send.set()
    reply.finish(rest("g"), takes_long=False)
    outbox.close()
    assert joined(call) == ["abcdefg"]
    assert len(call.parts) <= 2


def test_an_error_comes_behind_the_pieces_and_ends_the_stream() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    reply = reply_to(call, outbox)
    reply.add(0, "a")
    reply.refuse(CancelledError())
    reply.add(0, "b")  # the engine has not heard of the error yet
    outbox.close()
    assert call.parts in ([["a"]], [["ab"]])
    assert [str(end) for end in call.ends] == [
        "cancelled: the client cancelled the request, or another request with its id did (`stop` true)"
    ]


def test_texts_are_made_by_the_thread_that_sends(outbox: ResponseSender) -> None:
    makers = []

    def make() -> list[GeneratedOutput]:
        makers.append(threading.current_thread().name)
        return rest("a")()

    reply_to(InferenceRequest(), outbox).finish(make, takes_long=False)
    outbox.close()
    assert makers == ["hf_triton-outbox"]


def test_texts_that_cannot_be_made_are_an_error_behind_the_pieces(outbox: ResponseSender) -> None:
    def make() -> list[GeneratedOutput]:
        raise CancelledError

    call = InferenceRequest()
    reply = reply_to(call, outbox)
    reply.add(0, "a")
    reply.finish(make, takes_long=False)
    outbox.close()
    assert call.parts == [["a"]]
    assert [type(end) for end in call.ends] == [CancelledError]


def test_streams_and_short_answers_do_not_wait_for_an_answer_that_takes_long(outbox: ResponseSender) -> None:
    slow, quick, may_make = InferenceRequest(), InferenceRequest(), threading.Event()

    def make() -> list[GeneratedOutput]:
        assert may_make.wait(10)
        return rest("b")()

    reply = reply_to(slow, outbox)
    reply.add(0, "a")
    reply.finish(make, takes_long=True)
    reply = reply_to(quick, outbox)
    reply.add(0, "c")
    reply.finish(rest("d"), takes_long=False)
    deadline_s = time.monotonic() + 10
    while not quick.ends and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert joined(quick) == ["cd"]
    assert (slow.parts, slow.ends) == ([["a"]], [])
    may_make.set()
    outbox.close()
    assert joined(slow) == ["ab"]


def test_long_answers_are_made_in_order_and_all_of_them_before_the_end(outbox: ResponseSender) -> None:
    calls, ended = [InferenceRequest() for _ in range(20)], []

    def make(number: int) -> list[GeneratedOutput]:
        time.sleep(0.005)
        ended.append(number)
        return rest(str(number))()

    for number, call in enumerate(calls):
        reply_to(call, outbox).finish(partial(make, number), takes_long=True)
    outbox.close()
    assert ended == list(range(20))
    assert [joined(call) for call in calls] == [[str(number)] for number in range(20)]


@pytest.mark.parametrize("takes_long", [False, True])
def test_an_answer_that_cannot_be_sent_is_a_fault_of_ours_and_no_silence(
    outbox: ResponseSender, takes_long: bool
) -> None:
    call = InferenceRequest()
    call.takes_no_answer = True
    reply = reply_to(call, outbox)
    reply.finish(rest("a"), takes_long=takes_long)
    outbox.close()
    assert [str(end).split(":")[0] for end in call.ends] == ["internal"]


def test_what_could_not_be_sent_is_held_by_nobody(outbox: ResponseSender) -> None:
    """A call without an answer gives itself one when it goes, and must not stay until the next one comes."""

    class Dropped:
        def __call__(self) -> None:
            raise MemoryError

    sent = Dropped()
    has_gone = weakref.ref(sent)
    outbox.put(sent)
    del sent
    deadline_s = time.monotonic() + 10
    while has_gone() is not None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert has_gone() is None


def test_a_whole_answer_is_one_response() -> None:
    outbox, call = ResponseSender(), InferenceRequest()
    request = GenerationRequest([], [], RequestOptions(), (1,))
    StreamReply(call, request, [TEXT], outbox, TIMES).finish(rest("whole"), takes_long=False)  # type: ignore[arg-type]
    outbox.close()
    assert (call.parts, joined(call)) == ([], ["whole"])


def test_one_call_that_cannot_be_sent_to_is_no_matter_of_the_others(outbox: ResponseSender) -> None:
    broken, sound = InferenceRequest(), InferenceRequest()
    broken.is_broken = True
    reply_to(broken, outbox).add(0, "a")
    reply = reply_to(sound, outbox)
    reply.add(0, "b")
    reply.finish(rest("c"), takes_long=False)
    outbox.close()
    assert joined(sound) == ["bc"]


def test_many_streams_from_many_threads_keep_their_texts() -> None:
    outbox, calls = ResponseSender(), [InferenceRequest() for _ in range(8)]
    replies = [reply_to(call, outbox, num_texts=2) for call in calls]

    def write(number: int) -> None:
        for step in range(500):
            replies[number].add(step % 2, f"{number}.{step} ")
        replies[number].finish(rest("!", "?"), takes_long=False)

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(write, range(len(calls))))
    outbox.close()
    for number, call in enumerate(calls):
        even, odd = ("".join(f"{number}.{step} " for step in range(start, 500, 2)) for start in (0, 1))
        assert joined(call) == [even + "!", odd + "?"]
