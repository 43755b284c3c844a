# SPDX-License-Identifier: Apache-2.0
"""External faults with requests in flight: a killed stub, a reload, SIGTERM, disconnected clients."""

import http.client
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.triton.triton_words import says
from tests.support.client import Reply, generate, generate_stream, get, infer, open_stream, post
from tests.support.gateway import num_running, wait_until
from tests.support.slow_model import slow_model

pytestmark = pytest.mark.full

STEP_S = 0.02
SLOW_MODEL = slow_model(STEP_S)
LONG = 200  # new tokens: 4 s
SHORT = 10
CANARY = "The canary sings"
NUM_VANISHING = 100
STANDSTILL_S = 4
SLOW_TO_LOAD = """
import time
from pathlib import Path

import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def load(self, checkpoint):
        Path(__file__).with_name("loading").touch()
        time.sleep(2)
        return checkpoint
"""
AT_REST = ("requests_in_flight", "prompts_waiting", "rows_running")

CLOSED = (OSError, EOFError, http.client.HTTPException, InferenceServerException)
"""What a client sees of a server that is gone."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Path:
    """`slow` answers once, `streamed` piece by piece; at a token in `STEP_S` both. `slow_to_load` is not loaded."""
    root = tmp_path_factory.mktemp("repository")
    checkpoint = build_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None, max_position_embeddings=512
    )
    slow = make_folder(root, "slow", huggingface_model=checkpoint)
    decoupled = "model_transaction_policy { decoupled: true }"
    streamed = make_folder(root, "streamed", huggingface_model=checkpoint, config=decoupled, stream=True)
    for folder in (slow, streamed):
        (folder / "1" / "model.py").write_text(SLOW_MODEL)
    loading = make_folder(root, "slow_to_load", huggingface_model=checkpoint)
    (loading / "1" / "model.py").write_text(SLOW_TO_LOAD)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with start(repository, "slow", "streamed") as running:
        yield running


@pytest.fixture(scope="module")
def canary(server: TritonServer) -> str:
    reply = generate(server, "slow", CANARY, max_new_tokens=SHORT)
    assert reply.status == 200, reply.body
    return reply.body


def start(repository: Path, *models: str) -> TritonServer:
    loaded = [f"--load-model={name}" for name in models]
    return TritonServer(repository, arguments=["--model-control-mode=explicit", *loaded])


def in_background(*calls: Callable[[], object]) -> list[Future[object]]:
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures


def infer_over_grpc(server: TritonServer, num_tokens: int) -> object:
    client = grpcclient.InferenceServerClient(server.grpc_url)
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([CANARY.encode()], dtype=np.object_))
    try:
        return client.infer("slow", [tensor], parameters={"max_new_tokens": num_tokens})
    finally:
        client.close()


def read_stream(server: TritonServer, num_tokens: int) -> None:
    """Read a stream that a closed connection may end: `http.client` takes that for its end."""
    if len(generate_stream(server, "streamed", CANARY, max_new_tokens=num_tokens).events) < num_tokens // 2:
        raise EOFError


@dataclass(frozen=True)
class Sent:
    """A request of a `Load`, and its end."""

    started_s: float
    reply: Reply | None
    """None where the connection was refused or closed."""


class Load:
    """Clients that ask `slow` again and again, each as soon as it has its answer, until the block ends."""

    def __init__(self, server: TritonServer, num_clients: int = 12) -> None:
        self.sent: list[Sent] = []
        self._server = server
        self._is_over = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join(timeout=60)
        assert not any(client.is_alive() for client in self._clients), "a client hangs"

    def _ask(self, number: int) -> None:
        while not self._is_over.is_set():
            started_s = time.monotonic()
            try:
                reply = infer(self._server, "slow", [f"client {number}"], parameters={"max_new_tokens": SHORT})
            except CLOSED:
                reply = None
            self.sent.append(Sent(started_s, reply))
            if reply is None or reply.status != 200:
                time.sleep(0.2)


def statuses(sent: Iterable[Sent]) -> Counter[int | None]:
    """How many replies there were of each status; None counts closed connections."""
    return Counter(each.reply.status if each.reply else None for each in sent)


def stubs(server: TritonServer) -> list[psutil.Process]:
    assert server.process is not None
    return psutil.Process(server.process.pid).children()


def figures(server: TritonServer) -> dict[tuple[str, str], float]:
    """What the server says of `streamed`, by name and outcome."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name.removeprefix("hf_triton_"), sample.labels.get("outcome", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model") == "streamed"
    }


def test_disconnected_clients_leave_no_running_sequences(server: TritonServer, canary: str) -> None:
    def vanish() -> None:
        with open_stream(server, "streamed", "never read", max_new_tokens=LONG) as response:
            assert response.readline().startswith(b"data: ")

    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(vanish) for _ in range(NUM_VANISHING)]:
            future.result(timeout=60)
    wait_until(lambda: figures(server).get(("requests_total", "cancelled"), 0) == NUM_VANISHING)
    wait_until(lambda: not any(figures(server)[name, ""] for name in AT_REST))
    assert generate_stream(server, "streamed", CANARY, max_new_tokens=SHORT).status == 200
    assert generate(server, "slow", CANARY, max_new_tokens=SHORT).body == canary


def test_process_that_stands_still_while_it_loads_is_not_waited_for(
    server: TritonServer, canary: str, repository: Path
) -> None:
    """Triton 24.10 gives it up, and would wait for ever until it exits."""
    is_loading = repository / "slow_to_load" / "1" / "loading"
    others = {stub.pid for stub in stubs(server)}
    path = "/v2/repository/models/slow_to_load/load"
    (load,) = in_background(lambda: post(server, path, {}, timeout_s=120))
    wait_until(is_loading.exists, 120)
    (stub,) = [stub for stub in stubs(server) if stub.pid not in others]
    stub.suspend()
    time.sleep(STANDSTILL_S)
    stub.resume()
    reply = load.result(timeout=120)
    assert isinstance(reply, Reply)
    assert reply.status == 400
    assert says(reply.body, "not_healthy")
    assert "the process of the model slow_to_load stood still while it loaded" in server.read_log()
    assert {stub.pid for stub in stubs(server)} == others
    assert generate(server, "slow", CANARY, max_new_tokens=SHORT).body == canary
    assert post(server, path, {}, timeout_s=120).status == 200
    assert generate(server, "slow_to_load", CANARY, max_new_tokens=SHORT).status == 200
    assert post(server, path.replace("/load", "/unload"), {}).status == 200


def test_a_reload_under_load_answers_every_request(server: TritonServer, canary: str) -> None:
    with Load(server) as load:
        time.sleep(1)
        assert post(server, "/v2/repository/models/slow/unload", {}).status == 200
        time.sleep(0.3)
        assert post(server, "/v2/repository/models/slow/load", {}, timeout_s=120).status == 200
        time.sleep(1)
    counts = statuses(load.sent)
    assert counts[200] >= 24, counts
    assert counts[404] + counts[503] > 0, "no request came while the model was unloaded"
    assert set(counts) <= {200, 404, 503}, counts
    assert get(server, "/v2/models/slow/ready").status == 200
    assert generate(server, "slow", CANARY, max_new_tokens=SHORT).body == canary


def test_sigterm_under_load_answers_every_accepted_request(server: TritonServer, canary: str, repository: Path) -> None:
    with start(repository, "slow") as other:
        assert other.process is not None
        assert generate(other, "slow", CANARY, max_new_tokens=SHORT).body == canary
        with Load(server, 4) as load, Load(other) as other_load:
            time.sleep(2)
            accepted_s = time.monotonic() - 0.2
            other.process.send_signal(signal.SIGTERM)
            code = other.process.wait(timeout=60)
    assert code == 0
    accepted = statuses(sent for sent in other_load.sent if sent.started_s < accepted_s)
    assert set(accepted) == {200}, accepted
    assert accepted[200] >= 12
    assert set(statuses(other_load.sent)) <= {200, 503, None}
    assert set(statuses(load.sent)) == {200}
    assert generate(server, "slow", CANARY, max_new_tokens=SHORT).body == canary


def test_server_death_is_not_reported_as_a_model_error(repository: Path) -> None:
    with start(repository, "slow") as server:
        assert server.process is not None
        processes = stubs(server)
        os.kill(server.process.pid, signal.SIGSEGV)
        for process in processes:  # the server stays a zombie until it is waited for
            process.wait(timeout=60)
        time.sleep(2)
        assert "has died" not in server.read_log()


def test_killed_stub_ends_the_server_and_every_request(repository: Path) -> None:
    """Triton 24.10 neither answers the requests of a dead stub nor starts another, and stays ready."""
    with start(repository, "slow", "streamed") as server:
        assert server.process is not None
        calls = in_background(
            lambda: infer(server, "slow", ["once"], parameters={"max_new_tokens": LONG}),
            lambda: generate(server, "slow", "once", max_new_tokens=LONG),
            lambda: read_stream(server, LONG),
            lambda: infer_over_grpc(server, LONG),
        )
        wait_until(lambda: num_running(server) == 2 * len(calls))  # requests, and their sequences
        os.kill(stubs(server)[0].pid, signal.SIGKILL)
        assert server.process.wait(timeout=60) is not None
        for call in calls:
            failure = call.exception(timeout=60)
            assert failure is None or isinstance(failure, CLOSED)
        assert "has died; stopping the server" in server.read_log()
