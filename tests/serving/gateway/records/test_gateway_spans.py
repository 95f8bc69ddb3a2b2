"""A client's span is above the gateway's, an attempt's below it, and workers are told which is theirs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import get_args

import httpx
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InvalidArgument
from moonshard.serving.config.keys import GatewayConfig, TelemetryConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.pipeline.test_gateway_cancel import post_raw
from tests.serving.gateway.records.test_gateway_metrics import samples
from tests.serving.gateway.workers.fleet import (
    HANG_S,
    NUM_TOKENS,
    PROMPT,
    Form,
    ask,
    decode_worker,
    first_to_reach,
    fleet,
    front_of,
    prefill_worker,
    until,
)
from tests.serving.observe.spans.collector import ROOT, Collector, Exported, grpc_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
ASKED = {"model": "kimi", "prompt": [1, 2, 3, 4], "max_tokens": 5}
SECRET = "a secret of the client"
FORMS: tuple[Form, ...] = get_args(Form.__value__)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with grpc_collector() as collector:
        yield collector


@asynccontextmanager
async def traced(
    collector: Collector, worker: FakeWorker, gateway: GatewayConfig | None = None, **telemetry: object
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    """The collector has every span of the gateway when the block has ended."""
    defaults = {"endpoint": collector.url, "protocol": "grpc"}
    async with asyncio.timeout(60), fake_worker.serving(worker) as port:
        own = gateway or GatewayConfig(port=0, grpc_port=0, drain_timeout_s=1)
        config = make_config(own, FIXTURE, [f"127.0.0.1:{port}"])
        made = TelemetryConfig(**(defaults | telemetry))  # pyright: ignore[reportArgumentType]
        async with (
            serving(replace(config, telemetry=made)) as running,
            httpx.AsyncClient(base_url=running.http, timeout=HANG_S, trust_env=False) as http,
        ):
            await running.gateway.pool.wait_ready()
            yield running, http


def told(run: link_pb2.Run) -> tuple[str, str]:
    """Trace and span, as a worker was told them."""
    version, trace_id, span_id, flags = run.traceparent.split("-")
    assert (version, flags) == ("00", "01")
    return trace_id, span_id


def request_span(collector: Collector) -> Exported:
    (span,) = (span for span in collector.spans if span.kind == "server")
    return span


async def test_over_http_the_clients_span_is_the_parent_and_attributes_are_those_of_the_conventions(
    collector: Collector, worker: FakeWorker
):
    worker.script.cached_tokens = 2
    body = ASKED | {"temperature": 0.5, "n": 2, "seed": 3}
    async with traced(collector, worker) as (running, http):
        address = running.gateway.pool.links[0].address
        response = await http.post("/v1/completions", json=body, headers=HEADERS)
        assert response.status_code == 200
    span = request_span(collector)
    assert (span.trace_id, span.parent_id, span.state) == (TRACE, SPAN, "vendor=1")
    assert (span.name, span.is_error, span.is_parent_remote) == ("text_completion kimi", False, True)
    assert span.events == ("first_token",)
    assert span.resource["service.name"] == "moonshard"
    assert (span.role, span.resource["service.instance.id"]) == ("gateway", running.http.removeprefix("http://"))
    assert (
        span.attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "moonshard",
            "gen_ai.request.model": "kimi",
            "gen_ai.response.model": "kimi",
            "gen_ai.response.id": response.json()["id"],
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 3,
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.max_tokens": 5,
            "gen_ai.usage.input_tokens": 4,
            "gen_ai.usage.output_tokens": 10,
            "gen_ai.usage.cache_read.input_tokens": 2,
            "gen_ai.response.finish_reasons": ["length", "length"],
            "server.address": "127.0.0.1",
            "moonshard.num_retries": 0,
        }.items()
    )
    for name in ("time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill", "time_in_model_decode"):
        assert 0 < float(str(span.attributes[f"gen_ai.latency.{name}"])) < HANG_S
    assert not {"error.type", "moonshard.outcome"} & span.attributes.keys()
    (attempt,) = collector.below(span)
    assert (attempt.name, attempt.kind, attempt.is_error) == ("attempt", "client", False)
    assert f"{attempt.attributes['server.address']}:{attempt.attributes['server.port']}" == address
    assert attempt.attributes["moonshard.attempt.id"] == worker.runs[0].request_id.hex()
    assert told(worker.runs[0]) == (TRACE, attempt.span_id)
    assert worker.runs[0].tracestate == "vendor=1"
    collector.assert_nested()


async def test_over_grpc_the_clients_span_is_the_parent(collector: Collector, worker: FakeWorker):
    async with traced(collector, worker) as (running, _), AsyncClient(running.grpc) as client:
        await client.generate([1, 2, 3], max_tokens=2, request_id="mine", metadata=tuple(HEADERS.items()))
    span = request_span(collector)
    assert (span.trace_id, span.parent_id, span.state) == (TRACE, SPAN, "vendor=1")
    assert span.attributes["gen_ai.response.id"] == "mine"
    assert told(worker.runs[0]) == (TRACE, collector.one("attempt").span_id)


async def test_a_chat_is_one_and_none_of_its_text_is_told(collector: Collector, worker: FakeWorker):
    body = {"model": "kimi", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "stop": [SECRET]}
    async with traced(collector, worker) as (_, http):
        assert (await http.post("/v1/chat/completions", json=body | {"user": SECRET})).status_code == 200
        assert (await http.post("/v1/chat/completions", json=body | {"model": "other"})).status_code == 404
        assert (await http.post("/v1/chat/completions", json=body | {"stop": [SECRET * 100]})).status_code == 400
    assert [span.name for span in collector.spans if span.kind == "server"] == ["chat kimi"] * 3
    asked = {**collector.spans[0].attributes}
    assert asked["gen_ai.operation.name"] == "chat"
    told = [str(value) for span in collector.spans for value in (span.name, *span.attributes.values())]
    assert not [text for text in told if SECRET in text]


async def test_what_clients_call_things_is_told_up_to_a_length_and_numbers_up_to_64_bits(
    collector: Collector, worker: FakeWorker
):
    body = ASKED | {"model": "m" * 10_000, "seed": 2**63, "n": 2**64}
    async with traced(collector, worker) as (running, http), AsyncClient(running.grpc) as client:
        assert (await http.post("/v1/completions", json=body)).status_code == 404
        await client.generate([1, 2, 3], max_tokens=2, seed=2**64 - 1)
        with pytest.raises(InvalidArgument):
            await client.generate([1, 2, 3], max_tokens=2, request_id="i" * 10_000)
    refused, answered, too_long = (span.attributes for span in collector.spans if span.kind == "server")
    assert refused["gen_ai.request.model"] == "m" * 512
    assert refused["gen_ai.response.model"] == "kimi"
    assert not {"gen_ai.request.seed", "gen_ai.request.choice.count"} & refused.keys()
    assert too_long["gen_ai.response.id"] == too_long["gen_ai.request.id"] == "i" * 512
    assert "gen_ai.request.seed" not in answered


@pytest.mark.parametrize("form", FORMS)
async def test_without_a_clients_span_the_gateway_begins_a_trace_for_each(form: Form, collector: Collector):
    prefill, decode = prefill_worker(), decode_worker()
    async with fleet(prefill, decode, telemetry=TelemetryConfig(endpoint=collector.url)) as running:
        await asyncio.gather(*(ask(running, form) for _ in range(5)))
    spans = [span for span in collector.spans if span.kind == "server"]
    assert [span.parent_id for span in spans] == [ROOT] * 5
    assert len(collector.trace_ids) == 5
    assert {told(run) for run in prefill.runs} == {told(reserve.run) for reserve in decode.reserves}
    attempts = collector.named("attempt")
    assert {told(run) for run in prefill.runs} == {(attempt.trace_id, attempt.span_id) for attempt in attempts}
    for span in spans:
        assert collector.names_below(span) == ["attempt"]
        assert span.attributes["moonshard.transfer_ms"] == 0.05
    for attempt in attempts:
        legs = [attempt.attributes[f"moonshard.{leg}.worker"] for leg in ("prefill", "decode")]
        assert legs == [link.address for link in running.gateway.pool.links]
    collector.assert_nested()


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-x"])
async def test_a_malformed_parent_begins_a_trace(traceparent: str, collector: Collector, worker: FakeWorker):
    async with traced(collector, worker) as (running, http):
        headers = {"traceparent": traceparent, "tracestate": "vendor=1"}
        assert (await http.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200
        async with AsyncClient(running.grpc) as client:
            await client.generate([1, 2, 3], max_tokens=2, metadata=tuple(headers.items()))
    spans = [span for span in collector.spans if span.kind == "server"]
    assert [(span.parent_id, span.state) for span in spans] == [(ROOT, "")] * 2
    assert TRACE not in collector.trace_ids
    assert {told(run)[0] for run in worker.runs} == collector.trace_ids


async def test_a_trace_that_is_not_sampled_has_no_span_and_workers_are_not_told(
    collector: Collector, worker: FakeWorker
):
    async with traced(collector, worker) as (running, http):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        assert (await http.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200
        async with AsyncClient(running.grpc) as client:
            await client.generate([1, 2, 3], max_tokens=2, metadata=tuple(headers.items()))
        assert (await http.post("/v1/completions", json=ASKED, headers=HEADERS)).status_code == 200
    assert [bool(run.traceparent) for run in worker.runs] == [False, False, True]
    assert collector.names_below(request_span(collector)) == ["attempt"]
    assert len(collector.spans) == 2


async def test_the_ratio_is_of_traces_that_begin_here_unless_it_is_of_all(collector: Collector, worker: FakeWorker):
    async with traced(collector, worker, sampled_ratio=0.0) as (_, http):
        await http.post("/v1/completions", json=ASKED)
        await http.post("/v1/completions", json=ASKED, headers=HEADERS)
    assert [bool(run.traceparent) for run in worker.runs] == [False, True]
    async with traced(collector, worker, sampled_ratio=0.0, parent_based=False) as (_, http):
        await http.post("/v1/completions", json=ASKED, headers=HEADERS)
    assert len(worker.runs) == 3
    assert not worker.runs[2].traceparent
    assert len(collector.spans) == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", ["step 0", "step 3"])
async def test_a_retry_is_another_attempt_of_the_same_trace(form: Form, point: str, collector: Collector):
    workers = [FakeWorker(epoch=b"1" * 16), FakeWorker(epoch=b"2" * 16)]
    for worker in workers:
        worker.script.points.hold(point)
    async with fleet(*workers, telemetry=TelemetryConfig(endpoint=collector.url)) as running:
        asking = asyncio.create_task(ask(running, form))
        victim = await first_to_reach(point, workers)
        victim.die()
        await asking
    span = request_span(collector)
    assert (span.is_error, span.attributes["moonshard.num_retries"]) == (False, 1)
    assert span.attributes["gen_ai.usage.output_tokens"] == 2 * NUM_TOKENS
    first, second = collector.below(span)
    assert [first.attributes["moonshard.attempt.number"], second.attributes["moonshard.attempt.number"]] == [1, 2]
    assert (first.is_error, first.attributes["error.type"]) == (True, "unavailable")
    assert not second.is_error
    assert first.ended_ns <= second.begun_ns
    (other,) = (worker for worker in workers if worker is not victim)
    assert told(victim.runs[0]) == (span.trace_id, first.span_id)
    assert told(other.runs[0]) == (span.trace_id, second.span_id)
    collector.assert_nested()


async def test_a_handoff_that_fails_is_an_attempt_that_says_why(collector: Collector):
    prefill, decode = prefill_worker(), decode_worker()
    corrupt = link_pb2.Failed(code=15, message="bad sum", cause=link_pb2.HANDOFF_CAUSE_CORRUPT)
    decode.script.points.failures["start"] = corrupt
    async with fleet(prefill, decode, telemetry=TelemetryConfig(endpoint=collector.url)) as running:
        decode.script.points.hold("start")
        asking = asyncio.create_task(ask(running, "grpc"))
        await decode.script.points.reached("start")
        decode.script.points.release()
        await asking
    first, *_, last = collector.below(request_span(collector))
    assert (first.is_error, first.attributes["error.type"]) == (True, "corrupt")
    assert (last.is_error, "error.type" in last.attributes) == (False, False)


async def test_failures_have_their_type_and_refusals_have_no_attempt(collector: Collector, worker: FakeWorker):
    async with traced(collector, worker) as (_, http):
        assert (await http.post("/v1/completions", json=ASKED | {"temperature": 7})).status_code == 400
        worker.script.failure = link_pb2.Failed(code=8, message=SECRET)
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
        worker.script.failure, worker.script.fail_after_tokens = None, 2
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 500
    refused, full, broken = (span for span in collector.spans if span.kind == "server")
    types = [span.attributes["error.type"] for span in (refused, full, broken)]
    assert types == ["invalid_argument", "resource_exhausted", "internal"]
    assert all(span.is_error for span in (refused, full, broken))
    assert [len(collector.below(span)) for span in (refused, full, broken)] == [0, 1, 1]
    (attempt,) = collector.below(broken)
    assert (attempt.is_error, attempt.attributes["error.type"]) == (True, "internal")
    assert broken.attributes["gen_ai.usage.output_tokens"] == 2
    assert broken.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert "gen_ai.response.finish_reasons" not in refused.attributes
    collector.assert_nested()


async def test_a_client_that_leaves_is_no_error(collector: Collector, worker: FakeWorker):
    worker.script.max_tokens_sent = 3
    async with traced(collector, worker) as (running, _):
        reader, writer = await post_raw(running, ASKED | {"stream": True})
        for _ in range(3):
            await reader.readuntil(b"data: ")
        writer.close()
        await running.gateway.wait_idle()
        await until(lambda: worker.num_running == 0)  # else it takes the next one's leave to step
        worker.script.may_step.set()
        async with AsyncClient(running.grpc) as client, client.stream([1, 2, 3], max_tokens=5) as stream:
            await anext(stream)
        await running.gateway.wait_idle()
    spans = [span for span in collector.spans if span.kind == "server"]
    assert [span.attributes["moonshard.outcome"] for span in spans] == ["cancelled"] * 2
    for span in spans:
        (attempt,) = collector.below(span)
        assert attempt.attributes["moonshard.outcome"] == "cancelled"
        assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
        for each in (span, attempt):
            assert not each.is_error
            assert "error.type" not in each.attributes
    collector.assert_nested()


async def test_nobody_waits_for_a_collector_that_is_slow(collector: Collector, worker: FakeWorker):
    collector.delay_s = 30.0
    async with traced(collector, worker) as (_, http):
        for _ in range(20):
            begun_s = time.monotonic()
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
            assert time.monotonic() - begun_s < 5
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < 10
    assert collector.spans == []


async def test_a_collector_that_is_gone_costs_spans_which_are_counted(worker: FakeWorker):
    async with grpc_collector() as gone:
        pass
    gone.is_refusing = True
    async with traced(gone, worker) as (_, http):
        for _ in range(20):
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
        async with grpc_collector(gone, int(gone.url.rpartition(":")[2])):
            async with asyncio.timeout(HANG_S):
                while (await samples(http))["moonshard_gateway_lost_spans_total",] < 40:  # noqa: ASYNC110  # of a thread
                    await asyncio.sleep(0.05)
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 200


async def test_without_telemetry_nothing_is_told_and_nothing_counted(worker: FakeWorker):
    async with front_of(worker, GatewayConfig(port=0, grpc_port=0)) as (running, http):
        assert (await http.post("/v1/completions", json=ASKED, headers=HEADERS)).status_code == 200
        async with AsyncClient(running.grpc) as client:
            await client.generate(PROMPT, max_tokens=2, metadata=tuple(HEADERS.items()))
        assert not [key for key in await samples(http) if key[0].startswith("moonshard_gateway_lost_spans")]
    assert [(run.traceparent, run.tracestate) for run in worker.runs] == [("", "")] * 2
