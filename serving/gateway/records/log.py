"""The log of one request: what happened to it, in order. Metrics, rows, spans and accounts are read from it.

The pipeline appends each event in one place and tells nobody else. A reader is called with every event as it is
appended, for what users watch while a request runs; the last one is `RequestEnded`, when all the rest can be read from
the log. Outputs are as many as tokens: the log keeps the first one, and what they come to (`outputs`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from moonshard.rpc import inference_pb2 as pb
from moonshard.serving.gateway.records.events import (
    AttemptSent,
    LogEvent,
    RequestEnded,
    RequestReceived,
    RequestTokenized,
    TokensArrived,
)
from moonshard.serving.gateway.records.outputs import OutputTally
from moonshard.serving.gateway.records.times import RequestTimes
from moonshard.serving.gateway.request import GenerationRequest
from moonshard.serving.observe.spans.context import TraceContext, TraceSampling

type Reader = Callable[[LogEvent], None]
type OpenReader = Callable[["RequestLog"], Reader | None]  # None: it has no interest in this request


class RequestLog:
    """The log of one request. `context` is its span, or None where it has none: then nothing is told of spans."""

    def __init__(
        self, request: GenerationRequest, readers: Sequence[OpenReader] = (), context: TraceContext | None = None
    ) -> None:
        self.request = request
        self.context = context
        self.events: list[LogEvent] = [RequestReceived(at_ns=request.received_ns)]
        self.outputs = OutputTally()
        self._readers = [reader for open_reader in readers if (reader := open_reader(self)) is not None]

    def append(self, event: LogEvent) -> None:
        """Appends an event and calls the readers, who find it in the log already."""
        if isinstance(event, TokensArrived):
            if event.delta is not None and not self.outputs.first_ns:
                self.events.append(event)
            self.outputs.add(event)
        else:
            self.events.append(event)
        for read in self._readers:
            read(event)
        if isinstance(event, RequestEnded):
            self._readers.clear()  # they hold the log: without them nothing refers back to it, and it is freed at once

    def last[E](self, kind: type[E]) -> E | None:
        """The last event of a kind; of outputs, the only one that is kept."""
        for event in reversed(self.events):
            if isinstance(event, kind):
                return event
        return None

    @property
    def is_sent(self) -> bool:
        """Whether any worker got it, be it one that turned it down."""
        return self.last(AttemptSent) is not None

    @property
    def has_begun(self) -> bool:
        """Whether an output has come, so that its prompt was computed."""
        return self.outputs.first_ns > 0

    @cached_property
    def tokenized(self) -> RequestTokenized:
        """The event of that kind. RuntimeError before there is one."""
        if (event := self.last(RequestTokenized)) is None:
            raise RuntimeError("nothing is known of a request that was not tokenised")
        return event

    @cached_property
    def times(self) -> RequestTimes:
        """The times of a request that has ended."""
        if not isinstance(self.events[-1], RequestEnded):
            raise RuntimeError("the request has not ended")
        return RequestTimes.of(self.events, self.outputs)

    @cached_property
    def timing(self) -> pb.Timing:
        """The timing of a request that has had all its tokens."""
        return self.times.timing()

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of the prompt, as the worker found that computed it first; a worker that goes on with the
        request may find more.
        """
        return min(self.tokenized.num_prompt_tokens - 1, self.outputs.cached_tokens)

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Of these, those that came from tiers below that worker's device; empty where none did."""
        return self.outputs.claimed_by_tier(self.num_cached_tokens)

    def usage(self) -> pb.Usage:
        """What has been counted so far: before the first output nothing, not even the prompt."""
        if not self.has_begun:
            return pb.Usage()
        return pb.Usage(
            prompt_tokens=self.tokenized.num_prompt_tokens,
            completion_tokens=self.outputs.num_tokens,
            cached_tokens=self.num_cached_tokens,
            cached_by_tier=self.cached_by_tier,
        )

    @property
    def finish_reason(self) -> str:
        """The finish reason of the first choice; empty until it has ended."""
        return self.outputs.choices[0].finish_reason

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """The finish reason of each choice of a request that is over; `abort` for one that was cut short, as in the
        metrics.
        """
        choices = range(self.tokenized.num_choices)
        return tuple(self.outputs.choices[choice].finish_reason or "abort" for choice in choices)


class RequestLogs:
    """The logs of one gateway's requests, with their readers. Without `sampling` there are no spans."""

    def __init__(self, readers: Sequence[OpenReader], sampling: TraceSampling | None = None) -> None:
        self._readers = readers
        self._sampling = sampling

    @property
    def has_spans(self) -> bool:
        return self._sampling is not None

    @contextmanager
    def opened(self, request: GenerationRequest) -> Iterator[RequestLog]:
        """A log for a request, which is in the gateway during the block; however it ends, the log says so once."""
        log = RequestLog(request, self._readers, self._context(request))
        try:
            yield log
        except BaseException as error:
            log.append(RequestEnded.by(error))
            raise
        log.append(RequestEnded())

    def _context(self, request: GenerationRequest) -> TraceContext | None:
        context = None if self._sampling is None else self._sampling.begin(request.parent)
        return context if context is not None and context.is_sampled else None
