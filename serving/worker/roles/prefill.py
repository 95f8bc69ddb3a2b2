"""The role `prefill`: requests run up to their first token, and their KV goes to the worker that decodes them."""

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import KvConfig
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.engine.events import StepReport
from moonshard.serving.transfer.plane import Plane
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.prefill import PrefillHandoffs
from moonshard.serving.worker.report import kv_transfer_message
from moonshard.serving.worker.roles.role import Outputs, Parts, Role


class PrefillRole(Role):
    """Every request of this role belongs to a handoff, which knows its link."""

    name = "prefill"

    def __init__(self, parts: Parts, plane: Plane, kv: KvConfig):
        self._parts = parts
        self._plane = plane
        self.handoffs = PrefillHandoffs(
            engine=parts.engine,
            pool=parts.pool,
            cache=parts.scheduler.cache,
            plane=plane,
            epoch=parts.epoch,
            quarantine_s=kv.quarantine_s,
            spans=parts.spans,
            on_fault=parts.engine.fail,
            came=parts.came,
        )

    # ---- what a gateway asks

    def run_for(self, run: link_pb2.Run, link: Link) -> None:
        self.check_open()
        request = wire.request_from(run, self._parts.limits)
        self._parts.spans.begin(run)
        self.handoffs.run(run, request, link)

    def credits(self, credits: link_pb2.Credits, link: Link) -> None:
        self.handoffs.credits(credits, link)

    def cancel(self, request_id: bytes, target_epoch: int, link: Link) -> None:
        self.handoffs.cancel(request_id, target_epoch, link)

    def give_up(self, request_id: bytes, link: Link) -> None:
        self.handoffs.give_up(request_id, link)

    def close_link(self, link: Link) -> None:
        self.handoffs.close_link(link)

    # ---- what the engine says

    def before_prefill(self, plan: PrefillPlan) -> None:
        self.handoffs.launching(plan)

    def on_prefill(self, plan: PrefillPlan) -> None:
        self.handoffs.launched(plan)

    def outputs(self, report: StepReport) -> Outputs:
        """Nothing is sent as outputs: first tokens are told by their handoffs."""
        for item in report.emitted:
            self.handoffs.emitted(item)
        return {}

    def turned_down(self, request_id: bytes, message: link_pb2.WorkerMessage) -> None:
        if self.handoffs.owns(request_id):
            self.handoffs.turned_down(request_id, message)

    # ---- its handoffs

    def tick(self) -> None:
        self.handoffs.tick()

    @property
    def num_handoffs(self) -> int:
        return self.handoffs.num_handoffs

    def kv_transfer(self) -> link_pb2.KvTransfer:
        return kv_transfer_message(self._plane, self.handoffs.slab, self.handoffs.num_handoffs)

    def close(self) -> None:
        self._plane.close()
