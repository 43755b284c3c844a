# SPDX-License-Identifier: Apache-2.0
"""Stored responses: bounds on number, bytes and time; each client's own."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from hf_triton_gateway.agents.event_log import EventLog
from hf_triton_gateway.agents.response_store import Keeper, ResponseStore, StoredResponse
from hf_triton_gateway.http.api_errors import ApiError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(name: str, text: str = "", past: tuple[Any, ...] = ()) -> StoredResponse:
    output = [{"type": "message", "role": "assistant", "content": text}]
    return StoredResponse({"id": name, "output": output}, past, ({"role": "user", "content": name},))


def has(store: ResponseStore, name: str, key: bytes = b"") -> bool:
    try:
        return store.get(name, key).response["id"] == name
    except ApiError:
        return False


def test_the_oldest_makes_room() -> None:
    store = ResponseStore(2, 10_000, 60.0)
    for name in "abc":
        store.put(stored(name), b"")
    assert [has(store, name) for name in "abc"] == [False, True, True]


def test_bytes_are_bounded_conversations_included() -> None:
    one = stored("a", "x" * 100)
    size = len(json.dumps([one.response, one.past, one.input]))
    store = ResponseStore(100, 2 * size, 60.0)
    for name in "abc":
        store.put(stored(name, "x" * 100), b"")
    assert [has(store, name) for name in "abc"] == [False, True, True]
    store.put(stored("d", "x" * 100, past=store.get("c", b"").items), b"")  # as large as two
    assert [has(store, name) for name in "bcd"] == [False, False, True]
    store.put(stored("e", "x" * 3 * size), b"")  # larger than all may be: nothing makes room for it
    assert [has(store, name) for name in "de"] == [True, False]
    asyncio.run(store.delete("d", b""))
    for name in "fg":
        store.put(stored(name, "x" * 100), b"")
    assert has(store, "f")
    assert has(store, "g")


@pytest.mark.parametrize("bounds", [(4, 100_000), (100, 600)])
def test_a_busy_key_leaves_others_theirs(bounds: tuple[int, int]) -> None:
    store = ResponseStore(*bounds, 60.0)
    store.put(stored("mine"), b"one")
    for name in "abcdefgh":
        store.put(stored(name), b"two")
    assert has(store, "mine", b"one")
    assert [has(store, name, b"two") for name in "agh"] == [False, True, True]


def test_time_is_bounded() -> None:
    clock = Clock()
    store = ResponseStore(10, 10_000, 60.0, clock)
    store.put(stored("a"), b"")
    clock.now_s = 59.0
    store.put(stored("b"), b"")
    assert has(store, "a")
    clock.now_s = 60.0
    assert [has(store, name) for name in "ab"] == [False, True]


def test_another_key_finds_changes_and_deletes_nothing() -> None:
    store = ResponseStore(10, 10_000, 60.0)
    store.put(stored("a", "mine"), b"one")
    assert not has(store, "a", b"two")
    with pytest.raises(ApiError, match="there is no response 'a'"):
        asyncio.run(store.delete("a", b"two"))
    store.put(stored("a", "theirs"), b"two")
    assert store.get("a", b"one").response["output"][0]["content"] == "mine"
    assert not has(store, "a", b"two")


def test_items_are_the_conversation() -> None:
    first = stored("a", "first")
    second = stored("b", "second", past=first.items)
    assert [item["content"] for item in second.items] == ["a", "first", "b", "second"]


class Running:
    """A response in the background that ends as soon as it is stopped."""

    def __init__(self, store: ResponseStore, name: str) -> None:
        self.store, self.name, self.was_stopped = store, name, False
        store.begin(stored(name), self, b"")  # type: ignore[arg-type]

    def end(self, text: str = "") -> bool:
        ended = stored(self.name, text)
        return self.store.put(replace(ended, response={**ended.response, "background": True}), b"")

    async def stop(self) -> None:
        self.was_stopped = True
        self.end("stopped")


def test_what_runs_makes_no_room_and_its_time_begins_with_its_end() -> None:
    clock = Clock()
    store = ResponseStore(4, 100_000, 60.0, clock)
    running = [Running(store, name) for name in "ab"]
    with pytest.raises(ApiError, match="2 responses run in the background, as many as may") as error:
        store.check_room(stored("c"))
    assert error.value.status_code == 429
    for name in "cdef":
        store.put(stored(name), b"")
    assert [has(store, name) for name in "abcdef"] == [True, True, False, False, True, True]
    clock.now_s = 100.0
    assert [has(store, name) for name in "abcdef"] == [True, True, False, False, False, False]
    assert all(each.end() for each in running)
    clock.now_s = 159.0
    assert [has(store, name) for name in "ab"] == [True, True]
    store.check_room(stored("c"))
    clock.now_s = 160.0
    assert [has(store, name) for name in "ab"] == [False, False]


def test_what_runs_takes_half_of_the_bytes() -> None:
    size = stored("a").num_bytes
    store = ResponseStore(100, 4 * size, 60.0)
    for name in "ab":
        store.check_room(stored(name))
        Running(store, name)
    with pytest.raises(ApiError, match="as many as may"):
        store.check_room(stored("c"))
    with pytest.raises(ApiError, match="half of --max-stored-bytes") as error:
        store.check_room(stored("c", "x" * 2 * size))
    assert error.value.status_code == 413


def test_what_runs_is_cancelled_deleted_and_closed() -> None:
    store = ResponseStore(100, 100_000, 60.0)
    running = {name: Running(store, name) for name in "abc"}
    with pytest.raises(ApiError, match="there is no response 'a'"):
        asyncio.run(store.cancel("a", b"two"))
    assert asyncio.run(store.cancel("a", b"")).response["output"][0]["content"] == "stopped"
    asyncio.run(store.delete("b", b""))
    assert [has(store, name) for name in "abc"] == [True, False, True]
    assert [each.was_stopped for each in running.values()] == [True, True, False]
    asyncio.run(store.close())
    assert running["c"].was_stopped


def test_one_too_large_to_keep_is_kept_as_failed() -> None:
    store = ResponseStore(100, 2000, 60.0)
    response = {**stored("a", "x" * 2000).response, "background": True, "status": "completed"}
    Running(store, "a")
    asyncio.run(Keeper(store, b"", (), ()).keep(response, 0))
    kept = store.get("a", b"").response
    assert (kept["status"], kept["output"], kept["store"]) == ("failed", [], True)


def test_one_whose_events_are_too_large_to_keep_ends_too() -> None:
    """Events repeat the request: those of a response that begins have thrice its bytes."""
    store, events = ResponseStore(100, 2000, 60.0), EventLog()
    response = {**stored("a").response, "background": True, "status": "completed"}
    Running(store, "a")
    events.append(b"data: %s\n\n" % (b"x" * 2000))
    asyncio.run(Keeper(store, b"", (), (), events).keep(response, 0))
    kept = store.get("a", b"")
    assert (kept.response["status"], kept.response["store"], kept.events) == ("failed", True, None)


def test_none_are_kept() -> None:
    store = ResponseStore(0, 10_000, 60.0)
    assert not store.keeps_any
    store.put(stored("a"), b"")
    assert not has(store, "a")
