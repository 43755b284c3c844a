# SPDX-License-Identifier: Apache-2.0
"""The gateway's metrics, each declared once; the model's own are at Triton's metrics port."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from hf_triton_gateway.keys.accounts import LIMITS

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PREFIX: Final = "hf_triton_openai"
SHARED: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The folder in which the workers of a gateway that has several share their metrics; prometheus_client reads it."""


@dataclass(frozen=True)
class KeyCounts:
    """The counters of one API key."""

    requests: Counter
    prompt_tokens: Counter
    cached_tokens: Counter
    completion_tokens: Counter
    refused: Mapping[str, Counter]
    """The counter of each limit."""


class Metrics:
    """The metrics of one process; `exported` has those of all workers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", about, registry=self.registry, multiprocess_mode="livesum")

        def histogram(name: str, about: str, *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", about, labels, buckets=BUCKETS_S, registry=self.registry)

        first_token = "Time from a stream's request to its first event, in seconds."
        duration = "Time from a request's arrival to its last byte, in seconds."
        cached = "Of these, tokens that the prefix cache had, by the API key's name."
        completions = "Tokens of completions by the API key's name."
        refused = "Requests that a limit refused, by the API key's name and the limit."
        self.requests = counter("requests", "Requests by endpoint and status.", "endpoint", "status")
        self.in_flight = gauge("requests_in_flight", "Requests in flight.")
        self.duration = histogram("request_duration_seconds", duration, "endpoint")
        self.first_token = histogram("time_to_first_token_seconds", first_token, "endpoint")
        self.loads = counter("model_loads", "Loads on demand by model and outcome, wakes included.", "model", "outcome")
        what = "Time that loading or waking a model took, in seconds."
        self.load_seconds = histogram("model_load_seconds", what, "model")
        self.unloads = counter("model_unloads", "Idle models that were unloaded or put to sleep.", "model")
        what = "Requests that wait for a model to be loaded or woken."
        self.waiting_for_load = gauge("requests_waiting_for_load", what)
        self.key_requests = counter("key_requests", "Requests by the API key's name, without refused ones.", "key")
        self.key_prompt_tokens = counter("key_prompt_tokens", "Tokens of prompts by the API key's name.", "key")
        self.key_cached_tokens = counter("key_cached_tokens", cached, "key")
        self.key_completion_tokens = counter("key_completion_tokens", completions, "key")
        self.key_refused = counter("key_refused", refused, "key", "limit")

    def exported(self) -> bytes:
        """The metrics in Prometheus' form, of all workers together."""
        if SHARED not in os.environ:
            return generate_latest(self.registry)
        for file in Path(os.environ[SHARED]).glob("gauge_live*.db"):
            pid = int(file.stem.rpartition("_")[2])
            if not Path(f"/proc/{pid}").exists():
                mark_process_dead(pid)  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def of_key(self, name: str) -> KeyCounts:
        """The counters of an API key, which are exported from now on."""
        return KeyCounts(
            self.key_requests.labels(name),
            self.key_prompt_tokens.labels(name),
            self.key_cached_tokens.labels(name),
            self.key_completion_tokens.labels(name),
            {limit: self.key_refused.labels(name, limit) for limit in LIMITS},
        )

    def forget_key(self, name: str) -> None:
        """Export nothing of an API key any more, which was given to `of_key`; what workers share stays."""
        if SHARED in os.environ:
            return
        tokens = (self.key_prompt_tokens, self.key_cached_tokens, self.key_completion_tokens)
        for counter in (self.key_requests, *tokens):
            counter.remove(name)
        for limit in LIMITS:
            self.key_refused.remove(name, limit)
