"""A row for every request that the pipeline was asked, however it ended, and on demand one for every token.

Rows are as many as `moonshard_requests` counts: what was no request (no JSON, a wrong type, too large a body) has
none. Names of tenants and sessions are hashed, and neither text nor tokens are kept.
"""

import hashlib
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.serving.gateway.records.events import (
    AttemptSent,
    Leg,
    LogEvent,
    RequestEnded,
    RequestTokenized,
    TokensArrived,
)
from moonshard.serving.gateway.records.log import RequestLog
from moonshard.serving.gateway.records.times import RequestTimes
from moonshard.serving.observe.rows.recorder import Recorder, UnwrittenRows
from moonshard.serving.observe.rows.schema import REQUESTS, TOKENS, TableRow
from moonshard.serving.observe.spans.span import bounded, fitting

MAX_ERROR_CHARS = 500


class RecordedRequests:
    """Where a gateway's requests are recorded, and their tokens where these are wanted."""

    def __init__(self, model: str, recorder: Recorder, *, has_tokens: bool = False) -> None:
        self.model = model
        self.requests = recorder.rows(REQUESTS)
        self.tokens = recorder.rows(TOKENS) if has_tokens else None

    def reader(self, log: RequestLog) -> "RequestRows":
        return RequestRows(self, log)


class RequestRows:
    """A reader of one log: appends the request's row when it ends, and a token's row as it arrives."""

    def __init__(self, recorded: RecordedRequests, log: RequestLog) -> None:
        self._recorded = recorded
        self._log = log
        self._name = bounded(log.request.request_id)

    def __call__(self, event: LogEvent) -> None:
        match event:
            case TokensArrived():
                if self._recorded.tokens is not None:
                    self._append_tokens(self._recorded.tokens, event)
            case RequestEnded():
                self._recorded.requests.append(self._row(event))
            case _:
                pass

    def _append_tokens(self, tokens: UnwrittenRows, arrived: TokensArrived) -> None:
        """Appends rows for the tokens that the client is told of."""
        if (delta := arrived.delta) is None:
            return
        choice = self._log.outputs.choices[delta.choice]
        for index in range(choice.num_tokens - choice.num_new_tokens, choice.num_tokens):
            tokens.append((self._name, delta.choice, index, arrived.at_ns))

    def _row(self, ended: RequestEnded) -> TableRow:
        """The row of a request. What is not known when it ends is null."""
        log, caller, sent = self._log, self._log.request.caller, self._log.last(AttemptSent)
        return (
            self._name,
            None if sent is None else sent.assignment.attempt_id.hex(),
            self._recorded.model,
            _hash(caller.tenant.name),
            None if caller.affinity_key is None else caller.affinity_key.hex(),
            ended.outcome,
            None if ended.message is None else ended.message[:MAX_ERROR_CHARS],
            *_sizes(log),
            *_places(sent),
            *_times(log.times),
            *_worker_times(log.times),
        )


class LostRowMetrics(Collector):
    """Whether records can be written."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "moonshard_trace_failures",
            "Parts of records that could not be written, or not all of them.",
            self._recorder.num_failures,
        )
        yield CounterMetricFamily(
            "moonshard_trace_lost_rows", "Requests and tokens that are in no record.", self._recorder.num_lost
        )


def _hash(name: str) -> str:
    return hashlib.sha256(b"moonshard trace\0" + name.encode()).hexdigest()[:16]


def _sizes(log: RequestLog) -> TableRow:
    """finish_reason to num_retries; cached tokens are known with the first output only.

    What a client asked is checked by the time that it is tokenised.
    """
    request, tokenized = log.request, log.last(RequestTokenized)
    if tokenized is None:
        return None, fitting(request.n), fitting(request.max_tokens), None, None, None, 0, 0
    usage = log.usage()
    return (
        log.finish_reason or None,
        tokenized.num_choices,
        tokenized.max_tokens,
        tokenized.num_prompt_tokens,
        usage.cached_tokens if log.has_begun else None,
        sum(usage.cached_by_tier.values()) or None,
        usage.completion_tokens,
        log.times.num_retries,
    )


def _places(sent: AttemptSent | None) -> TableRow:
    """The columns that say where the last attempt ran."""
    if sent is None:
        return (None,) * 7
    assignment = sent.assignment
    return *_leg(assignment.prompt_leg), *_leg(assignment.decode), assignment.is_local_prefill


def _leg(leg: Leg) -> TableRow:
    return leg.worker, leg.epoch.hex(), leg.partition


def _times(times: RequestTimes) -> TableRow:
    """received_ns to lost_ns."""
    lost_ns = times.lost_ns if times.sent_ns else None
    return times.received_ns, times.ttft_ns, times.e2e_ns, *times.phases_ns, lost_ns


def _worker_times(times: RequestTimes) -> TableRow:
    """The columns decode_queue_ms to join_ms; null where no worker reported them."""
    if not times.outputs.first_ns:
        return (None,) * 11
    timing, outputs = times.worker_timing(), times.outputs
    decode_ms = timing.worker_decode_ms if outputs.has_decoded else None
    own = times.reserved_ms, timing.worker_queue_ms, timing.worker_prefill_ms, decode_ms, timing.wire_ms
    if times.transfer is None:
        return *own, *(None,) * 6
    return (
        *own,
        None if times.handoff_gap_ns is None else timing.handoff_gap_ms,
        timing.transfer_ms,
        timing.exposed_transfer_ms,
        times.transferred_ns,
        timing.land_ms if outputs.has_joined else None,
        timing.join_ms if outputs.has_joined else None,
    )
