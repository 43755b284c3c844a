# SPDX-License-Identifier: Apache-2.0
"""An OpenTelemetry collector in a thread: takes spans by OTLP over HTTP, and keeps them."""

import gzip
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2
"""The status code of a span that failed."""


@dataclass(frozen=True)
class Span:
    service: str
    scope: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: int
    message: str


class Collector:
    """A running collector as a context manager; `environment` switches the spans of hf_triton on."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.texts = b""
        """All bodies, to look for what must not be in them."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, body: bytes) -> None:
        self.texts += body
        if body.startswith(b"{"):  # Triton's own spans, in JSON
            return
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        service,
                        scope.scope.name,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _attributes(span.attributes),
                        span.status.code,
                        span.status.message,
                    )
                    for span in scope.spans
                ]

    def wait_for(self, num_spans: int, trace_id: str | None = None, timeout_s: float = 20.0) -> list[Span]:
        """The spans of hf_triton, once there are so many; of one trace, or all."""
        deadline = time.monotonic() + timeout_s
        while True:
            own = [span for span in self.spans if span.scope == "hf_triton" and trace_id in (None, span.trace_id)]
            if len(own) >= num_spans:
                return own
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.05)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
