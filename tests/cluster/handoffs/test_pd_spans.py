"""One trace through real processes: from the client through the gateway to both workers, also where one is killed."""

import itertools
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import wait_until
from tests.cluster.faults import Fleet, Process, running_fleet
from tests.dialling import inspect
from tests.engine_room import long_text
from tests.serving.observe.spans.collector import Collector, Exported, http_collector

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]
SPAN = "00f067aa0ba902b7"
_traces = (f"{number:032x}" for number in itertools.count(1))
WORKER_PHASES = {
    "prefill worker": {"queue", "prefill", "transfer"},
    "decode worker": {"reserve", "land", "join", "decode"},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Told of the collector as other services are: by OpenTelemetry's variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_SERVICE_NAME", "lab")
        with running_fleet(tmp_path_factory.mktemp("fleet"), num_prefill=1, num_decode=2) as fleet:
            yield fleet


def headers_of(trace_id: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{SPAN}-{flags}", "tracestate": "vendor=1"}


def ask_http(fleet: Fleet, trace_id: str, *, num_tokens: int = 20) -> None:
    body = {"prompt": long_text(100, seed=int(trace_id, 16)), "max_tokens": num_tokens, "ignore_eos": True}
    with fleet.http() as http:
        assert http.post("/v1/completions", json=body, headers=headers_of(trace_id)).status_code == 200


def ask_grpc(fleet: Fleet, trace_id: str, *, num_tokens: int = 20) -> None:
    prompt, metadata = long_text(100, seed=int(trace_id, 16)), tuple(headers_of(trace_id).items())
    with fleet.client() as client:
        client.generate(prompt, max_tokens=num_tokens, ignore_eos=True, metadata=metadata)


def trace_of(collector: Collector, trace_id: str, num_parts: int) -> Collector:
    """The spans of one trace, once the gateway and `num_parts` workers have reported theirs."""
    found = Collector()

    def is_whole() -> bool:
        found.spans = [span for span in collector.spans if span.trace_id == trace_id]
        return sum(span.kind == "server" for span in found.spans) > num_parts

    collector.wait(is_whole)
    found.assert_nested()
    return found


def assert_whole(trace: Collector, attempt: Exported) -> None:
    """Both workers are below the attempt that names them, with all their phases."""
    legs = {leg.name: leg for leg in trace.below(attempt)}
    assert legs.keys() == WORKER_PHASES.keys()
    for name, leg in legs.items():
        role = name.removesuffix(" worker")
        assert (leg.role, leg.resource["service.name"]) == (role, "lab")
        assert leg.resource["service.instance.id"] == attempt.attributes[f"moonshard.{role}.worker"]
        assert set(trace.names_below(leg)) == WORKER_PHASES[name]


@pytest.mark.parametrize("ask", [ask_http, ask_grpc])
def test_a_clients_trace_goes_through_the_gateway_to_both_workers(fleet: Fleet, collector: Collector, ask):
    trace_id = next(_traces)
    ask(fleet, trace_id)
    trace = trace_of(collector, trace_id, 2)
    (request,) = (span for span in trace.spans if span.role == "gateway" and span.kind == "server")
    assert (request.parent_id, request.state) == (SPAN, "vendor=1")
    (attempt,) = trace.below(request)
    assert_whole(trace, attempt)
    assert len(trace.spans) == 2 + 2 + 3 + 4
    assert not any(span.is_error for span in trace.spans)


def test_a_clients_word_that_it_is_not_sampled_holds_in_every_process(fleet: Fleet, collector: Collector):
    unsampled, sampled = next(_traces), next(_traces)
    with fleet.http() as http:
        body = {"prompt": long_text(50), "max_tokens": 5}
        assert http.post("/v1/completions", json=body, headers=headers_of(unsampled, "00")).status_code == 200
    ask_http(fleet, sampled)
    trace_of(collector, sampled, 2)
    assert unsampled not in collector.trace_ids


def decoding(fleet: Fleet) -> Process:
    """The worker that decodes now."""
    found: list[Process] = []

    def is_there() -> bool:
        workers = [worker for name, worker in fleet.workers.items() if name.startswith("decode")]
        found[:] = [worker for worker in workers if inspect(worker.address).load.num_running]
        return bool(found)

    assert wait_until(is_there, 10)
    return found[0]


def test_a_worker_that_is_killed_loses_its_part_and_the_trace_goes_on_with_another(fleet: Fleet, collector: Collector):
    trace_id = next(_traces)
    metadata = tuple(headers_of(trace_id).items())
    with (
        fleet.client() as client,
        client.stream(long_text(100, seed=5), max_tokens=1500, ignore_eos=True, metadata=metadata) as stream,
    ):
        for _ in range(20):
            next(stream)
        decoding(fleet).kill()
        assert sum(len(delta.token_ids) for delta in stream) > 1400
    trace = trace_of(collector, trace_id, 2)
    (request,) = (span for span in trace.spans if span.role == "gateway" and span.kind == "server")
    assert not request.is_error
    first, second = trace.below(request)
    assert (first.is_error, first.attributes["error.type"]) == (True, "decode_gone")
    assert not second.is_error
    assert trace.names_below(first) == ["prefill worker"]
    (other,) = trace.below(second)
    assert other.resource["service.instance.id"] == second.attributes["moonshard.decode.worker"]
    assert trace.names_below(other) == ["queue", "prefill", "decode"]
    fleet.restore()


def test_a_client_that_leaves_is_told_of_by_all(fleet: Fleet, collector: Collector):
    trace_id = next(_traces)
    metadata = tuple(headers_of(trace_id).items())
    with (
        fleet.client() as client,
        client.stream(long_text(100, seed=6), max_tokens=1500, ignore_eos=True, metadata=metadata) as stream,
    ):
        for _ in range(10):
            next(stream)
    trace = trace_of(collector, trace_id, 2)
    outcomes = {span.name: span.attributes.get("moonshard.outcome") for span in trace.spans if span.kind != "internal"}
    assert outcomes == {
        "text_completion kimi_k2": "cancelled",
        "attempt": "cancelled",
        "prefill worker": None,
        "decode worker": "cancelled",
    }
    assert not any(span.is_error for span in trace.spans)


def _lines_of_exports(process: Process) -> list[str]:
    return [line for line in process.log().splitlines() if "export" in line]


def test_a_collector_that_is_gone_is_one_line_in_each_log_and_ends_nothing_late(fleet: Fleet, collector: Collector):
    """The last test here: it ends the workers."""
    collector.is_refusing = True
    for _ in range(3):
        ask_http(fleet, next(_traces))
        ask_grpc(fleet, next(_traces))
        assert wait_until(lambda: fleet.metric("moonshard_lost_spans_total") > 0, 20)
    assert wait_until(lambda: fleet.metric("moonshard_gateway_lost_spans_total") >= 12, 20)
    told = (fleet["gateway"], fleet["prefill 0"])
    assert wait_until(lambda: all(_lines_of_exports(process) for process in told), 20)
    for process in fleet.processes:
        process.signal(signal.SIGTERM)
        assert process.running.wait(20) == 0
    for process in told:
        (line,) = _lines_of_exports(process)
        assert "400" in line
