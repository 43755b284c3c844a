# SPDX-License-Identifier: Apache-2.0
"""Adapters that come, change and go while requests wait for them, or for others. The model is a stand-in."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hf_triton.errors import CheckpointError, RequestError
from hf_triton.hub.locate import ADAPTER_FILES
from hf_triton.runner.lora.model_adapters import Adapter
from hf_triton.tasks.serving.adapters import NUM_LOADERS, AdapterStore, Waiter
from tests.support.waiting import wait_until
from tests.unit.test_text_generation import build_task, error_code, send


class SlowAdapters:
    """Loads adapters; those whose name begins with `slow` when they may."""

    def __init__(self) -> None:
        self.may_load = threading.Event()
        self.loading: list[str] = []
        self.num = 0

    def load(self, folder: Path, name: str) -> Adapter:
        self.loading.append(name)
        if name.startswith("slow"):
            assert self.may_load.wait(30)
        if (folder / ADAPTER_FILES[0]).read_text() == "bad":
            raise CheckpointError("adapter_invalid", "is bad")
        self.num += 1
        return Adapter(self.num, name)

    def sweep(self) -> None:
        pass


def save(root: Path, name: str, text: str = "good") -> Path:
    folder = root / "adapters" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in ADAPTER_FILES:
        (folder / file).write_text(text)
    return folder


@pytest.fixture
def adapters() -> Iterator[SlowAdapters]:
    adapters = SlowAdapters()
    yield adapters
    adapters.may_load.set()


@pytest.fixture
def store(adapters: SlowAdapters, tmp_path: Path) -> Iterator[AdapterStore]:
    save(tmp_path, "here")
    store = AdapterStore(cast(Any, adapters), {}, tmp_path, Path)
    yield store
    store.close()


def ask(store: AdapterStore, *names: str) -> threading.Event:
    started = threading.Event()
    store.when_known(Waiter(names, started.set))
    return started


def test_only_requests_for_the_slow_adapter_wait(store: AdapterStore, adapters: SlowAdapters, tmp_path: Path) -> None:
    save(tmp_path, "slow")
    waiting = ask(store, "slow", "here")
    wait_until(lambda: "slow" in adapters.loading)
    assert ask(store, "here").is_set()
    assert ask(store, "missing").wait(10)
    save(tmp_path, "quick")
    assert ask(store, "quick").wait(10)
    assert store.get("quick").name == "quick"
    assert not waiting.is_set()
    with pytest.raises(RequestError, match="there is no adapter 'missing'"):
        store.get("missing")
    adapters.may_load.set()
    assert waiting.wait(10)
    assert store.get("slow").name == "slow"


def test_an_adapter_is_found_by_the_first_request_that_names_it(store: AdapterStore, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        with pytest.raises(RequestError, match="there is no adapter"):
            store.get(name)
        save(tmp_path, name)
        assert ask(store, name).wait(10)
        assert store.get(name).name == name


def test_a_changed_adapter_is_the_former_one_until_it_is_loaded(
    store: AdapterStore, adapters: SlowAdapters, tmp_path: Path
) -> None:
    adapters.may_load.set()
    save(tmp_path, "slow")
    assert ask(store, "slow").wait(10)
    former = store.get("slow")
    adapters.may_load.clear()
    save(tmp_path, "slow", "changed")
    wait_until(lambda: adapters.loading.count("slow") == 2)
    assert ask(store, "slow").is_set()
    assert store.get("slow") is former
    adapters.may_load.set()
    wait_until(lambda: store.get("slow") is not former)
    latest = store.get("slow")
    save(tmp_path, "slow", "bad")
    wait_until(lambda: adapters.loading.count("slow") == 3)
    assert store.get("slow") is latest


def test_an_adapter_that_vanishes_while_it_is_loaded_is_not_there(
    store: AdapterStore, adapters: SlowAdapters, tmp_path: Path
) -> None:
    folder = save(tmp_path, "slow")
    waiting = ask(store, "slow")
    wait_until(lambda: "slow" in adapters.loading)
    shutil.rmtree(folder)
    adapters.may_load.set()
    assert waiting.wait(10)
    wait_until(lambda: "slow" not in store.names())
    with pytest.raises(RequestError, match="there is no adapter 'slow'"):
        store.get("slow")


def test_a_bad_adapter_refuses_those_who_waited_and_is_tried_again_when_it_changes(
    store: AdapterStore, adapters: SlowAdapters, tmp_path: Path
) -> None:
    save(tmp_path, "slow", "bad")
    waiting = ask(store, "slow")
    wait_until(lambda: "slow" in adapters.loading)
    with pytest.raises(RequestError, match="'slow' is being loaded"):
        store.get("slow")
    adapters.may_load.set()
    assert waiting.wait(10)
    with pytest.raises(RequestError, match="'slow' is bad"):
        store.get("slow")
    save(tmp_path, "slow", "mended")
    wait_until(lambda: adapters.loading.count("slow") == 2)
    assert ask(store, "slow").wait(10)
    assert store.get("slow").name == "slow"


def test_more_slow_adapters_than_threads_are_loaded_in_the_end(
    store: AdapterStore, adapters: SlowAdapters, tmp_path: Path
) -> None:
    names = [f"slow{number}" for number in range(2 * NUM_LOADERS)]
    for name in names:
        save(tmp_path, name)
    waiting = [ask(store, name) for name in names]
    wait_until(lambda: len(adapters.loading) == 1 + NUM_LOADERS)
    assert ask(store, "here").is_set()
    adapters.may_load.set()
    assert all(started.wait(10) for started in waiting)


def test_a_request_that_is_given_up_does_not_start(store: AdapterStore, adapters: SlowAdapters, tmp_path: Path) -> None:
    save(tmp_path, "slow")
    started = threading.Event()
    waiter = Waiter(["slow"], started.set)
    store.when_known(waiter)
    assert store.give_up(waiter)
    assert not store.give_up(waiter)
    late = Waiter(["slow"], started.set)
    assert store.give_up(late)
    store.when_known(late)
    adapters.may_load.set()
    assert ask(store, "slow").wait(10)
    assert not started.is_set()


@pytest.mark.parametrize("ends", ["by its client", "by its deadline", "with the model"])
def test_a_request_ends_while_its_adapter_is_loaded(
    store: AdapterStore, adapters: SlowAdapters, tmp_path: Path, ends: str
) -> None:
    task = build_task(adapters=store, max_waiting=1)
    save(tmp_path, "slow")
    is_cancelled, timeout_s = threading.Event(), 0.2 if ends == "by its deadline" else None
    reply = send(task, "abc", lora_name="slow", is_cancelled=is_cancelled.is_set, timeout_s=timeout_s)
    wait_until(lambda: "slow" in adapters.loading)
    if ends == "by its client":
        is_cancelled.set()
    elif ends == "with the model":
        task.close()
    assert reply.is_finished.wait(10)
    codes = {"by its client": "cancelled", "by its deadline": "deadline_exceeded", "with the model": "shutting_down"}
    assert error_code(reply) == codes[ends]
    if ends != "with the model":
        wait_until(lambda: task.load().num_waiting == 0)
    adapters.may_load.set()
    time.sleep(0.05)
    assert len(reply.results) == 1


def test_requests_for_others_are_answered_while_more_wait_than_there_are_threads(
    store: AdapterStore, adapters: SlowAdapters, tmp_path: Path
) -> None:
    task = build_task(adapters=store)
    save(tmp_path, "slow")
    slow = [send(task, "abc", lora_name="slow") for _ in range(20)]
    wait_until(lambda: "slow" in adapters.loading)
    others = [
        send(task, "abc", lora_name="here"),
        send(task, "abc", "xyz"),
        send(task, "abc"),
        send(task, "abc", lora_name="missing"),
    ]
    assert all(reply.is_finished.wait(10) for reply in others)
    assert error_code(others[-1]) == "adapter_not_found"
    assert not any(isinstance(reply.results[0], Exception) for reply in others[:-1])
    assert not any(reply.is_finished.is_set() for reply in slow)
    adapters.may_load.set()
    assert all(reply.is_finished.wait(10) for reply in slow)
    assert not any(isinstance(reply.results[0], Exception) for reply in slow)
