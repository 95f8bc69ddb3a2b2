"""What happened to a request is told once, in order, to all who read it."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc.status import RequestError, Unavailable
from moonshard.serving.gateway.records.events import (
    FirstDelivered,
    LogEvent,
    RequestEnded,
    RequestReceived,
    RequestTokenized,
    TokensArrived,
)
from moonshard.serving.gateway.records.log import RequestLog, RequestLogs
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.request_metrics import RequestMetrics
from moonshard.serving.gateway.refusals import LimitReached
from moonshard.serving.gateway.request import GenerationRequest, TokenPrompt
from tests.serving.gateway.records.logs import arrived, found, log_of, sent

REQUEST = GenerationRequest(request_id="r", received_ns=7, prompt=TokenPrompt([1]))


class Told:
    """A reader that keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []

    def reader(self, _log: RequestLog) -> "Told":
        return self

    def __call__(self, event: LogEvent) -> None:
        self.events.append(event)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_each_reader_is_told_of_each_event_once_and_in_order():
    told = [Told(), Told()]
    log = log_of(*(each.reader for each in told))
    events = [sent(1), arrived(2), FirstDelivered(), arrived(3), arrived(4), RequestEnded()]
    for event in events:
        log.append(event)
    for each in told:
        assert each.events[1:] == events  # behind that it was tokenised


def test_a_reader_finds_an_event_in_what_the_log_says():
    found: list[tuple[int, int]] = []

    def reader(log: RequestLog):
        return lambda _event: found.append((len(log.events), log.outputs.num_tokens))

    log = log_of(reader)
    for event in (sent(1), arrived(2), arrived(3)):
        log.append(event)
    assert found == [(2, 0), (3, 0), (4, 1), (4, 2)]


def test_of_outputs_the_log_keeps_the_first_however_many_there_are():
    log = log_of()
    log.append(sent(1))
    for at_ns in range(2, 1002):
        log.append(arrived(at_ns))
    assert [type(event) for event in log.events].count(TokensArrived) == 1
    assert (log.outputs.num_tokens, log.outputs.first_ns, log.outputs.last_ns) == (1000, 2, 1001)


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (None, "completed", None),
        (Unavailable("gone"), "unavailable", "gone"),
        (ValueError("the prompt was: SECRET"), "internal_error", "internal error"),
        (asyncio.CancelledError(), "cancelled", None),
        (GeneratorExit(), "cancelled", None),
    ],
)
def test_however_a_request_ends_its_log_says_so_once(error: BaseException | None, outcome: str, message: str | None):
    told, logs = Told(), list[RequestLog]()
    with suppress(BaseException), RequestLogs([told.reader]).opened(REQUEST) as log:
        logs.append(log)
        if error is not None:
            raise error
    assert [type(event) for event in logs[0].events] == [RequestReceived, RequestEnded]
    (ended,) = told.events
    assert isinstance(ended, RequestEnded)
    assert (ended.outcome, ended.message) == (outcome, message)
    assert logs[0].times.received_ns == 7


def test_a_limit_that_refuses_is_counted_under_its_name():
    metrics = GatewayMetrics("kimi")
    logs = RequestLogs([partial(RequestMetrics, metrics)])
    with pytest.raises(LimitReached), logs.opened(REQUEST):
        raise LimitReached("ttft_slo", "too late")
    counted = {
        reason: metrics.registry.get_sample_value(
            "vllm:admission_rejections_total", {"model_name": "kimi", "reason": reason}
        )
        for reason in metrics.rejections
    }
    assert counted == {"max_queued_requests": 0, "ttft_slo": 1, "tenant_tokens_per_minute": 0}


@pytest.mark.usefixtures("no_collector")
def test_a_log_is_freed_with_its_request_though_that_failed():
    """Else each request would stay until the collector comes, which on a serving thread costs all streams a pause."""
    logs = RequestLogs([partial(RequestMetrics, GatewayMetrics("kimi"))])

    def fail() -> weakref.ref[RequestLog]:
        held: list[weakref.ref[RequestLog]] = []
        try:
            with logs.opened(REQUEST) as log:
                held.append(weakref.ref(log))
                log.append(RequestTokenized(num_prompt_tokens=1, max_tokens=1, num_choices=1))
                log.append(sent(8))
                log.append(arrived(9))
                raise Unavailable("gone")
        except RequestError:
            pass
        return held[0]

    assert fail()() is None


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "by_tier", "claimed"),
    [
        (100, 64, {}, {}),
        (100, 64, {"ssd": 16, "host": 32}, {"host": 32, "ssd": 16}),
        (64, 64, {"host": 16}, {"host": 15}),  # the device's 48 come first
        (64, 64, {"ssd": 16, "store": 16, "host": 32}, {"host": 32, "store": 16, "ssd": 15}),
        (100, 40, {"host": 32, "store": 32}, {"host": 32, "store": 8}),  # the scheduler did not find all of it
        (100, 16, {"host": 32, "tape": 32}, {"host": 16}),
        (100, 0, {"host": 32}, {}),
    ],
)
def test_of_what_tiers_gave_the_last_of_the_slowest_is_claimed_last(
    num_prompt: int, num_cached: int, by_tier: dict[str, int], claimed: dict[str, int]
):
    log = log_of(num_prompt_tokens=num_prompt)
    log.append(sent(1))
    assert log.usage().cached_by_tier == {}
    log.append(found(2, num_cached, **by_tier))
    log.append(found(3, 99, host=99))  # of a worker that goes on with it: the first one counts
    assert list(log.cached_by_tier.items()) == list(claimed.items())  # the nearest first
    assert log.usage().cached_by_tier == claimed


@given(
    num_prompt=st.integers(1, 300),
    num_cached=st.integers(0, 400),
    by_tier=st.dictionaries(st.sampled_from(["host", "store", "ssd", "tape"]), st.integers(0, 200)),
)
def test_tiers_never_claim_more_than_was_cached_nor_more_than_they_gave(
    num_prompt: int, num_cached: int, by_tier: dict[str, int]
):
    metrics = GatewayMetrics("kimi")
    log = log_of(partial(RequestMetrics, metrics), num_prompt_tokens=num_prompt)
    log.append(sent(1))
    log.append(found(2, num_cached, **by_tier))
    usage, claimed = log.usage(), dict(log.usage().cached_by_tier)
    assert sum(claimed.values()) <= usage.cached_tokens < num_prompt
    assert all(0 < num <= by_tier[tier] for tier, num in claimed.items())
    counted = {
        sample.labels["tier"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "moonshard_cached_tokens_total"
    }
    assert counted == claimed | {"device": usage.cached_tokens - sum(claimed.values())}
    assert sum(counted.values()) == usage.cached_tokens
    sources = [
        sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:prompt_tokens_by_source_total"
    ]
    assert sum(sources) == num_prompt


def test_tokens_are_counted_while_the_request_runs():
    metrics = GatewayMetrics("kimi")
    log = log_of(partial(RequestMetrics, metrics))
    labels = {"model_name": "kimi", "engine": "0"}
    log.append(sent(1))
    for num_tokens in (1, 2, 3):
        log.append(arrived(num_tokens * 10))
        assert metrics.registry.get_sample_value("vllm:generation_tokens_total", labels) == num_tokens
        gaps = metrics.registry.get_sample_value("vllm:inter_token_latency_seconds_count", labels)
        assert gaps == num_tokens - 1
        assert metrics.registry.get_sample_value("vllm:prompt_tokens_total", labels) == 4
