"""A collector as the OTLP specification has it, over gRPC and over HTTP, that keeps the spans it is sent.

It can be told to misbehave: to answer late, to refuse, to be gone and to come back at the same port.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

type Attribute = str | int | float | bool | list[str]
ROOT = ""
WAIT_S = 20.0  # a bound for a hang, not a measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A span as it came, with its resource's attributes."""

    trace_id: str
    span_id: str
    parent_id: str  # ROOT for none
    state: str
    name: str
    kind: str
    attributes: dict[str, Attribute]
    resource: dict[str, Attribute]
    events: tuple[str, ...]
    begun_ns: int
    ended_ns: int
    is_error: bool
    is_parent_remote: bool

    @property
    def role(self) -> Attribute:
        return self.resource["moonshard.role"]


@dataclass
class Collector:
    """What it was sent. Filled by any thread."""

    url: str = ""
    spans: list[Exported] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)  # of each export
    paths: list[str] = field(default_factory=list)  # of each request over HTTP, also of those it knows nothing of
    delay_s: float = 0.0
    is_refusing: bool = False

    def take(self, request: service_pb2.ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.headers.append(headers)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            self.spans += [_exported(span, resource) for scope in of_resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Exported]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Exported:
        (span,) = self.named(name)
        return span

    def below(self, span: Exported) -> list[Exported]:
        """Its children, in the order of time."""
        children = (child for child in self.spans if child.parent_id == span.span_id)
        return sorted(children, key=lambda child: (child.begun_ns, child.ended_ns))

    def names_below(self, span: Exported) -> list[str]:
        return [child.name for child in self.below(span)]

    @property
    def trace_ids(self) -> set[str]:
        return {span.trace_id for span in self.spans}

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_there():  # noqa: ASYNC110  # spans come on another thread
                await asyncio.sleep(0.01)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """The same where there is no event loop."""
        end_s = time.monotonic() + WAIT_S
        while not is_there():
            assert time.monotonic() < end_s, [(span.name, span.role) for span in self.spans]
            time.sleep(0.01)

    def assert_nested(self) -> None:
        """Every span but those of other services' is within its parent's time, and has its trace and its state."""
        by_id = {span.span_id: span for span in self.spans}
        assert len(by_id) == len(self.spans)
        for span in self.spans:
            assert span.begun_ns <= span.ended_ns
            if (parent := by_id.get(span.parent_id)) is not None:
                assert (span.trace_id, span.state) == (parent.trace_id, parent.state)
                slack_ns = 0 if span.resource == parent.resource else 1_000_000  # each process reads the time of day
                assert parent.begun_ns - slack_ns <= span.begun_ns, (parent.name, span.name)
                assert span.ended_ns <= parent.ended_ns + slack_ns or span.is_parent_remote, (parent.name, span.name)


class _Service(service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(
        self, request: service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ExportTraceServiceResponse:
        await asyncio.sleep(self._collector.delay_s)
        if self._collector.is_refusing:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no spans, please")
        self._collector.take(request, {key: str(value) for key, value in context.invocation_metadata() or ()})
        return service_pb2.ExportTraceServiceResponse()


@contextlib.asynccontextmanager
async def grpc_collector(collector: Collector | None = None, port: int = 0) -> AsyncIterator[Collector]:
    """Served during the block; one that is given goes on at a port that it had."""
    collector = collector or Collector()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(collector), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


@contextlib.contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(collector.delay_s)
            collector.paths.append(self.path)
            is_right = (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            if is_right and not collector.is_refusing:
                headers = {key.lower(): value for key, value in self.headers.items()}
                collector.take(service_pb2.ExportTraceServiceRequest.FromString(body), headers)
            self.send_response(200 if is_right and not collector.is_refusing else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _exported(span: trace_pb2.Span, resource: dict[str, Attribute]) -> Exported:
    return Exported(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        state=span.trace_state,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        attributes=_attributes(span.attributes),
        resource=resource,
        events=tuple(event.name for event in span.events),
        begun_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        is_parent_remote=bool(span.flags & trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK),
    )


def _attributes(pairs) -> dict[str, Attribute]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value) -> Attribute:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]  # pyright: ignore[reportReturnType]
    return getattr(value, kind)
