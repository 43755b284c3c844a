# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of a folder: what it starts is closed in order, whatever fails, and what it waits for is withdrawn."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from hf_triton import model
from hf_triton.engine.protocols import EngineLoad
from hf_triton.errors import HfTritonError
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton.settings import ModelSettings
from hf_triton.stream_door.door_server import DoorServer
from hf_triton.tasks.interface import RequestService, ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.meter import Meter
from hf_triton.tasks.serving.sender import ResponseSender
from tests.support.collector import POLLER, Collector
from tests.support.gateway import wait_until
from tests.support.sleepy_triton import INFO
from tests.support.triton_stand_in import Response, stand_in

ORDER = ["sentinel", "drain", "service", "sender", "door", "meter"]


class Service(RequestService):
    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close = on_close

    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        raise NotImplementedError

    def is_healthy(self) -> bool:
        return True

    def load(self) -> EngineLoad:
        return EngineLoad()

    def close(self) -> None:
        self._on_close()


@pytest.mark.parametrize("failing", [[], *([name] for name in ORDER), ORDER])
def test_a_failing_close_leaves_no_other_part_open(failing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def closing(name: str) -> Callable[..., None]:
        def close(*arguments: Any) -> None:
            closed.append(name)
            if name in failing:
                raise OSError(name)

        return close

    monkeypatch.setattr(model, "start_text_generation", lambda *arguments: Service(closing("service")))
    monkeypatch.setattr(DoorServer, "open", lambda server: None)
    monkeypatch.setattr(DoorServer, "drain", closing("drain"))
    monkeypatch.setattr(DoorServer, "close", closing("door"))
    monkeypatch.setattr(ResponseSender, "close", closing("sender"))
    monkeypatch.setattr(Meter, "close", closing("meter"))
    folder = model.TritonPythonModel()
    folder.settings = ModelSettings(huggingface_model="none", metrics=False)
    sender = ResponseSender()
    config = ResponseConfig(["text_output"], is_decoupled=False, streams=False, sender=sender)
    with stand_in(Response):
        from hf_triton.triton_backend import process

        monkeypatch.setattr(process, "freeze_objects", lambda: None)
        args = {"model_name": "plain", "model_version": "1"}
        dispatcher = model.start_dispatcher(folder, None, config, args)
    dispatcher.closing.callback(closing("sentinel"))
    if failing:
        with pytest.raises(OSError, match=failing[-1]):
            dispatcher.close()
    else:
        dispatcher.close()
    assert closed == ORDER
    monkeypatch.undo()
    sender.close()


class Sleeper(Service):
    """Its work never ends."""

    info = INFO

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.called: Future[SleepAnswer] = Future()

    def set_sleeping(self, is_sleeping: bool) -> Future[SleepAnswer]:
        return self.called


class Nap(Collector):
    @property
    def parameters(self) -> dict[str, object]:
        return {"sleep": True}


@pytest.mark.parametrize(("timeout_s", "code"), [(None, "cancelled"), (0.01, "deadline_exceeded")])
def test_a_call_to_sleep_ends_with_its_request(timeout_s: float | None, code: str) -> None:
    service, request, sender = Sleeper(), Nap(timeout_s), ResponseSender()
    with stand_in(Response):
        from hf_triton.triton_backend.dispatcher import Dispatcher

        config = ResponseConfig(["output"], is_decoupled=False, streams=False, sender=sender)
        dispatcher = Dispatcher(
            service, config, poller=POLLER, meter=Meter(), cancel_elsewhere=lambda _: None, closing=ExitStack()
        )
        dispatcher.take(request, config)
        request.asks_whether_cancelled = lambda: timeout_s is None
        wait_until(service.called.cancelled)
        dispatcher.close()
    [error] = request.results
    assert isinstance(error, HfTritonError)
    assert error.code == code
    sender.close()
