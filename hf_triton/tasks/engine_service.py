# SPDX-License-Identifier: Apache-2.0
"""What tasks with an engine share: a gate, threads that prepare requests, and the order in which all of it ends."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from hf_triton.engine.types import Engine, EngineLoad
from hf_triton.errors import HfTritonError, as_own_error
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.prompts import Limits
from hf_triton.tasks.serving.adapters import AdapterStore, Waiter
from hf_triton.tasks.serving.admission import AdmissionGate, PendingResponse
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers

Response = TypeVar("Response", bound=PendingResponse)


class EngineService(ABC, Generic[Response]):
    """Admits requests and prepares them, see `RequestService`.

    Args:
        engine: Computes. It is closed with this task.
        limits: What one request may hold.
        max_waiting: Prompts that may wait; see `AdmissionGate`.
        num_threads: That prepare requests.
        info: What the model is.
        adapters: Its LoRA adapters; None: it takes none.
    """

    tokenizer: TokenizerAnswers | None = None
    """Answers what is asked of the tokenizer."""

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

    @abstractmethod
    def _prepare(self, response: Response) -> None:
        """Prepare a request and queue it, or refuse it; it leaves the gate then. Raises nothing."""

    def is_healthy(self) -> bool:
        """Whether requests can be taken."""
        return self._engine.is_healthy()

    def load(self) -> EngineLoad:
        """The engine's load; prompts in preparation are waiting ones."""
        load = self._engine.load()
        return dataclasses.replace(load, num_waiting=load.num_waiting + self._gate.num_preparing)

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
        response: Response,
        num_prompts: int,
        deadline_s: float | None,
        *,
        is_quick: bool,
        adapters: Collection[str] = (),
    ) -> None:
        """Admit a request and prepare it, or refuse it.

        Args:
            response: Its own.
            num_prompts: That the gate counts.
            deadline_s: By `time.monotonic()`; the request is refused if its preparation takes longer.
            is_quick: Whether it is prepared in this thread: it takes less than another thread costs.
            adapters: Names of adapters that it needs: it is prepared when they are known, and holds no thread before.
        """
        try:
            self._gate.enter(response, num_prompts)
        except HfTritonError as error:
            response.refuse(error)
            return
        response.request.on_ending(response.refuse, deadline_s)
        if adapters and self._adapters is not None:
            self._wait_for_adapters(self._adapters, response, adapters, deadline_s)
        elif is_quick:
            self._prepare(response)
        else:
            self._run(self._pool, self._prepare, response)

    def _wait_for_adapters(
        self, store: AdapterStore, response: Response, names: Collection[str], deadline_s: float | None
    ) -> None:
        waiter = Waiter(names, partial(self._run, self._pool, self._prepare, response))

        def end(error: HfTritonError) -> None:
            response.refuse(error)
            if store.give_up(waiter):
                self._leave(response)

        response.request.on_ending(end, deadline_s)
        store.when_known(waiter)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[[Response], None], response: Response) -> None:
        try:
            pool.submit(work, response)
        except RuntimeError as error:  # the pool is shut down, or no thread is available; a later one may run it still
            response.refuse(as_own_error("preparing the request", error))
            self._leave(response)

    def _leave(self, response: Response) -> None:
        self._gate.leave(response)
        response.request.on_ending(None)
