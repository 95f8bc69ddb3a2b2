"""A worker's part of each request as OpenTelemetry's spans, below the attempt that the gateway names in its message.

One span per request, or per leg of a handoff, from its arrival to its end here, and below it one per phase: queue,
prefill and transfer; or reserve, land, join and decode. They are made from the durations that phases have anyway, when
these are known. A phase that a request was cut off in is no span, but for decode. The gateway decides who is sampled:
a request that nobody wants spans of has no traceparent, and costs a look.
"""

import time
from dataclasses import dataclass, field

from moonshard.rpc import link_pb2
from moonshard.serving.engine.clocks import Phases
from moonshard.serving.engine.events import Emitted
from moonshard.serving.observe.spans.context import TraceContext, parse_context
from moonshard.serving.observe.spans.export import SpanExport
from moonshard.serving.observe.spans.span import CANCELLED, EndedSpan, SpanValue, error_of, outcome_attributes

FAILED = "internal"  # an outcome: the status that clients are told where a worker failed


@dataclass(kw_only=True, slots=True)
class _Part:
    """What is kept of one request while it is here."""

    parent: TraceContext
    context: TraceContext
    begun_ns: int
    attributes: dict[str, SpanValue]
    phases: list[tuple[str, int, int]] = field(default_factory=list)  # name, begin and end
    waited_from_ns: int  # since when it waits for its first step: its arrival, or its join
    decoding_from_ns: int = 0
    decoded_ns: int = 0  # when the last output so far that ended a choice was on the host


class WorkerSpans:
    """The spans of one worker. Without an export nothing is kept. All calls are on the event loop."""

    def __init__(self, export: SpanExport | None = None, *, role: str = "") -> None:
        self._export = export
        self._name = "worker" if role == "both" else f"{role} worker"
        self._decodes = role != "prefill"
        self._parts: dict[bytes, _Part] = {}

    @property
    def num_lost(self) -> int:
        return 0 if self._export is None else self._export.num_lost

    @property
    def num_open(self) -> int:
        """How many requests and legs are here."""
        return len(self._parts)

    def begin(self, run: link_pb2.Run) -> None:
        """A request has arrived, by itself or within a Reserve. One that is here already is not begun again."""
        if self._export is None or not run.traceparent or run.request_id in self._parts:
            return
        parent = parse_context(run.traceparent, run.tracestate)
        if parent is None or not parent.is_sampled:
            return
        now_ns = time.perf_counter_ns()
        self._parts[run.request_id] = _Part(
            parent=parent,
            context=parent.child(),
            begun_ns=now_ns,
            waited_from_ns=now_ns,
            attributes={
                "gen_ai.usage.input_tokens": len(run.prompt_tokens),
                "moonshard.attempt.id": run.request_id.hex(),
            },
        )

    def phase(self, request_id: bytes, name: str, begun_s: float) -> None:
        """A phase of a request has just ended. `begun_s` is of perf_counter."""
        if (part := self._parts.get(request_id)) is not None:
            part.phases.append((name, int(begun_s * 1e9), time.perf_counter_ns()))

    def joined(self, request_id: bytes, landing_from_s: float) -> None:
        """The request's KV has landed, and it waits for its first step."""
        if (part := self._parts.get(request_id)) is not None:
            part.waited_from_ns = time.perf_counter_ns()
            part.phases.append(("land", int(landing_from_s * 1e9), part.waited_from_ns))

    def emitted(self, emitted: Emitted) -> None:
        """An output that closes phases."""
        part = self._parts.get(emitted.output.sequence.request_id)
        if part is None or emitted.phases is None:
            return
        phases = emitted.phases
        if not part.decoding_from_ns:
            _launched(part, phases, emitted.output.num_cached_tokens)
        if emitted.output.finish is not None:
            since_ms = phases.queue_ms + phases.prefill_ms + phases.join_ms + phases.decode_ms
            part.decoded_ns = max(part.decoded_ns, part.waited_from_ns + int(since_ms * 1e6))

    def end(self, request_id: bytes, outcome: str | None = None) -> None:
        """The request is over here. `outcome`: None where all was done; "cancelled"; else a word for what failed."""
        part = self._parts.pop(request_id, None)
        if part is None or self._export is None:
            return
        now_ns = time.perf_counter_ns()
        decoded_ns = now_ns if outcome is not None else part.decoded_ns
        if self._decodes and 0 < part.decoding_from_ns < decoded_ns:
            part.phases.append(("decode", part.decoding_from_ns, decoded_ns))
        for name, begun_ns, ended_ns in part.phases:
            span = EndedSpan(
                name=name,
                kind="internal",
                context=part.context.child(),
                parent=part.context,
                begun_ns=begun_ns,
                ended_ns=ended_ns,
            )
            self._export.append(span)
        whole = EndedSpan(
            name=self._name,
            kind="server",
            context=part.context,
            parent=part.parent,
            begun_ns=part.begun_ns,
            ended_ns=now_ns,
            attributes=part.attributes | outcome_attributes(outcome),
            error=error_of(outcome),
        )
        self._export.append(whole)

    def close(self, outcome: str = CANCELLED) -> None:
        """Everything that still runs is cut off."""
        for request_id in tuple(self._parts):
            self.end(request_id, outcome)


def _launched(part: _Part, phases: Phases, num_cached_tokens: int) -> None:
    """Its first output is here: the phases before its decoding."""
    at_ns = part.waited_from_ns
    if part.waited_from_ns != part.begun_ns:  # it joined
        waits = {"join": phases.join_ms}
    else:
        waits = {"queue": phases.queue_ms, "prefill": phases.prefill_ms}
        part.attributes["gen_ai.usage.cache_read.input_tokens"] = num_cached_tokens
    for name, wait_ms in waits.items():
        end_ns = at_ns + int(wait_ms * 1e6)
        part.phases.append((name, at_ns, end_ns))
        at_ns = end_ns
    part.decoding_from_ns = at_ns
