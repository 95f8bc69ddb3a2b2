"""The workers of the loop: a scheduler, a device that takes scripted times, and the pure half of their handoffs.

Each does what its real process does, and nothing else: it turns messages and completed steps into verbs of the control
plane, and does what that returns. KV is the device's pages, copied from one worker to the other, so that a block that
was moved wrongly is found as wrong contents where it is read.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.queue import NeverFits, Rejected
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff import publications as p
from moonshard.serving.control.handoff import reservations as r
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.plan import DecodePlan, Delivered, Plan, PrefillPlan, Sampled
from moonshard.serving.control.request import SequenceId
from moonshard.serving.control.routing.fleet import Member
from tests.serving.control.loop.events import Events
from tests.serving.control.loop.messages import (
    End,
    FromWorker,
    Leg,
    News,
    Report,
    Step,
    Submit,
    ToWorker,
    TurnedDown,
    Welcome,
)
from tests.serving.fake_device import VOCAB_SIZE, FakeDevice

type Content = tuple[int | None, ...]
type Cells = dict[tuple[int, int], Content]

GATEWAY = "gateway"  # all that is owned here is its
TICK_S = 0.1
MAX_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Scripted, in seconds."""

    step_s: float = 0.002
    token_s: float = 0.0002  # of a prefill
    row_s: float = 0.0004  # of a decode
    copy_s: float = 0.0005  # pages to cells, or cells to a private copy
    write_s: float = 0.001  # a cell
    write_timeout_s: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    num_partitions: int
    num_blocks: int
    num_cells: int
    scheduler: SchedulerConfig
    lease_s: float
    quarantine_s: float
    block_size: int = 8


class StepLoop:
    """A scheduler whose steps run one after the other on a device, each for as long as it takes."""

    def __init__(self, events: Events, scheduler: Scheduler, device: FakeDevice, times: Times):
        self.is_alive = True
        self.before_prefill: Callable[[PrefillPlan], None] = lambda plan: None
        self.on_prefill: Callable[[PrefillPlan], None] = lambda plan: None
        self.on_step: Callable[[Delivered], None] = lambda delivered: None
        self._events, self._scheduler, self._device, self._times = events, scheduler, device, times
        self._in_flight: deque[tuple[Plan, Mapping[SequenceId, Sampled]]] = deque()
        self._busy_until_s = 0.0

    def wake(self) -> None:
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT and (plan := self._scheduler.schedule()) is not None:
            if isinstance(plan, PrefillPlan):
                self.before_prefill(plan)
            self._in_flight.append((plan, self._device.run(plan)))
            self._busy_until_s = max(self._busy_until_s, self._events.now_s) + self._duration_s(plan)
            self._events.at(self._busy_until_s, self._complete)
            if isinstance(plan, PrefillPlan):
                self.on_prefill(plan)

    def _duration_s(self, plan: Plan) -> float:
        match plan:
            case PrefillPlan():
                num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
                return self._times.step_s + self._times.token_s * num_tokens
            case DecodePlan():
                return self._times.step_s + self._times.row_s * len(plan.rows)
            case _:
                return self._times.copy_s

    def _complete(self) -> None:
        if self.is_alive:
            plan, results = self._in_flight.popleft()
            self.on_step(self._scheduler.complete(plan.number, results))
            self.wake()


class Worker:
    """What both roles have in common. `send` takes what is said to the gateway."""

    role = ""

    def __init__(
        self,
        name: str,
        epoch: int,
        config: WorkerConfig,
        *,
        events: Events,
        times: Times,
        draw: random.Random,
        send: Callable[[FromWorker], None],
    ):
        self.name, self.epoch, self.config = name, epoch, config
        self.pool = BlockPool(config.num_partitions, config.num_blocks, config.block_size)
        self.slab = BlockPool(config.num_partitions, config.num_cells, 1)
        self.scheduler = Scheduler(config.scheduler, self.pool)
        self.device = FakeDevice(config.block_size)
        self.cells: Cells = {}
        self.send = send
        self.events, self.times, self.draw = events, times, draw
        self.steps = StepLoop(events, self.scheduler, self.device, times)
        self.steps.on_step = self._stepped
        self._num_seen = 0
        self._next_event = 0

    @property
    def cache(self) -> PrefixCache:
        return self.scheduler.cache

    @property
    def is_alive(self) -> bool:
        return self.steps.is_alive

    @property
    def member(self) -> Member:
        return Member(
            address=self.name,
            epoch=self.epoch,
            role=self.role,
            num_partitions=self.config.num_partitions,
            fingerprint="",
            dtype="",
            vocab_size=VOCAB_SIZE,
            block_size=self.config.block_size,
            max_context_tokens=self.config.scheduler.max_context_tokens,
        )

    def start(self) -> None:
        known = tuple(self.cache.snapshot(partition) for partition in range(self.config.num_partitions))
        self.send(Welcome(self.member, known, self.cache.num_events))
        self.events.after(TICK_S, self._tick)

    def kill(self) -> None:
        self.steps.is_alive = False

    def later(self, delay_s: float, do: Callable[..., None], *what: object) -> None:
        """Unless the process is dead by then."""

        def if_alive() -> None:
            if self.is_alive:
                do(*what)

        self.events.after(delay_s, if_alive)

    def hear(self, message: ToWorker) -> None:
        self._num_seen += isinstance(message, Submit | Leg)
        try:
            self.receive(message)
        except Rejected as error:
            match message:
                case Submit() | Leg():
                    self.send(TurnedDown(message.request.id, error))
                case _:
                    raise
        self.steps.wake()

    def receive(self, message: ToWorker) -> None:
        raise NotImplementedError

    def expire(self, now_s: float) -> None:
        raise NotImplementedError

    def turn_down(self, request_id: bytes, error: Rejected) -> None:
        self.send(TurnedDown(request_id, error))

    def reserved_tokens(self, partition: int) -> int:
        del partition
        return 0

    def _stepped(self, delivered: Delivered) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        if not self.is_alive:
            return
        now_s = self.events.now_s
        for request_id, error in self.scheduler.expire(now_s):
            self.turn_down(request_id, error)
        self.expire(now_s)
        self.steps.wake()
        news = self.cache.events_from(self._next_event) or ()
        if news:
            self._next_event = self.cache.num_events
            self.send(News(news))
        self.report()
        self.events.after(TICK_S, self._tick)

    def report(self) -> None:
        counters = self.scheduler.counters()
        tokens = tuple(
            queued + active + self.reserved_tokens(partition)
            for partition, (queued, active) in enumerate(
                zip(counters.queued_tokens, counters.active_tokens, strict=True)
            )
        )
        self.send(Report(self._num_seen, counters.queued_tokens, tokens, counters.num_running))

    def check_as_begun(self) -> None:
        assert self.scheduler.is_idle, f"{self.name} has work left"
        for pool in (self.pool, self.slab):
            for partition in range(pool.num_partitions):
                counts = pool.counts(partition)
                assert counts.free == pool.blocks_per_partition, f"{self.name}: {counts}"
        slots = self.config.scheduler.slots_per_partition
        for partition in range(self.config.num_partitions):
            assert self.scheduler.num_free_slots(partition) == slots, f"{self.name} has slots that are taken"


class PrefillWorker(Worker):
    """`peers` are the decode workers' processes, dead ones too, by session: nothing fences a write into their cells."""

    role = "prefill"

    def __init__(self, *common: object, peers: Mapping[str, "DecodeWorker"], write_faults: float, **rest: object):
        super().__init__(*common, **rest)  # type: ignore[arg-type]
        side = PrefillSide(self.epoch, self.pool, self.slab, self.config.quarantine_s)
        self.publications = p.Publications[str](side, pool=self.pool, cache=self.cache)
        self.steps.before_prefill = lambda plan: self._do(self.publications.launching(plan, self.events.now_s))
        self.steps.on_prefill = lambda plan: self._do(self.publications.launched(plan))
        self._peers, self._write_faults = peers, write_faults
        self._sums: dict[int, tuple[int, ...]] = {}

    def receive(self, message: ToWorker) -> None:
        match message:
            case Leg(m.Run(target=target), request, partition):
                self._run(target, Leg(m.Run(target=target), request, partition))
            case m.Credits():
                if self.publications.is_of(message.handoff, GATEWAY):
                    self._do(self.publications.credits(message))
            case m.Cancel():
                self._do(self.publications.cancel(message.handoff, message.target_epoch, GATEWAY))
            case _:
                raise AssertionError(message)

    def _run(self, target: m.Target, leg: Leg) -> None:
        request = leg.request
        if self.publications.is_being_given_up(request.id):
            raise NeverFits("handoff", "this handoff is being given up")
        self.publications.begin(target, request, GATEWAY, self.events.now_s)
        try:
            self.scheduler.add(p.prefill_of(request), self.events.now_s, partition=leg.partition)
        except Rejected:
            self.publications.withdraw(request.id)
            raise

    def expire(self, now_s: float) -> None:
        self._do(self.publications.expire(now_s))

    def turn_down(self, request_id: bytes, error: Rejected) -> None:
        self.publications.withdraw(request_id)
        super().turn_down(request_id, error)

    def _stepped(self, delivered: Delivered) -> None:
        for output in delivered.outputs:
            if self.publications.is_here(output.sequence.request_id):
                self._do(self.publications.emitted(output))

    def _do(self, actions: p.Actions[str]) -> None:
        for action in actions:
            match action:
                case p.Tell():
                    self.send(action.message)
                case p.Over():
                    self.events.note("published", self.name, action.handoff.hex(), action.is_done)
                case m.Stop():
                    self.scheduler.cancel(action.handoff)
                case m.CopyIn():
                    pages = tuple(tuple(self.device.pages[action.partition, block]) for block, _ in action.pairs)
                    self.later(self.times.copy_s, self._stage, action, pages)
                case m.Write():
                    self._write(action)

    def _stage(self, copy: m.CopyIn, pages: tuple[Content, ...]) -> None:
        for (_, cell), content in zip(copy.pairs, pages, strict=True):
            self.cells[copy.partition, cell] = content
        self._sums[copy.ticket] = tuple(map(checksum, pages))
        self._do(self.publications.staged(copy.ticket))
        self.steps.wake()

    def _write(self, write: m.Write) -> None:
        """A write to a process that is gone fails, and some do otherwise: the bytes of these may land, late."""
        contents = tuple(self.cells[write.partition, cell] for cell in write.cells)
        delay_s = self.times.write_s * len(contents)
        peer = self._peers.get(write.target.session)
        if peer is None or not peer.is_alive or self.draw.random() < self._write_faults:
            self.later(self.times.write_timeout_s, self._fail, write)
            if self.draw.random() < 0.5:
                self.events.after(2 * self.times.write_timeout_s * self.draw.random(), self._land, write, contents)
            return
        self.later(delay_s, self._written, write, contents)

    def _written(self, write: m.Write, contents: tuple[Content, ...]) -> None:
        self._land(write, contents)
        self._do(self.publications.written(write.ticket, self._sums.pop(write.ticket)))

    def _fail(self, write: m.Write) -> None:
        self.events.note("write failed", self.name, write.target.handoff.hex())
        self._do(self.publications.write_failed(write.ticket, self.events.now_s))

    def _land(self, write: m.Write, contents: tuple[Content, ...]) -> None:
        if (peer := self._peers.get(write.target.session)) is not None:
            for grant, content in zip(write.grants, contents, strict=True):
                peer.cells[write.target.partition, grant.cell] = content

    def check_as_begun(self) -> None:
        super().check_as_begun()
        assert self.publications.num_handoffs == 0, f"{self.name} has handoffs left"


class DecodeWorker(Worker):
    role = "decode"

    def __init__(self, *common: object, **rest: object):
        super().__init__(*common, **rest)  # type: ignore[arg-type]
        config = self.config
        side = DecodeSideConfig(
            session=f"{self.name}:{self.epoch}",
            lease_s=config.lease_s,
            quarantine_s=config.quarantine_s,
            max_cells_per_handoff=max(1, config.num_cells // 4),
        )
        self.session = side.session
        self.side = DecodeSide(side, self.epoch, self.pool, self.slab)
        self.reservations = r.Reservations[str](
            r.ReservationsConfig(
                max_queued=config.scheduler.max_queued_requests, queue_timeout_s=config.scheduler.queue_timeout_s
            ),
            self.side,
            pool=self.pool,
            slab=self.slab,
            cache=self.cache,
            batch=self.scheduler,
        )
        self._running: set[bytes] = set()  # that were submitted, or have joined
        self._reserved: set[bytes] = set()  # ever
        self._copies: dict[int, tuple[Content, ...]] = {}

    def receive(self, message: ToWorker) -> None:
        now_s = self.events.now_s
        match message:
            case Submit(request, partition, resumed):
                self.scheduler.add(request, now_s, resumed, partition)
                self._running.add(request.id)
            case Leg(m.Reserve() as reserve, request, partition):
                self._reserved.add(request.id)
                self._do(self.reservations.reserve(reserve, request, partition, GATEWAY, now_s))
            case m.Manifest():
                self._do(self.reservations.landed(message, GATEWAY, now_s))
            case m.Start():
                self._do(self.reservations.start(message, GATEWAY, now_s))
            case m.Drained():
                self._do(self.reservations.drained(message.handoff, message.writer_epoch, now_s))
            case End(request_id) | m.Cancel(handoff=request_id):
                self._end(request_id)
            case _:
                raise AssertionError(message)

    def _end(self, request_id: bytes) -> None:
        now_s = self.events.now_s
        if request_id in self._running:
            self._running.remove(request_id)
            self.scheduler.cancel(request_id)
            self._do(self.reservations.left(request_id, now_s))
        else:
            self._do(self.reservations.cancel(request_id, GATEWAY, now_s))

    def expire(self, now_s: float) -> None:
        self._do(self.reservations.expire(now_s))

    def turn_down(self, request_id: bytes, error: Rejected) -> None:
        self._running.remove(request_id)
        super().turn_down(request_id, error)

    def reserved_tokens(self, partition: int) -> int:
        return self.reservations.num_tokens(partition) + self.scheduler.landed_tokens(partition)

    def _stepped(self, delivered: Delivered) -> None:
        now_s = self.events.now_s
        for request_id in delivered.ended:
            self._running.remove(request_id)
            self._do(self.reservations.left(request_id, now_s))
        self._do(self.reservations.admit(now_s))
        if delivered.outputs:
            self.send(Step(delivered.outputs))
            self.report()

    def _do(self, actions: r.Actions[str]) -> None:
        for action in actions:
            match action:
                case r.Reserved():
                    self.send(action.target)
                case r.Tell():
                    self.send(action.message)
                case r.Enter():
                    self._join(action.join)
                case r.CameBack():
                    self.steps.wake()
                    self._do(self.reservations.admit(self.events.now_s))
                case r.GivenUp() | r.NotHere():
                    self.events.note(type(action).__name__, self.name, action.handoff.hex())
                case m.CopyOut():
                    self.later(self.times.copy_s, self._copy, action)
                case m.Land():
                    contents = self._copies.pop(action.ticket)
                    for block, content in zip(action.blocks, contents, strict=True):
                        self.device.pages[action.partition, block] = list(content)

    def _copy(self, copy: m.CopyOut) -> None:
        contents = tuple(self.cells.get((copy.partition, cell), ()) for cell in copy.cells)
        is_intact = tuple(map(checksum, contents)) == copy.checksums
        if not is_intact:
            self.events.note("corrupt", self.name, copy.ticket)
        self._copies[copy.ticket] = contents
        self._do(self.reservations.verified(copy.ticket, is_intact, self.events.now_s))
        self._copies.pop(copy.ticket, None)

    def _join(self, join: m.Join) -> None:
        try:
            is_running = self.scheduler.join(join.request, join.partition, join.block_table, join.tokens)
        except Rejected as error:
            self.reservations.turned_down(join)
            self.send(TurnedDown(join.handoff, error))
            return
        if is_running:
            self._running.add(join.handoff)
        else:
            self._do(self.reservations.left(join.handoff, self.events.now_s))
        self.steps.wake()

    def check_as_begun(self) -> None:
        super().check_as_begun()
        assert self.reservations.num_handoffs == 0, f"{self.name} has reservations left"
        assert not any(map(self.side.knows, self._reserved)), f"{self.name} knows handoffs that are over"
        assert not self._running
        assert not self._copies


def checksum(content: Content) -> int:
    return hash(content)
