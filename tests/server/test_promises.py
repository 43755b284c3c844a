# SPDX-License-Identifier: Apache-2.0
"""Exactly one final response for every request: after internal faults, cancellation, unload, SIGTERM, a fatal error."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, generate, infer
from tests.support.gateway import wait_until

pytestmark = pytest.mark.full

# The engine knows token ids only, so a request says by its length which fault it wants.
FAILS, IS_FATAL, IS_SLOW, IS_DROPPED = 13, 17, 19, 23
FAULTY_MODEL = f"""
import time

import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def initialize(self, args):
        import torch

        super().initialize(args)
        engine, rows = self._dispatcher.service._engine, []

        def noted(work, of_work):
            def do(*arguments):
                rows[:] = of_work(*arguments)
                try:
                    return work(*arguments)
                finally:
                    rows.clear()

            return do

        running = engine.scheduler.running
        of_step = lambda step, _: [sequence for sequence in running if sequence.id in step.sequence_ids]
        engine.runner.run = noted(engine.runner.run, of_step)

        def forward(module, inputs):
            if type(module).__name__ != "LlamaForCausalLM":
                return
            lengths = {{sequence.group.params.max_new_tokens for sequence in rows}}
            if {FAILS} in lengths:
                raise RuntimeError("boom at /secret/path.py")
            if {IS_FATAL} in lengths:
                time.sleep(1)
                raise RuntimeError("CUDA error: device-side assert triggered")
            if {IS_SLOW} in lengths:
                time.sleep(0.2)

        torch.nn.modules.module.register_module_forward_pre_hook(forward)
        task = self._dispatcher.service
        submit = task.submit

        def drop_or_submit(request, config):
            if request.parameters.get("max_new_tokens") != {IS_DROPPED}:
                submit(request, config)

        task.submit = drop_or_submit
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("repository")
    checkpoint = build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)
    folder = make_folder(root, "faulty", huggingface_model=checkpoint)
    (folder / "1" / "model.py").write_text(FAULTY_MODEL)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    arguments = ["--model-control-mode=explicit", "--load-model=faulty"]
    with TritonServer(repository, arguments=arguments) as running:
        assert running.is_model_ready("faulty"), running.log_tail()
        yield running


@pytest.fixture(scope="module")
def canary(server: TritonServer) -> str:
    reply = generate(server, "faulty", "The canary sings", max_new_tokens=8)
    assert reply.status == 200, reply.body
    return reply.body


@pytest.fixture(autouse=True)
def _still_sings(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server, the same prompt has the same answer."""
    yield
    if "server" in request.fixturenames:
        server, canary = request.getfixturevalue("server"), request.getfixturevalue("canary")
        assert generate(server, "faulty", "The canary sings", max_new_tokens=8).body == canary


def in_background(call: Callable[[], Reply], count: int = 1) -> list[Future[Reply]]:
    """Call `count` times at once in threads that are not waited for."""
    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(call) for _ in range(count)]
    pool.shutdown(wait=False)
    return futures


@pytest.mark.usefixtures("canary")
def test_failing_request_is_refused_alone_without_showing_the_failure(server: TritonServer) -> None:
    alone = infer(server, "faulty", ["one good prompt"], parameters={"max_new_tokens": 6}).body
    good = in_background(lambda: infer(server, "faulty", ["one good prompt"], parameters={"max_new_tokens": 6}), 6)
    bad = in_background(lambda: infer(server, "faulty", ["a bad one"], parameters={"max_new_tokens": FAILS}), 3)
    assert {future.result().body for future in good} == {alone}
    for future in bad:
        reply = future.result()
        assert (reply.status, reply.error) == (
            500,
            "generation_failed: the model failed on this request; the server's log says how",
        )


@pytest.mark.usefixtures("canary")
def test_a_dropped_request_is_answered_at_once(server: TritonServer) -> None:
    started = time.monotonic()
    reply = infer(server, "faulty", ["lost"], parameters={"max_new_tokens": IS_DROPPED})
    assert reply.status == 500
    assert reply.error.startswith("internal: ")
    assert time.monotonic() - started < 30


@pytest.mark.usefixtures("canary")
def test_cancelled_requests_leave_the_server_and_the_others_alone(server: TritonServer) -> None:
    client = grpcclient.InferenceServerClient(server.grpc_url)
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"give me up"], dtype=np.object_))
    ends = threading.Semaphore(0)
    errors: list[InferenceServerException | None] = []

    def end(result: object, error: InferenceServerException | None) -> None:
        errors.append(error)
        ends.release()

    try:
        for round_number in range(30):  # at different points of a request's life, its end included
            parameters = {"max_new_tokens": 40}
            handle = client.async_infer("faulty", [tensor], end, parameters=parameters)
            time.sleep(0.003 * (round_number % 10))
            handle.cancel()
        for _ in range(30):
            assert ends.acquire(timeout=30)
    finally:
        client.close()
    assert server.is_running()
    assert any(error is not None and "CANCELLED" in str(error.status()) for error in errors)


def test_a_fatal_error_answers_everyone_and_stops_the_server(repository: Path) -> None:
    arguments = ["--model-control-mode=explicit", "--load-model=faulty", "--exit-timeout-secs=10"]
    with TritonServer(repository, arguments=arguments) as server:
        ask = {"max_new_tokens": IS_FATAL}
        guilty = in_background(lambda: infer(server, "faulty", ["poison"], parameters=ask))
        time.sleep(0.5)
        waiting = in_background(lambda: infer(server, "faulty", ["wait"], parameters={"max_new_tokens": 4}), 4)
        replies = [future.result(timeout=60) for future in [*guilty, *waiting]]
        assert [reply.status for reply in replies] == [503] * 5
        assert {reply.error.split(":")[0] for reply in replies} == {"engine_failed"}
        assert server.process is not None
        server.process.wait(timeout=60)


def test_a_killed_server_takes_its_stub_along(repository: Path) -> None:
    with TritonServer(repository, arguments=["--model-control-mode=explicit", "--load-model=faulty"]) as server:
        assert server.process is not None
        stubs = _children(server.process.pid)
        assert stubs
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(_is_running(stub) for stub in stubs))


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _children(pid: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [each for each in pids if _status(each)[1] == str(pid)]


def _is_running(pid: int) -> bool:
    return _status(pid)[0] not in "XZ"
