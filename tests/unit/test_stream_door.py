# SPDX-License-Identifier: Apache-2.0
"""The stream door's two sides over real sockets in one process, and peers that mean no good."""

import gc
import itertools
import json
import logging
import os
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import CancelledError, GenerationError, HfTritonError, RequestError, UnavailableError
from hf_triton.stream_door import address, client, connection, door_server
from hf_triton.stream_door.address import find_addresses, server_folder
from hf_triton.stream_door.client import Engines
from hf_triton.stream_door.door_server import DoorServer, RemoteRequest
from hf_triton.stream_door.messages import (
    ProtocolError,
    pack_error,
    pack_tensors,
    read_error,
    read_parameters,
    read_request,
    read_tensors,
)
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.triton_backend.cancellation import RequestPoller
from tests.support.marks import full
from tests.support.waiting import wait_until

SOON_S = 20.0
POLLER = RequestPoller(interval_s=0.01)
SENDER = ResponseSender()
MODEL = "falcon7b"


@pytest.fixture(autouse=True)
def _own_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:  # a socket's path is short
        monkeypatch.setattr(address, "ROOT", Path(root))
        yield


def texts(*values: bytes) -> dict[str, Any]:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return {"text_output": array}


class ClientCall(InferenceRequest):
    """A request at the door that notes its answer."""

    def __init__(self, prompt: bytes = b"I am going", request_id: str = "", **parameters: object) -> None:
        super().__init__(request_id)
        self.parts: list[list[bytes]] = []
        self.outcome: Any = None
        self.answer_parameters: Mapping[str, int] | None = None
        self._inputs = {"text_input": texts(prompt)["text_output"]}
        self._parameters = parameters

    def inputs(self) -> dict[str, Any]:
        return self._inputs

    @property
    def parameters(self) -> dict[str, object]:
        return self._parameters

    def requested_outputs(self) -> list[str]:
        return ["text_output"]

    def add(self, outputs: Mapping[str, Any]) -> None:
        self.parts.append(list(outputs["text_output"]))

    def answer(self, outputs: Mapping[str, Any], parameters: Mapping[str, int]) -> None:
        assert self.outcome is None
        self.answer_parameters = parameters
        self.outcome = list(outputs["text_output"])

    def refuse(self, error: HfTritonError) -> None:
        assert self.outcome is None
        self.outcome = error

    def wait(self) -> Any:
        wait_until(lambda: self.outcome is not None)
        return self.outcome


class Engine:
    """An engine's side whose calls the test answers itself."""

    def __init__(self, version: int = 1, name: str = MODEL) -> None:
        self.calls: list[RemoteRequest] = []
        self.held: list[RemoteRequest] = []
        self.outlets: list[ResponseConfig] = []
        self.outcomes: list[str] = []
        self.turns: list[bool] = []  # to sleep, or to wake
        self.door = DoorServer(
            name,
            version,
            take=self._take,
            begin_request=lambda: lambda outcome, adapter: self.outcomes.append(outcome),
            poller=POLLER,
            set_sleeping=self.turns.append,
        )
        self.door.open()

    def _take(self, call: Any, outlet: ResponseConfig) -> None:
        self.calls.append(call)
        self.outlets.append(outlet)

    def next_call(self) -> RemoteRequest:
        wait_until(lambda: self.calls)
        self.held.append(self.calls.pop(0))
        return self.held[-1]

    def close(self) -> None:
        self.door.drain(timeout_s=0)
        self.door.close()

    def vanish(self) -> None:
        """As a process does that is killed: no word is said, the socket's file stays."""
        assert self.door.listener is not None
        self.door.is_draining = True
        self.door.listener.shutdown(socket.SHUT_RDWR)
        self.door.listener.close()
        for peer in self.door.all_peers():
            peer.connection.end()


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    engines = []
    pids = itertools.count(10_000_000)  # every instance is a process of its own

    def make(version: int = 1, name: str = MODEL, kind: type[Engine] = Engine) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: next(pids))
            patch.setattr(address, "_remove_stale", lambda folder: None)  # these processes are nobody's
            engines.append(kind(version, name))
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.door.is_draining:
            engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines(MODEL)
    yield engines
    engines.close()


def submit(engines: Engines, call: ClientCall, streams: bool = True) -> ClientCall:
    POLLER.add(call)
    engines.submit(call, ResponseConfig(["text_output"], is_decoupled=True, streams=streams, sender=SENDER))
    return call


# --- what passes -----------------------------------------------------------------------------------------------------


def test_a_request_arrives_as_it_was_and_its_answer_as_it_is(engine: Engine, engines: Engines) -> None:
    prompt = "Schöne Grüße 🙂\0".encode() + bytes(range(256))
    parameters = {"temperature": 0.1, "seed": 2**63 - 1, "stop": True, "odd \ud800": "\udc80", "big": 10**30}
    call = ClientCall(prompt, request_id="größer", **parameters)
    call.timeout_s = 100.0
    submit(engines, call, streams=False)
    remote = engine.next_call()
    assert list(remote.inputs()["text_input"]) == [prompt]
    assert remote.parameters == parameters
    assert remote.request_id == "größer"
    assert 90 < (remote.timeout_s or 0) <= 100
    assert engine.outlets[0].output_names == ["text_output"]
    assert (engine.outlets[0].is_decoupled, engine.outlets[0].streams) == (True, False)
    for part in (b"one", b"\xff", b""):
        remote.add(texts(part))
    remote.answer(texts(b"end", b"other"))
    assert call.wait() == [b"end", b"other"]
    assert call.parts == [[b"one"], [b"\xff"], [b""]]
    assert engine.outcomes == ["ok"]


def test_tensors_of_every_type_pass_unchanged() -> None:
    source = random.Random(0)
    arrays = {
        "bytes": np.array([[source.randbytes(source.randrange(40))] for _ in range(200)], np.object_),
        "utf8": np.array(
            [chr(0xD7FF).encode(), "🙂".encode(), b"\xf0\x9f\x99", b"\xed\xa0\x80\xed\xb0\x80"], np.object_
        ),
        "float32": np.array([0.1, -np.inf, 3e38], np.float32),
        "float16": np.array([[0.1]], np.float16),
        "uint64": np.array([2**64 - 1], np.uint64),
        "int8": np.array([-128], np.int8),
        "bool": np.array([True, False]),
        "none": np.zeros((0, 3), np.int32),
    }
    body = json.dumps(pack_tensors(arrays), ensure_ascii=False).encode("utf-8", "surrogatepass")
    read = read_tensors(json.loads(body.decode("utf-8", "surrogatepass")))
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert np.array_equal(read[name], array)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("invalid_parameter", "top_p must be a number"),
        UnavailableError("queue_full", "full"),
        CancelledError(),
        HfTritonError("internal", "a fault"),
        GenerationError("generation_failed", "the model failed"),
    ],
    ids=lambda error: error.code,
)
def test_an_error_keeps_code_sentence_and_status(error: HfTritonError, engine: Engine, engines: Engines) -> None:
    call = submit(engines, ClientCall())
    engine.next_call().refuse(error)
    assert (str(call.wait()), call.outcome.triton_code) == (str(error), error.triton_code)
    assert engine.outcomes == [error.code]


def test_only_the_first_answer_counts(engine: Engine, engines: Engines) -> None:
    call = submit(engines, ClientCall())
    remote = engine.next_call()
    remote.answer(texts(b"first"))
    remote.answer(texts(b"second"))
    remote.refuse(CancelledError())
    remote.add(texts(b"late"))
    after = submit(engines, ClientCall())
    engine.next_call().answer(texts(b"other"))
    assert (call.wait(), after.wait()) == ([b"first"], [b"other"])
    assert call.parts == []


def test_answers_of_many_requests_do_not_mix(engine: Engine, engines: Engines) -> None:
    calls = {number: submit(engines, ClientCall(str(number).encode())) for number in range(300)}
    remotes = [engine.next_call() for _ in calls]
    random.Random(1).shuffle(remotes)
    for remote in remotes:
        remote.add({"text_output": remote.inputs()["text_input"]})
    for remote in reversed(remotes):
        remote.answer({"text_output": remote.inputs()["text_input"]})
    for number, call in calls.items():
        assert call.wait() == [str(number).encode()]
        assert call.parts == [[str(number).encode()]]


def test_a_call_that_is_dropped_is_answered(engine: Engine, engines: Engines) -> None:
    call = submit(engines, ClientCall())
    engine.next_call()
    engine.held.clear()
    gc.collect()
    assert call.wait().code == "internal"
    assert engine.outcomes == ["internal"]


def test_time_that_passes_at_the_door_is_gone(
    engine: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1000.0, 1000.75])
    call = ClientCall()
    call.timeout_s = 1.0
    with monkeypatch.context() as patch:
        patch.setattr(client, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(times))}))
        call.times.arrival_s = next(times)
        submit(engines, call)
        remote = engine.next_call()
    assert remote.timeout_s == pytest.approx(0.25)
    remote.answer(texts(b""))


# --- giving up -------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_is_cancelled_in_the_engine_and_no_other(engine: Engine, engines: Engines) -> None:
    call, other = submit(engines, ClientCall(b"one")), submit(engines, ClientCall(b"two"))
    remote, other_remote = engine.next_call(), engine.next_call()
    assert not remote.is_cancelled()
    call.cancel()
    wait_until(remote.is_cancelled)
    assert not other_remote.is_cancelled()
    remote.refuse(CancelledError())
    other_remote.answer(texts(b"text"))
    assert isinstance(call.wait(), CancelledError)
    assert other.wait() == [b"text"]


def test_a_cancellation_by_id_reaches_the_requests_of_all_doors(
    engine: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, own = Engines(MODEL), ClientCall(request_id="a")  # brought by Triton
    POLLER.add(own)
    for number, (door, request_id) in enumerate([(engines, "a"), (second, "a"), (engines, "b")]):
        submit(door, ClientCall(request_id=request_id))
        wait_until(lambda count=number + 1: len(engine.calls) == count)
    with monkeypatch.context() as patch:
        patch.setattr(client.os, "getpid", lambda: 0)  # as another process
        client.cancel_elsewhere(MODEL, "a")
    wait_until(lambda: own.is_cancelled() and engine.calls[1].is_cancelled())
    assert [each.is_cancelled() for each in engine.calls] == [True, True, False]
    second.close()


def test_a_model_s_other_processes_are_told_to_sleep_and_wake(engine: Engine) -> None:
    for is_sleeping in (True, False):
        client.sleep_elsewhere(MODEL, is_sleeping)
        wait_until(lambda is_sleeping=is_sleeping: engine.turns[-1:] == [is_sleeping])
    assert engine.turns == [True, False]


def test_the_requests_of_a_door_that_is_gone_are_cancelled(engine: Engine) -> None:
    engines, stays = Engines(MODEL), Engines(MODEL)
    submit(engines, ClientCall())
    remote = engine.next_call()
    call = submit(stays, ClientCall())
    other = engine.next_call()
    engines.close()
    wait_until(remote.is_cancelled)
    wait_until(lambda: engine.outcomes)
    assert not other.is_cancelled()
    remote.add(texts(b"to nobody"))
    remote.answer(texts(b"to nobody"))
    other.answer(texts(b"text"))
    assert call.wait() == [b"text"]
    assert engine.outcomes == ["cancelled", "ok"]
    stays.close()


# --- engines come and go ---------------------------------------------------------------------------------------------


def test_without_an_engine_a_request_is_refused(engines: Engines) -> None:
    with pytest.raises(UnavailableError, match=r"^not_loaded: the model falcon7b, which this folder streams from"):
        submit(engines, ClientCall())
    assert not engines.is_healthy()


def test_a_refusal_that_fails_does_not_affect_other_requests(
    make_engine: Callable[..., Engine], engines: Engines
) -> None:
    class Broken(ClientCall):
        def refuse(self, error: HfTritonError) -> None:
            raise RuntimeError("Failed to increase the shared memory pool")

    first = make_engine()
    submit(engines, Broken())
    call = submit(engines, ClientCall())
    first.next_call()
    first.next_call()
    first.vanish()
    assert call.wait().code == "engine_failed"
    second = make_engine()
    call = submit(engines, ClientCall())
    second.next_call().answer(texts(b"text"))
    assert call.wait() == [b"text"]


def test_after_an_engine_s_death_the_next_one_takes_over(make_engine: Callable[..., Engine], engines: Engines) -> None:
    first = make_engine()
    call = submit(engines, ClientCall())
    first.next_call().add(texts(b"begin"))
    wait_until(lambda: call.parts)
    waiting = submit(engines, ClientCall())
    first.next_call()
    first.vanish()
    assert {call.wait().code, waiting.wait().code} == {"engine_failed"}
    with pytest.raises(UnavailableError, match="not_loaded"):
        submit(engines, ClientCall())
    second = make_engine()
    assert engines.is_healthy()
    call = submit(engines, ClientCall())
    second.next_call().answer(texts(b"text"))
    assert call.wait() == [b"text"]


def close_beside(engine: Engine) -> threading.Thread:
    closing = threading.Thread(target=engine.close)
    closing.start()
    return closing


def test_requests_of_a_connection_that_is_never_accepted_go_to_another_engine(
    make_engine: Callable[..., Engine], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_engine(1)
    with monkeypatch.context() as patch:
        patch.setattr(DoorServer, "_accept", lambda door, listener: None)
        closing = make_engine(2)
    calls = [submit(engines, ClientCall()) for _ in range(3)]
    closing.close()
    for _ in calls:
        other.next_call().answer(texts(b"text"))
    assert [call.wait() for call in calls] == [[b"text"]] * 3


def test_requests_that_a_closing_engine_has_not_read_go_to_another(
    make_engine: Callable[..., Engine], engines: Engines
) -> None:
    other, closing = make_engine(1), make_engine(2)
    has_first, goes_on = threading.Event(), threading.Event()

    def hold(call: Any, outlet: ResponseConfig) -> None:
        has_first.set()
        assert goes_on.wait(SOON_S)

    closing.door.take = hold  # in the thread that reads
    calls = [submit(engines, ClientCall()) for _ in range(3)]
    assert has_first.wait(SOON_S)
    end = close_beside(closing)
    for _ in calls:
        other.next_call().answer(texts(b"text"))
    assert [call.wait() for call in calls] == [[b"text"]] * 3
    goes_on.set()
    end.join(SOON_S)


def test_an_engine_drains_until_its_refusals_are_sent(
    make_engine: Callable[..., Engine], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, closing = make_engine(1), make_engine(2)
    sends, goes_on = threading.Event(), threading.Event()
    send_framed = connection.Connection.send_framed

    def hold(link: connection.Connection, framed: bytes) -> None:
        if b"shutting_down" in framed:
            sends.set()
            assert goes_on.wait(SOON_S)
        send_framed(link, framed)

    monkeypatch.setattr(connection.Connection, "send_framed", hold)
    closing.door.is_draining = True  # and its address is still there
    call = submit(engines, ClientCall())
    assert sends.wait(SOON_S)
    assert [peer.num_open for peer in closing.door.all_peers()] == [1]
    goes_on.set()
    other.next_call().answer(texts(b"text"))
    assert call.wait() == [b"text"]
    closing.close()


def test_a_begun_stream_of_an_engine_that_ends_is_not_forwarded_again(
    make_engine: Callable[..., Engine], engines: Engines
) -> None:
    other, ending = make_engine(1), make_engine(2)
    begun, waiting = submit(engines, ClientCall()), submit(engines, ClientCall())
    ending.next_call().add(texts(b"begin"))
    ending.next_call()
    wait_until(lambda: begun.parts)
    ending.vanish()
    assert begun.wait().code == "engine_failed"
    other.next_call().answer(texts(b"text"))
    assert waiting.wait() == [b"text"]


def test_a_request_is_tried_once_with_each_engine(make_engine: Callable[..., Engine], engines: Engines) -> None:
    both = [make_engine(2), make_engine(1)]
    call = submit(engines, ClientCall())
    for each in both:
        each.next_call()
        each.vanish()
    assert call.wait().code == "engine_failed"


def test_a_door_that_is_closed_sends_nothing_on(make_engine: Callable[..., Engine], engines: Engines) -> None:
    other, first = make_engine(1), make_engine(2)
    call = submit(engines, ClientCall())
    first.next_call()
    engines.close()
    assert call.wait().code == "engine_failed"
    assert not other.calls


def test_a_request_sent_on_can_be_cancelled(make_engine: Callable[..., Engine], engines: Engines) -> None:
    other, ending = make_engine(1), make_engine(2)
    call, cancelled = submit(engines, ClientCall()), submit(engines, ClientCall())
    ending.next_call()
    remote = ending.next_call()
    cancelled.cancel()
    wait_until(remote.is_cancelled)
    ending.vanish()
    first, second = other.next_call(), other.next_call()
    wait_until(lambda: first.is_cancelled() != second.is_cancelled())
    call.cancel()
    wait_until(lambda: first.is_cancelled() and second.is_cancelled())


@pytest.mark.parametrize("num_cycles", [10, *full(100)])
def test_no_request_is_lost_while_a_version_comes_and_goes(
    num_cycles: int, make_engine: Callable[..., Engine], engines: Engines
) -> None:
    class Prompt(Engine):
        def _take(self, call: Any, outlet: ResponseConfig) -> None:
            call.answer(texts(b"text"))

    stop = threading.Event()
    outcomes: list[Any] = []

    def ask() -> None:
        while not stop.is_set():
            outcomes.append(submit(engines, ClientCall()).wait())

    make_engine(1, kind=Prompt)
    clients = [threading.Thread(target=ask) for _ in range(8)]
    for each in clients:
        each.start()
    for _ in range(num_cycles):
        engine = make_engine(2, kind=Prompt)
        wanted = len(outcomes) + 10
        wait_until(lambda wanted=wanted: len(outcomes) > wanted)
        engine.door.drain()
        engine.door.close()
    stop.set()
    for each in clients:
        each.join(SOON_S)
    assert outcomes
    assert all(outcome == [b"text"] for outcome in outcomes)


def test_requests_spread_over_the_instances_of_the_highest_version(
    make_engine: Callable[..., Engine], engines: Engines
) -> None:
    old, first, second, other = make_engine(9), make_engine(10), make_engine(10), make_engine(11, "other")
    calls = [submit(engines, ClientCall()) for _ in range(6)]
    wait_until(lambda: len(first.calls) == len(second.calls) == 3)
    assert not old.calls
    assert not other.calls
    for remote in first.calls + second.calls:
        remote.answer(texts(b"text"))
    assert all(call.wait() == [b"text"] for call in calls)
    for each in (first, second):
        each.close()
    call = submit(engines, ClientCall())
    old.next_call().answer(texts(b"old"))
    assert call.wait() == [b"old"]


def test_an_unloaded_engine_finishes_its_requests(make_engine: Callable[..., Engine], engines: Engines) -> None:
    old = make_engine()
    call = submit(engines, ClientCall())
    remote = old.next_call()
    drain = threading.Thread(target=old.door.drain)
    drain.start()
    wait_until(lambda: not find_addresses(MODEL))
    new = make_engine()
    after = submit(engines, ClientCall())
    new.next_call().answer(texts(b"new"))
    assert after.wait() == [b"new"]
    assert drain.is_alive()
    remote.add(texts(b"still"))
    remote.answer(texts(b"old"))
    assert call.wait() == [b"old"]
    assert call.parts == [[b"still"]]
    drain.join(SOON_S)
    assert not drain.is_alive()
    old.door.close()


def test_a_request_that_crosses_an_unload_goes_to_the_next_engine(
    make_engine: Callable[..., Engine], engines: Engines
) -> None:
    first, second = make_engine(2), make_engine(1)
    first.door.is_draining = True  # and its address is still there
    call = submit(engines, ClientCall())
    second.next_call().answer(texts(b"text"))
    assert call.wait() == [b"text"]
    second.door.is_draining = True
    assert submit(engines, ClientCall()).wait().code == "shutting_down"
    first.close()
    second.close()


def test_a_cancelled_request_stays_cancelled_across_an_unload(
    make_engine: Callable[..., Engine], engines: Engines
) -> None:
    first, second = make_engine(2), make_engine(1)
    call = submit(engines, ClientCall())
    remote = first.next_call()
    call.cancel()
    wait_until(remote.is_cancelled)
    remote.refuse(UnavailableError("shutting_down", "the model is being unloaded"))
    wait_until(second.next_call().is_cancelled)


def test_a_begun_stream_is_not_forwarded_again(make_engine: Callable[..., Engine], engines: Engines) -> None:
    first, second = make_engine(2), make_engine(1)
    call = submit(engines, ClientCall())
    remote = first.next_call()
    remote.add(texts(b"begin"))
    remote.refuse(UnavailableError("shutting_down", "the model is being unloaded"))
    assert call.wait().code == "shutting_down"
    assert not second.calls


def test_two_servers_do_not_meet(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    make_engine()
    assert len(find_addresses(MODEL)) == 1
    monkeypatch.setattr(os, "getppid", lambda: 1)  # another server
    assert find_addresses(MODEL) == []
    make_engine()
    [found] = find_addresses(MODEL)
    assert found.path.parent == server_folder()


def test_nothing_is_left_behind(engine: Engine) -> None:
    engine.close()
    assert list(address.ROOT.iterdir()) == []


def test_what_killed_servers_and_instances_left_is_removed() -> None:
    living = server_folder()
    killed = living.with_name(f"{living.name.rpartition('-')[0]}-1")  # the same process id, begun at another time
    elsewhere = living.with_name("hf_triton_door-1-1-1")  # another process namespace
    strange = living.with_name(f"{living.name.split('-')[0]}-{living.name.split('-')[1]}-x")
    for folder in (living, killed, elsewhere, strange):
        folder.mkdir(mode=0o700)
        (folder / "0123456789ab-1-999999999").touch()
    (living / "no address").touch()
    engine = Engine()
    assert not killed.exists()
    assert elsewhere.exists()
    assert sorted(path.name for path in living.iterdir()) == sorted(["no address", find_addresses(MODEL)[0].path.name])
    engine.close()


# --- who may come in -------------------------------------------------------------------------------------------------


def test_the_folder_is_the_users_alone(engine: Engine) -> None:
    found = server_folder().stat()
    assert (found.st_mode & 0o777, found.st_uid) == (0o700, os.geteuid())


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_folder_that_others_may_enter_is_not_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "a link":
        tmp_path.chmod(0o700)
        server_folder().symlink_to(tmp_path)
    else:
        server_folder().mkdir()
        server_folder().chmod(0o755)
    with caplog.at_level(logging.WARNING):
        engine = Engine()
    assert "no stream door can reach this model" in caplog.text
    assert find_addresses(MODEL) == []
    engine.close()


def test_another_users_process_is_sent_away(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = find_addresses(MODEL)
    monkeypatch.setattr(connection.os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(SOON_S)
        peer.connect(str(found.path))
        assert peer.recv(1) == b""
    assert client._connect(found) is None  # nor does a door talk to another user's process


# --- peers that mean no good -----------------------------------------------------------------------------------------


def frame(value: object) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("!I", len(body)) + body


REQUEST = {
    "inputs": {"text_input": ["object", [1], ["prompt"]]},
    "parameters": {},
    "request_id": "",
    "timeout_s": None,
    "output_names": ["text_output"],
    "requested_outputs": ["text_output"],
    "streams": True,
}
BAD_TENSORS = [
    ["text_input"],
    {"text_input": ["object", [2], ["one"]]},
    {"text_input": ["object", [1], [5]]},
    {"text_input": ["object", ["x"], ["one"]]},
    {"text_input": ["int64", [1], ["word"]]},
    {"text_input": ["int8", [1], [[1, 2]]]},
    {"text_input": ["uint64", [1], [2**70]]},
    {"text_input": ["complex128", [1], [1]]},
    {"text_input": ["O", [1], ["one"]]},
    {"text_input": "prompt"},
]
HOSTILE = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "random bytes": random.Random(0).randbytes(4096),
    "a length that is huge": struct.pack("!I", 2**32 - 1) + b"x",
    "no JSON": frame(b"{"),
    "no UTF-8": frame(b'{"id": 1, "\xff": 1}'),
    "no text at all": frame(b""),
    "thousands of brackets": frame(b"[" * 100_000),
    "thousands of digits": frame(b'{"id": ' + b"9" * 10_000 + b"}"),
    "no object": frame([1]),
    "no id": frame({"request": REQUEST}),
    "an id that is true": frame({"id": True, "request": REQUEST}),
    "nothing to do": frame({"id": 1}),
    "no request": frame({"id": 1, "request": 5}),
    "a request without its parts": frame({"id": 1, "request": {"inputs": {}}}),
    "outputs that are numbers": frame({"id": 1, "request": REQUEST | {"output_names": [1]}}),
    "requested outputs that are numbers": frame({"id": 1, "request": REQUEST | {"requested_outputs": [1]}}),
    "one id twice": frame({"id": 1, "request": REQUEST}) * 2,
    **{
        f"tensor {number}": frame({"id": 1, "request": REQUEST | {"inputs": each}})
        for number, each in enumerate(BAD_TENSORS)
    },
}


def connect() -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(SOON_S)
    peer.connect(str(find_addresses(MODEL)[0].path))
    return peer


def is_ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", HOSTILE)
def test_a_malformed_message_ends_its_connection_alone(
    said: str, engine: Engine, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    call = submit(engines, ClientCall(b"good"))
    remote = engine.next_call()
    with caplog.at_level(logging.INFO), connect() as peer:
        peer.sendall(HOSTILE[said])
        assert is_ended(peer)
    wait_until(lambda: len(engine.door.all_peers()) == 1)
    assert "prompt" not in caplog.text
    assert not remote.is_cancelled()
    remote.answer(texts(b"text"))
    assert call.wait() == [b"text"]


@pytest.mark.parametrize("part", [frame({"id": 1, "request": REQUEST})[:30], b"\0\0", struct.pack("!I", 60 << 20)])
def test_half_a_message_does_not_delay_others(part: bytes, engine: Engine, engines: Engines) -> None:
    with connect() as peer:
        peer.sendall(part)
        call = submit(engines, ClientCall())
        engine.next_call().answer(texts(b"text"))
        assert call.wait() == [b"text"]
        assert len(engine.door.all_peers()) == 2
    wait_until(lambda: len(engine.door.all_peers()) == 1)


def test_connections_are_bounded(engine: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_server, "MAX_CONNECTIONS", 2)
    with connect():
        wait_until(lambda: len(engine.door.all_peers()) == 1)
        call = submit(engines, ClientCall())
        remote = engine.next_call()
        with connect() as third:
            assert is_ended(third)
        remote.answer(texts(b"text"))
        assert call.wait() == [b"text"]


def test_a_door_that_cannot_be_accepted_does_not_affect_others(
    engine: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, num_threads = threading.Thread.start, threading.active_count()

    def start_others(self: threading.Thread) -> None:
        if self.name == "hf_triton-door-reader":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        with connect() as peer:
            assert is_ended(peer)
    wait_until(lambda: "a stream door could not be taken: RuntimeError" in caplog.text)
    assert not engine.door.all_peers()
    wait_until(lambda: threading.active_count() <= num_threads)
    call = submit(engines, ClientCall())
    engine.next_call().answer(texts(b"text"))
    assert call.wait() == [b"text"]


def test_a_peer_that_does_not_read_is_disconnected(
    engine: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_S", 1)
    with connect() as peer:
        peer.sendall(frame({"id": 7, "request": REQUEST}))
        stalled = engine.next_call()
        outbox = engine.outlets[0].sender
        for _ in range(200):
            outbox.put(lambda: stalled.add(texts(b"x" * 10_000)))
        call = submit(engines, ClientCall())
        remote = engine.next_call()
        remote.add(texts(b"quick"))
        remote.answer(texts(b"text"))
        assert call.wait() == [b"text"]
        wait_until(stalled.is_cancelled)
        wait_until(lambda: len(engine.door.all_peers()) == 1)


def test_a_message_too_large_refuses_its_request_alone(
    engine: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 2000)
    other = submit(engines, ClientCall())
    remote = engine.next_call()
    large = submit(engines, ClientCall(b"x" * 2000)).wait()
    assert (large.code, large.triton_code) == ("invalid_input", "INVALID_ARG")
    large_answer = submit(engines, ClientCall())
    engine.next_call().answer(texts(b"x" * 2000))
    assert large_answer.wait().code == "out_of_memory"
    large_piece = submit(engines, ClientCall())
    piece_remote = engine.next_call()
    piece_remote.add(texts(b"x" * 2000))
    assert large_piece.wait().code == "out_of_memory"
    assert piece_remote.is_cancelled()
    piece_remote.answer(texts(b"the rest"))
    remote.answer(texts(b"text"))
    assert other.wait() == [b"text"]
    assert engine.outcomes == ["out_of_memory", "out_of_memory", "ok"]


def test_a_delta_that_triton_rejects_ends_its_request_alone(engine: Engine, engines: Engines) -> None:
    class Broken(ClientCall):
        def add(self, outputs: Mapping[str, Any]) -> None:
            raise RuntimeError("Failed to increase the shared memory pool")

    broken, other = submit(engines, Broken()), submit(engines, ClientCall())
    broken_remote, remote = engine.next_call(), engine.next_call()
    broken_remote.add(texts(b"piece"))
    assert broken.wait().code == "internal"
    wait_until(broken_remote.is_cancelled)
    remote.answer(texts(b"text"))
    assert other.wait() == [b"text"]


@pytest.mark.parametrize(
    ("read", "value"),
    [
        *(
            (read_error, value)
            for value in (None, [], ["INTERNAL", "internal"], ["NONE", "a", "b"], ["INTERNAL", 1, "b"])
        ),
        *((read_parameters, value) for value in (None, [], {"a": "b"}, {"a": 1.5}, {"a": True})),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_malformed_parts_are_protocol_errors(read: Callable[[object], object], value: object) -> None:
    with pytest.raises(ProtocolError):
        read(value)


def test_a_request_and_an_error_read_back_as_themselves() -> None:
    assert read_request(REQUEST).output_names == ["text_output"]
    assert str(read_error(pack_error(UnavailableError("queue_full", "full")))) == "queue_full: full"
