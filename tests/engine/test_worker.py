# SPDX-License-Identifier: Apache-2.0
"""The worker of every engine: each group is answered exactly once, whatever fails."""

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hf_triton.engine import worker as module
from hf_triton.engine.worker import Worker
from hf_triton.errors import HfTritonError, RequestError
from tests.support.groups import Work


class Echo(Worker[Work]):
    """Finishes one group a step with its name, once `may_step` is set."""

    def __init__(self, device: str = "cpu", on_fatal: Callable[[], None] = lambda: None, **options: float) -> None:
        super().__init__(torch.device(device), on_fatal, **options)
        self.may_step, self.has_begun, self.was_released = threading.Event(), threading.Event(), threading.Event()
        self.may_step.set()
        self.compute: Callable[[Work], str] = lambda group: group.name
        self._running: list[Work] = []
        self.thread.start()

    def admission_error(self, group: Work) -> HfTritonError | None:
        return RequestError("invalid_input", "no name") if not group.name else None

    def unfinished(self) -> list[Work]:
        return self._running

    def step(self) -> None:
        self._running = self.queue.take(1, takes_any=True)
        self.has_begun.set()
        assert self.may_step.wait(60)
        if self.rejection() is None:
            for group in self._running:
                group.finish(self.compute(group))

    def release(self) -> None:
        self.was_released.set()


StartWorker = Callable[..., Echo]


@pytest.fixture
def start() -> Iterator[StartWorker]:
    workers: list[Echo] = []

    def start(**options: Any) -> Echo:
        workers.append(Echo(**options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.may_step.set()
        worker.close()


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def results(groups: list[Work]) -> list[str]:
    return [group.result() for group in groups]


def test_a_request_is_refused_whole_if_one_of_its_groups_is(start: StartWorker) -> None:
    groups = [Work("a"), Work("")]
    worker = start()
    worker.submit(groups)
    assert results(groups) == ["invalid_input"] * 2
    assert worker.is_healthy()


def test_a_callback_that_raises_stops_nothing(start: StartWorker) -> None:
    worker, good = start(), Work("good")
    worker.submit([Work("bad", on_finish=raises(SystemExit(1)))])
    worker.submit([good])
    assert good.result() == "good"
    assert worker.is_healthy()


def test_close_answers_queued_and_running_groups_and_later_ones(start: StartWorker) -> None:
    on_fatal = Mock()
    worker, groups, late = start(on_fatal=on_fatal), [Work("a") for _ in range(20)], Work("late")
    worker.may_step.clear()
    worker.submit(groups)
    assert worker.has_begun.wait(60)
    closing = threading.Thread(target=worker.close)
    closing.start()
    while worker.is_healthy():
        pass
    worker.may_step.set()
    closing.join()
    worker.submit([late])
    worker.close()
    assert results([*groups, late]) == ["shutting_down"] * 21
    on_fatal.assert_not_called()


def test_a_failed_worker_answers_all_and_reports_it_once(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.logger, "error", raises(RuntimeError("the log is gone")))
    groups, late = [Work("a") for _ in range(5)], Work("late")
    num_answered: list[int] = []
    told = threading.Event()

    def on_fatal() -> None:
        num_answered.append(sum(group.is_answered.is_set() for group in groups))
        told.set()

    worker = start(on_fatal=on_fatal)
    worker.compute = raises(SystemExit(1))
    with worker.queue.changed:  # it takes none meanwhile
        worker.submit(groups)
    assert results(groups) == ["engine_failed"] * 5
    assert told.wait(60)
    assert not worker.is_healthy()
    worker.submit([late])
    assert late.result() == "engine_failed"
    assert num_answered == [5], "reported once, after every outcome"


def test_each_group_is_answered_once_if_the_worker_closes_during_submits(start: StartWorker) -> None:
    worker, requests = start(), [[Work("a") for _ in range(200)] for _ in range(4)]

    def submit_all(groups: list[Work]) -> None:
        for group in groups:
            worker.submit([group])

    threads = [threading.Thread(target=submit_all, args=(groups,)) for groups in requests]
    for thread in threads:
        thread.start()
    requests[0][0].result()
    worker.close()
    for thread in threads:
        thread.join()
    assert {result for groups in requests for result in results(groups)} <= {"a", "shutting_down"}


def test_memory_is_released_after_rest_and_work_goes_on(start: StartWorker) -> None:
    worker, group = start(idle_release_s=0.01), Work("a")
    assert worker.was_released.wait(60)
    worker.submit([group])
    assert group.result() == "a"


def test_the_cores_are_kept_while_the_worker_lingers(start: StartWorker) -> None:
    worker = start(linger_s=60.0)
    worker.device_context.idle = Mock()  # type: ignore[method-assign]
    for name in "ab":
        group = Work(name)
        worker.submit([group])
        assert group.result() == name
    worker.device_context.idle.assert_not_called()


def test_the_gpu_of_the_model_is_current_in_the_thread(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    for device in ("cpu", "cuda:1"):
        start(device=device).close()
    assert chosen == [("hf_triton-engine", torch.device("cuda:1"))]
