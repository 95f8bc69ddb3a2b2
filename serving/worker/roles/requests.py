"""The requests that an engine serves to their last token, and the links that their tokens go to."""

from moonshard.rpc import link_pb2
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.observe.spans.span import CANCELLED
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.roles.role import Outputs
from moonshard.serving.worker.spans import WorkerSpans


class ServedRequests:
    def __init__(self, engine: Engine, spans: WorkerSpans, limits: wire.Limits, came: wire.Came):
        self._engine = engine
        self._spans = spans
        self._limits = limits
        self._came = came
        self._links: dict[bytes, Link] = {}

    def submit(self, run: link_pb2.Run, link: Link) -> None:
        """Raises InvalidArgument, or Rejected as the engine does; nothing is kept then."""
        request = wire.request_from(run, self._limits)
        resumed = wire.resumed_from(run, self._limits)
        self._spans.begin(run)
        self._engine.submit(request, resumed, wire.partition_from(run))
        self._links[request.id] = link

    def joined(self, request_id: bytes, link: Link) -> None:
        """The engine has taken a request whose KV has landed."""
        self._links[request_id] = link

    def is_of(self, request_id: bytes, link: Link) -> bool:
        return self._links.get(request_id) is link

    def of(self, link: Link) -> list[bytes]:
        return [request_id for request_id, owner in self._links.items() if owner is link]

    def end(self, request_id: bytes) -> None:
        """Ends a request without telling its link."""
        del self._links[request_id]
        self._spans.end(request_id, CANCELLED)
        self._engine.cancel(request_id)

    def outputs(self, report: StepReport) -> Outputs:
        """A step's outputs by link. Requests that ended with it are removed."""
        by_link: Outputs = {}
        for item in report.emitted:
            link = self._links[item.output.sequence.request_id]
            by_link.setdefault(link, []).append(wire.sequence_output(item, self._came))
        for request_id in report.ended:
            if self._links.pop(request_id, None) is not None:
                self._spans.end(request_id)
        return by_link

    def turned_down(self, request_id: bytes, message: link_pb2.WorkerMessage) -> None:
        if (link := self._links.pop(request_id, None)) is not None:
            link.send(message)
