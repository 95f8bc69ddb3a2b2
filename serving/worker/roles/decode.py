"""The role `decode`: KV is taken from prefill workers and decoded, and requests are prefilled here too where asked."""

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.events import StepReport
from moonshard.serving.transfer.endpoint import Endpoint
from moonshard.serving.transfer.plane import Plane
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.decode import DecodeHandoffConfig, DecodeHandoffs
from moonshard.serving.worker.report import kv_transfer_message
from moonshard.serving.worker.roles.requests import ServedRequests
from moonshard.serving.worker.roles.role import Outputs, Parts, Role


def handoff_config(config: Config, num_cells: int) -> DecodeHandoffConfig:
    """`num_cells` are the cells of each partition."""
    kv, gateway = config.kv, config.gateway
    return DecodeHandoffConfig(
        lease_s=kv.lease_s,
        quarantine_s=kv.quarantine_s,
        max_cells_per_handoff=kv.slots_per_handoff or max(1, num_cells // 4),
        max_queued=gateway.max_queued_requests,
        queue_timeout_s=gateway.queue_timeout_s,
    )


class DecodeRole(Role):
    """A handoff knows its link until it has joined the engine; from then on the link is kept as for any request."""

    name = "decode"

    def __init__(self, parts: Parts, plane: Plane, config: Config):
        self._parts = parts
        self._plane = plane
        self._requests = ServedRequests(parts.engine, parts.spans, parts.limits, parts.came)
        self.handoffs = DecodeHandoffs(
            handoff_config(config, plane.endpoint.num_cells),
            engine=parts.engine,
            batch=parts.scheduler,
            pool=parts.pool,
            cache=parts.scheduler.cache,
            plane=plane,
            epoch=parts.epoch,
            on_join=self._requests.joined,
            spans=parts.spans,
            on_fault=parts.engine.fail,
        )

    # ---- what a gateway asks

    def run(self, run: link_pb2.Run, link: Link) -> None:
        self.check_open()
        self._requests.submit(run, link)

    def reserve(self, reserve: link_pb2.Reserve, link: Link) -> None:
        self.check_open()
        request = wire.request_from(reserve.run, self._parts.limits)
        self._parts.spans.begin(reserve.run)
        self.handoffs.reserve(reserve, request, link)

    def landed(self, manifest: link_pb2.Manifest, link: Link) -> None:
        self.handoffs.landed(manifest, link)

    def start(self, start: link_pb2.Start, link: Link) -> None:
        wire.check_first_tokens(start, self._parts.limits)
        self.handoffs.start(start, link)

    def drained(self, drained: link_pb2.Drained, link: Link) -> None:
        self.handoffs.drained(drained)

    def cancel(self, request_id: bytes, target_epoch: int, link: Link) -> None:
        self.give_up(request_id, link)

    def give_up(self, request_id: bytes, link: Link) -> None:
        if self._requests.is_of(request_id, link):
            self._end(request_id)
        else:
            self.handoffs.cancel(request_id, link)

    def close_link(self, link: Link) -> None:
        """Gives up the link's handoffs before its requests, so that room that a request leaves does not go to one of
        them.
        """
        self.handoffs.close_link(link)
        for request_id in self._requests.of(link):
            self._end(request_id)

    def _end(self, request_id: bytes) -> None:
        self._requests.end(request_id)
        self.handoffs.left(request_id)

    # ---- what the engine says

    def outputs(self, report: StepReport) -> Outputs:
        outputs = self._requests.outputs(report)
        for request_id in report.ended:
            self.handoffs.left(request_id)
        self.handoffs.admit()  # the request ahead of its slot may have one now, or a choice has left its slot
        return outputs

    def turned_down(self, request_id: bytes, message: link_pb2.WorkerMessage) -> None:
        self._requests.turned_down(request_id, message)
        self.handoffs.left(request_id)

    # ---- its handoffs

    def tick(self) -> None:
        self.handoffs.tick()

    @property
    def num_handoffs(self) -> int:
        return self.handoffs.num_handoffs

    def reserved_tokens(self, partition: int) -> int:
        return self.handoffs.reserved_tokens(partition) + self._parts.scheduler.landed_tokens(partition)

    @property
    def endpoint(self) -> Endpoint:
        return self._plane.endpoint

    def kv_transfer(self) -> link_pb2.KvTransfer:
        return kv_transfer_message(self._plane, self.handoffs.slab, self.handoffs.num_handoffs)

    def close(self) -> None:
        self._plane.close()
