# SPDX-License-Identifier: Apache-2.0
"""The spans of requests: one for the request, and below it queue, prefill and decode. No prompt, no completion.

They are made when a request is answered, from the times that the meter notes, in a thread of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple

from hf_triton.engine.sequence import FinishReason, RequestTimes, RequestUsage
from hf_triton.errors import where
from hf_triton.protocol.otlp import CLOSE_S, TRACE_CONTEXT, Tracing, build_tracing
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.metrics import OK

logger = logging.getLogger(__name__)

OPERATION: Final = "text_completion"
FINISH_REASONS: Final[Mapping[FinishReason, str]] = {"eos": "stop", "stop_string": "stop"}
"""OpenTelemetry's names where they differ."""


class _Answered(NamedTuple):
    times: RequestTimes
    context: dict[str, object]
    outcome: str
    answered_s: float


class RequestTracer:
    """Makes the spans of one model's requests."""

    def __init__(self, tracing: Tracing, model_name: str) -> None:
        self._tracing = tracing
        self._model_name = model_name
        self._zero_ns = time.time_ns() - time.monotonic_ns()
        self._has_failed = False
        # Its `put` may run in a destructor, wherever the garbage collector does.
        self._answered: SimpleQueue[_Answered | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name="hf_triton-tracing", daemon=True)
        self._thread.start()

    def begin(self, request: InferenceRequest, parameters: Mapping[str, object]) -> None:
        """Trace a request to its final response, as a child of the span that its parameters name."""
        request.times.usage = RequestUsage()
        context = {name: parameters[name] for name in TRACE_CONTEXT if name in parameters}
        request.on_traced = partial(self._end, request.times, context)  # not the request: it would be a cycle

    def _end(self, times: RequestTimes, context: dict[str, object], outcome: str) -> None:
        self._answered.put(_Answered(times, context, outcome, time.monotonic()))

    def close(self) -> None:
        """Send the last spans."""
        self._answered.put(None)
        self._thread.join(CLOSE_S)
        self._tracing.close()

    def _loop(self) -> None:
        while (answered := self._answered.get()) is not None:
            try:
                self._record(answered)
            except Exception as error:
                if not self._has_failed:
                    logger.error("traces are incomplete from now on: %s", where(error))
                self._has_failed = True

    def _record(self, answered: _Answered) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        times = answered.times
        span = self._tracing.tracer.start_span(
            f"{OPERATION} {self._model_name}",
            self._tracing.parent(answered.context),
            SpanKind.SERVER,
            self._attributes(times.usage),
            start_time=self._ns(times.arrival_s),
        )
        below = set_span_in_context(span)
        starts_s = {"queue": times.arrival_s, "prefill": times.admitted_s, "decode": times.first_token_s}
        phases = [(name, start_s) for name, start_s in starts_s.items() if start_s is not None]
        ends_s = [start_s for _, start_s in phases[1:]] + [answered.answered_s]
        for (name, start_s), end_s in zip(phases, ends_s, strict=True):
            phase = self._tracing.tracer.start_span(name, below, start_time=self._ns(start_s))
            self._finish(phase, end_s, answered.outcome if end_s is ends_s[-1] else OK)
        self._finish(span, answered.answered_s, answered.outcome)

    def _attributes(self, usage: RequestUsage | None) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": "hf_triton",
            "gen_ai.request.model": self._model_name,
        }
        if usage is not None and usage.finish_reasons:
            attributes |= {
                "gen_ai.usage.input_tokens": usage.num_input_tokens,
                "gen_ai.usage.output_tokens": usage.num_output_tokens,
                "gen_ai.response.finish_reasons": [
                    FINISH_REASONS.get(reason, reason) for reason in usage.finish_reasons
                ],
            }
        return attributes

    def _finish(self, span: Any, end_s: float, outcome: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        if outcome != OK:
            span.set_attribute("error.type", outcome)
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end(end_time=self._ns(end_s))

    def _ns(self, monotonic_s: float) -> int:
        return self._zero_ns + int(monotonic_s * 1e9)


def build_request_tracer(environment: Mapping[str, str], model_name: str) -> RequestTracer | None:
    """The tracer of a model's requests; None if the environment asks for no spans, or OpenTelemetry is missing."""
    tracing = build_tracing(environment, "hf_triton")
    return None if tracing is None else RequestTracer(tracing, model_name)
