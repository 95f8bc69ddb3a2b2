"""A decode worker's half of its handoffs: the process around `handoff.reservations`.

Messages become its verbs, and what it asks is done: answers are sent, cells are copied out and checked, what is intact
is landed in the device's pages, and a request whose prompt has landed joins the engine's batch. Nothing is decided
here. Whoever knows the slab's address can write to it, so only a copy that was checked is landed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.rpc import link_pb2
from moonshard.rpc.status import NotFound
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff import reservations as r
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.request import Request
from moonshard.serving.engine.engine import Engine
from moonshard.serving.observe.spans.span import CANCELLED
from moonshard.serving.transfer.plane import Plane
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.spans import WorkerSpans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeHandoffConfig:
    lease_s: float
    quarantine_s: float
    max_cells_per_handoff: int
    max_queued: int
    queue_timeout_s: float


class DecodeHandoffs:
    """The handoffs of one decode worker, all on its event loop. `on_join` is told the link of a request that joins,
    before its first output.
    """

    def __init__(
        self,
        config: DecodeHandoffConfig,
        *,
        engine: Engine,
        batch: r.SchedulerView,
        pool: BlockPool,
        cache: PrefixCache,
        plane: Plane,
        epoch: int,
        on_join: Callable[[bytes, Link], None],
        spans: WorkerSpans,
        on_fault: Callable[[BaseException], None],
    ):
        self.slab = BlockPool(plane.num_partitions, plane.endpoint.num_cells, 1)
        self._engine = engine
        self._plane = plane
        self._on_join = on_join
        self._spans = spans
        side = DecodeSideConfig(
            session=plane.endpoint.session,
            lease_s=config.lease_s,
            quarantine_s=config.quarantine_s,
            max_cells_per_handoff=config.max_cells_per_handoff,
        )
        self._reservations = r.Reservations[Link](
            r.ReservationsConfig(max_queued=config.max_queued, queue_timeout_s=config.queue_timeout_s),
            DecodeSide(side, epoch, pool, self.slab, on_restore=plane.clear),
            pool=pool,
            slab=self.slab,
            cache=cache,
            batch=batch,
        )
        self._background = Background(on_fault)

    @property
    def num_handoffs(self) -> int:
        return self._reservations.num_handoffs

    def reserved_tokens(self, partition: int) -> int:
        """How many tokens the prompts have that are to come to the partition, those that wait for room included."""
        return self._reservations.num_tokens(partition)

    # ---- what the gateway says

    def reserve(self, reserve: link_pb2.Reserve, request: Request, link: Link) -> None:
        """Answers with a Target now or when there is room, or with Failed; not at all where it has joined already.

        Raises:
            InvalidArgument: the message does not hold together; nothing is kept.
            Rejected: the request can never be served here, or another link has one of its id; likewise.
        """
        message, partition = handoff_wire.reserve_from(reserve), wire.partition_from(reserve.run)
        self._do(self._reservations.reserve(message, request, partition, link, time.perf_counter()))

    def landed(self, manifest: link_pb2.Manifest, link: Link) -> None:
        self._do(self._reservations.landed(handoff_wire.manifest_from(manifest), link, time.perf_counter()))

    def start(self, start: link_pb2.Start, link: Link) -> None:
        self._do(self._reservations.start(handoff_wire.start_from(start), link, time.perf_counter()))

    def drained(self, drained: link_pb2.Drained) -> None:
        message = handoff_wire.drained_from(drained)
        self._do(self._reservations.drained(message.handoff, message.writer_epoch, time.perf_counter()))

    def cancel(self, handoff: bytes, link: Link) -> None:
        """Give up a reservation that came over this link. A request that has joined is the engine's."""
        self._do(self._reservations.cancel(handoff, link, time.perf_counter()))

    def left(self, handoff: bytes) -> None:
        """A request that had joined has ended."""
        self._do(self._reservations.left(handoff, time.perf_counter()))

    def close_link(self, link: Link) -> None:
        self._do(self._reservations.close(link, time.perf_counter()))

    # ---- what the worker says

    def admit(self) -> None:
        """Reserves for those who wait, where there is room now."""
        self._do(self._reservations.admit(time.perf_counter()))

    def tick(self) -> None:
        self._do(self._reservations.expire(time.perf_counter()))

    # ---- what is asked

    def _do(self, actions: r.Actions[Link]) -> None:
        for action in actions:
            match action:
                case r.Reserved():
                    self._answer(action)
                case m.Tell():
                    self._tell(action.owner, action.message)
                case r.NotHere():
                    error = NotFound("there is no such handoff here", field="handoff")
                    action.owner.send(wire.failed(action.handoff, error))
                case r.GivenUp():
                    self._spans.end(action.handoff, CANCELLED)
                case r.Enter():
                    self._join(action.join, action.owner)
                case r.CameBack():
                    self._engine.wake()
                    self.admit()
                case m.CopyOut():
                    self._background.spawn(self._copy(action))
                case m.Land():
                    self._land(action)

    def _answer(self, reserved: r.Reserved[Link]) -> None:
        self._spans.phase(reserved.target.handoff, "reserve", reserved.arrived_s)
        queue_ms = (time.perf_counter() - reserved.arrived_s) * 1e3
        target = handoff_wire.target_message(reserved.target, queue_ms=queue_ms)
        reserved.owner.send(link_pb2.WorkerMessage(target=target))

    def _tell(self, link: Link, message: m.Credits | m.Failed) -> None:
        match message:
            case m.Credits():
                link.send(link_pb2.WorkerMessage(credits=handoff_wire.credits_message(message)))
            case m.Failed(handoff=handoff, cause=cause):
                self._spans.end(handoff, cause.name.lower())
                failed = handoff_wire.failed_message(handoff, cause, retry_after_s=message.retry_after_s)
                link.send(link_pb2.WorkerMessage(failed=failed))

    async def _copy(self, copy: m.CopyOut) -> None:
        fault = await self._plane.copy_out(copy.ticket, copy.partition, copy.cells, copy.checksums, copy.pieces)
        if fault is not None:
            logger.warning("a published block is not what its manifest says: %s", fault)
        self._do(self._reservations.verified(copy.ticket, fault is None, time.perf_counter()))
        self._plane.drop(copy.ticket)  # of a handoff that was given up meanwhile

    def _land(self, land: m.Land) -> None:
        pages = self._plane.take(land.ticket)
        self._engine.land(land.partition, land.blocks, pages, lambda: None, ticket=land.ticket)

    def _join(self, join: m.Join, link: Link) -> None:
        land_ms = (time.perf_counter() - join.started_s) * 1e3
        self._spans.joined(join.handoff, join.started_s)
        try:
            is_running = self._engine.join(
                join.request, join.partition, join.block_table, join.tokens, join.guesses, land_ms=land_ms
            )
        except Rejected as error:  # above all: another number of first tokens than of choices
            self._reservations.turned_down(join)
            refusal = wire.rejection(error)
            link.send(wire.failed(join.handoff, refusal))
            self._spans.end(join.handoff, refusal.code.name.lower())
            return
        if is_running:
            self._on_join(join.handoff, link)
        else:
            self.left(join.handoff)
            self._spans.end(join.handoff)
