"""A decode worker's half of its handoffs: the process around `handoff.decode`.

The side decides; here cells are copied out and checked, what is intact is landed in the device's pages, and a request
whose prompt has landed joins the engine's batch. Reservations that find no room wait here, first come first served, as
requests wait in the scheduler. Left out: who may write the slab (`transfer.plane`, and nobody can be kept out).
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.kv.transfer import ChecksumMismatch
from moonshard.rpc import link_pb2
from moonshard.rpc.status import NotFound
from moonshard.serving.control.batching.queue import NeverFits, Rejected
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.request import Request
from moonshard.serving.engine.engine import Engine
from moonshard.serving.observe.spans.span import CANCELLED
from moonshard.serving.transfer.plane import KvPlane
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
    max_queued: int  # reservations that wait for room; an equal share is each partition's, however many others have
    queue_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A reservation without room yet."""

    reserve: m.Reserve
    link: Link
    arrived_s: float


class DecodeHandoffs:
    """All on the event loop. `on_join` is told the link of a request that joins, before its first output."""

    def __init__(
        self,
        config: DecodeHandoffConfig,
        *,
        engine: Engine,
        pool: BlockPool,
        cache: PrefixCache,
        plane: KvPlane,
        epoch: int,
        on_join: Callable[[bytes, Link], None],
        spans: WorkerSpans,
        on_fault: Callable[[BaseException], None],
    ):
        self.slab = BlockPool(plane.num_partitions, plane.endpoint.num_cells, 1)
        self._config = config
        self._engine = engine
        self._pool = pool
        self._cache = cache
        self._plane = plane
        self._on_join = on_join
        self._spans = spans
        side = DecodeSideConfig(
            session=plane.endpoint.session,
            lease_s=config.lease_s,
            quarantine_s=config.quarantine_s,
            retry_after_s=1.0,
            max_cells_per_handoff=config.max_cells_per_handoff,
        )
        self._side = DecodeSide(side, epoch, pool, self.slab, on_restore=plane.clear)
        self._waiting = tuple(deque[_Waiting]() for _ in range(pool.num_partitions))
        self._links: dict[bytes, Link] = {}  # of reservations
        self._copies: dict[int, np.ndarray] = {}  # private ones that are intact, by ticket
        self._started_s: dict[bytes, float] = {}
        self._background = Background(on_fault)

    @property
    def num_handoffs(self) -> int:
        return self._num_waiting + len(self._links)

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    def reserved_tokens(self, partition: int) -> int:
        """Of prompts that are to come there, those that wait for room included."""
        waiting = sum(len(waiting.reserve.request.prompt) for waiting in self._waiting[partition])
        return waiting + self._side.num_tokens_reserved(partition)

    # ---- what the gateway says

    def reserve(self, reserve: link_pb2.Reserve, request: Request, link: Link) -> None:
        """Answers with a Target now or when there is room, or with Failed; not at all where it has joined already.

        Raises:
            Rejected: the request can never be served here, or another link has one of its id; nothing is kept.
        """
        if self._has_joined(request.id):
            return
        if self._is_of_another(request.id, link):
            raise NeverFits("id", "a request with this id is being served")
        partition = wire.partition_from(reserve.run)
        self._engine.check(request, partition)
        message = handoff_wire.reserve_from(reserve, request, self._pool.block_size)
        if partition is None:
            partition = self._roomiest(request)
        if self._is_full(partition):
            self._refuse(message.handoff, link)
            return
        self._waiting[partition].append(_Waiting(reserve=message, link=link, arrived_s=time.perf_counter()))
        self.admit()

    def landed(self, manifest: link_pb2.Manifest, link: Link) -> None:
        message = handoff_wire.manifest_from(manifest)
        if self._is_known(message.handoff, link):
            self._do(self._side.landed(message, time.perf_counter()))

    def start(self, start: link_pb2.Start, link: Link) -> None:
        message = handoff_wire.start_from(start)
        if self._is_known(message.handoff, link):
            now_s = time.perf_counter()
            if not self._has_joined(message.handoff):
                self._started_s[message.handoff] = now_s
            self._do(self._side.start(message, now_s))

    def drained(self, drained: link_pb2.Drained) -> None:
        message = handoff_wire.drained_from(drained)
        self._side.drained(message.handoff, message.writer_epoch)
        self.admit()

    def cancel(self, handoff: bytes, link: Link) -> None:
        """Give up a reservation that came over this link. A request that has joined is the engine's."""
        for line in self._waiting:
            for waiting in [w for w in line if w.reserve.handoff == handoff and w.link is link]:
                line.remove(waiting)
                self._spans.end(handoff, CANCELLED)
        if self._links.get(handoff) is link:
            del self._links[handoff]
            self._do(self._side.cancel(handoff, time.perf_counter()))
            self._started_s.pop(handoff, None)
            self._spans.end(handoff, CANCELLED)
            self._gave_back()

    def left(self, handoff: bytes) -> None:
        """A request that had joined has ended."""
        self._side.left(handoff)
        self.admit()

    def close_link(self, link: Link) -> None:
        waiting = [waiting.reserve.handoff for line in self._waiting for waiting in line if waiting.link is link]
        for handoff in waiting + [handoff for handoff, owner in self._links.items() if owner is link]:
            self.cancel(handoff, link)

    def _has_joined(self, handoff: bytes) -> bool:
        return self._side.knows(handoff) and handoff not in self._links

    def _is_of_another(self, handoff: bytes, link: Link) -> bool:
        waiting = (waiting.link for line in self._waiting for waiting in line if waiting.reserve.handoff == handoff)
        return any(owner is not link for owner in (*waiting, self._links.get(handoff, link)))

    def _is_known(self, handoff: bytes, link: Link) -> bool:
        """A forged or replayed id is answered, so that whoever sent it by mistake hears of it."""
        if self._links.get(handoff, link) is link and self._side.knows(handoff):
            return True
        link.send(wire.failed(handoff, NotFound("there is no such handoff here", field="handoff")))
        return False

    # ---- room

    def admit(self) -> None:
        """Reserve for those who wait, in their order within each partition, as far as there is room."""
        for partition, line in enumerate(self._waiting):
            while line and self._admit(line[0], partition):
                line.popleft()

    def _admit(self, waiting: _Waiting, partition: int) -> bool:
        reserve = waiting.reserve
        if not self._has_place(partition) or not self._has_room(reserve.request, partition):
            return False
        found = self._found(reserve.request, partition)
        answer = self._side.reserve(reserve, partition, found, time.perf_counter())
        if isinstance(answer, m.Target):
            self._links[reserve.handoff] = waiting.link
            self._spans.phase(reserve.handoff, "reserve", waiting.arrived_s)
            queue_ms = (time.perf_counter() - waiting.arrived_s) * 1e3
            target = handoff_wire.target_message(answer, queue_ms=queue_ms)
            waiting.link.send(link_pb2.WorkerMessage(target=target))
        return not isinstance(answer, m.Overloaded)

    def _found(self, request: Request, partition: int) -> tuple[int, ...]:
        """Blocks that begin the prompt and need not move."""
        return self._cache.match(partition, request.block_names)

    def _roomiest(self, request: Request) -> int:
        """The partition for a request that names none: one with room now, or else with the shortest line."""

        def room(partition: int) -> tuple[bool, int, int, int]:
            is_now = self._has_place(partition) and self._has_room(request, partition)
            num_found = len(self._found(request, partition))
            return is_now, num_found, -len(self._waiting[partition]), self._pool.num_free(partition)

        return max(range(self._pool.num_partitions), key=room)

    def _is_full(self, partition: int) -> bool:
        """Whether nobody more may wait there: a partition that is full stops nobody elsewhere."""
        share = -(-self._config.max_queued // len(self._waiting))
        return self._num_waiting >= self._config.max_queued and len(self._waiting[partition]) >= share

    def _gave_back(self) -> None:
        """Blocks or cells may have come back: for the engine's own line first, then for those who wait here."""
        self._engine.wake()
        self.admit()

    def _has_place(self, partition: int) -> bool:
        """Whether KV can land there, and at most one would then wait for a slot: who waits with KV waits for ever.

        One may come ahead of its slot, so that none stands empty for a whole handoff, and so that the engine's own line
        does not take every slot before one can be reserved for.
        """
        num_spare = self._engine.num_spare_slots(partition) - self._side.num_choices_reserved(partition)
        return num_spare >= 0 and self.slab.num_free(partition) > 0

    def _has_room(self, request: Request, partition: int) -> bool:
        """What stays free: a block to grow into for each sequence, and what the next in the engine's own line needs.

        Else those would be preempted for newcomers, and be overtaken for ever when they come back.
        """
        found = self._found(request, partition)
        num_shared = len(found) - self._pool.num_free_of(partition, found)
        num_spare = self._pool.num_free(partition) - self._pool.num_blocks_for(len(request.prompt)) + num_shared
        return num_spare >= self._engine.num_sequences(partition) + self._engine.num_blocks_due(partition)

    def _refuse(self, handoff: bytes, link: Link) -> None:
        self._spans.end(handoff, m.Cause.OVERLOADED.name.lower())
        failed = handoff_wire.failed_message(handoff, m.Cause.OVERLOADED, retry_after_s=1.0)
        link.send(link_pb2.WorkerMessage(failed=failed))

    # ---- time

    def tick(self) -> None:
        now_s = time.perf_counter()
        for line in self._waiting:
            while line and now_s - line[0].arrived_s > self._config.queue_timeout_s:
                late = line.popleft()
                self._refuse(late.reserve.handoff, late.link)
        self._do(self._side.expire(now_s))
        self._gave_back()

    # ---- what the side asks

    def _do(self, actions: tuple[m.DecodeAction, ...]) -> None:
        for action in actions:
            match action:
                case m.CopyOut():
                    self._background.spawn(self._copy(action))
                case m.Land():
                    self._engine.land(action.partition, action.blocks, self._copies.pop(action.ticket), lambda: None)
                case m.Credits():
                    self._tell(action.handoff, credits=handoff_wire.credits_message(action))
                case m.Join():
                    self._join(action)
                case m.Failed():
                    self._tell(action.handoff, failed=handoff_wire.failed_message(action.handoff, action.cause))
                    self._spans.end(action.handoff, action.cause.name.lower())
                    self._forget(action.handoff)
                case m.Leave():
                    self._engine.cancel(action.handoff)

    async def _copy(self, copy: m.CopyOut) -> None:
        copied = await self._plane.copy_out(copy.partition, copy.cells, copy.checksums)
        is_intact = not isinstance(copied, ChecksumMismatch)
        if is_intact:
            self._copies[copy.ticket] = copied
        else:
            logger.warning("a published block is not what its manifest says: %s", copied)
        self._do(self._side.verified(copy.ticket, is_intact, time.perf_counter()))
        self._copies.pop(copy.ticket, None)  # of a handoff that was given up meanwhile
        self._gave_back()

    def _join(self, join: m.Join) -> None:
        link, started_s = self._links.pop(join.handoff), self._started_s.pop(join.handoff)
        land_ms = (time.perf_counter() - started_s) * 1e3
        self._spans.joined(join.handoff, started_s)
        try:
            is_running = self._engine.join(join.request, join.partition, join.block_table, join.tokens, land_ms)
        except Rejected as error:  # above all: another number of first tokens than of choices
            self._pool.release(join.partition, join.block_table[::-1])
            refusal = wire.rejection(error)
            link.send(wire.failed(join.handoff, refusal))
            self._spans.end(join.handoff, refusal.code.name.lower())
            is_running = False
        if is_running:
            self._on_join(join.handoff, link)
        else:
            self._side.left(join.handoff)
            self._spans.end(join.handoff)

    def _tell(self, handoff: bytes, **message: Any) -> None:
        self._links[handoff].send(link_pb2.WorkerMessage(**message))

    def _forget(self, handoff: bytes) -> None:
        del self._links[handoff]
        self._started_s.pop(handoff, None)
