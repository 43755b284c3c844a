# SPDX-License-Identifier: Apache-2.0
"""The meter: what is noted arrives, whoever notes it and whatever the sink does."""

import logging
import re
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.sequence import Completion, RequestTimes, SequenceGroup
from hf_triton.runner.image_inputs import ImageInput, PromptImages
from hf_triton.runner.lora.model_adapters import Adapter
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.serving.meter import Meter, MetricsMeter, build_meter
from hf_triton.tasks.serving.metrics import (
    COMPLETIONS,
    GENERATED_TOKENS,
    IMAGE_TOKENS,
    IMAGES,
    IN_FLIGHT,
    KV_CACHE_USAGE,
    LATENCY,
    METRICS,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUESTS,
    RUNNING,
    TIME_PER_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOWER_TIME,
    USED_TOKENS,
    Metric,
)
from tests.support.waiting import wait_until


class Board:
    """A sink that keeps what it is told, and can be out of order."""

    def __init__(self) -> None:
        self.values: dict[tuple[Metric, str], float] = defaultdict(float)
        self.seen: dict[Metric, list[float]] = defaultdict(list)
        self.declared: set[tuple[Metric, str]] = set()
        self.is_broken = False
        self.was_called = threading.Event()

    def declare(self, metric: Metric, value: str) -> None:
        self.declared.add((metric, value))

    def add(self, metric: Metric, value: str, amount: float, adapter: str = "") -> None:
        self.was_called.set()
        if self.is_broken:
            raise RuntimeError("no room")
        self.values[metric, f"{value}@{adapter}" if adapter else value] += amount

    def observe(self, metric: Metric, amount: float) -> None:
        if self.is_broken:
            raise RuntimeError("no room")
        self.seen[metric].append(amount)


def idle() -> EngineLoad:
    return EngineLoad()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_declarations_keep_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"hf_triton_[a-z0-9_]+", metric.name)  # an invalid name can end the whole server
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_count", "_sum", "_bucket"))
    assert metric.help.endswith(".")
    assert metric.label not in ("instance", "model", "version", "le")
    assert bool(metric.label) == (metric.values != ("",))
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("has_images", [False, True])
def test_everything_is_declared_before_it_happens(*, has_images: bool) -> None:
    board = Board()
    meter = MetricsMeter(board)
    if has_images:
        meter.expect_images()
    meter.start(idle)
    meter.close()
    assert {metric for metric, _ in board.declared} == {each for each in METRICS if has_images or not each.of_images}
    assert {value for metric, value in board.declared if metric is COMPLETIONS} == {
        "eos",
        "stop_string",
        "length",
        "deadline",
    }


def test_images_are_counted() -> None:
    board = Board()
    meter = MetricsMeter(board)
    meter.expect_images()
    meter.start(idle)
    images = tuple(ImageInput(np.arange(start, start + 4), {}, b"") for start in (2, 8))
    meter.on_admit(SequenceGroup([1] * 14, SamplingParams(1), images=PromptImages(images, {})))
    meter.on_tower(0.25)
    meter.close()
    assert (board.values[IMAGES, ""], board.values[IMAGE_TOKENS, ""], board.seen[TOWER_TIME]) == (2, 8, [0.25])


def test_counts_from_many_threads_add_up() -> None:
    board = Board()
    meter = MetricsMeter(board)
    meter.start(idle)

    def work(_: int) -> None:
        for number in range(500):
            meter.begin_request()("ok" if number % 5 else "queue_full", "")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    meter.close()
    assert board.values[REQUESTS, "ok"] == 8 * 400
    assert board.values[REQUESTS, "queue_full"] == 8 * 100
    assert board.values[IN_FLIGHT, ""] == 0
    assert len(board.seen[LATENCY]) == 8 * 400


def test_instances_that_share_a_sink_add_up_and_leave_nothing() -> None:
    board = Board()
    meters = [MetricsMeter(board, num_instances=2), MetricsMeter(board, num_instances=2)]
    for meter in meters:
        meter.start(lambda: EngineLoad(num_waiting=1, num_running=3, num_used_tokens=100, max_used_tokens=1000))
        meter.begin_request()
    wait_until(lambda: (board.values[RUNNING, ""], board.values[USED_TOKENS, ""]) == (6, 200))
    wait_until(lambda: board.values[KV_CACHE_USAGE, ""] == pytest.approx(0.1, abs=1e-4))
    assert board.values[IN_FLIGHT, ""] == 2
    meters[0].close()
    assert (board.values[RUNNING, ""], board.values[USED_TOKENS, ""]) == (3, 100)
    meters[1].close()
    assert (board.values[RUNNING, ""], board.values[USED_TOKENS, ""]) == (0, 0)
    assert board.values[KV_CACHE_USAGE, ""] == 0


def test_a_ratio_returns_to_zero_exactly() -> None:
    board = Board()
    loads = iter([EngineLoad(num_used_tokens=used, max_used_tokens=997) for used in range(1, 997, 31)])
    meter = MetricsMeter(board, num_instances=3, flush_s=0.001)
    meter.start(lambda: next(loads, EngineLoad()))
    wait_until(lambda: next(loads, None) is None)
    meter.close()
    assert board.values[KV_CACHE_USAGE, ""] == 0


def test_a_sequence_is_timed_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    board, clock = Board(), [100.0]
    monkeypatch.setattr("hf_triton.tasks.serving.meter.time.monotonic", lambda: clock[0])
    meter = MetricsMeter(board)
    plan = SamplingParams(8, num_return_sequences=2)
    sequence = SequenceGroup([1, 2, 3], plan, times=RequestTimes(99.0))
    clock[0] = 100.5
    observer = meter.on_admit(sequence)
    for now_s, copy, is_text in [(101.0, 0, True), (101.0, 1, True), (102.0, 0, True), (105.0, 0, False)]:
        clock[0] = now_s
        observer.on_token_sampled(copy, is_text=is_text)
    observer.on_complete([Completion([7, 8], "eos"), Completion([9], "length")])
    meter.start(idle)
    meter.close()
    assert board.seen[QUEUE_TIME] == [1.5]
    assert board.seen[TIME_TO_FIRST_TOKEN] == [2.0]
    assert sequence.times == RequestTimes(99.0, admitted_s=100.5, first_token_s=101.0)
    assert board.seen[TIME_PER_TOKEN] == [2.0]  # of the one text with more than a token
    assert board.values[PROMPT_TOKENS, ""] == 3
    assert board.values[GENERATED_TOKENS, ""] == 3
    assert (board.values[COMPLETIONS, "eos"], board.values[COMPLETIONS, "length"]) == (1, 1)


def test_requests_and_tokens_are_counted_by_adapter() -> None:
    board = Board()
    meter = MetricsMeter(board)
    for adapter in (None, Adapter(1, "law"), Adapter(2, "law"), Adapter(3, "sql")):
        group = SequenceGroup([1, 2, 3], SamplingParams(8), adapter=adapter)
        observer = meter.on_admit(group)
        for is_text in (True, True, False):
            observer.on_token_sampled(0, is_text=is_text)
        meter.begin_request()("ok", "" if adapter is None else adapter.name)
    meter.on_encoded(5, "law")
    meter.start(idle)
    meter.close()
    for metric, each in ((REQUESTS, 1), (PROMPT_TOKENS, 3), (GENERATED_TOKENS, 2)):
        value = "ok" if metric is REQUESTS else ""
        more = 5 if metric is PROMPT_TOKENS else 0
        found = [board.values[metric, f"{value}{adapter}"] for adapter in ("", "@law", "@sql")]
        assert found == [each, 2 * each + more, each]
        assert metric.by_adapter


@pytest.mark.parametrize("counts", [True, False])
def test_a_request_s_times_are_those_of_its_first_sequence(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("hf_triton.tasks.serving.meter.time.monotonic", lambda: clock[0])
    meter, times = MetricsMeter(Board()) if counts else Meter(), RequestTimes(99.0)
    sequences = [SequenceGroup([1], SamplingParams(8), times=times) for _ in range(2)]
    observers = []
    for sequence in sequences:
        observers.append(meter.on_admit(sequence))
        clock[0] += 1
    for observer in reversed(observers):
        observer.on_token_sampled(0, is_text=True)
        clock[0] += 1
        observer.on_token_sampled(0, is_text=False)
    assert times == RequestTimes(99.0, admitted_s=100.0, first_token_s=102.0)


def test_counters_catch_up_after_a_sink_s_failure(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    board.is_broken = True
    meter = MetricsMeter(board)
    meter.start(idle)
    with caplog.at_level(logging.ERROR, "hf_triton"):
        for _ in range(10):
            meter.begin_request()("ok", "")
        assert board.was_called.wait(10)
        board.was_called.clear()
        assert board.was_called.wait(10)  # it is tried again
        board.is_broken = False
        meter.close()
    assert board.values[REQUESTS, "ok"] == 10
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "no room" not in caplog.text


def test_a_failing_load_reading_raises_nothing() -> None:
    was_asked = threading.Event()

    def load() -> EngineLoad:
        was_asked.set()
        raise RuntimeError("no idea")

    board = Board()
    meter = MetricsMeter(board)
    meter.start(load)
    meter.begin_request()("ok", "")
    assert was_asked.wait(10)
    meter.close()
    assert board.values[REQUESTS, "ok"] == 1


def test_without_a_sink_serving_continues_uncounted(caplog: pytest.LogCaptureFixture) -> None:
    def no_sink() -> Board:
        raise RuntimeError("metrics are off")

    with caplog.at_level(logging.WARNING, "hf_triton"):
        meter = build_meter(no_sink)
    assert type(meter) is Meter
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    meter.start(idle)
    meter.begin_request()("ok", "")
    meter.close()
