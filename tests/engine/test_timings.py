# SPDX-License-Identifier: Apache-2.0
"""`return_timings` from the request to the response, on a stand-in for the response class of Triton 25.02.

The model, its engines and the stream door are the real ones.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_triton
from hf_triton.engine.protocols import EngineLoad
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.model import TritonPythonModel
from hf_triton.sampling.types import LogitsProcessor
from hf_triton.settings import ModelSettings
from hf_triton.stream_door import address
from hf_triton.stream_door.client import Engines
from hf_triton.stream_door.door_server import DoorServer
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.meter import Meter, MetricsMeter
from hf_triton.tasks.serving.metrics import LATENCY, QUEUE_TIME, TIME_TO_FIRST_TOKEN, Metric
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.tasks.text_generation.service import build_text_generation
from hf_triton.testing import build_tiny_checkpoint
from hf_triton.triton_backend.cancellation import RequestPoller
from tests.support.triton_stand_in import Request as BareRequest
from tests.support.triton_stand_in import Response, stand_in

NAMES = ("queue_time_us", "time_to_first_token_us", "e2e_request_latency_us")
TOKEN_S = 0.02
NUM_TOKENS = 5


class SlowModel(hf_triton.TritonPythonModel):
    """Every token takes at least `TOKEN_S`."""

    def logits_processor(self) -> LogitsProcessor:
        def wait(token_ids: list[int], scores: Any) -> Any:
            time.sleep(TOKEN_S)
            return scores

        return wait


class Request(BareRequest):
    """A request of Triton's: prompts and parameters."""

    def __init__(self, *prompts: str, **parameters: object) -> None:
        super().__init__()
        self._prompts = prompts
        self._parameters = {"max_new_tokens": NUM_TOKENS, **parameters}

    def inputs(self) -> list[Any]:
        array = np.array([prompt.encode() for prompt in self._prompts], np.object_)
        return [Input("text_input", array)]

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> set[str]:
        return {"text_output"}

    def wait(self) -> Response:
        deadline_s = time.monotonic() + 30
        while not self.sender.sent:
            assert time.monotonic() < deadline_s, "no answer"
            time.sleep(0.001)
        [response] = self.sender.sent
        assert isinstance(response, Response)
        return response


class Input:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class Board:
    """A sink that keeps the observed amounts."""

    def __init__(self) -> None:
        self.seen: dict[Metric, list[float]] = defaultdict(list)

    def declare(self, metric: Metric, value: str) -> None:
        pass

    def add(self, metric: Metric, value: str, amount: float, adapter: str = "") -> None:
        pass

    def observe(self, metric: Metric, amount: float) -> None:
        self.seen[metric].append(amount)


def times_of(response: Response) -> dict[str, int]:
    timings: dict[str, int] = json.loads(response.parameters())
    assert set(timings) == set(NAMES)
    assert all(type(value) is int for value in timings.values())
    assert 0 <= timings["queue_time_us"] <= timings["time_to_first_token_us"] <= timings["e2e_request_latency_us"]
    return timings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)


@pytest.fixture
def door() -> Iterator[Any]:
    with stand_in(Response) as module:
        yield module


@pytest.fixture(params=["continuous", "batch"])
def start(request: pytest.FixtureRequest, checkpoint: Path, door: Any) -> Iterator[Callable[..., TritonPythonModel]]:
    """A model as `initialize` makes it, but independent of a server's process; it generates one sequence at a time."""
    started: list[TritonPythonModel] = []

    def start(meter: Meter, *, is_decoupled: bool = False) -> TritonPythonModel:
        from hf_triton.triton_backend.dispatcher import Dispatcher

        settings = ModelSettings(huggingface_model=str(checkpoint), engine=request.param, max_num_seqs=1)
        hub = Hub(checkpoint, settings, {})
        loaded = load_checkpoint(hub, settings, Placement("CPU", 0))
        model = SlowModel()
        task = build_text_generation(
            loaded,
            settings,
            model,
            hub,
            chat_template=None,
            on_fatal=lambda: None,
            observer=meter,
            returns_timings=True,
        )
        config = ResponseConfig(["text_output"], is_decoupled=is_decoupled, streams=False, sender=ResponseSender())
        closing = ExitStack()
        closing.callback(config.sender.close)
        closing.callback(task.close)
        model._dispatcher = Dispatcher(
            task, config, poller=RequestPoller(), meter=meter, cancel_elsewhere=lambda request_id: None, closing=closing
        )
        started.append(model)
        return model

    yield start
    for model in started:
        model.finalize()


def test_timings_equal_the_metrics_and_are_in_order(start: Callable[..., TritonPythonModel]) -> None:
    board = Board()
    meter = MetricsMeter(board)
    model = start(meter)
    requests = [Request("The sea", return_timings=True), Request("Where", return_timings=True)]
    began_s = time.monotonic()
    model.execute(requests)
    timings = sorted((times_of(request.wait()) for request in requests), key=lambda each: each[NAMES[0]])
    passed_us = (time.monotonic() - began_s) * 1e6
    model.finalize()
    meter.start(lambda: EngineLoad())
    meter.close()
    for metric, name in ((QUEUE_TIME, NAMES[0]), (TIME_TO_FIRST_TOKEN, NAMES[1])):
        assert [round(seconds * 1e6) for seconds in board.seen[metric]] == [each[name] for each in timings]
    for each, latency_s in zip(timings, board.seen[LATENCY], strict=True):
        assert each[NAMES[2]] <= min(passed_us, latency_s * 1e6)
        assert each[NAMES[2]] - each[NAMES[1]] > (NUM_TOKENS - 1) * TOKEN_S * 1e6
    assert timings[1][NAMES[0]] > (NUM_TOKENS - 1) * TOKEN_S * 1e6, "the other one ran first"


def test_timings_need_no_metrics_and_are_returned_only_if_asked_for(start: Callable[..., TritonPythonModel]) -> None:
    model = start(Meter())
    with_timings, without, declined = (
        Request("x", return_timings=True),
        Request("x"),
        Request("x", return_timings=False),
    )
    model.execute([with_timings, without, declined])
    times_of(with_timings.wait())
    assert [each.wait().parameters() for each in (without, declined)] == ["{}", "{}"]
    outputs = [each.wait().tensors["text_output"].tolist() for each in (with_timings, without, declined)]
    assert outputs[1:] == outputs[:1] * 2


def test_timings_of_several_prompts_are_those_of_the_first(start: Callable[..., TritonPythonModel]) -> None:
    model = start(Meter())
    request = Request("The sea", "Where", "x", return_timings=True)
    model.execute([request])
    timings = times_of(request.wait())
    others_us = 2 * NUM_TOKENS * TOKEN_S * 1e6
    assert timings[NAMES[1]] < timings[NAMES[2]] - others_us


def test_timings_pass_a_stream_door(
    start: Callable[..., TritonPythonModel], door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, request = start(Meter()), Request("x", stream=True, return_timings=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        monkeypatch.setattr(address, "ROOT", Path(root))
        server = DoorServer(
            "plain", 1, take=model._dispatcher.take, begin_request=Meter().begin_request, poller=RequestPoller()
        )
        server.open()
        engines = Engines("plain")
        config = ResponseConfig(["text_output"], is_decoupled=True, streams=True, sender=ResponseSender())
        engines.submit(door.TritonRequest(request, RequestPoller()), config)
        times_of(request.wait())
        engines.close()
        server.drain()
        server.close()
    assert len(request.sender.parts) > 1
