# SPDX-License-Identifier: Apache-2.0
"""Loads models when they are asked for, and unloads idle ones. Knows neither Triton's protocol nor HTTP.

Each model is unloaded -> loading -> ready -> (draining ->) unloading -> unloaded. Requests enter through
`OnDemand.in_use`, which is the only place that waits for a load. `_plan` alone decides, without awaiting anything:
models that are waited for are loaded in the order of their first waiting requests. A `Repository` may put models to
sleep in place of unloading them: to this module, one that sleeps is unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from hf_triton.errors import clip, where
from hf_triton_gateway.http.api_errors import ApiError, model_not_found

if TYPE_CHECKING:
    from hf_triton_gateway.http.gateway_metrics import Metrics

LOG: Final = logging.getLogger("hf_triton_gateway")
TICK_S: Final = 0.25
"""Longest time between two plans."""
POLL_S: Final = 1.0
"""Time between two looks at what others do with Triton's models."""
YIELD_S: Final = 10.0
"""A busy model that is waited out serves at least this long, or as long as its load took; then it is drained."""
RETRY_S: Final = 5.0
"""Requests get the error of a failed load for this long; after each further one, for twice as long."""
MAX_RETRY_S: Final = 600.0
MAX_WAITING: Final = 512
"""Requests that wait for a load; more are refused."""


class State(Enum):
    """A model's state, as the gateway sees it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """Loaded; its requests in flight finish, new ones wait."""
    UNLOADING = "unloading"


LEAVING: Final = (State.DRAINING, State.UNLOADING)


@dataclass(frozen=True)
class Activity:
    """What Triton says of a loaded model's requests, the gateway's own included."""

    num_in_flight: int
    """Up to a second old; 0 if it is not known."""
    idle_s: float
    """Seconds since the last request began; infinite if there was none."""


@dataclass(frozen=True)
class Terms:
    """What a folder's own settings say of how long its model stays."""

    keep_alive_s: float | None = None
    """It leaves when it is idle for so many seconds; None: as the gateway's others."""
    is_pinned: bool = False
    """Whether it never leaves."""


class Repository(Protocol):
    """Triton's model repository; all methods raise `ApiError`."""

    async def check(self) -> None:
        """Check that models may be loaded and unloaded."""

    async def loaded(self) -> Mapping[str, bool]:
        """Each model, and whether it is loaded."""

    async def activity(self) -> Mapping[str, Activity]:
        """The activity of the loaded models."""

    async def terms(self, name: str) -> Terms:
        """The terms of a loaded model."""

    async def load(self, name: str) -> str:
        """Load a model; return when it is ready, with a word for what was done."""

    async def load_door(self, name: str) -> None:
        """Load the stream door of a loaded model, if there is one; return when it is ready."""

    async def unload(self, name: str) -> str:
        """Unload a model; return when its memory is free, with a word for what was done."""

    def is_sleeping(self, name: str) -> bool:
        """Whether a loaded model sleeps, as of the last look."""

    def note_sleep(self, name: str, *, is_sleeping: bool) -> bool:
        """A model has been put to sleep, or woken, on an admin's word; whether it is unloaded to `loaded` now."""


@dataclass(frozen=True)
class Use:
    """A request's hold on a loaded model."""

    name: str
    change: int
    """Identifies the load that made it ready."""
    left_s: float
    """What is left of the request's time, in seconds."""


@dataclass(eq=False)
class _Entry:
    """One model."""

    name: str
    order: int = 0
    """Place in the order of models that are waited for."""
    state: State = State.UNLOADED
    change: int = 0
    """Number of changes of `state`."""
    num_in_use: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    waiting_since_s: float = 0.0
    ready_since_s: float = 0.0
    draining_since_s: float = 0.0
    idle_since_s: float = 0.0
    terms: Terms = Terms()
    asked_s: float = math.inf
    """The last request wants the model kept for so many seconds behind it; infinite: it did not say."""
    load_s: float = 0.0
    peaks: deque[int] = field(default_factory=lambda: deque([0], 3))
    """Most requests of the gateway in flight between the last looks at Triton, whose gauge lags behind."""
    is_busy: bool = False
    """Whether others' requests are in flight, directly through Triton."""
    failure: ApiError | None = None
    failed_until_s: float = 0.0
    retry_s: float = 0.0
    """How long requests get the error of the last load; 0: it did not fail, or nothing is known against the folder."""

    def enter(self, state: State) -> None:
        self.state, self.change = state, self.change + 1

    def use(self) -> None:
        self.num_in_use += 1
        self.peaks[-1] = max(self.peaks[-1], self.num_in_use)

    @property
    def may_leave(self) -> bool:
        return self.state is State.READY and not self.terms.is_pinned

    @property
    def is_idle(self) -> bool:
        """Whether it may leave now."""
        return self.may_leave and not (self.num_in_use or self.waiting or self.is_busy)

    def admit(self) -> None:
        """Let the waiting requests in."""
        for future in self.waiting:
            if not future.done():
                self.use()
                future.set_result(None)
        self.waiting.clear()

    def refuse(self, error: ApiError, retry_after_s: float = 0.0) -> None:
        """Answer the waiting requests with an error."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(_copy(error, retry_after_s))
        self.waiting.clear()


def _copy(error: ApiError, retry_after_s: float) -> ApiError:
    copy = ApiError(error.status_code, error.message, code=error.code)
    if copy.headers and retry_after_s > 1:
        copy.headers = {**copy.headers, "Retry-After": str(math.ceil(retry_after_s))}
    return copy


def _no_room(name: str, num_pinned: int) -> ApiError:
    message = (
        f"the model {clip(name)} cannot be loaded: the {num_pinned} models that --max-loaded allows have the setting "
        "pinned, and stay"
    )
    return ApiError(503, message, code="not_loaded")


class OnDemand:
    """The models of one Triton, of which some are loaded. Belongs to one event loop.

    Args:
        repository: Triton's.
        metrics: The gateway's.
        keep_alive_s: A model that is idle for so many seconds is unloaded, unless its folder says otherwise; None:
            never.
        max_loaded: Most loaded models; None: any number.
        clock: Seconds, monotonic.
        tick_s: Longest time between two plans, in seconds.
        yield_s: See `YIELD_S`.
        max_waiting: See `MAX_WAITING`.
    """

    def __init__(
        self,
        repository: Repository,
        metrics: Metrics,
        keep_alive_s: float | None,
        max_loaded: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = TICK_S,
        yield_s: float = YIELD_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._repository = repository
        self._metrics = metrics
        self._keep_alive_s = math.inf if keep_alive_s is None else keep_alive_s
        self._max_loaded = max_loaded
        self._clock = clock
        self._tick_s = tick_s
        self._yield_s = yield_s
        self._max_waiting = max_waiting
        self._entries: dict[str, _Entry] = {}
        self._names: frozenset[str] = frozenset()
        self._is_checked = False
        self._orders = itertools.count()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._doors: dict[str, asyncio.Task[None]] = {}
        self._door_failures: dict[str, tuple[float, ApiError]] = {}  # and until when requests get them
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load and unload meanwhile; at the end, waiting requests are refused."""
        runner = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            tasks = [runner, *self._tasks, *self._doors.values(), *([self._looking] if self._looking else [])]
            for task in tasks:
                task.cancel()
            for entry in self._entries.values():
                entry.refuse(ApiError(503, "the gateway is stopping: send the request again later", code="unavailable"))
            await asyncio.gather(*tasks, return_exceptions=True)

    async def names(self) -> Mapping[str, bool]:
        """All models in the repository, and whether they are loaded."""
        if not self._names or self._clock() - self._looked_s > 2 * POLL_S:
            await asyncio.shield(self._look())
        loaded = {name for name, entry in self._entries.items() if entry.state in (State.READY, State.DRAINING)}
        return {name: name in loaded for name in self._names}

    @contextlib.asynccontextmanager
    async def in_use(self, name: str, timeout_s: float, keep_alive_s: float = math.inf) -> AsyncIterator[Use]:
        """Have a model loaded, and keep it loaded meanwhile.

        Args:
            name: The model's.
            timeout_s: What the request has left, in seconds.
            keep_alive_s: The model may leave this long after the request, if none comes behind it, though its own time
                is longer.
        """
        start_s = self._clock()
        if name not in self._names:
            await asyncio.shield(self._look())
            if name not in self._names:
                raise model_not_found(name, self._names)
        entry = self._entries.setdefault(name, _Entry(name))
        entry.asked_s = keep_alive_s
        if entry.state is State.READY and not entry.waiting:
            entry.use()
        else:
            await self._wait(entry, timeout_s)
        try:
            yield Use(name, entry.change, max(0.001, timeout_s - (self._clock() - start_s)))
        finally:
            self._leave(entry)

    def lost(self, use: Use) -> None:
        """Triton said that a model is not loaded, though it was: somebody unloaded it, or Triton has restarted."""
        entry = self._entries.get(use.name)
        if entry is not None and entry.change == use.change and entry.state in (State.READY, State.DRAINING):
            entry.enter(State.UNLOADED)
            self._wake.set()

    def is_sleeping(self, name: str) -> bool:
        """Whether a loaded model sleeps; up to some seconds old if others have done it."""
        return self._repository.is_sleeping(name)

    def note_sleep(self, name: str, *, is_sleeping: bool) -> None:
        """Take note that an admin has put a model to sleep, or woken it; a request in flight has woken it again."""
        entry = self._entries.get(name)
        is_awake = is_sleeping and entry is not None and entry.num_in_use
        if not is_awake and self._repository.note_sleep(name, is_sleeping=is_sleeping):
            if entry is not None and entry.state is State.READY:
                entry.enter(State.UNLOADED)
            self._wake.set()

    async def load_door(self, name: str) -> None:
        """Load the stream door of a model in use, which another client has unloaded alone, or not loaded."""
        until_s, failure = self._door_failures.get(name, (0.0, None))
        if failure is not None and (left_s := until_s - self._clock()) > 0:
            raise _copy(failure, left_s)
        if name not in self._doors:
            self._doors[name] = asyncio.ensure_future(self._load_door(name))
            self._doors[name].add_done_callback(lambda task: task.cancelled() or task.exception())  # none may wait
        await asyncio.shield(self._doors[name])

    async def _load_door(self, name: str) -> None:
        try:
            await self._repository.load_door(name)
        except ApiError as error:
            LOG.warning("%s; tried again for a stream in %g s or later", error.logged, RETRY_S)
            self._door_failures[name] = (self._clock() + RETRY_S, error)
            raise
        finally:
            del self._doors[name]

    def _leave(self, entry: _Entry) -> None:
        entry.num_in_use -= 1
        entry.idle_since_s = self._clock()
        self._wake.set()

    async def _wait(self, entry: _Entry, timeout_s: float) -> None:
        """Wait in the queue of a model; at the end, it is in use."""
        left_s = entry.failed_until_s - self._clock()
        if entry.failure is not None and left_s > 0 and not entry.waiting:
            raise _copy(entry.failure, left_s)
        num_waiting = sum(len(other.waiting) for other in self._entries.values())
        if num_waiting >= self._max_waiting:
            message = f"{num_waiting} requests wait for models to be loaded, as many as may: send it again later"
            raise ApiError(429, message, code="too_many_requests")
        if not entry.waiting:
            entry.order, entry.waiting_since_s = next(self._orders), self._clock()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(future)
        self._wake.set()
        self._metrics.waiting_for_load.inc()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(future)
        except TimeoutError:
            self._give_up(entry, future)
            message = f"the model {clip(entry.name)} was not loaded in time: send the request again later"
            raise ApiError(504, message, code="deadline_exceeded") from None
        except asyncio.CancelledError:  # the client has left; the load goes on
            self._give_up(entry, future)
            raise
        finally:
            self._metrics.waiting_for_load.dec()

    def _give_up(self, entry: _Entry, future: asyncio.Future[None]) -> None:
        if future in entry.waiting:
            entry.waiting.remove(future)
            future.cancel()
            self._wake.set()
        elif future.exception() is None:  # let in at the same moment
            self._leave(entry)

    async def _run(self) -> None:
        while True:
            if self._clock() - self._looked_s >= POLL_S:
                with contextlib.suppress(ApiError):  # Triton is away; requests say so
                    await asyncio.shield(self._look())
            self._wake.clear()
            self._plan()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()

    def _look(self) -> asyncio.Task[None]:
        """Start looking at Triton, or join a look under way."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._compare())
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())  # none may wait for it
        return self._looking

    async def _compare(self) -> None:
        """Adopt what others have loaded and unloaded, and see which models they use."""
        self._looked_s = self._clock()
        if not self._is_checked:
            await self._repository.check()
            self._is_checked = True
        changes = {name: entry.change for name, entry in self._entries.items()}
        loaded = await self._repository.loaded()
        activity = await self._repository.activity()
        self._names = frozenset(loaded)
        for name in [name for name, entry in self._entries.items() if name not in loaded and not entry.waiting]:
            if self._entries[name].state is State.UNLOADED and not self._entries[name].num_in_use:
                del self._entries[name]
        for name, is_loaded in loaded.items():
            entry = self._entries.setdefault(name, _Entry(name))
            if entry.change == changes.get(name, 0):  # otherwise Triton's answer may be older
                self._adopt(entry, is_loaded)
            if name in activity:
                self._see(entry, activity[name])
        ready = [entry for entry in self._entries.values() if entry.state is State.READY]
        await asyncio.gather(*map(self._read_terms, ready))

    async def _read_terms(self, entry: _Entry) -> None:
        with contextlib.suppress(ApiError):  # unloaded meanwhile
            entry.terms = await self._repository.terms(entry.name)

    def _adopt(self, entry: _Entry, is_loaded: bool) -> None:
        if is_loaded and entry.state is State.UNLOADED:
            entry.enter(State.READY)
            entry.failure, entry.retry_s = None, 0.0
            entry.asked_s = entry.asked_s if entry.waiting else math.inf
            entry.ready_since_s = entry.idle_since_s = self._clock()
            entry.admit()
        elif not is_loaded and entry.state in (State.READY, State.DRAINING):
            entry.enter(State.UNLOADED)

    def _see(self, entry: _Entry, activity: Activity) -> None:
        entry.is_busy = activity.num_in_flight > max(entry.peaks)
        entry.peaks.append(entry.num_in_use)
        used_s = self._clock() - (0.0 if entry.is_busy else activity.idle_s)
        entry.idle_since_s = max(entry.idle_since_s, used_s)

    def _plan(self) -> None:
        """Start the loads and unloads that are due."""
        now_s = self._clock()
        for entry in self._entries.values():
            own_s = self._keep_alive_s if entry.terms.keep_alive_s is None else entry.terms.keep_alive_s
            if entry.is_idle and now_s - entry.idle_since_s >= min(own_s, entry.asked_s):
                self._start_unload(entry)
        self._make_room(now_s)
        for entry in self._entries.values():
            # Triton itself lets requests in flight finish: those of others are waited for, but not for ever.
            has_waited = not entry.is_busy or now_s - entry.draining_since_s >= self._yield_s
            if entry.state is State.DRAINING and not entry.num_in_use and has_waited:
                self._start_unload(entry)

    def _make_room(self, now_s: float) -> None:
        """Load what is waited for, in order; choose which models leave, if there is no room.

        A folder whose last load failed comes last. It takes the place of a model only that is idle for as long as it
        had to wait itself; if there is none, its requests get the error again.
        """
        present = [entry for entry in self._entries.values() if entry.state is not State.UNLOADED]
        num_free = float("inf") if self._max_loaded is None else self._max_loaded - len(present)
        num_leaving = sum(entry.state in LEAVING for entry in present)
        num_pinned = sum(entry.terms.is_pinned for entry in present)
        num_wanted = 0  # places that are not free yet
        waiting = [entry for entry in self._entries.values() if entry.waiting]
        for entry in sorted(waiting, key=lambda entry: (entry.retry_s > 0, entry.order)):
            if entry.state is State.DRAINING and num_wanted < num_leaving:
                self._resume(entry)
                num_leaving -= 1
            elif entry.state is State.READY:
                entry.admit()
            elif entry.state is State.UNLOADED and num_free > 0:
                self._start_load(entry)
                num_free -= 1
            elif entry.state in (State.UNLOADED, State.UNLOADING):
                num_wanted += 1
                if num_wanted > num_leaving and self._evict_for(entry, now_s):
                    num_leaving += 1
                elif num_pinned >= (self._max_loaded or math.inf):
                    num_wanted -= 1
                    entry.refuse(_no_room(entry.name, num_pinned))
                elif num_wanted > num_leaving and entry.retry_s and entry.failure is not None:
                    num_wanted -= 1
                    entry.refuse(entry.failure)
        for entry in present:
            if entry.state is State.DRAINING and num_leaving > num_wanted:  # those who waited for its place have left
                self._resume(entry)
                num_leaving -= 1

    def _evict_for(self, waiting: _Entry, now_s: float) -> bool:
        """Let the least recently used idle model go, or drain the one that has served longest; whether one leaves."""
        if idle := [entry for entry in self._entries.values() if entry.is_idle]:
            oldest = min(idle, key=lambda entry: entry.idle_since_s)
            if now_s - oldest.idle_since_s >= waiting.retry_s:
                self._start_unload(oldest)
                return True
        if waiting.retry_s or now_s - waiting.waiting_since_s < self._yield_s:
            return False
        served = [
            entry
            for entry in self._entries.values()
            if entry.may_leave and now_s - entry.ready_since_s >= max(self._yield_s, entry.load_s)
        ]
        if not served:
            return False
        longest = min(served, key=lambda entry: entry.ready_since_s)
        longest.enter(State.DRAINING)
        longest.draining_since_s = now_s
        return True

    def _resume(self, entry: _Entry) -> None:
        entry.enter(State.READY)
        entry.admit()

    def _start_load(self, entry: _Entry) -> None:
        entry.enter(State.LOADING)
        self._start(self._load(entry))

    def _start_unload(self, entry: _Entry) -> None:
        entry.enter(State.UNLOADING)
        self._start(self._unload(entry))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: self._wake.set())

    async def _load(self, entry: _Entry) -> None:
        start_s, failure = self._clock(), None
        word = ""
        LOG.info("loading %s", clip(entry.name))
        try:
            word = await self._repository.load(entry.name)
            await self._read_terms(entry)
        except ApiError as error:
            failure = error
        except Exception as error:  # a bug; its requests must be answered
            LOG.error("loading %s failed: %s", clip(entry.name), where(error))
            failure = ApiError(500, f"the gateway failed to load the model {clip(entry.name)}")
        entry.load_s = self._clock() - start_s
        entry.failure = failure
        self._metrics.loads.labels(entry.name, "ok" if failure is None else "failed").inc()
        if failure is None:
            self._metrics.load_seconds.labels(entry.name).observe(entry.load_s)
            LOG.info("%s %s in %.1f s", word, clip(entry.name), entry.load_s)
            entry.enter(State.READY)
            entry.ready_since_s = entry.idle_since_s = self._clock()
            entry.retry_s = 0.0
            entry.admit()
        else:
            wait_s = RETRY_S
            if failure.code == "not_loaded":  # Triton's answer, not its absence
                entry.retry_s = wait_s = min(max(RETRY_S, 2 * entry.retry_s), MAX_RETRY_S)
            LOG.warning("%s; tried again for a request in %g s or later", failure.logged, wait_s)
            entry.failed_until_s = self._clock() + wait_s
            entry.enter(State.UNLOADED)
            entry.refuse(failure, wait_s)

    async def _unload(self, entry: _Entry) -> None:
        try:
            word = await self._repository.unload(entry.name)
            self._metrics.unloads.labels(entry.name).inc()
            LOG.info("%s %s", word, clip(entry.name))
        except ApiError as error:
            LOG.warning("unloading %s: %s", clip(entry.name), error.message)
        except Exception as error:  # a bug; the next look at Triton finds the truth
            LOG.error("unloading %s failed: %s", clip(entry.name), where(error))
        entry.enter(State.UNLOADED)
