"""What the workers of the loop have in common: a scheduler, and a device that takes scripted times.

A worker does what its real process does, and nothing else: it turns messages and completed steps into verbs of the
control plane, and does what that returns. KV is the device's pages, copied from one worker to the other, so that a
block that was moved wrongly is found as wrong contents where it is read.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonshard.kv.blocks import PLAIN, BlockGroups, BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.members.fleet import Member
from moonshard.serving.control.plan import DecodePlan, Delivered, Plan, PrefillPlan, Sampled
from moonshard.serving.control.request import SequenceId
from tests.serving.control.loop.events import Events
from tests.serving.control.loop.messages import FromWorker, Leg, News, Report, Submit, ToWorker, TurnedDown, Welcome
from tests.serving.fake_device import VOCAB_SIZE, FakeDevice

type Content = tuple[int | None, ...]
type Cells = dict[tuple[int, int], Content]

GATEWAY = "gateway"  # all that is owned here is its
TICK_S = 0.1
MAX_STEPS_IN_FLIGHT = 2


def checksum(content: Content) -> int:
    return hash(content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Scripted durations, in seconds."""

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
    groups: BlockGroups = PLAIN


class StepLoop:
    """A scheduler whose steps run one after the other on a device, each for its scripted time."""

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
    """What both roles have in common. `send` sends a message to the gateway."""

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
        self.pool = BlockPool(config.num_partitions, config.num_blocks, config.block_size, config.groups)
        self.slab = BlockPool(config.num_partitions, config.num_cells, 1)
        self.scheduler = Scheduler(config.scheduler, self.pool)
        self.device = FakeDevice(self.pool)
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
        """Calls it after a while, unless the process is dead by then."""

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
