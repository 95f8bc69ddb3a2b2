"""The role `both`: requests are prefilled and decoded where they are, and no KV moves."""

from moonshard.rpc import link_pb2
from moonshard.serving.engine.events import StepReport
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.roles.requests import ServedRequests
from moonshard.serving.worker.roles.role import Outputs, Parts, Role


class AggregatedRole(Role):
    name = "both"

    def __init__(self, parts: Parts):
        self._requests = ServedRequests(parts.engine, parts.spans, parts.limits, parts.came)

    def run(self, run: link_pb2.Run, link: Link) -> None:
        self.check_open()
        self._requests.submit(run, link)

    def cancel(self, request_id: bytes, target_epoch: int, link: Link) -> None:
        self.give_up(request_id, link)

    def give_up(self, request_id: bytes, link: Link) -> None:
        if self._requests.is_of(request_id, link):
            self._requests.end(request_id)

    def close_link(self, link: Link) -> None:
        for request_id in self._requests.of(link):
            self._requests.end(request_id)

    def outputs(self, report: StepReport) -> Outputs:
        return self._requests.outputs(report)

    def turned_down(self, request_id: bytes, message: link_pb2.WorkerMessage) -> None:
        self._requests.turned_down(request_id, message)
