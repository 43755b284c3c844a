# SPDX-License-Identifier: Apache-2.0
"""The worker of every engine: each group is answered exactly once, whatever fails."""

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import torch

from hf_triton.engine import worker as module
from hf_triton.engine.protocols import Nap
from hf_triton.engine.worker import Worker
from hf_triton.errors import HfTritonError, RequestError
from tests.support.groups import Work


class Echo(Worker[Work]):
    """Finishes one group a step with its name, once `may_step` is set."""

    def __init__(self, device: str = "cpu", on_fatal: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__(torch.device(device), on_fatal, **options)
        self.may_step, self.has_begun, self.was_released = threading.Event(), threading.Event(), threading.Event()
        self.may_step.set()
        self.compute: Callable[[Work], str] = lambda group: group.name
        self._running: list[Work] = []
        self.changes: list[str] = []
        self.fail_to_sleep: Callable[[], None] = lambda: None
        self.fail_to_wake: Callable[[], None] = lambda: None
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

    def sleep(self) -> None:
        self.changes.append("sleep")
        self.fail_to_sleep()

    def wake(self) -> None:
        self.changes.append("wake")
        self.fail_to_wake()


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


def turn(worker: Echo, is_sleeping: bool) -> Nap:
    return worker.set_sleeping(is_sleeping).result(60)


def test_a_worker_sleeps_when_its_work_is_done_and_wakes_for_more(start: StartWorker) -> None:
    worker, groups = start(), [Work(name) for name in "abc"]
    worker.may_step.clear()
    worker.submit(groups)
    nap = worker.set_sleeping(True)
    assert worker.has_begun.wait(60)
    assert not nap.done()
    worker.may_step.set()
    assert nap.result(60).is_sleeping
    assert all(group.is_answered.is_set() for group in groups)
    assert turn(worker, True) == Nap(is_sleeping=True), "it slept already"
    assert worker.is_healthy()
    late = Work("late")
    worker.submit([late])
    assert late.result() == "late"
    assert not worker.is_sleeping
    assert turn(worker, False) == Nap(is_sleeping=False)
    assert worker.changes == ["sleep", "wake"]


@pytest.mark.parametrize("why", ["work", "wake"])
def test_what_comes_before_a_worker_sleeps_keeps_it_awake(why: str, start: StartWorker) -> None:
    worker, groups = start(), [Work("a"), Work("b")]
    worker.may_step.clear()
    worker.submit(groups[:1])
    assert worker.has_begun.wait(60)
    nap = worker.set_sleeping(True)
    if why == "work":
        worker.submit(groups[1:])
    else:
        assert turn(worker, False) == Nap(is_sleeping=False)
    assert nap.result(60) == Nap(is_sleeping=False), "at once"
    worker.may_step.set()
    assert groups[0].result() == "a"
    assert worker.changes == []


def test_a_call_that_was_withdrawn_puts_no_worker_to_sleep(start: StartWorker) -> None:
    worker, group = start(), Work("a")
    worker.may_step.clear()
    worker.submit([group])
    naps = [worker.set_sleeping(True) for _ in range(3)]
    assert all(nap.cancel() for nap in naps)
    worker.may_step.set()
    assert group.result() == "a"
    worker.thread.join(0.1)
    assert (worker.changes, worker.is_healthy()) == ([], True)
    assert turn(worker, True).is_sleeping
    worker.set_sleeping(False).cancel()
    assert turn(worker, False) == Nap(is_sleeping=False, seconds=ANY)


def test_a_worker_that_cannot_fall_asleep_wakes(start: StartWorker) -> None:
    worker, group = start(), Work("a")
    worker.fail_to_sleep = raises(MemoryError())
    with pytest.raises(HfTritonError, match="too little memory for falling asleep"):
        turn(worker, True)
    worker.submit([group])
    assert group.result() == "a"
    assert worker.changes == ["sleep", "wake"]
    assert turn(worker, False) == Nap(is_sleeping=False)


def test_a_worker_that_cannot_wake_refuses_what_waits_and_tries_again(start: StartWorker) -> None:
    worker, groups = start(), [Work(name) for name in "abc"]
    turn(worker, True)
    worker.fail_to_wake = raises(MemoryError())
    worker.submit(groups[:1])
    assert groups[0].result() == "out_of_memory"
    with pytest.raises(HfTritonError, match="too little memory for waking"):
        turn(worker, False)
    worker.fail_to_wake = raises(ValueError())
    worker.submit(groups[1:2])
    assert groups[1].result() == "internal"
    assert worker.is_sleeping
    worker.fail_to_wake = lambda: None
    worker.submit(groups[2:])
    assert groups[2].result() == "c"
    assert worker.changes == ["sleep", *["wake", "sleep"] * 3, "wake"]


def test_a_lost_device_ends_a_worker_that_sleeps(start: StartWorker) -> None:
    on_fatal, group = Mock(), Work("a")
    worker = start(on_fatal=on_fatal)
    turn(worker, True)
    worker.fail_to_wake = raises(RuntimeError("CUDA error: an illegal memory access was encountered"))
    worker.submit([group])
    assert group.result() == "engine_failed"
    worker.thread.join(60)
    on_fatal.assert_called_once()
    with pytest.raises(HfTritonError, match="the engine stopped"):
        turn(worker, False)


def test_a_worker_closes_while_it_sleeps_or_is_to(start: StartWorker) -> None:
    asleep, busy, group = start(), start(), Work("a")
    turn(asleep, True)
    asleep.close()
    with pytest.raises(HfTritonError):
        turn(asleep, False)
    busy.may_step.clear()
    busy.submit([group])
    nap = busy.set_sleeping(True)
    closing = threading.Thread(target=busy.close)
    closing.start()
    while busy.is_healthy():
        pass
    busy.may_step.set()
    closing.join()
    with pytest.raises(HfTritonError):
        nap.result(60)


def test_a_worker_that_another_thread_needs_stays_awake(start: StartWorker) -> None:
    worker = start()
    turn(worker, True)
    with worker.kept_awake():
        assert not worker.is_sleeping
        nap = worker.set_sleeping(True)
        groups = [Work("a")]
    assert nap.result(60).is_sleeping
    worker.submit(groups)
    assert groups[0].result() == "a"
    assert worker.changes == ["sleep", "wake"] * 2
