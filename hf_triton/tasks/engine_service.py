# SPDX-License-Identifier: Apache-2.0
"""What services with an engine share: a gate, threads that prepare requests, and the order in which all of it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from hf_triton.engine.protocols import Engine, EngineLoad, Nap
from hf_triton.errors import HfTritonError, as_own_error
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton.tasks.interface import RequestService
from hf_triton.tasks.serving.adapters import AdapterStore, Waiter
from hf_triton.tasks.serving.admission import AdmissionGate, PendingResponse


class EngineService(RequestService):
    """Admits requests and has them prepared for its engine.

    Args:
        engine: Computes. It is closed with this service.
        max_waiting: Prompts that may wait; see `AdmissionGate`.
        adapters: Its LoRA adapters; None: it takes none.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        *,
        max_waiting: int,
        num_threads: int,
        info: ModelInfo | None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.info = info
        self._adapters = adapters
        self._engine = engine
        self._limits = limits
        self._gate = AdmissionGate(max_waiting, engine.load)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hf_triton-prepare")
        self._pools = [self._pool]
        """What `close` ends, in order."""

    def is_healthy(self) -> bool:
        return self._engine.is_healthy()

    def is_sleeping(self) -> bool:
        return self._engine.is_sleeping

    def set_sleeping(self, is_sleeping: bool) -> Future[SleepAnswer]:
        answer: Future[SleepAnswer] = Future()

        def give(done: Future[Nap]) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(SleepAnswer(*done.result()))
            except Exception as error:
                answer.set_exception(error)

        nap = self._engine.set_sleeping(is_sleeping)
        answer.add_done_callback(lambda _: nap.cancel())  # of one that is done, it does nothing
        nap.add_done_callback(give)
        return answer

    def load(self) -> EngineLoad:
        """The engine's load; prompts in preparation are waiting ones."""
        load = self._engine.load()
        num_waiting = load.num_waiting + self._gate.num_preparing
        return dataclasses.replace(load, num_waiting=num_waiting, is_sleeping=self._engine.is_sleeping)

    def close(self) -> None:
        """Answer every request that is not finished, then stop."""
        self._gate.close()
        self._engine.close()
        if self._adapters is not None:
            self._adapters.close()
        for pool in self._pools:
            pool.shutdown(wait=True)

    def _begin(
        self,
        response: PendingResponse,
        prepare: Callable[[], None],
        *,
        num_prompts: int,
        deadline_s: float | None,
        is_quick: bool,
        adapters: Collection[str] = (),
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """Admit a request and prepare it, or refuse it.

        Args:
            response: Ends the request if it is refused.
            prepare: Prepares the request and queues it, or refuses it; it leaves the gate then. Raises nothing.
            num_prompts: Prompts that the gate counts.
            deadline_s: By `time.monotonic()`; the request is refused if its preparation takes longer.
            is_quick: Whether it is prepared in this thread: it takes less than another thread costs.
            adapters: Names of adapters that it needs: it is prepared when they are known, and holds no thread before.
            pool: Its threads prepare the request; None: those of most requests.
        """
        pool = pool or self._pool
        try:
            self._gate.enter(response, num_prompts)
        except HfTritonError as error:
            response.refuse(error)
            return
        response.request.on_ending(response.refuse, deadline_s)
        if adapters and self._adapters is not None:
            self._wait_for_adapters(self._adapters, response, prepare, adapters, deadline_s, pool)
        elif is_quick:
            prepare()
        else:
            self._run(pool, prepare, response)

    def _wait_for_adapters(
        self,
        store: AdapterStore,
        response: PendingResponse,
        prepare: Callable[[], None],
        names: Collection[str],
        deadline_s: float | None,
        pool: ThreadPoolExecutor,
    ) -> None:
        waiter = Waiter(names, lambda: self._run(pool, prepare, response))

        def end(error: HfTritonError) -> None:
            response.refuse(error)
            if store.give_up(waiter):
                self._leave(response)

        response.request.on_ending(end, deadline_s)
        store.when_known(waiter)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[[], None], response: PendingResponse) -> None:
        try:
            pool.submit(work)
        except RuntimeError as error:  # the pool is shut down, or no thread is available; a later one may run it still
            response.refuse(as_own_error("preparing the request", error))
            self._leave(response)

    def _leave(self, response: PendingResponse) -> None:
        self._gate.leave(response)
        response.request.on_ending(None)
