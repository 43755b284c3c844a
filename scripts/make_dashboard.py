# SPDX-License-Identifier: Apache-2.0
"""Write deploy/grafana/hf_triton.json, Grafana's dashboard, from the declarations of the metrics: `make docs`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from hf_triton.tasks.serving import metrics as declared
from hf_triton.tasks.serving.metrics import Metric
from hf_triton_gateway.http.gateway_metrics import Metrics

PATH: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "hf_triton.json"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
RATE: Final = "[$__rate_interval]"
OF_MODEL: Final = '{model=~"$model"}'
QUANTILES: Final = (0.5, 0.95, 0.99)
WIDTH, HEIGHT, NUM_COLUMNS = 8, 7, 3
GATEWAY: Final = Metrics()
TOKENS_OF_KEYS: Final = {
    "prompts": GATEWAY.key_prompt_tokens,
    "cached": GATEWAY.key_cached_tokens,
    "generated": GATEWAY.key_completion_tokens,
}


@dataclass(frozen=True)
class Panel:
    """A graph.

    Attributes:
        title: Its heading.
        help: What it shows.
        queries: PromQL by legend, in Grafana's form: `{{model}}`.
        unit: Grafana's name of the unit.
        needs: Where the numbers come from alone; empty: from every server.
    """

    title: str
    help: str
    queries: dict[str, str]
    unit: str = "short"
    needs: str = ""


def _rate(metric: Metric, *labels: str) -> str:
    return f"sum by ({', '.join(['model', *labels])}) (rate({metric.name}{OF_MODEL}{RATE}))"


def _now(metric: Metric) -> str:
    return f"sum by (model) ({metric.name}{OF_MODEL})"


def _quantiles(name: str, label: str, selector: str) -> dict[str, str]:
    rate = f"sum by ({label}, le) (rate({name}_bucket{selector}{RATE}))"
    return {f"{{{{{label}}}}} p{100 * part:g}": f"histogram_quantile({part}, {rate})" for part in QUANTILES}


def _times(title: str, metric: Metric) -> Panel:
    return Panel(title, metric.help, _quantiles(metric.name, "model", OF_MODEL), "s")


def _gateway(title: str, metric: MetricWrapperBase, *labels: str, unit: str = "short", needs: str = "gateway") -> Panel:
    """A panel of a metric of the gateway's."""
    name, text = metric._name, metric._documentation
    if isinstance(metric, Histogram):
        return Panel(title, text, _quantiles(name, labels[0], ""), unit, needs)
    if isinstance(metric, Counter):
        legend = " ".join(f"{{{{{label}}}}}" for label in labels)
        return Panel(title, text, {legend: f"sum by ({', '.join(labels)}) (rate({name}_total{RATE}))"}, unit, needs)
    return Panel(title, text, {"gateway": f"sum ({name})"}, unit, needs)


def panels() -> Iterator[tuple[str, list[Panel]]]:
    """The rows of the dashboard: heading, panels."""
    failed = f'{declared.REQUESTS.name}{{model=~"$model", outcome!="{declared.OK}"}}'
    yield (
        "Requests",
        [
            Panel(
                "Requests",
                declared.REQUESTS.help,
                {"{{model}} {{outcome}}": _rate(declared.REQUESTS, "outcome")},
                "reqps",
            ),
            Panel(
                "Errors",
                "Share of the requests that were not answered `ok`, by code.",
                {
                    "{{model}} {{outcome}}": f"sum by (model, outcome) (rate({failed}{RATE})) / on (model) group_left "
                    f"{_rate(declared.REQUESTS)}"
                },
                "percentunit",
            ),
            Panel("In flight", declared.IN_FLIGHT.help, {"{{model}}": _now(declared.IN_FLIGHT)}),
            Panel("Waiting", declared.WAITING.help, {"{{model}}": _now(declared.WAITING)}),
            Panel(
                "Requests by adapter",
                "Requests per second of each LoRA adapter; without a name, the model's own.",
                {"{{model}} {{adapter}}": _rate(declared.REQUESTS, "adapter")},
                "reqps",
            ),
            _times("Time in the queue", declared.QUEUE_TIME),
            _times("Time of a request", declared.LATENCY),
        ],
    )
    batch = f"{_rate(declared.STEP_ROWS)} / {_rate(declared.STEPS)}"
    yield (
        "Text",
        [
            _times("Time to the first token", declared.TIME_TO_FIRST_TOKEN),
            _times("Time per token", declared.TIME_PER_TOKEN),
            Panel(
                "Tokens",
                "Tokens per second: of prompts, of these served from the prefix cache, and generated.",
                {
                    "{{model}} prompts": _rate(declared.PROMPT_TOKENS),
                    "{{model}} cached": _rate(declared.SHARED_TOKENS),
                    "{{model}} generated": _rate(declared.GENERATED_TOKENS),
                },
            ),
            Panel("Running", declared.RUNNING.help, {"{{model}}": _now(declared.RUNNING)}),
            Panel("Batch", "Mean number of sequences that a step gives a token.", {"{{model}}": batch}),
            Panel(
                "KV cache",
                declared.KV_CACHE_USAGE.help,
                {"{{model}}": f"avg by (model) ({declared.KV_CACHE_USAGE.name}{OF_MODEL})"},
                "percentunit",
            ),
            Panel(
                "Images",
                "Images of prompts per second, and the tokens that stand for them.",
                {"{{model}} images": _rate(declared.IMAGES), "{{model}} tokens": _rate(declared.IMAGE_TOKENS)},
            ),
            _times("Vision tower", declared.TOWER_TIME),
            Panel(
                "Tokens by adapter",
                "Tokens per second of each LoRA adapter, of prompts and generated; without a name, the model's own.",
                {
                    "{{model}} {{adapter}} prompts": _rate(declared.PROMPT_TOKENS, "adapter"),
                    "{{model}} {{adapter}} generated": _rate(declared.GENERATED_TOKENS, "adapter"),
                },
            ),
            Panel("Preemptions", declared.PREEMPTIONS.help, {"{{model}}": _rate(declared.PREEMPTIONS)}),
            Panel(
                "Prompt lookup",
                declared.ACCEPTED_TOKENS.help,
                {
                    "{{model}} proposed": _rate(declared.PROPOSED_TOKENS),
                    "{{model}} accepted": _rate(declared.ACCEPTED_TOKENS),
                },
            ),
            Panel(
                "Completions",
                declared.COMPLETIONS.help,
                {"{{model}} {{finish_reason}}": _rate(declared.COMPLETIONS, "finish_reason")},
            ),
            Panel("Sleeping", declared.SLEEPING.help, {"{{model}}": _now(declared.SLEEPING)}),
        ],
    )
    yield (
        "Gateway",
        [
            _gateway("Requests of the gateway", GATEWAY.requests, "endpoint", "status", unit="reqps"),
            _gateway("Time of the gateway's requests", GATEWAY.duration, "endpoint", unit="s"),
            _gateway("Time to the first event", GATEWAY.first_token, "endpoint", unit="s", needs="streams"),
            _gateway("Requests by key", GATEWAY.key_requests, "key", unit="reqps", needs="keys"),
            Panel(
                "Tokens by key",
                "Tokens per second of each API key: of prompts, of these from the prefix cache, and generated.",
                {
                    f"{{{{key}}}} {what}": f"sum by (key) (rate({counter._name}_total{RATE}))"
                    for what, counter in TOKENS_OF_KEYS.items()
                },
                needs="keys",
            ),
            _gateway("Refused by limits", GATEWAY.key_refused, "key", "limit", unit="reqps", needs="keys"),
            _gateway("Loads on demand", GATEWAY.loads, "model", "outcome", needs="on demand"),
            _gateway("Waiting for a load", GATEWAY.waiting_for_load),
        ],
    )
    yield (
        "Machine",
        [
            Panel(
                "Processor", "Use of the processor, by Triton.", {"{{instance}}": "nv_cpu_utilization"}, "percentunit"
            ),
            Panel("Memory", "Memory in use, by Triton.", {"{{instance}}": "nv_cpu_memory_used_bytes"}, "bytes"),
            Panel("GPU", "Use of the GPU, by Triton.", {"{{gpu_uuid}}": "nv_gpu_utilization"}, "percentunit", "GPU"),
            Panel("GPU memory", "GPU memory in use.", {"{{gpu_uuid}}": "nv_gpu_memory_used_bytes"}, "bytes", "GPU"),
        ],
    )


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's JSON."""
    made: list[dict[str, Any]] = []
    top = 0
    for heading, row in panels():
        made.append({"type": "row", "title": heading, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}, "panels": []})
        for index, panel in enumerate(row):
            line, column = divmod(index, NUM_COLUMNS)
            made.append(_graph(panel, WIDTH * column, top + 1 + HEIGHT * line))
        top += 1 + HEIGHT * (1 + (len(row) - 1) // NUM_COLUMNS)
    return {
        "uid": "hf-triton",
        "title": "hf_triton",
        "tags": ["triton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _models()]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(made, 1)],
    }


def _graph(panel: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _models() -> dict[str, Any]:
    query = f"label_values({declared.IN_FLIGHT.name}, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "models"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
