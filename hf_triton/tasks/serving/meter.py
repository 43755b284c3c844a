# SPDX-License-Identifier: Apache-2.0
"""Meters: the times of requests, and the metrics. Knows no Triton: figures go to a `Sink`.

An update costs the server's Python stub a round trip between processes (20 to 500 us), so counts are only noted, and a
thread sends the changes twice a second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

from hf_triton.engine.protocols import EngineLoad, Observer
from hf_triton.engine.sequence import Completion, RequestTimes, SequenceGroup, SequenceObserver
from hf_triton.errors import CODES, where
from hf_triton.tasks.serving import metrics
from hf_triton.tasks.serving.metrics import METRICS, OK, UNCOUNTED, Metric

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.5

RATIO_UNITS: Final = 2**16
"""A ratio is sent in multiples of 1 / RATIO_UNITS: their sums are exact in floating point, so that it returns to 0."""


class Sink(Protocol):
    """Receives the figures. Called from one thread at a time; may raise."""

    def declare(self, metric: Metric, value: str) -> None:
        """Export a metric from now on, even if it is still 0. Its own label, if it has one, is `value`."""

    def add(self, metric: Metric, value: str, amount: float, adapter: str = "") -> None:
        """Add to a counter or a gauge; `adapter` is the LoRA adapter that it is of."""

    def observe(self, metric: Metric, amount: float) -> None:
        """Add a value to a histogram."""


class Meter(Observer):
    """Notes the times of requests. This one counts nothing."""

    def begin_request(self) -> Callable[[str, str], None]:
        """Count a request. Returns a function to call once with its outcome and the name of its adapter.

        The outcome is `ok`, the error's code, or `UNCOUNTED`.
        """
        return lambda outcome, adapter: None

    def on_admit(self, group: SequenceGroup) -> SequenceObserver:
        group.times.note_admitted(time.monotonic())
        return _SequenceTimer(group)

    def on_encoded(self, num_tokens: int, adapter: str = "") -> None:
        """An encoder reads `num_tokens` tokens for a request, with an adapter."""

    def on_begin(self, times: RequestTimes) -> None:
        """An encoder begins with a request."""

    def start(self, load: Callable[[], EngineLoad]) -> None:
        """Begin to send; `load` returns the engine's load and is called from another thread."""

    def close(self) -> None:
        """Send the last figures, after the engine has stopped."""


class MetricsMeter(Meter):
    """Notes counts from any thread, and sends the figures to a sink from a thread of its own.

    Gauges are sent as differences, so that several instances of a model add up under the same labels.

    Args:
        sink: Receives the figures.
        num_instances: Instances of the model under the sink's labels; a ratio is their mean.
        flush_s: Seconds between two flushes.
    """

    def __init__(self, sink: Sink, num_instances: int = 1, flush_s: float = FLUSH_S) -> None:
        self._flush_s = flush_s
        self._num_instances = num_instances
        self._sink = sink
        self._load: Callable[[], EngineLoad] = lambda: EngineLoad()
        # Appending is safe from any thread and takes no lock: the destructor of a dropped request counts it, wherever
        # the garbage collector runs.
        self._notes: deque[tuple[Metric, str, str, float]] = deque()
        self.nums_generated: dict[str, int] = {"": 0}
        """Generated tokens by adapter. Too many to be noted one by one; only the engine's thread adds to it."""
        self._totals: dict[tuple[Metric, str, str], float] = {}
        self._sent: dict[tuple[Metric, str, str], float] = {}
        self._has_failed = False
        self._has_images = False
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

    # --- noting counts ------------------------------------------------------------------------------------------------

    def note(self, metric: Metric, amount: float, value: str = "", adapter: str = "") -> None:
        """Add to a counter, a gauge or a histogram with the next flush."""
        self._notes.append((metric, value, adapter, amount))

    def begin_request(self) -> Callable[[str, str], None]:
        """Count a request."""
        self.note(metrics.IN_FLIGHT, 1)
        return partial(self._end_request, time.monotonic())

    def _end_request(self, arrival_s: float, outcome: str, adapter: str) -> None:
        self.note(metrics.IN_FLIGHT, -1)
        if outcome == UNCOUNTED:
            return
        self.note(metrics.REQUESTS, 1, outcome if outcome == OK or outcome in CODES else "hook_failed", adapter)
        if outcome == OK:
            self.note(metrics.LATENCY, time.monotonic() - arrival_s)

    def on_admit(self, group: SequenceGroup) -> SequenceObserver:
        now_s = time.monotonic()
        group.times.note_admitted(now_s)
        self.note(metrics.QUEUE_TIME, now_s - group.times.arrival_s)
        if group.images is not None:
            self.note(metrics.IMAGES, len(group.images.images))
            self.note(metrics.IMAGE_TOKENS, sum(len(image.places) for image in group.images.images))
        return _SequenceMeter(self, group)

    def on_encoded(self, num_tokens: int, adapter: str = "") -> None:
        """Count a request's tokens as prompt tokens."""
        self.note(metrics.PROMPT_TOKENS, num_tokens, adapter=adapter)

    def on_begin(self, times: RequestTimes) -> None:
        """Note how long a request has waited."""
        self.note(metrics.QUEUE_TIME, time.monotonic() - times.arrival_s)

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.note(metrics.SHARED_TOKENS, num_tokens)

    def on_step(self, num_sequences: int) -> None:
        self.note(metrics.STEPS, 1)
        self.note(metrics.STEP_ROWS, num_sequences)

    def on_proposal(self, num_proposed: int, num_accepted: int) -> None:
        self.note(metrics.PROPOSED_TOKENS, num_proposed)
        self.note(metrics.ACCEPTED_TOKENS, num_accepted)

    def on_preempt(self, num_sequences: int) -> None:
        self.note(metrics.PREEMPTIONS, num_sequences)

    def expect_images(self) -> None:
        """Export what is counted of images from the start."""
        self._has_images = True

    def on_tower(self, seconds: float) -> None:
        self.note(metrics.TOWER_TIME, seconds)

    # --- sending figures ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        for metric in METRICS:
            for value in metric.values if self._has_images or not metric.of_images else ():
                with self._failures_logged():
                    self._sink.declare(metric, value)
        while not self._closing.wait(self._flush_s):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._failures_logged():
            load = self._load()
            self._totals[metrics.WAITING, "", ""] = load.num_waiting
            self._totals[metrics.RUNNING, "", ""] = load.num_running
            self._totals[metrics.SLEEPING, "", ""] = load.is_sleeping
            self._totals[metrics.USED_TOKENS, "", ""] = load.num_used_tokens
            self._totals[metrics.MAX_TOKENS, "", ""] = load.max_used_tokens
            usage = min(load.num_used_tokens / load.max_used_tokens, 1.0) if load.max_used_tokens else 0.0
            self._totals[metrics.KV_CACHE_USAGE, "", ""] = (
                round(usage / self._num_instances * RATIO_UNITS) / RATIO_UNITS
            )
        for adapter, num_tokens in list(self.nums_generated.items()):
            self._totals[metrics.GENERATED_TOKENS, "", adapter] = num_tokens
        for _ in range(len(self._notes)):  # without later ones
            metric, value, adapter, amount = self._notes.popleft()
            if metric.kind == "histogram":
                with self._failures_logged():
                    self._sink.observe(metric, amount)
            else:
                self._totals[metric, value, adapter] = self._totals.get((metric, value, adapter), 0) + amount
        for labelled, total in self._totals.items():
            difference = total - self._sent.get(labelled, 0)
            if difference:
                with self._failures_logged():
                    metric, value, adapter = labelled
                    self._sink.add(metric, value, difference, adapter)
                    self._sent[labelled] = total

    @contextlib.contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Log the first failure; a counter or gauge that was not sent is sent with the next flush."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                logger.error("metrics are incomplete from now on: %s", where(error))
            self._has_failed = True


class _SequenceTimer(SequenceObserver):
    """Notes the time of a request's first token. Refers to no group, which refers to it: that would be a cycle."""

    def __init__(self, group: SequenceGroup) -> None:
        self._times = group.times
        self._num_prompt_tokens = len(group.prompt_ids)

    def on_token_sampled(self, index: int, *, is_text: bool) -> None:
        self._note_token(time.monotonic())

    def _note_token(self, now_s: float) -> None:
        if self._times.first_token_s is None:
            self._times.first_token_s = now_s

    def on_complete(self, completions: list[Completion]) -> None:
        self._times.note_completions(self._num_prompt_tokens, completions)


class _SequenceMeter(_SequenceTimer):
    def __init__(self, meter: MetricsMeter, group: SequenceGroup) -> None:
        super().__init__(group)
        self._meter = meter
        self._adapter = "" if group.adapter is None else group.adapter.name
        self._has_begun = False
        self._spans_s: dict[int, tuple[float, float, int]] = {}  # first and last token, and the number of tokens

    def on_token_sampled(self, index: int, *, is_text: bool) -> None:
        now_s = time.monotonic()
        self._note_token(now_s)
        if not self._has_begun:
            self._has_begun = True
            self._meter.note(metrics.TIME_TO_FIRST_TOKEN, now_s - self._times.arrival_s)
            self._meter.note(metrics.PROMPT_TOKENS, self._num_prompt_tokens, adapter=self._adapter)
        first_s, _, num_tokens = self._spans_s.get(index, (now_s, now_s, 0))
        self._spans_s[index] = first_s, now_s, num_tokens + 1
        nums = self._meter.nums_generated
        nums[self._adapter] = nums.get(self._adapter, 0) + is_text

    def on_complete(self, completions: list[Completion]) -> None:
        super().on_complete(completions)
        for completion in completions:
            self._meter.note(metrics.COMPLETIONS, 1, completion.finish_reason)
        for first_s, last_s, num_tokens in self._spans_s.values():
            if num_tokens > 1:
                self._meter.note(metrics.TIME_PER_TOKEN, (last_s - first_s) / (num_tokens - 1))


def build_meter(make_sink: Callable[[], Sink], num_instances: int = 1) -> Meter:
    """A meter for a sink; if the sink fails, one that counts nothing, because serving continues without metrics."""
    try:
        return MetricsMeter(make_sink(), num_instances)
    except Exception as error:
        logger.warning("no metrics: the server does not take them (%s)", where(error))
        return Meter()
