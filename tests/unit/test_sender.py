# SPDX-License-Identifier: Apache-2.0
"""The order of sends, and the responses that a sender sends beside a request that keeps them."""

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hf_triton.engine.sequence import Completion, SequenceGroup
from hf_triton.errors import CancelledError
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.checked_hooks import CheckedHooks
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.tasks.text_generation.prepare import PreparedPrompt
from hf_triton.tasks.text_generation.resolve import TaskParams
from hf_triton.tasks.text_generation.response import MAX_QUICK_TOKENS, GenerationResponse
from tests.support.collector import Collector, config_of
from tests.support.tokenizers import codec_of, raw_ids
from tests.support.waiting import wait_until

KIND = "byte_level"


class InferenceRequest(Collector):
    """`may_send` holds up its deltas, `is_broken` and `takes_no_answer` fail them and the final response."""

    def __init__(self) -> None:
        super().__init__()
        self.may_send = threading.Event()
        self.may_send.set()
        self.is_broken = False
        self.takes_no_answer = False

    def add(self, outputs: Mapping[str, Any]) -> None:
        assert self.may_send.wait(10)
        if self.is_broken:
            raise RuntimeError
        super().add(outputs)

    def answer(self, outputs: Mapping[str, Any], parameters: Mapping[str, int] | None = None) -> None:
        if self.takes_no_answer:
            raise MemoryError
        super().answer(outputs, parameters)


@pytest.fixture
def sender() -> Iterator[ResponseSender]:
    sender = ResponseSender()
    yield sender
    sender.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="long") as pool:
        yield pool


class Writer:
    """The engine's side of one request: writes text of its sequences, then ends them."""

    def __init__(
        self,
        request: InferenceRequest,
        sender: ResponseSender,
        pool: Any = None,
        *,
        num_prompts: int = 1,
        streams: bool = True,
        codec: Any = None,
        **options: bool,
    ) -> None:
        preparer = SimpleNamespace(
            codec=codec or codec_of(KIND),
            hooks=CheckedHooks(Hooks()),
            overridden=frozenset(),
            text_field="generated_text",
            describe_tokens=None,
        )
        checked = GenerationRequest([], [], RequestOptions(**options), (num_prompts,))
        config = config_of(streams=streams, sender=sender)
        self.response = GenerationResponse(request, checked, config, cast(Any, preparer), pool)
        self.response.prompts += [PreparedPrompt(TaskParams(), [], SamplingParams(1)) for _ in range(num_prompts)]
        self.groups: list[SequenceGroup] = self.response.begin()
        self.ids: list[list[int]] = [[] for _ in range(num_prompts)]

    def write(self, row: int, text: str) -> None:
        for token_id in raw_ids(KIND, text):
            self.ids[row].append(token_id)
            if self.groups[row].listens_to_tokens:
                self.response.on_token(row, 0, token_id, None)

    def finish(self, *, is_long: bool = False) -> None:
        for row, ids in enumerate(self.ids):
            self.response.on_finish(row, [Completion(ids * (MAX_QUICK_TOKENS + 1 if is_long else 1), "length")])


def joined(request: Collector) -> list[str]:
    [end] = request.results
    assert isinstance(end, list), end
    return ["".join(pieces) for pieces in zip(*request.parts, [each.text_output for each in end], strict=True)]


# --- the sender ------------------------------------------------------------------------------------------------------


def test_a_send_during_close_runs_after_the_queued_ones() -> None:
    sender, sent, may_send = ResponseSender(), list[str](), threading.Event()

    def first() -> None:
        assert may_send.wait(10)
        sent.append("first")

    sender.put(first)
    with ThreadPoolExecutor(2) as threads:
        closing = threads.submit(sender.close)
        time.sleep(0.1)
        ending = threads.submit(sender.put, lambda: sent.append("second"))
        time.sleep(0.1)
        assert [closing.done(), ending.done()] == [False, False]
        may_send.set()
    assert sent == ["first", "second"]


def test_a_send_of_the_garbage_collector_does_not_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is dropped in a cycle is refused wherever the collector runs, even while a send is queued."""
    sent: list[str] = []

    class Collecting(queue.SimpleQueue[Any]):
        is_first = True

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            was_first, self.is_first = self.is_first, False
            if was_first:
                sender.put(lambda: sent.append("the collector's"))

    with monkeypatch.context() as patch:
        patch.setattr(queue, "SimpleQueue", Collecting)
        sender = ResponseSender()
    putting = threading.Thread(target=sender.put, args=[lambda: sent.append("its own")], daemon=True)
    putting.start()
    putting.join(10)
    assert not putting.is_alive()
    sender.close()
    assert sent == ["its own", "the collector's"]


def test_a_send_queued_by_the_last_send_runs() -> None:
    sender, sent, is_closing = ResponseSender(), list[str](), threading.Event()

    def first() -> None:
        assert is_closing.wait(10)
        time.sleep(0.05)
        sender.put(lambda: sent.append("third"))

    sender.put(first)
    sender.put(lambda: sent.append("second"))
    is_closing.set()
    sender.close()
    assert sent == ["second", "third"]


def test_a_failed_send_is_not_kept(sender: ResponseSender) -> None:
    """A request without a response answers in its destructor, and must not stay until the next send."""

    class Dropped:
        def __call__(self) -> None:
            raise MemoryError

    sent = Dropped()
    has_gone = weakref.ref(sent)
    sender.put(sent)
    del sent
    wait_until(lambda: has_gone() is None)


def test_a_send_that_exits_does_not_end_the_thread(sender: ResponseSender) -> None:
    def leave() -> None:
        raise SystemExit

    is_sent = threading.Event()
    sender.put(leave)
    sender.put(is_sent.set)
    assert is_sent.wait(30)


# --- responses -------------------------------------------------------------------------------------------------------


def test_deltas_precede_the_rest_and_are_empty_for_other_sequences() -> None:
    sender, request = ResponseSender(), InferenceRequest()
    writer = Writer(request, sender, num_prompts=2)
    writer.write(1, "b")
    wait_until(lambda: request.parts)
    writer.write(0, "a")
    wait_until(lambda: len(request.parts) == 2)
    writer.finish()
    sender.close()
    assert request.parts == [["", "b"], ["a", ""]]
    assert joined(request) == ["a", "b"]


@pytest.mark.parametrize("is_long", [False, True])
def test_a_response_after_the_sender_s_end_is_sent_without_a_thread(is_long: bool) -> None:
    sender, threads = ResponseSender(), threading.active_count()
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    sender.close()
    request = InferenceRequest()
    writer = Writer(request, sender, pool, streams=False)
    writer.write(0, "a")
    writer.finish(is_long=is_long)
    assert joined(request) == ["a" * ((MAX_QUICK_TOKENS + 1) if is_long else 1)]
    assert threading.active_count() == threads - 1


def test_deltas_and_response_after_the_sender_s_end_are_sent() -> None:
    sender, request = ResponseSender(), InferenceRequest()
    writer = Writer(request, sender)
    sender.close()
    writer.write(0, "ab")
    writer.finish()
    assert joined(request) == ["ab"]


@pytest.mark.parametrize("is_broken", [True, False])
def test_an_error_is_sent_even_if_the_deltas_before_it_are_not(is_broken: bool) -> None:
    sender, request = ResponseSender(), InferenceRequest()
    request.is_broken = is_broken
    writer = Writer(request, sender)
    writer.write(0, "a")
    writer.response.refuse(CancelledError())
    sender.close()
    [end] = request.results
    assert isinstance(end, CancelledError)


def test_other_outputs_come_with_the_final_response_alone() -> None:
    sender, request = ResponseSender(), InferenceRequest()
    writer = Writer(request, sender, return_num_output_tokens=True)
    writer.write(0, "a")
    writer.finish()
    sender.close()
    assert request.outputs["num_output_tokens"].tolist() == [1]
    assert request.parts == [["a"]]


def test_deltas_that_wait_for_the_sender_are_sent_together() -> None:
    sender, request = ResponseSender(), InferenceRequest()
    request.may_send.clear()
    writer = Writer(request, sender)
    for letter in "abcdef":
        writer.write(0, letter)
    request.may_send.set()
    writer.finish()
    sender.close()
    assert joined(request) == ["abcdef"]
    assert len(request.parts) <= 2


def test_an_error_follows_the_deltas_and_ends_the_stream() -> None:
    sender, request = ResponseSender(), InferenceRequest()
    writer = Writer(request, sender)
    writer.write(0, "a")
    writer.response.refuse(CancelledError())
    writer.write(0, "b")  # the engine does not know of the error yet
    sender.close()
    assert request.parts in ([["a"]], [["ab"]])
    assert [str(end) for end in request.results] == [
        "cancelled: the client cancelled the request, or another request with its id did (`cancel` true)"
    ]


class NamingCodec:
    """A tokenizer that keeps the names of the threads that decode with it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def stream(self, prompt_ids: list[int], stop_strings: tuple[str, ...], *, includes_stop: bool) -> Any:
        return codec_of(KIND).stream(prompt_ids, stop_strings, includes_stop=includes_stop)

    def continuation(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        self.threads.append(threading.current_thread().name)
        return "text"


@pytest.mark.parametrize(("is_long", "thread"), [(False, "hf_triton-sender"), (True, "long_0")])
def test_texts_are_decoded_by_the_sender_and_long_ones_by_the_pool(
    is_long: bool, thread: str, sender: ResponseSender, pool: ThreadPoolExecutor
) -> None:
    codec, request = NamingCodec(), InferenceRequest()
    writer = Writer(request, sender, pool, streams=False, codec=codec)
    writer.write(0, "a")
    writer.finish(is_long=is_long)
    assert request.is_finished.wait(10)
    assert codec.threads == [thread]


def test_short_responses_do_not_wait_for_a_long_one(sender: ResponseSender) -> None:
    may_make, pool = threading.Event(), ThreadPoolExecutor(1)
    pool.submit(may_make.wait, 10)
    slow, quick = InferenceRequest(), InferenceRequest()
    writer = Writer(slow, sender, pool)
    writer.write(0, "a")
    writer.finish(is_long=True)
    writer = Writer(quick, sender, pool)
    writer.write(0, "c")
    writer.finish()
    assert quick.is_finished.wait(10)
    assert joined(quick) == ["c"]
    assert (slow.parts, slow.results) == ([["a"]], [])
    may_make.set()
    pool.shutdown()
    sender.close()
    assert joined(slow) == ["a"]


def test_long_responses_are_all_sent_before_the_pool_ends(sender: ResponseSender) -> None:
    requests, pool = [InferenceRequest() for _ in range(20)], ThreadPoolExecutor(1)
    for request in requests:
        writer = Writer(request, sender, pool, streams=False)
        writer.write(0, "a")
        writer.finish(is_long=True)
    sender.close()
    pool.shutdown()
    assert [joined(request) for request in requests] == [["a" * (MAX_QUICK_TOKENS + 1)]] * 20


@pytest.mark.parametrize("is_long", [False, True])
def test_a_response_that_cannot_be_sent_is_an_internal_error(
    sender: ResponseSender, pool: ThreadPoolExecutor, is_long: bool
) -> None:
    request = InferenceRequest()
    request.takes_no_answer = True
    writer = Writer(request, sender, pool, streams=False)
    writer.write(0, "a")
    writer.finish(is_long=is_long)
    assert request.is_finished.wait(10)
    assert [str(end).split(":")[0] for end in request.results] == ["internal"]


def test_a_failed_request_does_not_affect_others(sender: ResponseSender) -> None:
    broken, sound = InferenceRequest(), InferenceRequest()
    broken.is_broken = True
    Writer(broken, sender).write(0, "a")
    writer = Writer(sound, sender)
    writer.write(0, "bc")
    writer.finish()
    sender.close()
    assert joined(sound) == ["bc"]


def test_many_streams_from_many_threads_keep_their_texts() -> None:
    sender, requests = ResponseSender(), [InferenceRequest() for _ in range(8)]
    writers = [Writer(request, sender, num_prompts=2) for request in requests]

    def write(number: int) -> None:
        for step in range(200):
            writers[number].write(step % 2, f"{number}.{step} ")
        writers[number].finish()

    with ThreadPoolExecutor(len(requests)) as threads:
        list(threads.map(write, range(len(requests))))
    sender.close()
    for number, request in enumerate(requests):
        even, odd = ("".join(f"{number}.{step} " for step in range(start, 200, 2)) for start in (0, 1))
        assert joined(request) == [even, odd]
