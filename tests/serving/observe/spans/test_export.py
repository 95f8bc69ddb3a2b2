"""Spans reach a collector over either protocol, and a collector that is not there costs spans and nothing else."""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import Event
from typing import Any, Literal

import pytest

from moonshard.serving.config.keys import TelemetryConfig
from moonshard.serving.observe.spans import export as export_module
from moonshard.serving.observe.spans.context import TraceContext
from moonshard.serving.observe.spans.export import BATCH_SPANS, MAX_WAITING_SPANS, SpanExport, exporting
from moonshard.serving.observe.spans.otlp import traces_url
from moonshard.serving.observe.spans.span import EndedSpan
from tests.serving.observe.spans.collector import ROOT, Collector, grpc_collector, http_collector

BOUND_S = export_module.FLUSH_TIMEOUT_S + export_module.ABORT_TIMEOUT_S + 1.0
_numbers = itertools.count(1)


def span(**fields: Any) -> EndedSpan:
    now_ns = time.perf_counter_ns()
    made = EndedSpan(
        name="a span",
        kind="internal",
        context=TraceContext(b"t" * 16, next(_numbers).to_bytes(8), 1, "a=1,b=2"),
        parent=None,
        begun_ns=now_ns - 5_000_000,
        ended_ns=now_ns,
    )
    return replace(made, **fields)


def telemetry(url: str, protocol: Literal["grpc", "http"] = "grpc") -> TelemetryConfig:
    return TelemetryConfig(endpoint=url, protocol=protocol, service_name="mine")


class Sink:
    """An exporter that keeps spans, and stands still or fails when it is told to."""

    def __init__(self) -> None:
        self.spans: list[EndedSpan] = []
        self.batches: list[int] = []
        self.trouble: str | Exception | None = None
        self.may_go_on = Event()
        self.may_go_on.set()

    def export(self, spans: Sequence[EndedSpan]) -> str | None:
        self.may_go_on.wait(20)
        if isinstance(self.trouble, Exception):
            raise self.trouble
        if self.trouble is None:
            self.spans += spans
            self.batches.append(len(spans))
        return self.trouble

    def close(self) -> None:
        self.may_go_on.set()


@pytest.fixture(autouse=True)
def _exporters_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has just heard, this one hears too."""
    monkeypatch.setattr(logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter"), "filters", [])


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What we log. The exporters' own loggers end below the root, where pytest looks too."""
    return [record.getMessage() for record in caplog.records if record.name == export_module.__name__]


def started(sink: Sink) -> SpanExport:
    export = SpanExport(lambda: sink, "nowhere")
    export.start()
    return export


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_span_arrives_as_it_was_made(protocol: Literal["grpc", "http"], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    parent = TraceContext(b"t" * 16, b"parent!!", 1, "a=1,b=2")
    unix_ns = time.time_ns()
    attributes = {"a": "text", "b": 7, "c": 0.5, "d": True, "e": ("x", "y")}
    async with grpc_collector() as over_grpc:
        with http_collector() as over_http:
            collector = over_grpc if protocol == "grpc" else over_http
            async with exporting(telemetry(collector.url, protocol), role="decode", instance="here:1") as export:
                assert export is not None
                now_ns = time.perf_counter_ns()
                export.append(
                    span(kind="server", parent=parent, attributes=attributes, events=(("half", now_ns),), error="bad")
                )
                export.append(span(kind="client"))
                export.append(span(parent=parent))
    first, second, third = collector.spans
    assert (first.trace_id, first.parent_id) == ((b"t" * 16).hex(), b"parent!!".hex())
    assert (first.name, first.kind, first.state, first.events) == ("a span", "server", "a=1,b=2", ("half",))
    assert first.attributes == attributes | {"e": ["x", "y"]}
    assert [each.is_error for each in collector.spans] == [True, False, False]
    assert [each.kind for each in collector.spans] == ["server", "client", "internal"]
    assert [each.is_parent_remote for each in collector.spans] == [True, False, False]
    assert second.parent_id == ROOT
    assert third.parent_id == first.parent_id
    assert first.ended_ns - first.begun_ns == 5_000_000
    assert abs(first.ended_ns - unix_ns) < 10e9
    wanted = {"service.name": "mine", "service.instance.id": "here:1", "moonshard.role": "decode"}
    assert first.resource.items() >= (wanted | {"deployment.environment": "lab"}).items()
    assert collector.headers[0]["api-key"] == "secret"
    assert export.num_lost == 0


async def test_without_an_endpoint_there_is_no_export():
    async with exporting(TelemetryConfig(), role="gateway", instance="here:1") as export:
        assert export is None


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_the_path_is_added_where_it_is_not_named(endpoint: str, url: str):
    assert traces_url(endpoint) == url


async def test_a_whole_url_is_used_as_it_is():
    with http_collector() as collector:
        config = replace(telemetry(f"{collector.url}/ingest", "http"), whole_url=True)
        for each in (config, replace(config, whole_url=False)):
            async with exporting(each, role="decode", instance="here:1") as export:
                assert export is not None
                export.append(span())
    assert collector.paths == ["/ingest", "/ingest/v1/traces"]


@pytest.mark.parametrize("num_spans", [1, BATCH_SPANS, 10 * BATCH_SPANS + 1])
def test_every_span_is_sent_once_and_in_order(num_spans: int):
    sink = Sink()
    export = started(sink)
    made = [span() for _ in range(num_spans)]
    for each in made:
        export.append(each)
    export.close()
    assert sink.spans == made
    assert max(sink.batches) <= BATCH_SPANS
    assert export.num_lost == 0


def test_spans_do_not_wait_for_a_full_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export_module, "PERIOD_S", 0.02)
    sink = Sink()
    export = started(sink)
    export.append(span())
    end_s = time.monotonic() + 10
    while not sink.spans and time.monotonic() < end_s:
        time.sleep(0.01)
    assert len(sink.spans) == 1
    export.close()


def test_a_full_batch_is_sent_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export_module, "PERIOD_S", 1000.0)
    sink = Sink()
    export = started(sink)
    for _ in range(BATCH_SPANS):
        export.append(span())
    end_s = time.monotonic() + 10
    while not sink.spans and time.monotonic() < end_s:
        time.sleep(0.01)
    assert len(sink.spans) == BATCH_SPANS
    export.close()


def test_memory_is_bounded_and_what_is_lost_is_counted():
    sink = Sink()
    sink.may_go_on.clear()
    export = started(sink)
    num_spans = MAX_WAITING_SPANS + 5 * BATCH_SPANS
    begun_s = time.perf_counter()
    for _ in range(num_spans):
        export.append(span())
    assert time.perf_counter() - begun_s < 5  # nothing waited for the sink
    assert 0 < export.num_lost <= 5 * BATCH_SPANS
    export.close()
    assert len(sink.spans) + export.num_lost == num_spans
    export.append(span())  # too late
    assert len(sink.spans) + export.num_lost == num_spans + 1


@pytest.mark.parametrize("trouble", ["it is full", ValueError("it broke")])
def test_trouble_is_logged_once_and_so_is_its_end(
    trouble: str | Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(export_module, "PERIOD_S", 0.01)
    caplog.set_level(logging.WARNING)
    sink = Sink()
    export = started(sink)

    def send(num_spans: int) -> None:
        num_done = export.num_lost + len(sink.spans)
        for _ in range(num_spans):
            export.append(span())
        while export.num_lost + len(sink.spans) < num_done + num_spans:
            time.sleep(0.005)

    for sink.trouble in (None, trouble, None, None):
        for _ in range(3):
            send(2)
    export.close()
    assert export.num_lost == 6
    lost, again = ours(caplog)
    assert lost.startswith("spans cannot be exported to nowhere and are lost: ")
    assert str(trouble) in lost
    assert again == "spans are exported to nowhere again"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_the_end_is_bounded_and_the_log_short_where_nobody_listens(
    protocol: Literal["grpc", "http"], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    async with grpc_collector() as collector:
        gone = collector.url
    async with exporting(telemetry(gone, protocol), role="decode", instance="here:1") as export:
        assert export is not None
        for _ in range(3 * BATCH_SPANS):
            export.append(span())
        await asyncio.sleep(0.3)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < BOUND_S
    assert export.num_lost == 3 * BATCH_SPANS
    (text,) = ours(caplog)
    assert "onnection refused" in text
    assert not logging.getLogger("opentelemetry.exporter").propagate


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_the_end_is_bounded_where_the_collector_is_too_slow(protocol: Literal["grpc", "http"]):
    async with grpc_collector() as over_grpc:
        with ExitStack() as stack:
            over_http = stack.enter_context(http_collector())
            collector: Collector = over_grpc if protocol == "grpc" else over_http
            collector.delay_s = 6.0
            async with exporting(telemetry(collector.url, protocol), role="decode", instance="here:1") as export:
                assert export is not None
                export.append(span())
                begun_s = time.monotonic()
            assert time.monotonic() - begun_s < BOUND_S


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_what_a_collector_refuses_is_lost_and_its_words_are_logged(
    protocol: Literal["grpc", "http"], caplog: pytest.LogCaptureFixture
):
    async with grpc_collector() as over_grpc:
        with http_collector() as over_http:
            collector: Collector = over_grpc if protocol == "grpc" else over_http
            collector.is_refusing = True
            async with exporting(telemetry(collector.url, protocol), role="decode", instance="here:1") as export:
                assert export is not None
                export.append(span())
            assert export.num_lost == 1
    (text,) = ours(caplog)
    assert ("no spans, please" if protocol == "grpc" else "400") in text


async def test_a_collector_that_dies_and_comes_back_gets_the_spans_of_then():
    async with grpc_collector() as collector:
        port = int(collector.url.rpartition(":")[2])
        async with exporting(telemetry(collector.url), role="decode", instance="here:1") as export:
            assert export is not None
            export.append(span(name="before"))
            await collector.until(lambda: bool(collector.named("before")))
    async with exporting(telemetry(collector.url), role="decode", instance="here:1") as export:
        assert export is not None
        export.append(span(name="meanwhile"))
        await asyncio.sleep(1.2)  # it has been tried
        async with grpc_collector(collector, port):
            export.append(span(name="after"))
            await collector.until(lambda: bool(collector.named("after")))
            assert collector.named("meanwhile")  # tried again
    assert export.num_lost == 0
