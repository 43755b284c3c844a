# SPDX-License-Identifier: Apache-2.0
"""Spans to a collector by OTLP over HTTP, switched on by OpenTelemetry's standard variables. Knows no request."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import where

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

TRACE_CONTEXT: Final = ("traceparent", "tracestate")
"""The caller's trace, by W3C Trace Context."""
TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP: Final = ("", "http/protobuf")
CLOSE_S: Final = 5.0
"""How long the last spans may take at the end."""


def wants_traces(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans: by an endpoint, or by `OTEL_TRACES_EXPORTER=otlp`."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporters == "otlp" or (not exporters and any(environment.get(name) for name in ENDPOINTS))


class Tracing:
    """Makes spans and sends them from a thread of its own; a collector that is down costs nothing but its spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("hf_triton")

    def parent(self, values: Mapping[str, object]) -> Context:
        """The context of a caller's `traceparent` and `tracestate`; an empty one without a valid `traceparent`."""
        from opentelemetry.context import Context

        carrier = {name: value for name in TRACE_CONTEXT if isinstance(value := values.get(name), str)}
        return self._propagator.extract(carrier, Context())

    def headers(self, span: Any) -> dict[str, str]:
        """`traceparent` and `tracestate` for the calls that a span makes."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier

    def close(self) -> None:
        """Send the last spans, within `CLOSE_S`."""
        closing = threading.Thread(target=self._provider.shutdown, name="hf_triton-tracing-end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def build_tracing(environment: Mapping[str, str], service_name: str) -> Tracing | None:
    """Spans as the environment asks for them; None without. What prevents them is a warning."""
    if not wants_traces(environment):
        return None
    try:
        return Tracing(_build_provider(environment, service_name))
    except ImportError:
        logger.warning("no traces: OpenTelemetry is not installed: pip install 'hf-triton[tracing]'")
    except Exception as error:  # a variable that OpenTelemetry cannot read
        logger.warning("no traces: OpenTelemetry does not start (%s)", where(error))
    return None


def _build_provider(environment: Mapping[str, str], service_name: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = next(filter(None, map(environment.get, PROTOCOLS)), "")
    if protocol not in HTTP:
        logger.warning("traces are sent as http/protobuf, and not as %s, to the endpoint given", protocol)
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service_name}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
