"""The prefill workers of the loop: publications, with the copies and writes that they ask for."""

from collections.abc import Mapping
from typing import Any

from moonshard.serving.control.batching.queue import NeverFits, Rejected
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff import publications as p
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.plan import Delivered
from moonshard.serving.control.request import Request
from tests.serving.control.loop.decode_worker import DecodeWorker
from tests.serving.control.loop.messages import Leg, ToWorker
from tests.serving.control.loop.worker import GATEWAY, Content, Worker, checksum


class PrefillWorker(Worker):
    """`peers` are the decode workers' processes, dead ones too, by session: nothing fences a write into their cells."""

    role = "prefill"

    def __init__(self, *common: Any, peers: Mapping[str, DecodeWorker], write_faults: float, **rest: Any):
        super().__init__(*common, **rest)
        side = PrefillSide(self.epoch, self.pool, self.slab, self.config.quarantine_s)
        self.publications = p.Publications[str](side, pool=self.pool, cache=self.cache)
        self.steps.before_prefill = lambda plan: self._do(self.publications.launching(plan, self.events.now_s))
        self.steps.on_prefill = lambda plan: self._do(self.publications.launched(plan))
        self._peers, self._write_faults = peers, write_faults
        self._sums: dict[int, tuple[int, ...]] = {}

    def receive(self, message: ToWorker) -> None:
        match message:
            case Leg(m.Run(target=m.Target() as target), request, partition):
                self._run(target, request, partition)
            case m.Credits():
                if self.publications.is_of(message.handoff, GATEWAY):
                    self._do(self.publications.credits(message))
            case m.Cancel():
                self._do(self.publications.cancel(message.handoff, message.target_epoch, GATEWAY))
            case _:
                raise AssertionError(message)

    def _run(self, target: m.Target, request: Request, partition: int) -> None:
        if self.publications.is_being_given_up(request.id):
            raise NeverFits("handoff", "this handoff is being given up")
        self.publications.begin(target, request, GATEWAY, self.events.now_s)
        try:
            self.scheduler.add(p.prefill_of(request), self.events.now_s, partition=partition)
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
                case m.Tell():
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
