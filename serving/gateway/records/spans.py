"""A request as OpenTelemetry's spans: one of the gateway's, below the client's, and below it one per attempt.

Made when the request has ended, from the stamps that are taken anyway; workers make their own, below their attempt's.
An attempt's span has the first half of the attempt's id as its own: nobody need keep the two together. Attributes are
named by OpenTelemetry's GenAI semantic conventions, and as vLLM and SGLang do for what these leave out. Left out here:
text of any kind, names of tenants and sessions, and what was no request, which has no record either (`rows`).
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.rpc import link_pb2
from moonshard.serving.gateway.failures import HandoffFailed
from moonshard.serving.gateway.records.assignment import SentAttempt
from moonshard.serving.gateway.records.metrics import outcome_of
from moonshard.serving.gateway.records.record import RequestRecord
from moonshard.serving.gateway.records.stamps import Stamps
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest
from moonshard.serving.observe.spans.context import SPAN_ID_BYTES, Sampling, TraceContext, with_span
from moonshard.serving.observe.spans.export import SpanExport
from moonshard.serving.observe.spans.span import Span, Value, bounded, error_of, fitting, outcome_attributes

PROVIDER = "moonshard"
_ASKED = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


class RequestSpan:
    """Of one request whose trace is sampled."""

    def __init__(self, request: GenerationRequest, context: TraceContext) -> None:
        self.context = context
        self._request = request

    def mark(self, run: link_pb2.Run) -> None:
        """What is sent for this request says so; each attempt puts its own span in (`mark_attempt`)."""
        run.traceparent, run.tracestate = self.context.traceparent, self.context.state

    def spans(
        self, model: str, host: str, stamps: Stamps, record: RequestRecord | None, outcome: str
    ) -> Iterator[Span]:
        """`outcome`: as counted. What was never sent has one."""
        failure = None if outcome == "completed" else outcome
        operation = "chat" if isinstance(self._request.prompt, ChatPrompt) else "text_completion"
        yield Span(
            name=f"{operation} {model}",
            kind="server",
            context=self.context,
            parent=self._request.parent,
            begun_ns=stamps.received_ns,
            ended_ns=stamps.ended_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": bounded(self._request.model or model),
                "gen_ai.response.model": model,
                "gen_ai.response.id": bounded(self._request.request_id),
                "gen_ai.request.id": bounded(self._request.request_id),
                "server.address": host,
                **_asked(self._request),
                **({} if record is None else _told(record)),
                **_times(stamps),
                **outcome_attributes(failure),
            },
            events=(("first_token", stamps.first_delivered_ns),) if stamps.first_delivered_ns else (),
            error=error_of(failure),
        )
        for number, attempt in enumerate(() if record is None else record.attempts, 1):
            is_last = record is not None and number == len(record.attempts)
            cause = _cause(attempt) or (failure if is_last else None)
            yield self._attempt(number, attempt, cause)

    def _attempt(self, number: int, attempt: SentAttempt, cause: str | None) -> Span:
        assignment = attempt.assignment
        address, _, port = assignment.decode.worker.rpartition(":")
        return Span(
            name="attempt",
            kind="client",
            context=self.context.child(assignment.attempt_id[:SPAN_ID_BYTES]),
            parent=self.context,
            begun_ns=attempt.sent_ns,
            ended_ns=attempt.ended_ns,
            attributes={
                "server.address": address.strip("[]"),
                "server.port": int(port),
                "moonshard.attempt.id": assignment.attempt_id.hex(),
                "moonshard.attempt.number": number,
                "moonshard.prefill.worker": assignment.prompt_leg.worker,
                "moonshard.prefill.partition": assignment.prompt_leg.partition,
                "moonshard.decode.worker": assignment.decode.worker,
                "moonshard.decode.partition": assignment.decode.partition,
                **outcome_attributes(cause),
            },
            error=error_of(cause),
        )


class RequestSpans:
    """Of one gateway, which clients reach at `host`."""

    def __init__(self, export: SpanExport, sampling: Sampling, *, model: str, host: str) -> None:
        self._export = export
        self._sampling = sampling
        self._model = model
        self._host = host

    def begin(self, request: GenerationRequest) -> RequestSpan | None:
        """None where the request's trace is not sampled: nothing of it is kept, and nobody is told of it."""
        context = self._sampling.begin(request.parent)
        return RequestSpan(request, context) if context.is_sampled else None

    def end(self, span: RequestSpan, stamps: Stamps, record: RequestRecord | None, outcome: str) -> None:
        """It has ended, as its stamps say."""
        for made in span.spans(self._model, self._host, stamps, record, outcome):
            self._export.append(made)


class LostSpanMetrics(Collector):
    """Whether spans can be exported."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "moonshard_gateway_lost_spans", "Spans of the gateway that could not be exported.", self._export.num_lost
        )


def mark_attempt(run: link_pb2.Run) -> None:
    """Once the attempt has its id."""
    if run.traceparent:
        run.traceparent = with_span(run.traceparent, run.request_id[:SPAN_ID_BYTES])


def _asked(request: GenerationRequest) -> dict[str, Value]:
    """What the client said, but for text, and for numbers that no span can hold."""
    asked = {name: getattr(request, name) for name in _ASKED}
    asked["choice.count"] = None if request.n == 1 else request.n
    said = {name: fitting(value) if isinstance(value, int) else value for name, value in asked.items()}
    return {f"gen_ai.request.{name}": value for name, value in said.items() if value is not None}


def _told(record: RequestRecord) -> dict[str, Value]:
    """Of a prompt that was tokenised; what was cached is known with the first output."""
    usage = record.usage()
    told: dict[str, Value] = {
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.usage.input_tokens": record.num_prompt,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "moonshard.num_retries": record.stamps.num_retries,
    }
    if record.is_sent:
        told["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.has_begun:
        told["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return told


def _times(stamps: Stamps) -> dict[str, Value]:
    """In seconds under names of others, in milliseconds under our own."""
    times: dict[str, Value] = {"gen_ai.latency.e2e": stamps.e2e_ns / 1e9}
    if stamps.sent_ns:
        times["moonshard.gateway_queue_ms"] = (stamps.sent_ns - stamps.received_ns) / 1e6
    if stamps.first_delivered_ns:
        times["gen_ai.response.time_to_first_chunk"] = times["gen_ai.latency.time_to_first_token"] = stamps.ttft_s()
    if not stamps.first_arrival_ns:
        return times
    timing = stamps.worker_timing()
    times |= {
        "gen_ai.latency.time_in_queue": timing.worker_queue_ms / 1e3,
        "gen_ai.latency.time_in_model_prefill": timing.worker_prefill_ms / 1e3,
        "gen_ai.latency.time_in_model_decode": timing.worker_decode_ms / 1e3,
        "moonshard.wire_ms": timing.wire_ms,
        "moonshard.lost_ms": timing.lost_ms,
    }
    if stamps.reserved_ms is not None:
        times["moonshard.decode_queue_ms"] = stamps.reserved_ms
    if stamps.transfer is not None:
        joined = ("land_ms", "join_ms") if stamps.has_joined else ()
        own = ("handoff_gap_ms", "transfer_ms", "exposed_transfer_ms", *joined)
        times |= {f"moonshard.{name}": getattr(timing, name) for name in own}
    return times


def _cause(attempt: SentAttempt) -> str | None:
    """Why it failed, as `retries` counts it where a handoff did."""
    error = attempt.error
    if error is None:
        return None
    return error.cause.name.lower() if isinstance(error, HandoffFailed) else outcome_of(error)
