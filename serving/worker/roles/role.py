"""The verbs that every role of a worker has. What a role does not do is refused here, with the same words for all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from moonshard.kv.blocks import BlockPool
from moonshard.rpc import link_pb2
from moonshard.rpc.status import FailedPrecondition, Unavailable
from moonshard.serving.config.keys import WorkerRole
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.transfer.endpoint import Endpoint
from moonshard.serving.wire.link import Link
from moonshard.serving.wire.requests import Came, Limits
from moonshard.serving.worker.spans import WorkerSpans

type Outputs = dict[Link, list[link_pb2.SequenceOutput]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What every role works with."""

    engine: Engine
    scheduler: Scheduler
    pool: BlockPool
    spans: WorkerSpans
    limits: Limits
    epoch: int  # the worker's
    came: Came  # how many tokens of a request's prompt came from tiers below the device's pages


def nothing_came(request_id: bytes) -> Mapping[str, int]:
    """For a worker without tiers below the device's pages."""
    del request_id
    return {}


class Role(ABC):
    """One worker's role, on its event loop.

    The verbs of gateways raise RequestError about the request that the message names, and Rejected where the scheduler
    refuses it. The verbs of the engine are `EngineEvents`, without the outputs, which the worker sends.
    """

    name: ClassVar[WorkerRole]
    is_draining = False

    def check_open(self) -> None:
        if self.is_draining:
            raise Unavailable("this worker is shutting down", retry_after_s=1.0)

    def _publishes_no_kv(self) -> FailedPrecondition:
        return FailedPrecondition(f"a worker of role {self.name} publishes no KV", field="role")

    def _takes_no_kv(self) -> FailedPrecondition:
        return FailedPrecondition(f"a worker of role {self.name} takes no KV", field="role")

    # ---- what a gateway asks

    def run(self, run: link_pb2.Run, link: Link) -> None:
        """Serve a request here to its last token."""
        self.check_open()
        reason = f"a worker of role {self.name} does not decode; its runs have a target"
        raise FailedPrecondition(reason, field="role")

    def run_for(self, run: link_pb2.Run, link: Link) -> None:
        """Prefill for the worker that the run's target is of."""
        raise self._publishes_no_kv()

    def credits(self, credits: link_pb2.Credits, link: Link) -> None:
        raise self._publishes_no_kv()

    def reserve(self, reserve: link_pb2.Reserve, link: Link) -> None:
        raise self._takes_no_kv()

    def landed(self, manifest: link_pb2.Manifest, link: Link) -> None:
        raise self._takes_no_kv()

    def start(self, start: link_pb2.Start, link: Link) -> None:
        raise self._takes_no_kv()

    def drained(self, drained: link_pb2.Drained, link: Link) -> None:
        raise self._takes_no_kv()

    @abstractmethod
    def cancel(self, request_id: bytes, target_epoch: int, link: Link) -> None:
        """End a request that came over this link, or a leg of a handoff; do nothing for any other."""

    @abstractmethod
    def give_up(self, request_id: bytes, link: Link) -> None:
        """End whatever there is of a request that came over this link and is malformed, without telling anybody."""

    @abstractmethod
    def close_link(self, link: Link) -> None:
        """End everything that came over the link."""

    # ---- what the engine says

    def before_prefill(self, plan: PrefillPlan) -> None:  # noqa: B027  # no role must
        """Nothing is published."""

    def on_prefill(self, plan: PrefillPlan) -> None:  # noqa: B027  # no role must
        """Nothing is published."""

    @abstractmethod
    def outputs(self, report: StepReport) -> Outputs:
        """The outputs of a step that are to be sent, without what a handoff keeps."""

    @abstractmethod
    def turned_down(self, request_id: bytes, message: link_pb2.WorkerMessage) -> None:
        """A request waited too long for its first step and is gone: `message` says so to whoever asked for it."""

    # ---- its handoffs, where it has any

    def tick(self) -> None:  # noqa: B027  # no role must
        """Called at each tick of the worker's clock."""

    @property
    def num_handoffs(self) -> int:
        return 0

    def reserved_tokens(self, partition: int) -> int:
        """Tokens of handoffs between their Reserve and their first step. Nobody else counts these: their gateway no
        longer does.
        """
        del partition
        return 0

    @property
    def endpoint(self) -> Endpoint | None:
        """Where KV for this worker is written to."""
        return None

    def kv_transfer(self) -> link_pb2.KvTransfer | None:
        """How the KV plane is, where there is one."""
        return None

    def close(self) -> None:  # noqa: B027  # no role must
        """Blocks; called on a thread, when the engine has ended."""
