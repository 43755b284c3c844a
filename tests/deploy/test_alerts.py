# SPDX-License-Identifier: Apache-2.0
"""Each alert of deploy/ fires by the fault that it is for, and by nothing else: promtool runs the rules on series."""

import json
import subprocess
from pathlib import Path
from typing import Final

import yaml

from hf_triton.tasks.serving.metrics import METRICS
from hf_triton_gateway.http.gateway_metrics import Metrics
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, program

ALERTS: Final = ROOT / "deploy" / "prometheus" / "alerts.yml"
STEP_S: Final = 15
MINUTES: Final = 40
MODEL: Final = 'model="m",version="1"'
LOADS: Final = 'hf_triton_openai_model_loads_total{model="m",outcome="failed",instance="a"}'

Series = dict[str, str]
"""Values by series, in promtool's form."""


def requests(outcome: str, instance: str = "a") -> str:
    return f'hf_triton_requests_total{{{MODEL},outcome="{outcome}",instance="{instance}"}}'


def waits(name: str, bound: str, until: str) -> Series:
    """A histogram whose every value is between two neighbouring bounds of a bucket."""
    counts = {bound: "0+0x200", until: "0+9x200", "+Inf": "0+9x200"}
    return {f'hf_triton_{name}_seconds_bucket{{{MODEL},le="{le}",instance="a"}}': value for le, value in counts.items()}


def caches(preemptions: str, *usages: float) -> Series:
    found = {f'hf_triton_num_preemptions_total{{{MODEL},instance="0"}}': preemptions}
    for instance, usage in enumerate(usages):
        found[f'hf_triton_kv_cache_usage_ratio{{{MODEL},instance="{instance}"}}'] = f"{usage}x200"
    return found


UP: Final = 'up{job="triton",instance="a"}'
GATEWAY: Final = 'hf_triton_openai_requests_total{{endpoint="/v1/completions",status="{}",instance="a"}}'
CASES: Final[dict[str, tuple[Series, set[str]]]] = {
    "a server is gone": ({UP: "1x50 0x150"}, {"ServerDown"}),
    "a server is restarted once": ({UP: "1x100 0x4 1x100"}, set()),
    "a server ends again and again": ({UP: "1x120 0x1 1x5 0x1 1x5 0x1 1x30"}, {"ServerRestarts"}),
    "a model fails now and then": ({requests("ok"): "0+9x200", requests("internal"): "0+1x200"}, {"ModelFails"}),
    "clients are wrong": ({requests("ok"): "0+9x200", requests("invalid_parameter"): "0+9x200"}, set()),
    "a queue is full": ({requests("ok"): "0+9x200", requests("queue_full"): "0+1x200"}, {"RequestsRefused"}),
    "a few are refused": ({requests("ok"): "0+99x200", requests("queue_full"): "0+1x200"}, set()),
    "requests wait": (waits("queue_time", "10", "25"), {"QueueGrows"}),
    "they wait a little": (waits("queue_time", "2.5", "5"), set()),
    "first tokens are late": (waits("time_to_first_token", "25", "50"), {"FirstTokenLate"}),
    "a cache is full": (caches("0+30x200", 0.97), {"CacheFull"}),
    "one cache of two is full": (caches("0+30x200", 0.97, 0.1), {"CacheFull"}),
    "a full cache preempts nothing": (caches("0x200", 0.97), set()),
    "the gateway fails": ({GATEWAY.format(200): "0+9x200", GATEWAY.format(500): "0+1x200"}, {"GatewayFails"}),
    "the gateway refuses": ({GATEWAY.format(200): "0+9x200", GATEWAY.format(429): "0+9x200"}, set()),
    "the first load fails": ({LOADS: "_x120 1x80"}, {"LoadFails"}),
    "a load fails once more": ({LOADS: "1x120 2x80"}, {"LoadFails"}),
    "a load fails after a restart": ({LOADS: "7x100 _x20 1x80"}, {"LoadFails"}),
    "a load failed long ago": ({LOADS: "_x20 1x180"}, set()),
    "nothing happens": (
        {UP: "1x200", requests("ok"): "9x200", requests("internal"): "9x200"}
        | dict.fromkeys(waits("queue_time", "10", "25"), "5x200"),
        set(),
    ),
    "a server restarts after faults": (
        {UP: "1x100 0x2 1x100", requests("ok"): "900x100 _x2 0+9x100", requests("internal"): "9x100 _x2 0x100"},
        set(),
    ),
}


def test_an_alert_fires_by_its_fault_and_by_nothing_else(tmp_path: Path) -> None:
    rule = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{MINUTES}m"}
    tests = []
    for case, (series, fired) in CASES.items():
        firing = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(fired)]
        given = [{"series": name, "values": values} for name, values in series.items()]
        told = {"name": case, "interval": f"{STEP_S}s", "input_series": given}
        tests.append(told | {"promql_expr_test": [rule | {"exp_samples": firing}]})
    file = tmp_path / "test.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": f"{STEP_S}s", "tests": tests}))
    command = [program("promtool"), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == set().union(*(fired for _, fired in CASES.values()))


def test_the_series_are_those_that_servers_write() -> None:
    """Names, labels, and bounds of buckets."""
    labels = {metric.name: {metric.label} - {""} for metric in METRICS}
    buckets = {f"{metric.name}_bucket": {f"{bound:g}" for bound in metric.buckets} for metric in METRICS}
    gateway = {f"{family._name}_total": set(family._labelnames) for family in (Metrics().requests, Metrics().loads)}
    for series, _ in CASES.values():
        for name, _, rest in (each.partition("{") for each in series):
            known = dict(pair.split("=", 1) for pair in rest.removesuffix("}").split(","))
            own = {label for label in known if label not in ("instance", "job")}
            if name in gateway:
                assert own == gateway[name]
            elif name in buckets:
                assert known["le"].strip('"') in buckets[name] | {"+Inf"}
            elif name != "up":
                assert own == labels[name] | {"model", "version"}
