# SPDX-License-Identifier: Apache-2.0
"""Spans of a real server in a real collector's protocol: parents, times, errors, a collector that is down."""

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hf_triton.protocol.otlp import build_tracing, wants_traces
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.client import generate, generate_stream, infer, open_stream, post
from tests.support.gateway import GatewayThread, add_demo
from tests.support.otlp import ERROR, Collector, Span
from tests.support.slow_model import DECOUPLED, slow_model

pytestmark = pytest.mark.full

PROMPT = "Wolverine prompt that no span may hold"
PHASES = ["queue", "prefill", "decode"]
NUM_REQUESTS = 30


@pytest.fixture(scope="module")
def repository(make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`demo` with a door, and `slow`, which streams."""
    root = tmp_path_factory.mktemp("tracing")
    checkpoint = build_tiny_checkpoint(root / "checkpoint", "llama", eos_token_id=None)
    add_demo(root / "repository")
    folder = make_folder(root / "repository", "slow", huggingface_model=checkpoint, config=DECOUPLED)
    (folder / "1" / "model.py").write_text(slow_model(0.1))
    return root / "repository"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(repository: Path, collector: Collector) -> Iterator[TritonServer]:
    arguments = ["--http-header-forward-pattern=.*"]
    with TritonServer(repository, arguments=arguments, environment=collector.environment) as running:
        for name in ("demo", "demo_stream", "slow"):
            assert running.is_model_ready(name), running.log_tail()
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    add_demo(root)
    shutil.rmtree(root / "demo_stream")
    return root


def new_trace() -> tuple[str, str, str]:
    """A trace's id, its span's, and the header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


def in_order(spans: list[Span]) -> list[Span]:
    """A request's span and its phases; they follow each other inside it."""
    (request,) = (span for span in spans if span.name.startswith("text_completion "))
    phases = sorted((span for span in spans if span is not request), key=lambda span: PHASES.index(span.name))
    assert {span.parent_id for span in phases} == {request.span_id}
    assert {span.trace_id for span in spans} == {request.trace_id}
    ends = [request.start_ns, *(span.end_ns for span in phases)]
    assert [span.start_ns for span in phases] == ends[:-1]
    assert ends == sorted(ends)
    assert ends[-1] == request.end_ns
    return [request, *phases]


@pytest.mark.parametrize("model", ["demo", "demo_stream"])
def test_a_request_has_three_phases_below_its_caller(server: TritonServer, collector: Collector, model: str) -> None:
    trace_id, span_id, traceparent = new_trace()
    before_ns = time.time_ns()
    ask = generate if model == "demo" else generate_stream
    ask(server, model, PROMPT, max_tokens=5, ignore_eos=True, traceparent=traceparent)
    after_ns = time.time_ns()
    request, *phases = in_order(collector.wait_for(4, trace_id))
    assert [span.name for span in phases] == PHASES
    assert (request.parent_id, request.name, request.service) == (span_id, "text_completion demo", "hf_triton")
    assert before_ns - 10**6 < request.start_ns < request.end_ns < after_ns + 10**8
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert request.attributes["gen_ai.usage.input_tokens"] > 1
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["gen_ai.request.model"] == "demo"
    assert not any(span.status for span in (request, *phases))


def test_a_forwarded_header_is_the_parent(server: TritonServer, collector: Collector) -> None:
    trace_id, span_id, traceparent = new_trace()
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]}
    assert post(server, "/v2/models/demo/infer", body, headers={"Traceparent": traceparent}).status == 200
    request, *_ = in_order(collector.wait_for(4, trace_id))
    assert request.parent_id == span_id


def test_refused_and_cancelled_requests_end_in_errors(server: TritonServer, collector: Collector) -> None:
    refused_id, _, traceparent = new_trace()
    assert generate(server, "demo", PROMPT, traceparent=traceparent, no_such_parameter=1).status == 400
    request, *phases = in_order(collector.wait_for(2, refused_id))
    assert (request.status, request.attributes["error.type"]) == (ERROR, "unknown_parameter")
    assert [(span.name, span.status) for span in phases] == [("queue", ERROR)]
    cancelled_id, _, traceparent = new_trace()
    with open_stream(server, "slow", PROMPT, max_tokens=100, stream=True, traceparent=traceparent) as response:
        response.readline()
    request, *phases = in_order(collector.wait_for(4, cancelled_id))
    assert (request.status, request.attributes.get("error.type")) == (ERROR, "cancelled")
    assert [span.status for span in phases] == [0, 0, ERROR]


def test_every_request_is_a_trace_of_its_own(server: TritonServer, collector: Collector) -> None:
    traces = [new_trace() for _ in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda trace: infer_in(server, trace[2]), traces))
    assert replies == [200] * NUM_REQUESTS
    for trace_id, span_id, _ in traces:
        request, *phases = in_order(collector.wait_for(4, trace_id))
        assert (request.parent_id, len(phases)) == (span_id, 3)
    assert PROMPT.encode() not in collector.texts
    assert b"Wolverine" not in collector.texts


def infer_in(server: TritonServer, traceparent: str) -> int:
    return infer(server, "demo", [PROMPT], parameters={"max_tokens": 3, "traceparent": traceparent}).status


@pytest.mark.parametrize("wrong", ["", "00-zz-zz-01", "x" * 1000, 5])
def test_a_wrong_caller_gives_a_trace_of_its_own(server: TritonServer, collector: Collector, wrong: object) -> None:
    num_before = len(collector.spans)
    assert generate(server, "demo", PROMPT, max_tokens=2, traceparent=wrong).status == 200
    collector.wait_for(num_before + 4)
    (request,) = (span for span in collector.spans[num_before:] if span.name == "text_completion demo")
    assert request.parent_id == ""


def test_below_tritons_own_trace_and_a_forwarded_header(demo: Path) -> None:
    with Collector() as collector:
        arguments = ["--http-header-forward-pattern=^traceparent$", "--trace-config", "mode=opentelemetry"]
        for config in ("rate=1", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}/v1/traces"):
            arguments += ["--trace-config", config]
        trace_id, span_id, traceparent = new_trace()
        with TritonServer(demo, arguments=arguments, environment=collector.environment) as server:
            body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]}
            assert post(server, "/v2/models/demo/infer", body, headers={"Traceparent": traceparent}).status == 200
            request, *_ = in_order(collector.wait_for(4, trace_id))
        tritons = collector.texts.decode(errors="replace")
        assert f'"{request.parent_id}"' in tritons
        assert request.parent_id != span_id


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_gateways_span_is_between_caller_and_model(
    server: TritonServer, collector: Collector, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    trace_id, span_id, traceparent = new_trace()
    chat = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": is_stream}
    with (
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway,
        httpx.Client(trust_env=False, timeout=60, headers={"traceparent": traceparent}) as client,
    ):
        answer = client.post(f"{gateway.url}/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        assert client.get(f"{gateway.url}/v1/models").status_code == 200
    spans = collector.wait_for(5, trace_id)
    (outer,) = (span for span in spans if span.service == "hf_triton_gateway")
    request, *phases = in_order([span for span in spans if span is not outer])
    assert (outer.name, outer.parent_id, request.parent_id) == ("POST /v1/chat/completions", span_id, outer.span_id)
    assert outer.attributes["http.response.status_code"] == 200
    assert outer.start_ns <= request.start_ns < outer.end_ns
    assert len(phases) == 3
    assert b"Wolverine" not in collector.texts


def test_a_gateway_without_spans_passes_the_caller_on(server: TritonServer, collector: Collector) -> None:
    trace_id, span_id, traceparent = new_trace()
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4}
    with (
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        url = f"{gateway.url}/v1/completions"
        assert client.post(url, json=body, headers={"traceparent": traceparent}).status_code == 200
        assert client.post(url, json=body, headers={"traceparent": "00-nonsense"}).status_code == 200
    request, *_ = in_order(collector.wait_for(4, trace_id))
    assert request.parent_id == span_id


def test_without_a_collector_every_request_is_answered(demo: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with TritonServer(demo, environment=environment) as server, ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: infer_in(server, ""), range(NUM_REQUESTS)))
        assert statuses == [200] * NUM_REQUESTS
        assert server.stop() == 0


def test_a_missing_package_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert build_tracing({"OTEL_TRACES_EXPORTER": "otlp"}, "any") is None
    assert [record.message for record in caplog.records] == [
        "no traces: OpenTelemetry is not installed: pip install 'hf-triton[tracing]'"
    ]


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, False),
    ],
)
def test_the_standard_variables_switch_spans_on(variables: dict[str, str], is_on: bool) -> None:
    assert wants_traces(variables) is is_on
