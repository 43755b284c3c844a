# SPDX-License-Identifier: Apache-2.0
"""The gateway's metrics, each declared once; the model's own are at Triton's metrics port."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PREFIX: Final = "hf_triton_openai"


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}_requests", "Requests by endpoint and status.", ("endpoint", "status"), registry=self.registry
        )
        self.in_flight = Gauge(f"{PREFIX}_requests_in_flight", "Requests in flight.", registry=self.registry)
        self.duration = Histogram(
            f"{PREFIX}_request_duration_seconds",
            "Time from a request's arrival to its last byte, in seconds.",
            ("endpoint",),
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "Time from a stream's request to its first event, in seconds.",
            ("endpoint",),
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.loads = Counter(
            f"{PREFIX}_model_loads",
            "Loads on demand by model and outcome.",
            ("model", "outcome"),
            registry=self.registry,
        )
        self.load_seconds = Histogram(
            f"{PREFIX}_model_load_seconds",
            "Time that loading a model took, in seconds.",
            ("model",),
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.unloads = Counter(
            f"{PREFIX}_model_unloads", "Idle models that were unloaded.", ("model",), registry=self.registry
        )
        self.waiting_for_load = Gauge(
            f"{PREFIX}_requests_waiting_for_load",
            "Requests that wait for a model to be loaded.",
            registry=self.registry,
        )
