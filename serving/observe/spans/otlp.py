"""Spans as OpenTelemetry has them, and sent by OTLP: the only import of OpenTelemetry's packages.

Of the SDK only what encodes and sends: its exporters know the standard variables for headers, certificates, compression
and timeout, and try again what a collector turned down. Its batching is not used, for it does not count what it drops,
and its shutdown has no bound to choose; nor are its tracers, since spans are made when they have ended.
"""

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from moonshard.serving.config.keys import TelemetryConfig
from moonshard.serving.observe.rows.origin import unix_offset_ns
from moonshard.serving.observe.spans.context import TraceContext
from moonshard.serving.observe.spans.span import EndedSpan, SpanKindName

SERVICE_NAME = "moonshard"
TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
_KINDS: Mapping[SpanKindName, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SCOPE = InstrumentationScope("moonshard")


class _FirstWords(logging.Handler):
    """What the exporters' loggers would say at each attempt: of one batch the first is kept, which tells the cause.

    They do not repeat themselves within seconds; what was said last then holds still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = "no reason was given"
        self.is_new_batch = True

    def emit(self, record: logging.LogRecord) -> None:
        if self.is_new_batch:
            self.text, self.is_new_batch = record.getMessage(), False


class OtlpExporter:
    """The exporter of one process, which `role` and `instance` identify."""

    def __init__(self, config: TelemetryConfig, *, role: str, instance: str) -> None:
        endpoint = config.endpoint or ""
        self._exporter = (
            HttpExporter(endpoint=endpoint if config.whole_url else traces_url(endpoint))
            if config.protocol == "http"
            else GrpcExporter(endpoint=endpoint)
        )
        self._resource = Resource.create(
            {
                "service.name": config.service_name or SERVICE_NAME,
                "service.instance.id": instance,
                "moonshard.role": role,
            }
        )
        self._words = _FirstWords()
        loggers = logging.getLogger("opentelemetry.exporter")  # for the process's life: an export may outlast `close`
        loggers.addHandler(self._words)
        loggers.propagate = False

    def export(self, spans: Sequence[EndedSpan]) -> str | None:
        """The offset to the time of day is read for each batch: that of a long-lived process is corrected meanwhile."""
        self._words.is_new_batch, offset_ns = True, unix_offset_ns()
        result = self._exporter.export([_readable(span, offset_ns, self._resource) for span in spans])
        return None if result is SpanExportResult.SUCCESS else self._words.text

    def close(self) -> None:
        self._exporter.shutdown()


def traces_url(endpoint: str) -> str:
    """The traces URL of a collector's base URL. A URL that already names the path is kept."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _readable(span: EndedSpan, offset_ns: int, resource: Resource) -> ReadableSpan:
    return ReadableSpan(
        name=span.name,
        context=_context(span.context, is_remote=False),
        parent=None if span.parent is None else _context(span.parent, is_remote=span.kind == "server"),
        resource=resource,
        attributes=span.attributes,
        events=[Event(name, timestamp=at_ns + offset_ns) for name, at_ns in span.events],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR),
        start_time=span.begun_ns + offset_ns,
        end_time=span.ended_ns + offset_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        trace_id=int.from_bytes(context.trace_id),
        span_id=int.from_bytes(context.span_id),
        is_remote=is_remote,
        trace_flags=TraceFlags(context.flags),
        trace_state=TraceState.from_header([context.state]) if context.state else TraceState(),
    )
