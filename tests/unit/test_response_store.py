# SPDX-License-Identifier: Apache-2.0
"""Stored responses: bounds on number, bytes and time; each client's own."""

import json
from typing import Any

import pytest

from hf_triton_gateway.agents.response_store import ResponseStore, StoredResponse
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
    store.delete("d", b"")
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
        store.delete("a", b"two")
    store.put(stored("a", "theirs"), b"two")
    assert store.get("a", b"one").response["output"][0]["content"] == "mine"
    assert not has(store, "a", b"two")


def test_items_are_the_conversation() -> None:
    first = stored("a", "first")
    second = stored("b", "second", past=first.items)
    assert [item["content"] for item in second.items] == ["a", "first", "b", "second"]


def test_none_are_kept() -> None:
    store = ResponseStore(0, 10_000, 60.0)
    assert not store.keeps_any
    store.put(stored("a"), b"")
    assert not has(store, "a")
