# SPDX-License-Identifier: Apache-2.0
"""The metrics endpoint counts what was sent: on both engines, for several models and instances."""

import base64
import itertools
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import yaml
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from hf_triton.server import free_ports
from hf_triton.tasks.serving.metrics import METRICS
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.adapters import save_adapter
from tests.support.client import generate, infer, post
from tests.support.gateway import GatewayThread
from tests.support.image_checkpoints import build_seeing_checkpoint
from tests.support.images import encoded, made_image
from tests.support.paths import ROOT, load_script
from tests.support.programs import program
from tests.support.slow_model import slow_model

pytestmark = pytest.mark.full

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
STEP_S = 0.02
IS_DROPPED = 23  # so many new tokens
SLOW_MODEL = f"""{slow_model(STEP_S)}
        task = self._dispatcher.service
        submit = task.submit

        def drop_or_submit(request, config):
            if request.parameters.get("max_new_tokens") != {IS_DROPPED}:
                submit(request, config)

        task.submit = drop_or_submit
"""
A = 67  # the tiny tokenizer's token for "a"
ALWAYS_A = f'{{"{A}": 100}}'
AT_REST = ("requests_in_flight", "prompts_waiting", "rows_running")

Figures = dict[tuple[str, str], float]
"""Samples of one model by name without `hf_triton_`, and by the value of the label beside `model` and `version`.

Behind that is `@` and the adapter, if there is one.
"""


def figures(text: str, model: str) -> Figures:
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("version") == "1"
            if labels.pop("model") == model:
                adapter = labels.pop("adapter", None)
                [value] = labels.values() or [""]
                key = (sample.name.removeprefix("hf_triton_"), value if adapter is None else f"{value}@{adapter}")
                assert key not in found, "two samples of one name and labels"
                found[key] = sample.value
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)


@pytest.fixture(scope="module")
def num_tokens(checkpoint: Path) -> Callable[[str], int]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return lambda text: len(tokenizer(text).input_ids)


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("repository")
    law = save_adapter(checkpoint, tmp_path_factory.mktemp("law"))
    seeing = build_seeing_checkpoint(tmp_path_factory.mktemp("seeing"), "llava")
    twins = "instance_group { count: 2 kind: KIND_CPU }"
    folders = [
        make_folder(root, "continuous", huggingface_model=checkpoint, engine="continuous"),
        make_folder(root, "batch", huggingface_model=checkpoint, engine="batch"),
        make_folder(root, "twins", huggingface_model=checkpoint, config=twins),
        make_folder(root, "tight", huggingface_model=checkpoint, max_cache_tokens=512, enable_prefix_caching="false"),
        make_folder(root, "uncounted", huggingface_model=checkpoint, metrics="false"),
        make_folder(root, "tuned", huggingface_model=checkpoint, adapters=json.dumps({"law": str(law)})),
        make_folder(root, "seeing", huggingface_model=seeing),
    ]
    for folder in folders[:3]:
        (folder / "1" / "model.py").write_text(SLOW_MODEL)
    arguments = ["--model-control-mode=explicit", *(f"--load-model={folder.name}" for folder in folders)]
    with TritonServer(root, arguments=arguments, ready_timeout_s=280) as running:
        for folder in folders:
            assert running.is_model_ready(folder.name), running.log_tail()
        yield running


def exported(server: TritonServer) -> str:
    """Our part of what the server exports; Triton's own names are not all as promtool wants them."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return "".join(f"{line}\n" for line in lines if re.match(r"(# (HELP|TYPE) )?hf_triton_", line))


def wait_for(server: TritonServer, model: str, condition: Callable[[Figures], bool], what: str) -> Figures:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        found = figures(exported(server), model)
        if condition(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"never: {what}; {found}")


def settled(server: TritonServer, model: str, num_requests: int) -> Figures:
    """The figures once so many requests are counted, and nothing is in hand."""
    return wait_for(
        server,
        model,
        lambda found: outcomes(found).total() == num_requests and not any(found[name, ""] for name in AT_REST),
        f"{num_requests} requests, and rest",
    )


class Outcomes(dict[str, float]):
    def total(self) -> float:
        return sum(self.values())


def outcomes(found: Figures) -> Outcomes:
    return Outcomes({value: count for (name, value), count in found.items() if name == "requests_total"})


def by_label(found: Figures, name: str) -> dict[str, float]:
    return {value: count for (each, value), count in found.items() if each == name and count}


@pytest.mark.parametrize("engine", ["continuous", "batch"])
def test_metrics_count_what_was_sent(server: TritonServer, engine: str, num_tokens: Callable[[str], int]) -> None:
    before = figures(exported(server), engine)
    assert not any(count for (name, _), count in before.items() if name.endswith(("_total", "_count", "_sum")))
    started_s = time.monotonic()

    prompts = ["one", "another prompt", "and a third one"]
    assert infer(server, engine, prompts, parameters={"max_new_tokens": 6}).status == 200
    two = {"max_new_tokens": 5, "do_sample": True, "seed": 1, "n": 2}
    assert infer(server, engine, ["drawn twice"], parameters=two).status == 200
    stopped = {"max_new_tokens": 50, "logit_bias": ALWAYS_A, "stop_strings": "aaa"}
    assert infer(server, engine, ["stop me"], parameters=stopped).status == 200
    ended = {"max_new_tokens": 50, "logit_bias": ALWAYS_A, "eos_token_id": A}
    assert infer(server, engine, ["nothing at all"], parameters=ended).status == 200
    assert generate(server, engine, "x", no_such_parameter=1).status == 400
    assert generate(server, engine, "x", max_new_tokens=10_000).status == 400
    assert infer(server, engine, ["fine", ""], parameters={"max_new_tokens": 5, "temperature": -1}).status == 400

    assert infer(server, engine, ["lost"], parameters={"max_new_tokens": IS_DROPPED}).status == 500

    found = settled(server, engine, 8)
    elapsed_s = time.monotonic() - started_s
    errors = ("unknown_parameter", "context_exceeded", "invalid_parameter", "internal")
    assert outcomes(found) == {"ok": 4, **dict.fromkeys(errors, 1)}
    read = [*prompts, "drawn twice", "stop me", "nothing at all"]
    assert found["prompt_tokens_total", ""] == sum(map(num_tokens, read))
    assert found["generation_tokens_total", ""] == 3 * 6 + 2 * 5 + 3
    assert by_label(found, "completions_total") == {"length": 5, "stop_string": 1, "eos": 1}
    assert found["num_preemptions_total", ""] == 0

    num_picks = 3 * 6 + 2 * 5 + 3 + 1
    num_texts = 3 + 2 + 1 + 1
    assert found["step_rows_total", ""] == num_picks
    assert 5 + 4 + 2 <= found["steps_total", ""] <= found["step_rows_total", ""]

    assert found["queue_time_seconds_count", ""] == found["time_to_first_token_seconds_count", ""] == len(read)
    assert found["time_per_output_token_seconds_count", ""] == num_texts - 1
    assert found["e2e_request_latency_seconds_count", ""] == 4
    assert STEP_S <= found["time_per_output_token_seconds_sum", ""] / (num_texts - 1) < elapsed_s
    assert len(read) * STEP_S <= found["time_to_first_token_seconds_sum", ""] < len(read) * elapsed_s
    assert found["queue_time_seconds_sum", ""] < found["time_to_first_token_seconds_sum", ""]
    assert (6 + 5 + 3 + 1) * STEP_S <= found["e2e_request_latency_seconds_sum", ""] <= elapsed_s
    assert found["time_per_output_token_seconds_bucket", "0.015"] == 0
    assert found["time_per_output_token_seconds_bucket", "+Inf"] == num_texts - 1


def test_cancelled_request_is_running_and_then_counted(server: TritonServer) -> None:
    engine = "continuous"
    before = figures(exported(server), engine)
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"a long one"], dtype=object))
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        call = client.async_infer(engine, [tensor], lambda result, error: None, parameters={"max_new_tokens": 240})
        working = wait_for(
            server,
            engine,
            lambda found: found["requests_in_flight", ""] == 1 == found["rows_running", ""],
            "a request in flight, with its row",
        )
        assert 0 < working["kv_cache_tokens", ""] <= working["kv_cache_max_tokens", ""]
        call.cancel()
        found = settled(server, engine, int(outcomes(before).total()) + 1)
    assert by_label(found, "requests_total")["cancelled"] == 1
    num_new = found["generation_tokens_total", ""] - before["generation_tokens_total", ""]
    assert 0 < num_new < 240
    for name in ("completions_total", "e2e_request_latency_seconds_count", "time_per_output_token_seconds_count"):
        assert by_label(found, name) == by_label(before, name)


def test_tokens_of_a_shared_beginning_are_counted(server: TritonServer, num_tokens: Callable[[str], int]) -> None:
    text = "The river goes to the mill, and then to the sea, and what comes after the sea nobody knows. " * 4
    before = settled(server, "continuous", int(outcomes(figures(exported(server), "continuous")).total()))
    for _ in range(2):
        assert generate(server, "continuous", text, max_new_tokens=4).status == 200
    found = settled(server, "continuous", int(outcomes(before).total()) + 2)
    num_cached = found["prefix_cache_hits_total", ""] - before["prefix_cache_hits_total", ""]
    assert num_cached == num_tokens(text) // 64 * 64 > 0
    num_read = found["prompt_tokens_total", ""] - before["prompt_tokens_total", ""]
    assert num_read == 2 * num_tokens(text)


def test_rows_that_must_wait_again_are_counted(server: TritonServer) -> None:
    prompts = [f"{number} goes over the bridge and then to the mill" for number in range(4)]
    assert infer(server, "tight", prompts, parameters={"max_new_tokens": 190}).status == 200
    found = settled(server, "tight", 1)
    assert found["num_preemptions_total", ""] > 0
    assert found["generation_tokens_total", ""] == 4 * 190
    assert by_label(found, "completions_total") == {"length": 4}
    assert found["kv_cache_max_tokens", ""] == 512


def test_instances_of_a_model_add_up_and_a_reload_goes_on(server: TritonServer) -> None:
    with ThreadPoolExecutor(6) as pool:
        replies = [pool.submit(generate, server, "twins", f"number {i}", max_new_tokens=100) for i in range(6)]
        wait_for(
            server,
            "twins",
            lambda found: found["requests_in_flight", ""] == found["rows_running", ""] == 6,
            "six requests in flight, with their rows",
        )
    assert [reply.result().status for reply in replies] == [200] * 6
    before = settled(server, "twins", 6)
    assert before["generation_tokens_total", ""] == 600

    assert post(server, "/v2/repository/models/twins/unload", {}).status == 200
    gauges = [metric.name.removeprefix("hf_triton_") for metric in METRICS if metric.kind == "gauge"]
    gone = wait_for(server, "twins", lambda found: not any(found[name, ""] for name in gauges), "gauges at zero")
    assert outcomes(gone) == {"ok": 6}
    assert post(server, "/v2/repository/models/twins/load", {}).status == 200
    assert generate(server, "twins", "again", max_new_tokens=3).status == 200
    found = settled(server, "twins", 7)
    assert found["generation_tokens_total", ""] == 603
    assert found["time_to_first_token_seconds_count", ""] == 7


def test_adapters_are_counted_by_name(server: TritonServer, num_tokens: Callable[[str], int]) -> None:
    for adapter, text in (("", "one"), ("law", "another prompt"), ("law", "and a third one")):
        assert generate(server, "tuned", text, max_new_tokens=4, lora_name=adapter).status == 200
    assert generate(server, "tuned", "x", lora_name="law", max_new_tokens=10_000).status == 400
    for number in range(20):
        assert generate(server, "tuned", "x", lora_name=f"no-{number}").status == 400
    found = settled(server, "tuned", 24)
    assert outcomes(found) == {"ok": 1, "ok@law": 2, "context_exceeded": 1, "adapter_not_found": 20}
    assert by_label(found, "generation_tokens_total") == {"": 4, "@law": 8}
    read = num_tokens("another prompt") + num_tokens("and a third one")
    assert by_label(found, "prompt_tokens_total") == {"": num_tokens("one"), "@law": read}


def test_every_model_but_one_without_metrics_has_all_from_the_start(server: TritonServer) -> None:
    assert generate(server, "uncounted", "hello", max_new_tokens=3).status == 200
    assert figures(exported(server), "uncounted") == {}
    families = {family.name: family for family in text_string_to_metric_families(exported(server))}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        models = {"continuous", "batch", "twins", "tight", "tuned", "seeing"}
        assert {sample.labels["model"] for sample in family.samples} == ({"seeing"} if metric.of_images else models)
        assert not any("instance" in label for sample in family.samples for label in sample.labels)


# --- the real Prometheus ---------------------------------------------------------------------------------------------


def test_promtool_has_nothing_to_say(server: TritonServer) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=exported(server), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


KEY = "sk-of-prometheus"


@pytest.fixture(scope="module")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY} name=prometheus\n")
    with GatewayThread(GatewayConfig(triton=server.grpc_url, port=0, api_key_file=keys)) as running:
        yield running


@pytest.fixture(scope="module")
def query(
    server: TritonServer, gateway: GatewayThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[Any]]]:
    """Asks a Prometheus that scrapes the server and a gateway in front of it."""
    folder = tmp_path_factory.mktemp("prometheus")
    [port] = free_ports(1)
    targets = [urllib.parse.urlsplit(url).netloc for url in (server.metrics_url, gateway.url)]
    config = {
        "global": {"scrape_interval": "500ms"},
        "scrape_configs": [
            {"job_name": "triton", "static_configs": [{"targets": targets}], "authorization": {"credentials": KEY}}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:

        def ask(expression: str) -> list[Any]:
            url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(url, timeout=10) as answer:
                result: list[Any] = json.load(answer)["data"]["result"]
            return result

        def is_up() -> bool:
            try:
                return any(each["value"][1] == "1" for each in ask("up"))
            except OSError:
                return False

        try:
            deadline_s = time.monotonic() + 60
            while not is_up():
                assert time.monotonic() < deadline_s, (folder / "log").read_text()
                time.sleep(0.2)
            yield ask
        finally:
            process.terminate()


def until(ask: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if ask():
            return True
        time.sleep(0.2)
    return False


def test_prometheus_scrapes_the_same_values(server: TritonServer, query: Callable[[str], list[Any]]) -> None:
    num_before = int(outcomes(figures(exported(server), "continuous")).total())
    assert infer(server, "continuous", ["one", "two"], parameters={"max_new_tokens": 6}).status == 200
    found = settled(server, "continuous", num_before + 1)
    for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"):
        asked = f'hf_triton_{name}{{model="continuous"}}'
        assert until(
            lambda asked=asked, name=name: [float(each["value"][1]) for each in query(asked)] == [found[name, ""]]
        )


def test_documented_queries_have_answers(server: TritonServer, query: Callable[[str], list[Any]]) -> None:
    blocks = re.findall(r"^```promql\n(.*?)^```\n", OPERATIONS, flags=re.DOTALL | re.MULTILINE)
    expressions = [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]
    assert expressions
    assert generate(server, "continuous", "x", no_such_parameter=1).status == 400
    for expression in expressions:
        assert infer(server, "continuous", ["one", "two"], parameters={"max_new_tokens": 6}).status == 200

        def has_numbers(expression: str = expression) -> bool:
            values = [each["value"][1] for each in query(expression) if each["metric"].get("model") == "continuous"]
            return bool(values) and "NaN" not in values

        assert until(has_numbers), expression


def of_deployment() -> Iterator[str]:
    """The queries of Grafana's dashboard and of the alerts, for any model and outcome, without thresholds."""
    for _, row in load_script("make_dashboard").panels():
        for panel in row:
            if panel.needs not in ("GPU", "on demand", "streams"):
                yield from panel.queries.values()
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            if "model_loads" not in rule["expr"]:
                yield re.sub(r" [>=]=? [\d.]+", "", re.sub(r'(outcome|status)=~"[^"]*"', r'\1=~".*"', rule["expr"]))


def test_the_dashboards_and_the_alerts_queries_have_answers(
    server: TritonServer, gateway: GatewayThread, query: Callable[[str], list[Any]]
) -> None:
    images = (base64.b64encode(encoded(made_image(24, 24, seed))).decode() for seed in itertools.count())
    for expression in of_deployment():
        asked = expression.replace("$model", ".*").replace("$__rate_interval", "5s").replace("[5m]", "[5s]")

        def has_numbers(asked: str = asked) -> bool:
            infer(server, "continuous", ["one", "two"], parameters={"max_new_tokens": 6})
            generate(server, "continuous", "x", no_such_parameter=1)
            body = {"model": "continuous", "prompt": "a", "max_tokens": 2}
            httpx.post(f"{gateway.url}/v1/completions", json=body, headers={"x-api-key": KEY})
            httpx.get(f"{gateway.url}/v1/models", headers={"x-api-key": KEY})
            generate(server, "tuned", "x", max_new_tokens=2, lora_name="law")
            generate(server, "seeing", "x", max_new_tokens=2, image=[next(images)])
            found = query(asked)
            if "adapter" in asked and not any(each["metric"].get("adapter") == "law" for each in found):
                return False
            return any(each["value"][1] != "NaN" for each in found)

        assert until(has_numbers), expression
