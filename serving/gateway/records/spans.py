"""A request as OpenTelemetry's spans: one of the gateway's, below the client's, and below it one per attempt.

Made when the request has ended, from its log; workers make their own, below their attempt's. An attempt's span has the
first half of the attempt's id as its own: nobody need keep the two together. Attributes are named by OpenTelemetry's
GenAI semantic conventions, and as vLLM and SGLang do for what these leave out. No span has text of any kind, nor the
names of tenants and sessions; what was no request has none, as it has no row (`rows`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.rpc import link_pb2
from moonshard.serving.control.sampling_parameters import PARAMETERS
from moonshard.serving.gateway.records.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptSent,
    LogEvent,
    RequestEnded,
    RequestTokenized,
)
from moonshard.serving.gateway.records.log import Reader, RequestLog
from moonshard.serving.gateway.records.times import RequestTimes
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest
from moonshard.serving.observe.spans.context import SPAN_ID_BYTES, TraceContext, with_span
from moonshard.serving.observe.spans.export import SpanExport
from moonshard.serving.observe.spans.span import EndedSpan, SpanValue, bounded, error_of, fitting, outcome_attributes

PROVIDER = "moonshard"


@dataclass(frozen=True, slots=True)
class RequestSpans:
    """The spans of one gateway, which clients reach at `host`."""

    export: SpanExport
    model: str
    host: str

    def reader(self, log: RequestLog) -> Reader | None:
        """None where the request's trace is not sampled."""
        if (context := log.context) is None:
            return None

        def read(event: LogEvent) -> None:
            if isinstance(event, RequestEnded):
                for span in self._spans(log, context, event):
                    self.export.append(span)

        return read

    def _spans(self, log: RequestLog, context: TraceContext, ended: RequestEnded) -> Iterator[EndedSpan]:
        failure = None if ended.is_complete else ended.outcome
        yield self._whole(log, context, failure)
        attempts = tuple(_attempts(log.events))
        for number, attempt in enumerate(attempts, 1):
            cause = attempt.cause or (failure if number == len(attempts) else None)
            yield _attempt_span(context, number, attempt, cause)

    def _whole(self, log: RequestLog, context: TraceContext, failure: str | None) -> EndedSpan:
        """`failure`: how it ended, where that was not well. What was never sent has one."""
        request, times = log.request, log.times
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        return EndedSpan(
            name=f"{operation} {self.model}",
            kind="server",
            context=context,
            parent=request.parent,
            begun_ns=times.received_ns,
            ended_ns=times.ended_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": bounded(request.model or self.model),
                "gen_ai.response.model": self.model,
                "gen_ai.response.id": bounded(request.request_id),
                "gen_ai.request.id": bounded(request.request_id),
                "server.address": self.host,
                **_asked(request),
                **_sizes(log),
                **_times(times),
                **outcome_attributes(failure),
            },
            events=(("first_token", times.first_delivered_ns),) if times.first_delivered_ns else (),
            error=error_of(failure),
        )


@dataclass(frozen=True, slots=True)
class _EndedAttempt:
    sent: AttemptSent
    ended_ns: int
    cause: str | None  # why it failed


def _attempts(events: Sequence[LogEvent]) -> Iterator[_EndedAttempt]:
    """The spans of attempts, in their order. An attempt that was sent has ended by the time that its request has."""
    sent, cause = None, None
    for event in events:
        match event:
            case AttemptSent():
                sent, cause = event, None
            case AttemptFailed():
                cause = event.cause
            case AttemptEnded(at_ns=at_ns) if sent is not None:
                yield _EndedAttempt(sent, at_ns, cause)
            case _:
                pass


def _attempt_span(request: TraceContext, number: int, attempt: _EndedAttempt, cause: str | None) -> EndedSpan:
    assignment = attempt.sent.assignment
    address, _, port = assignment.decode.worker.rpartition(":")
    return EndedSpan(
        name="attempt",
        kind="client",
        context=request.child(assignment.attempt_id[:SPAN_ID_BYTES]),
        parent=request,
        begun_ns=attempt.sent.at_ns,
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


class LostSpanMetrics(Collector):
    """Whether spans can be exported."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "moonshard_gateway_lost_spans", "Spans of the gateway that could not be exported.", self._export.num_lost
        )


def mark(run: link_pb2.Run, context: TraceContext | None) -> None:
    """What is sent for the request names its span; None: workers make none."""
    if context is not None:
        run.traceparent, run.tracestate = context.traceparent, context.state


def mark_attempt(run: link_pb2.Run) -> None:
    """The same with the attempt's own span, once it has its id."""
    if run.traceparent:
        run.traceparent = with_span(run.traceparent, run.request_id[:SPAN_ID_BYTES])


def _asked(request: GenerationRequest) -> dict[str, SpanValue]:
    """What the client asked for, without text, and without numbers that no span can hold."""
    asked = {each.name: request.sampling.get(each.name) for each in PARAMETERS if each.is_in_spans}
    asked["choice.count"] = None if request.n == 1 else request.n
    said = {name: fitting(value) if isinstance(value, int) else value for name, value in asked.items()}
    return {f"gen_ai.request.{name}": value for name, value in said.items() if value is not None}


def _sizes(log: RequestLog) -> dict[str, SpanValue]:
    """The sizes of a prompt that was tokenised; cached tokens are known with the first output."""
    if (tokenized := log.last(RequestTokenized)) is None:
        return {}
    usage = log.usage()
    sizes: dict[str, SpanValue] = {
        "gen_ai.request.max_tokens": tokenized.max_tokens,
        "gen_ai.usage.input_tokens": tokenized.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "moonshard.num_retries": log.times.num_retries,
    }
    if log.is_sent:
        sizes["gen_ai.response.finish_reasons"] = log.finish_reasons
    if log.has_begun:
        sizes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return sizes


def _times(times: RequestTimes) -> dict[str, SpanValue]:
    """Times in seconds where the attribute is a convention's, in milliseconds where it is our own."""
    told: dict[str, SpanValue] = {"gen_ai.latency.e2e": times.e2e_ns / 1e9}
    if times.sent_ns:
        told["moonshard.gateway_queue_ms"] = (times.sent_ns - times.received_ns) / 1e6
    if times.ttft_ns is not None:
        ttft_s = times.ttft_ns / 1e9
        told["gen_ai.response.time_to_first_chunk"] = told["gen_ai.latency.time_to_first_token"] = ttft_s
    if not times.outputs.first_ns:
        return told
    timing = times.worker_timing()
    told |= {
        "gen_ai.latency.time_in_queue": timing.worker_queue_ms / 1e3,
        "gen_ai.latency.time_in_model_prefill": timing.worker_prefill_ms / 1e3,
        "gen_ai.latency.time_in_model_decode": timing.worker_decode_ms / 1e3,
        "moonshard.wire_ms": timing.wire_ms,
        "moonshard.lost_ms": timing.lost_ms,
    }
    if times.reserved_ms is not None:
        told["moonshard.decode_queue_ms"] = times.reserved_ms
    if times.transfer is not None:
        joined = ("land_ms", "join_ms") if times.outputs.has_joined else ()
        own = ("handoff_gap_ms", "transfer_ms", "exposed_transfer_ms", *joined)
        told |= {f"moonshard.{name}": getattr(timing, name) for name in own}
    return told
