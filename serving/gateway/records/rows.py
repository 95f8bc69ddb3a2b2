"""A row for every request that the pipeline was asked, however it ended, on demand one for every token, and spans.

Rows are as many as `moonshard_requests` counts: what was no request (no JSON, a wrong type, too large a body) has
none. Names of tenants and sessions are hashed, and neither text nor tokens are kept. Left out: what is told to
Prometheus (`record`) and to whoever pays (`accounts`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError
from moonshard.serving.gateway.records.assignment import Leg
from moonshard.serving.gateway.records.metrics import outcome_of
from moonshard.serving.gateway.records.record import RequestRecord
from moonshard.serving.gateway.records.spans import RequestSpan, RequestSpans
from moonshard.serving.gateway.records.stamps import Stamps
from moonshard.serving.gateway.request import GenerationRequest
from moonshard.serving.observe.rows.recorder import Recorder, Rows
from moonshard.serving.observe.rows.schema import REQUESTS, TOKENS, Row
from moonshard.serving.observe.spans.span import bounded, fitting

MAX_ERROR_CHARS = 500
UNEXPECTED = "internal error"  # for what its client is told no more of: it may quote a prompt


class RequestTrace:
    """One request's. What is not known yet when it ends is null in its row."""

    def __init__(
        self, request: GenerationRequest, stamps: Stamps, tokens: Rows | None, span: RequestSpan | None
    ) -> None:
        self.record: RequestRecord | None = None
        self.span = span  # None: none is wanted
        self._request = request
        self._stamps = stamps
        self._tokens = tokens
        self._name = bounded(request.request_id)
        self._num_tokens: Counter[int] = Counter()  # by choice

    def tokenized(self, run: link_pb2.Run, record: RequestRecord) -> None:
        """`run` is what workers will be sent, and `record` will be told of all that follows."""
        self.record = record
        if self.span is not None:
            self.span.mark(run)

    def arrived(self, arrived_ns: int, delta: pb.Delta) -> None:
        """The client is told of these tokens."""
        if self._tokens is None:
            return
        index = self._num_tokens[delta.choice]
        self._num_tokens[delta.choice] += len(delta.token_ids)
        for offset in range(len(delta.token_ids)):
            self._tokens.append((self._name, delta.choice, index + offset, arrived_ns))

    def row(self, model: str, outcome: str, error: str | None) -> Row:
        caller = self._request.caller
        return (
            self._name,
            *_attempt_id(self.record),
            model,
            _hash(caller.tenant.name),
            None if caller.affinity_key is None else caller.affinity_key.hex(),
            outcome,
            error,
            *_sizes(self._request, self.record),
            *_places(self.record),
            *_times(self._stamps, is_complete=outcome == "completed"),
            *_worker_times(self._stamps),
        )


class RequestTraces:
    """Of one gateway. Without a recorder nothing is recorded, and without `spans` there are none."""

    def __init__(
        self, model: str, recorder: Recorder | None, spans: RequestSpans | None, *, has_tokens: bool = False
    ) -> None:
        self.has_spans = spans is not None
        self._model = model
        self._spans = spans
        self._requests = None if recorder is None else recorder.rows(REQUESTS)
        self._tokens = None if recorder is None or not has_tokens else recorder.rows(TOKENS)

    @contextmanager
    def entry(self, request: GenerationRequest, stamps: Stamps) -> Iterator[RequestTrace]:
        """The block is the request's time here; its row is appended, and its spans are made, as it ends."""
        span = None if self._spans is None else self._spans.begin(request)
        trace, outcome, message = RequestTrace(request, stamps, self._tokens, span), "completed", None
        try:
            yield trace
        except BaseException as error:
            outcome, message = outcome_of(error), _told(error)
            raise
        finally:
            stamps.end()
            if self._requests is not None:
                self._requests.append(trace.row(self._model, outcome, message))
            if self._spans is not None and span is not None:
                self._spans.end(span, stamps, trace.record, outcome)


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


def _told(error: BaseException) -> str | None:
    """What a row says of it: nothing of a client that left."""
    if isinstance(error, RequestError):
        return error.message[:MAX_ERROR_CHARS] or None
    return UNEXPECTED if isinstance(error, Exception) else None


def _attempt_id(record: RequestRecord | None) -> Row:
    return (None,) if record is None or record.assignment is None else (record.assignment.attempt_id.hex(),)


def _sizes(request: GenerationRequest, record: RequestRecord | None) -> Row:
    """finish_reason to num_retries; cached tokens are known with the first output only.

    What a client asked is checked by the time that there is a record.
    """
    if record is None:
        return None, fitting(request.n), fitting(request.max_tokens), None, None, 0, 0
    usage = record.usage()
    num_cached = usage.cached_tokens if usage.prompt_tokens else None
    return (
        record.finish_reason or None,
        request.n,
        record.max_tokens,
        record.num_prompt,
        num_cached,
        usage.completion_tokens,
        record.stamps.num_retries,
    )


def _places(record: RequestRecord | None) -> Row:
    if record is None or record.assignment is None:
        return (None,) * 7
    assignment = record.assignment
    return *_leg(assignment.prompt_leg), *_leg(assignment.decode), assignment.is_local_prefill


def _leg(leg: Leg) -> Row:
    return leg.worker, leg.epoch.hex(), leg.partition


def _times(stamps: Stamps, *, is_complete: bool) -> Row:
    """received_ns to lost_ns, of a request that has ended."""
    phases_ns = stamps.phases_ns(is_complete=is_complete)
    ttft_ns = stamps.first_delivered_ns - stamps.received_ns if stamps.first_delivered_ns else None
    lost_ns = stamps.lost_ns if stamps.sent_ns else None
    return stamps.received_ns, ttft_ns, stamps.e2e_ns, *phases_ns, lost_ns


def _worker_times(stamps: Stamps) -> Row:
    """decode_queue_ms to join_ms: null where no worker said so."""
    if not stamps.first_arrival_ns:
        return (None,) * 11
    timing, transfer = stamps.worker_timing(), stamps.transfer
    decode_ms = timing.worker_decode_ms if stamps.has_decoded else None
    own = stamps.reserved_ms, timing.worker_queue_ms, timing.worker_prefill_ms, decode_ms, timing.wire_ms
    if transfer is None:
        return *own, *(None,) * 6
    return (
        *own,
        timing.handoff_gap_ms if len(stamps.first_two_ns) == 2 else None,
        timing.transfer_ms,
        timing.exposed_transfer_ms,
        stamps.transferred_ns,
        timing.land_ms if stamps.has_joined else None,
        timing.join_ms if stamps.has_joined else None,
    )
