# SPDX-License-Identifier: Apache-2.0
"""The metrics, each declared once, and the meter that counts them. Knows no Triton: figures go to a `Sink`.

An update costs the server's Python stub a round trip between processes (20 to 500 us), so counts are only noted, and a
thread sends the changes twice a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol, get_args

from hf_triton.engine.types import (
    Completion,
    EngineLoad,
    FinishReason,
    Observer,
    SequenceGroup,
    SequenceObserver,
)
from hf_triton.errors import CODES, where

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.5
OK: Final = "ok"

WAIT_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0),
)
"""From tiny models on a GPU to long completions on a CPU."""
TOKEN_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric family. Prometheus conventions: the unit ends the name, a counter's name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    """A label of its own, beside `model` and `version`."""
    values: tuple[str, ...] = ("",)
    """The label's values at the start; each is exported with 0, so that a rate has a start."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


REQUESTS: Final = Metric(
    "hf_triton_requests_total",
    "counter",
    "Answered requests by outcome: `ok`, or the error's code (`hook_failed` for the codes of a folder's own hooks).",
    label="outcome",
    values=(OK,),
)
IN_FLIGHT: Final = Metric("hf_triton_requests_in_flight", "gauge", "Requests without a final response.")
WAITING: Final = Metric(
    "hf_triton_prompts_waiting", "gauge", "Prompts in preparation or in the queue, and preempted sequences."
)
RUNNING: Final = Metric("hf_triton_rows_running", "gauge", "Running sequences: in prefill, or decoding.")
QUEUE_TIME: Final = Metric(
    "hf_triton_queue_time_seconds",
    "histogram",
    "From a request's arrival until the engine admits a prompt of it.",
    buckets=WAIT_BUCKETS_S,
)
TIME_TO_FIRST_TOKEN: Final = Metric(
    "hf_triton_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to the first token of a prompt.",
    buckets=WAIT_BUCKETS_S,
)
TIME_PER_TOKEN: Final = Metric(
    "hf_triton_time_per_output_token_seconds",
    "histogram",
    "Mean time between two tokens of a sequence that has two or more.",
    buckets=TOKEN_BUCKETS_S,
)
LATENCY: Final = Metric(
    "hf_triton_e2e_request_latency_seconds",
    "histogram",
    "From a request's arrival to its final response, for requests that end `ok`.",
    buckets=WAIT_BUCKETS_S,
)
PROMPT_TOKENS: Final = Metric("hf_triton_prompt_tokens_total", "counter", "Tokens of prompts that were prefilled.")
GENERATED_TOKENS: Final = Metric(
    "hf_triton_generation_tokens_total", "counter", "Generated tokens, without end-of-sequence tokens."
)
SHARED_TOKENS: Final = Metric(
    "hf_triton_prefix_cache_hits_total",
    "counter",
    "Prompt tokens served from the prefix cache.",
)
COMPLETIONS: Final = Metric(
    "hf_triton_completions_total",
    "counter",
    "Completions by finish reason, without those that best_of discards. The output finish_reason calls both eos and "
    "stop_string stop.",
    label="finish_reason",
    values=get_args(FinishReason),
)
STEPS: Final = Metric(
    "hf_triton_steps_total", "counter", "Decoding steps; each computes one token of every running sequence."
)
STEP_ROWS: Final = Metric(
    "hf_triton_step_rows_total", "counter", "Sequences in decoding steps; divided by the steps, the mean batch size."
)
PREEMPTIONS: Final = Metric(
    "hf_triton_num_preemptions_total",
    "counter",
    "Preempted sequences: for memory, after a failure, or for a new prefill (LongRoPE).",
)
USED_TOKENS: Final = Metric(
    "hf_triton_kv_cache_tokens",
    "gauge",
    "KV cache tokens in use by the continuous engine, padding included; a hybrid model's states count by their size.",
)
MAX_TOKENS: Final = Metric("hf_triton_kv_cache_max_tokens", "gauge", "Tokens that the KV cache may hold now.")

METRICS: Final = (
    *(REQUESTS, IN_FLIGHT, WAITING, RUNNING),
    *(QUEUE_TIME, TIME_TO_FIRST_TOKEN, TIME_PER_TOKEN, LATENCY),
    *(PROMPT_TOKENS, GENERATED_TOKENS, SHARED_TOKENS, COMPLETIONS),
    *(STEPS, STEP_ROWS, PREEMPTIONS, USED_TOKENS, MAX_TOKENS),
)


class Sink(Protocol):
    """Receives the figures. Called from one thread at a time; may raise."""

    def declare(self, metric: Metric, value: str) -> None:
        """Export a metric from now on, even if it is still 0. Its own label, if it has one, is `value`."""

    def add(self, metric: Metric, value: str, amount: float) -> None:
        """Add to a counter or a gauge."""

    def observe(self, metric: Metric, amount: float) -> None:
        """Add a value to a histogram."""


class NoMeter(Observer):
    """Counts nothing, but notes the times of requests."""

    def begin_request(self) -> Callable[[str], None]:
        """Count a request. Returns a function to call once with its outcome: `ok` or the error's code."""
        return lambda outcome: None

    def on_admit(self, sequence: SequenceGroup) -> SequenceObserver:
        """The engine admits a sequence group."""
        sequence.times.note_admitted(time.monotonic())
        return _SequenceClock(sequence)

    def start(self, load: Callable[[], EngineLoad]) -> None:
        """Begin to send; `load` returns the engine's load and is called from another thread."""

    def close(self) -> None:
        """Send the last figures, after the engine has stopped."""


class Meter(NoMeter):
    """Notes counts from any thread, and sends the figures to a sink from a thread of its own.

    Gauges are sent as differences, so that several instances of a model add up under the same labels.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._load: Callable[[], EngineLoad] = lambda: EngineLoad()
        # Appending is safe from any thread and takes no lock: the destructor of a dropped request counts it, wherever
        # the garbage collector runs.
        self._notes: deque[tuple[Metric, str, float]] = deque()
        self.num_generated = 0
        """Generated tokens. Too many to be noted one by one; only the engine's thread adds to it."""
        self._totals: dict[tuple[Metric, str], float] = {}
        self._sent: dict[tuple[Metric, str], float] = {}
        self._has_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hf_triton-metrics", daemon=True)

    def start(self, load: Callable[[], EngineLoad]) -> None:
        """Begin to send."""
        self._load = load
        self._thread.start()

    def close(self) -> None:
        """Send the last figures."""
        self._load = lambda: EngineLoad()
        self._closing.set()
        self._thread.join()

    # --- noting counts ----------------------------------------------------------------------------------------------

    def note(self, metric: Metric, amount: float, value: str = "") -> None:
        """Add to a counter, a gauge or a histogram with the next flush."""
        self._notes.append((metric, value, amount))

    def begin_request(self) -> Callable[[str], None]:
        """Count a request."""
        self.note(IN_FLIGHT, 1)
        return partial(self._end_request, time.monotonic())

    def _end_request(self, arrival_s: float, outcome: str) -> None:
        self.note(IN_FLIGHT, -1)
        self.note(REQUESTS, 1, outcome if outcome == OK or outcome in CODES else "hook_failed")
        if outcome == OK:
            self.note(LATENCY, time.monotonic() - arrival_s)

    def on_admit(self, sequence: SequenceGroup) -> SequenceObserver:
        """The engine admits a sequence group."""
        now_s = time.monotonic()
        sequence.times.note_admitted(now_s)
        self.note(QUEUE_TIME, now_s - sequence.times.arrival_s)
        return _SequenceMeter(self, sequence)

    def on_prefix_hit(self, num_tokens: int) -> None:
        """Count tokens served from the prefix cache."""
        self.note(SHARED_TOKENS, num_tokens)

    def on_step(self, num_rows: int) -> None:
        """Count a decoding step."""
        self.note(STEPS, 1)
        self.note(STEP_ROWS, num_rows)

    def on_preempt(self, num_rows: int) -> None:
        """Count preempted sequences."""
        self.note(PREEMPTIONS, num_rows)

    # --- sending figures ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        for metric in METRICS:
            for value in metric.values:
                self._attempt(partial(self._sink.declare, metric, value))
        while not self._closing.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        self._attempt(self._take_load)
        self._totals[GENERATED_TOKENS, ""] = self.num_generated
        for metric, value, amount in self._noted():
            if metric.kind == "histogram":
                self._attempt(partial(self._sink.observe, metric, amount))
            else:
                self._totals[metric, value] = self._totals.get((metric, value), 0) + amount
        for series, total in self._totals.items():
            if total != self._sent.get(series, 0):
                self._attempt(partial(self._send, series, total))

    def _noted(self) -> Iterator[tuple[Metric, str, float]]:
        for _ in range(len(self._notes)):  # without later ones
            yield self._notes.popleft()

    def _take_load(self) -> None:
        load = self._load()
        self._totals[WAITING, ""] = load.num_waiting
        self._totals[RUNNING, ""] = load.num_running
        self._totals[USED_TOKENS, ""] = load.num_used_tokens
        self._totals[MAX_TOKENS, ""] = load.max_used_tokens

    def _send(self, series: tuple[Metric, str], total: float) -> None:
        metric, value = series
        self._sink.add(metric, value, total - self._sent.get(series, 0))
        self._sent[series] = total

    def _attempt(self, work: Callable[[], None]) -> None:
        """Log a failure and go on; a counter or gauge that was not sent is sent with the next flush."""
        try:
            work()
        except Exception as error:
            if not self._has_failed:
                logger.error("metrics are incomplete from now on: %s", where(error))
            self._has_failed = True


class _SequenceClock(SequenceObserver):
    """Notes the time of a request's first token."""

    def __init__(self, sequence: SequenceGroup) -> None:
        self._times = sequence.times

    def on_token_sampled(self, copy: int, *, is_text: bool) -> None:
        """A sequence has its next token."""
        if self._times.first_token_s is None:
            self._times.note_token(time.monotonic())


class _SequenceMeter(SequenceObserver):
    """Times the tokens of one sequence group."""

    def __init__(self, meter: Meter, sequence: SequenceGroup) -> None:
        self._meter = meter
        self._sequence = sequence
        self._has_begun = False
        self._firsts_s = [0.0] * sequence.params.num_sequences
        self._lasts_s = [0.0] * sequence.params.num_sequences
        self._num_picks = [0] * sequence.params.num_sequences

    def on_token_sampled(self, copy: int, *, is_text: bool) -> None:
        """A sequence has its next token."""
        now_s = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._sequence.times.note_token(now_s)
            self._meter.note(TIME_TO_FIRST_TOKEN, now_s - self._sequence.times.arrival_s)
            self._meter.note(PROMPT_TOKENS, len(self._sequence.prompt_ids))
        if not self._num_picks[copy]:
            self._firsts_s[copy] = now_s
        self._lasts_s[copy] = now_s
        self._num_picks[copy] += 1
        if is_text:
            self._meter.num_generated += 1

    def on_complete(self, completions: list[Completion]) -> None:
        """The sequence group is finished."""
        for completion in completions:
            self._meter.note(COMPLETIONS, 1, completion.finish_reason)
        for first_s, last_s, num_picks in zip(self._firsts_s, self._lasts_s, self._num_picks, strict=True):
            if num_picks > 1:
                self._meter.note(TIME_PER_TOKEN, (last_s - first_s) / (num_picks - 1))


def build_meter(make_sink: Callable[[], Sink]) -> NoMeter:
    """A meter for a sink; if the sink fails, one that counts nothing, because serving continues without metrics."""
    try:
        return Meter(make_sink())
    except Exception as error:
        logger.warning("no metrics: the server does not take them (%s)", where(error))
        return NoMeter()
