# SPDX-License-Identifier: Apache-2.0
"""Triton's own metrics as the sink of a meter."""

from __future__ import annotations

from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from hf_triton.tasks.serving.metrics import METRICS, Metric


class MetricsSink:
    """The server's metrics. What several instances of a model add under the same labels adds up."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families = {
            metric: pb_utils.MetricFamily(
                name=metric.name, description=metric.help, kind=getattr(pb_utils.MetricFamily, metric.kind.upper())
            )
            for metric in METRICS
        }
        self._declared: dict[tuple[Metric, str, str], pb_utils.Metric] = {}

    def declare(self, metric: Metric, value: str, adapter: str = "") -> None:
        """Export a metric from now on, even if it is still 0. Its own label, if it has one, is `value`."""
        if (metric, value, adapter) not in self._declared:
            labels = self._labels | ({metric.label: value} if metric.label else {})
            labels |= {"adapter": adapter} if adapter else {}
            buckets = {"buckets": list(metric.buckets)} if metric.buckets else {}
            self._declared[metric, value, adapter] = self._families[metric].Metric(labels=labels, **buckets)

    def add(self, metric: Metric, value: str, amount: float, adapter: str = "") -> None:
        self.declare(metric, value, adapter)
        self._declared[metric, value, adapter].increment(amount)

    def observe(self, metric: Metric, amount: float) -> None:
        """Put one value into a histogram."""
        self.declare(metric, "")
        self._declared[metric, "", ""].observe(amount)
