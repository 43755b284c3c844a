# SPDX-License-Identifier: Apache-2.0
"""Loading on demand without Triton: a repository in memory, whose loads take as long as the test says."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

import pytest

from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.triton.on_demand import RETRY_S, Activity, OnDemand, Terms


class MemoryRepository:
    """Models in memory. Loads wait while `gate` is clear."""

    def __init__(self, *names: str) -> None:
        self.models = dict.fromkeys(names, False)
        self.broken: dict[str, ApiError] = {}
        self.direct: dict[str, int] = {}
        self.own: dict[str, Terms] = {}
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.max_loaded = 0

    async def check(self) -> None:
        await asyncio.sleep(0)

    async def loaded(self) -> Mapping[str, bool]:
        await asyncio.sleep(0)
        return dict(self.models)

    async def activity(self) -> Mapping[str, Activity]:
        return {name: Activity(count, 0.0) for name, count in self.direct.items()}

    async def terms(self, name: str) -> Terms:
        return self.own.get(name, Terms())

    def is_sleeping(self, name: str) -> bool:
        return False

    def note_sleep(self, name: str, *, is_sleeping: bool) -> bool:
        return False

    async def load(self, name: str) -> str:
        self.log.append(f"load {name}")
        await self.gate.wait()
        await asyncio.sleep(0.001)
        if name in self.broken:
            raise self.broken[name]
        self.models[name] = True
        self.max_loaded = max(self.max_loaded, sum(self.models.values()))
        return "loaded"

    async def unload(self, name: str) -> str:
        self.log.append(f"unload {name}")
        await asyncio.sleep(0.001)
        self.models[name] = False
        return "unloaded"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


Body = Callable[[OnDemand, MemoryRepository, Clock], Coroutine[None, None, None]]


def run(body: Body, *, keep_alive_s: float | None = None, max_loaded: int | None = 1, max_waiting: int = 100) -> None:
    """Run a test on the models a, b and c."""

    async def main() -> None:
        repository, clock = MemoryRepository("a", "b", "c"), Clock()
        limits = (keep_alive_s, max_loaded)
        on_demand = OnDemand(
            repository, Metrics(), *limits, clock=clock, tick_s=0.001, yield_s=10.0, max_waiting=max_waiting
        )
        async with asyncio.timeout(20), on_demand.running():
            await body(on_demand, repository, clock)

    asyncio.run(main())


async def use(on_demand: OnDemand, name: str, until: asyncio.Event | None = None, timeout_s: float = 30.0) -> None:
    async with on_demand.in_use(name, timeout_s):
        if until is not None:
            await until.wait()


@contextlib.asynccontextmanager
async def held(on_demand: OnDemand, name: str) -> AsyncIterator[None]:
    async with on_demand.in_use(name, 30.0):
        yield


async def settle(condition: Callable[[], bool] = lambda: False, timeout_s: float = 0.1) -> None:
    """Wait until a condition holds; without one, until everything that is due has happened."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s if condition() is False else 5.0):
            while not condition():
                await asyncio.sleep(0.001)


def test_many_requests_share_one_load() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        await asyncio.gather(*(use(on_demand, "a") for _ in range(20)))
        assert repository.log == ["load a"]

    run(body)


def test_least_recently_used_idle_model_leaves() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        for name in ("a", "b", "a", "c"):
            clock.now_s += 1
            await use(on_demand, name)
        assert repository.log == ["load a", "load b", "unload b", "load c"]
        assert repository.max_loaded == 2

    run(body, max_loaded=2)


def test_model_in_use_is_not_unloaded_before_its_time() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        until = asyncio.Event()
        first = asyncio.ensure_future(use(on_demand, "a", until))
        await settle(lambda: repository.models["a"])
        second = asyncio.ensure_future(use(on_demand, "b"))
        await settle()
        await use(on_demand, "a")  # still let in
        assert repository.log == ["load a"]
        clock.now_s += 11  # now it is drained: its new requests wait behind b
        await settle()
        third = asyncio.ensure_future(use(on_demand, "a"))
        await settle()
        assert not third.done()
        assert repository.log == ["load a"]
        until.set()
        await asyncio.gather(first, second, third)
        assert repository.log == ["load a", "unload a", "load b", "unload b", "load a"]

    run(body)


def test_draining_ends_when_the_others_have_left() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        async with held(on_demand, "a"):
            other = asyncio.ensure_future(use(on_demand, "b"))
            await settle()
            clock.now_s += 11
            await settle()
            other.cancel()
            await use(on_demand, "a")
        assert repository.log == ["load a"]

    run(body)


def test_direct_requests_keep_a_model() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        await use(on_demand, "a")
        repository.direct["a"] = 2
        for _ in range(6):
            clock.now_s += 1.5  # a look at Triton each
            await settle(timeout_s=0.02)
        waiting = asyncio.ensure_future(use(on_demand, "b"))
        await settle()
        assert repository.log == ["load a"]
        repository.direct["a"] = 0
        clock.now_s += 1.5
        await waiting
        assert repository.log == ["load a", "unload a", "load b"]

    run(body, keep_alive_s=5)


def test_idle_model_is_unloaded_after_its_time() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        async with held(on_demand, "a"):
            clock.now_s += 1000
            await settle()
            assert repository.log == ["load a"]
        clock.now_s += 59
        await settle()
        assert repository.log == ["load a"]
        clock.now_s += 2
        await settle(lambda: not repository.models["a"])
        assert repository.log == ["load a", "unload a"]

    run(body, keep_alive_s=60)


def test_a_folders_own_time_and_a_requests_shorter_one() -> None:
    """A folder's `keep_alive` comes before the gateway's; a request's counts until the next, and lengthens none."""

    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.own = {"a": Terms(keep_alive_s=10), "b": Terms(keep_alive_s=math.inf)}

        async def check(name: str, expected_s: float, *asked_s: float) -> None:
            for each in asked_s:
                async with on_demand.in_use(name, 30.0, each):
                    pass
            if expected_s:
                clock.now_s += expected_s - 0.5
                await settle(timeout_s=0.02)
                assert repository.models[name]
                clock.now_s += 0.5
            await settle(lambda: not repository.models[name])
            assert not repository.models[name]

        await check("a", 10, math.inf)
        await check("a", 5, 5)
        await check("a", 10, 500)
        await check("a", 10, 5, math.inf)
        await check("a", 0, 0)
        await check("c", 60, math.inf)
        await check("b", 1000, math.inf, 1000)

    run(body, keep_alive_s=60, max_loaded=3)


def test_a_pinned_model_never_leaves() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.own = {"a": Terms(keep_alive_s=1, is_pinned=True)}
        async with on_demand.in_use("a", 30.0, 0):
            pass
        for name in ("b", "c", "b"):
            clock.now_s += 2
            await use(on_demand, name)
        async with held(on_demand, "b"):
            waiting = asyncio.ensure_future(use(on_demand, "c"))
            await settle()
            clock.now_s += 100  # the busy model is drained, though the pinned one is idle
            await settle()
        await waiting
        expected = ["a", "b", "b", "c", "c", "b", "b", "c"]
        assert [entry.split()[1] for entry in repository.log] == expected
        repository.own["c"] = Terms(is_pinned=True)
        clock.now_s += 2
        await settle()
        with pytest.raises(ApiError, match="'b' cannot be loaded: the 2 models that --max-loaded allows have") as full:
            await use(on_demand, "b")
        assert full.value.status_code == 503
        repository.own.clear()  # loaded again with another config
        clock.now_s += 2
        await settle()
        await use(on_demand, "b")

    run(body, max_loaded=2)


def test_failed_load_answers_each_and_is_not_repeated_at_once() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.broken["a"] = ApiError(503, "the model 'a' cannot be loaded: no room", code="not_loaded")
        results = await asyncio.gather(*(use(on_demand, "a") for _ in range(5)), return_exceptions=True)
        results += await asyncio.gather(*(use(on_demand, "a") for _ in range(5)), return_exceptions=True)
        assert [(type(error), getattr(error, "code", "")) for error in results] == [(ApiError, "not_loaded")] * 10
        assert repository.log == ["load a"]
        await use(on_demand, "b")  # the others are served
        repository.broken.clear()
        clock.now_s += RETRY_S
        await use(on_demand, "a")

    run(body)


def test_failed_load_waits_longer_each_time() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.broken["a"] = ApiError(503, "the model 'a' cannot be loaded: no room", code="not_loaded")
        waits_s = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
        for number, wait_s in enumerate(waits_s, start=1):
            for _ in range(2):  # the first loads it, the second has its error
                with pytest.raises(ApiError, match="no room") as failed:
                    await use(on_demand, "a")
                assert failed.value.headers == {"Retry-After": f"{wait_s:g}"}
            assert repository.log == ["load a"] * number
            clock.now_s += wait_s
        repository.models["a"] = True  # others have loaded it: nothing is known against it any more
        clock.now_s += 2
        await settle()
        await use(on_demand, "a")
        repository.models["a"] = False
        clock.now_s += 2
        await settle()
        with pytest.raises(ApiError, match="no room") as failed:
            await use(on_demand, "a")
        assert failed.value.headers == {"Retry-After": "5"}

    run(body)


def test_folder_that_fails_takes_no_place_from_a_model_in_use() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.broken["b"] = ApiError(503, "the model 'b' cannot be loaded: no files", code="not_loaded")
        for _ in range(400):  # a request for each, once a second
            clock.now_s += 1
            await use(on_demand, "a")
            with pytest.raises(ApiError, match="no files"):
                await use(on_demand, "b")
        assert repository.log == ["load a", "unload a", "load b", "load a"]
        clock.now_s += 600  # `a` is not asked for
        with pytest.raises(ApiError, match="no files"):
            await use(on_demand, "b")
        assert repository.log[4:] == ["unload a", "load b"]
        await asyncio.gather(use(on_demand, "a"), use(on_demand, "c"))
        assert repository.log[6:] == ["load a", "unload a", "load c"]

    run(body)


def test_folder_that_failed_is_loaded_in_free_room_and_is_like_the_others_then() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.broken["b"] = ApiError(503, "the model 'b' cannot be loaded: no files", code="not_loaded")
        await use(on_demand, "a")
        with pytest.raises(ApiError, match="no files"):
            await use(on_demand, "b")
        del repository.broken["b"]
        clock.now_s += RETRY_S
        await use(on_demand, "b")
        assert repository.log == ["load a", "load b", "load b"]
        for name in ("c", "a", "b"):
            clock.now_s += 0.1
            await use(on_demand, name)
        assert repository.log[3:] == ["unload a", "load c", "unload b", "load a", "unload c", "load b"]

    run(body, max_loaded=2)


def test_triton_that_is_away_is_held_against_no_folder() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.broken["b"] = ApiError(503, "the server cannot be reached", code="unavailable")
        for _ in range(4):
            with pytest.raises(ApiError, match="cannot be reached") as failed:
                await use(on_demand, "b")
            assert failed.value.headers == {"Retry-After": f"{RETRY_S:g}"}
            clock.now_s += RETRY_S
        await use(on_demand, "a")
        del repository.broken["b"]
        await use(on_demand, "b")
        assert repository.log[4:] == ["load a", "unload a", "load b"]

    run(body)


def test_request_that_leaves_lets_the_load_go_on() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.gate.clear()
        waiting = asyncio.ensure_future(use(on_demand, "a"))
        await settle(lambda: bool(repository.log))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        repository.gate.set()
        await settle(lambda: repository.models["a"])
        await use(on_demand, "a")
        await use(on_demand, "b")  # nothing is in use by the request that left
        assert repository.log == ["load a", "unload a", "load b"]

    run(body)


def test_waiting_is_bounded_in_time_and_number() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.gate.clear()
        waiting = [asyncio.ensure_future(use(on_demand, "a", timeout_s=0.5)) for _ in range(3)]
        await settle(lambda: bool(repository.log))
        with pytest.raises(ApiError, match="as many as may") as refused:
            await use(on_demand, "b")
        assert refused.value.status_code == 429
        assert refused.value.headers == {"Retry-After": "1"}
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(error, "code", "") for error in results] == ["deadline_exceeded"] * 3

    run(body, max_waiting=3)


def test_models_that_others_load_and_unload_are_noticed() -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        await settle()
        repository.models["a"] = True
        clock.now_s += 2
        await settle()
        await use(on_demand, "a")
        assert repository.log == []
        async with on_demand.in_use("a", 30.0) as stale:
            repository.models["a"] = False
        on_demand.lost(stale)
        await use(on_demand, "a")
        on_demand.lost(stale)  # late news of the load before
        await use(on_demand, "a")
        assert repository.log == ["load a"]
        del repository.models["b"]
        clock.now_s += 2
        await settle()
        with pytest.raises(ApiError, match="'b' does not exist"):
            await use(on_demand, "b")

    run(body)


def test_waiting_requests_are_answered_at_the_end() -> None:
    answers: list[object] = []

    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        repository.gate.clear()
        waiting = asyncio.ensure_future(use(on_demand, "a"))
        waiting.add_done_callback(lambda task: answers.append(str(task.exception())))
        await settle(lambda: bool(repository.log))

    run(body)
    assert answers == ["503: the gateway is stopping: send the request again later"]


@pytest.mark.parametrize("max_loaded", [1, 2])
def test_random_load_starves_no_model(max_loaded: int) -> None:
    async def body(on_demand: OnDemand, repository: MemoryRepository, clock: Clock) -> None:
        served = dict.fromkeys("abc", 0)

        async def client(name: str) -> None:
            for _ in range(30):
                async with held(on_demand, name):
                    assert repository.models[name]
                    await asyncio.sleep(0.001)
                    assert repository.models[name]
                    clock.now_s += 0.5
                served[name] += 1

        await asyncio.gather(*(client(name) for name in "aaaabbbbcccc"))
        assert served == dict.fromkeys("abc", 120)
        assert repository.max_loaded <= max_loaded

    run(body, max_loaded=max_loaded)


class DoorRepository(MemoryRepository):
    async def load_door(self, name: str) -> None:
        self.log.append(f"load door {name}")
        await self.gate.wait()
        if name in self.broken:
            raise self.broken[name]


def test_streams_share_the_load_of_a_door_that_is_gone() -> None:
    async def main() -> None:
        repository, clock = DoorRepository("a"), Clock()
        on_demand = OnDemand(repository, Metrics(), None, None, clock=clock, tick_s=0.001)
        async with asyncio.timeout(20), on_demand.running(), held(on_demand, "a"):
            repository.gate.clear()
            streams = [asyncio.ensure_future(on_demand.load_door("a")) for _ in range(5)]
            await settle(lambda: "load door a" in repository.log)
            streams[0].cancel()  # its client leaves; the load goes on
            repository.gate.set()
            await asyncio.gather(*streams[1:])
            repository.broken["a"] = ApiError(503, "no room", code="not_loaded")
            for _ in range(3):
                with pytest.raises(ApiError, match="no room"):
                    await on_demand.load_door("a")
            assert repository.log == ["load a", "load door a", "load door a"]
            clock.now_s += 6
            del repository.broken["a"]
            await on_demand.load_door("a")

    asyncio.run(main())
