"""The decode workers of the loop: reservations, with the copies that they ask for."""

from typing import Any

from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff import reservations as r
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.plan import Delivered
from tests.serving.control.loop.messages import End, Leg, Step, Submit, ToWorker, TurnedDown
from tests.serving.control.loop.worker import GATEWAY, Content, Worker, checksum


class DecodeWorker(Worker):
    role = "decode"

    def __init__(self, *common: Any, **rest: Any):
        super().__init__(*common, **rest)
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
                case m.Tell():
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
