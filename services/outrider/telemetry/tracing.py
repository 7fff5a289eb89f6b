"""OpenTelemetry spans, if the `otel` extra is installed and an endpoint is configured; else none.

Configured only by the standard variables: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT enables it.
Protocol, headers, sampler, batching and service name are configured as in the OpenTelemetry SDK.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.telemetry.context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Large, because all rounds of a request become spans at its end.
_QUEUED_SPANS = 32_768


@dataclass(frozen=True, slots=True)
class Tracing:
    """Exports one process's spans to a collector."""

    provider: TracerProvider

    @property
    def tracer(self) -> Tracer:
        return self.provider.get_tracer("outrider")

    def close(self) -> None:
        """Sends the remaining spans. Blocks at most for the exporter's timeout."""
        self.provider.shutdown()


def configured(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment enables spans."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environ.get(name) for name in _ENDPOINTS)


def open_tracing(service: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Opens tracing for `service`, or the name in OTEL_SERVICE_NAME; None if not configured.

    Without the `otel` extra it only warns, because missing spans are no reason not to serve.
    """
    if not configured(environ):
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(environ)
    except ImportError as error:
        log.warning("no spans are sent: %s; install outrider[otel]", error)
        return None
    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    queued = None if environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else _QUEUED_SPANS
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=queued))
    return Tracing(provider)


def _exporter(environ: Mapping[str, str]) -> SpanExporter:
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    if protocol != "http/protobuf":
        log.warning("OTEL_EXPORTER_OTLP_PROTOCOL: %r is not known here; http/protobuf is taken", protocol)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


def parent_of(context: TraceContext) -> Context:
    """The context in which a span continues the caller's trace; a new trace if the caller has none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(context.headers, Context())


def context_of(span: Span) -> TraceContext:
    """The trace context for callees, so that their spans become children of `span`."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    return TraceContext.of(headers.items())
