"""A prefill worker's half of its handoffs: the process around `handoff.publications`.

Messages become its verbs, and what it asks is done: pages are exported right behind the step that computes them, copied
into own cells, checksummed, written into the decode worker's cells, and told. What is checked here is only whether a
message holds together. How bytes travel is `transfer.plane`'s.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.kv.transfer import TransferFailed
from moonshard.rpc import inference_pb2, link_pb2
from moonshard.rpc.status import FailedPrecondition, InvalidArgument, NotFound
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff import publications as p
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.request import Request
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import Emitted
from moonshard.serving.observe.spans.span import CANCELLED
from moonshard.serving.transfer.endpoint import Endpoint, endpoint_from, plan_to
from moonshard.serving.transfer.plane import Plane, pieces_to
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.sharding.layout import Tile

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True, slots=True)
class _Leg:
    """What a handoff's messages need besides what is decided: where it writes, its first tokens, and its times."""

    request: Request  # as the client asked
    remote: Endpoint
    pieces: tuple[Tile, ...]  # by which blocks are checked on their way there
    outputs: dict[int, link_pb2.SequenceOutput] = field(default_factory=dict)  # by choice
    staged_s: float | None = None  # when the first block was
    first_tokens_s: float | None = None

    def phases(self, now_s: float) -> link_pb2.TransferPhases:
        staged_s = self.staged_s if self.staged_s is not None else now_s
        exposed_s = 0.0 if self.first_tokens_s is None else now_s - max(staged_s, self.first_tokens_s)
        return link_pb2.TransferPhases(transfer_ms=(now_s - staged_s) * 1e3, exposed_ms=exposed_s * 1e3)


class PrefillHandoffs:
    """All on the event loop. `on_fault` is told of an error in our own bookkeeping."""

    def __init__(
        self,
        *,
        engine: Engine,
        pool: BlockPool,
        cache: PrefixCache,
        plane: Plane,
        epoch: int,
        quarantine_s: float,
        spans: WorkerSpans,
        on_fault: Callable[[BaseException], None],
        came: wire.Came,
    ):
        self._came = came
        self.slab = BlockPool(plane.num_partitions, plane.endpoint.num_cells, 1)
        self._engine = engine
        self._pool = pool
        self._plane = plane
        self._spans = spans
        self._epoch = epoch
        side = PrefillSide(epoch, pool, self.slab, quarantine_s, on_restore=plane.clear)
        self._publications = p.Publications[Link](side, pool=pool, cache=cache)
        self._legs: dict[bytes, _Leg] = {}
        self._checksums: dict[int, tuple[int, ...]] = {}  # of staged pieces, by ticket
        self._background = Background(on_fault)

    @property
    def num_handoffs(self) -> int:
        return self._publications.num_handoffs

    def owns(self, handoff: bytes) -> bool:
        return self._publications.is_here(handoff)

    # ---- what the gateway says

    def run(self, run: link_pb2.Run, request: Request, link: Link) -> None:
        """Prefill for a target.

        Raises:
            FailedPrecondition: the target is of a worker whose KV is not ours, or for another writer; nothing is kept.
            InvalidArgument: what it names does not hold together; likewise.
            Rejected: the scheduler turns the request down; likewise.
        """
        target, remote = handoff_wire.target_from(run.target), endpoint_from(run.endpoint)
        plan_to(self._plane.endpoint, remote)
        self._check(target, remote, request)
        if self._publications.is_here(request.id):
            return
        if self._publications.is_being_given_up(request.id):
            raise FailedPrecondition("this handoff is being given up", field="handoff")
        pieces = pieces_to(self._plane.endpoint, remote)
        self._legs[request.id] = _Leg(request=request, remote=remote, pieces=pieces)
        self._publications.begin(target, request, link, time.perf_counter())
        try:
            self._engine.submit(p.prefill_of(request), partition=wire.partition_from(run))
        except BaseException:
            self._withdraw(request.id)
            raise

    def _check(self, target: m.Target, remote: Endpoint, request: Request) -> None:
        """Whether the target is for this request and this process. Raises as `run` says."""
        if not handoff_wire.is_duration(target.lease_s):
            raise InvalidArgument(f"a lease of {target.lease_s:g} s is none", field="lease_s")
        if (target.handoff, target.writer_epoch, target.session) != (request.id, self._epoch, remote.session):
            raise FailedPrecondition("this target is for another handoff or another process", field="target")
        num_blocks = self._pool.num_seen(len(request.prompt))
        max_held = len(request.prompt) // self._pool.block_size if self._pool.groups.is_plain else 0
        if target.num_blocks != num_blocks or target.num_blocks_held > max_held:
            raise FailedPrecondition(
                f"this target is not for a prompt of which {num_blocks} blocks move", field="target"
            )
        if len(target.grants) > num_blocks:
            raise InvalidArgument(f"{len(target.grants)} grants for {num_blocks} blocks", field="grants")

    def _withdraw(self, handoff: bytes) -> Link:
        del self._legs[handoff]
        return self._publications.withdraw(handoff)

    def credits(self, credits: link_pb2.Credits, link: Link) -> None:
        """Raises NotFound for a handoff that did not come over this link, or is over."""
        message = handoff_wire.credits_from(credits)
        if not self._publications.is_of(message.handoff, link):
            raise NotFound("there is no such handoff here", field="handoff")
        self._do(self._publications.credits(message))

    def give_up(self, handoff: bytes, link: Link) -> None:
        """Gives a handoff up that came over this link; does nothing for any other."""
        self._do(self._publications.give_up(handoff, link))

    def cancel(self, handoff: bytes, target_epoch: int, link: Link) -> None:
        """Gives a handoff up and answers Drained when that is true, at once for a handoff that is not here.

        Does nothing for a handoff that came over another link.
        """
        self._do(self._publications.cancel(handoff, target_epoch, link))

    def close_link(self, link: Link) -> None:
        self._do(self._publications.close(link))

    def turned_down(self, handoff: bytes, message: link_pb2.WorkerMessage) -> None:
        """The engine has ended a prefill of ours: it waited too long to begin, or its first token cannot be drawn."""
        if self._publications.has_begun(handoff):
            owner = self._publications.owner_of(handoff)
            owner.send(message)
            self.give_up(handoff, owner)
        else:
            self._withdraw(handoff).send(message)

    # ---- what the engine says

    def launching(self, plan: PrefillPlan) -> None:
        """A prefill step is about to be launched: what earlier steps wrote of its prompts need not wait for it."""
        self._do(self._publications.launching(plan, time.perf_counter()))

    def launched(self, plan: PrefillPlan) -> None:
        """A prefill step was launched: what it completes may be exported right behind it."""
        self._do(self._publications.launched(plan))

    def emitted(self, emitted: Emitted) -> None:
        """A first token was drawn; the first tokens of all of a request's choices are told together."""
        leg = self._legs[emitted.output.sequence.request_id]
        output = wire.sequence_output(emitted, self._came)
        if p.finish_of(leg.request, emitted.output) is None:
            output.finish_reason = inference_pb2.FINISH_REASON_UNSPECIFIED
        leg.outputs[output.choice] = output
        self._do(self._publications.emitted(emitted.output))

    # ---- time

    def tick(self) -> None:
        self._do(self._publications.expire(time.perf_counter()))

    # ---- what is asked

    def _do(self, actions: p.Actions[Link]) -> None:
        for action in actions:
            match action:
                case m.CopyIn():
                    self._export(action)
                case m.Write():
                    self._background.spawn(self._write(action))
                case m.Stop():
                    self._engine.cancel(action.handoff)
                case m.Tell():
                    action.owner.send(self._message(action.message))
                case p.Over():
                    del self._legs[action.handoff]
                    self._spans.end(action.handoff, None if action.is_done else CANCELLED)

    def _message(self, message: m.Manifest | m.FirstTokens | m.Drained | m.Failed) -> link_pb2.WorkerMessage:
        match message:
            case m.Manifest():
                return link_pb2.WorkerMessage(chunk=self._chunk(message))
            case m.FirstTokens():
                return link_pb2.WorkerMessage(first_tokens=self._first_tokens(message))
            case m.Drained():
                return link_pb2.WorkerMessage(drained=handoff_wire.drained_message(message))
            case m.Failed():
                self._spans.end(message.handoff, message.cause.name.lower())
                return link_pb2.WorkerMessage(failed=handoff_wire.failed_message(message.handoff, message.cause))

    def _chunk(self, manifest: m.Manifest) -> link_pb2.Manifest:
        """The manifest as a message. The last one tells how long the transfer took."""
        leg = self._legs[manifest.handoff]
        pieces = leg.pieces if manifest.blocks else ()
        if not manifest.is_last:
            return handoff_wire.manifest_message(manifest, pieces)
        if leg.staged_s is not None:
            self._spans.phase(manifest.handoff, "transfer", leg.staged_s)
        return handoff_wire.manifest_message(manifest, pieces, leg.phases(time.perf_counter()))

    def _first_tokens(self, first: m.FirstTokens) -> link_pb2.FirstTokens:
        leg = self._legs[first.handoff]
        leg.first_tokens_s = time.perf_counter()
        return handoff_wire.first_tokens_message(first, [leg.outputs[choice] for choice in range(leg.request.n)])

    def _export(self, stage: m.CopyIn) -> None:
        """Exports at once: the pages are read in launch order, before anything decided later can overwrite them."""
        blocks = [block for block, _ in stage.pairs]
        leg = self._legs[self._publications.handoff_of(stage.ticket)]

        def exported(pages: np.ndarray) -> None:
            self._background.spawn(self._stage(stage, leg, pages))

        self._engine.export(stage.partition, blocks, exported, ticket=stage.ticket)

    async def _stage(self, stage: m.CopyIn, leg: _Leg, pages: np.ndarray) -> None:
        cells = [cell for _, cell in stage.pairs]
        if leg.staged_s is None:
            leg.staged_s = time.perf_counter()
        checksums = await self._plane.stage(stage.ticket, stage.partition, cells, pages, leg.pieces)
        actions = self._publications.staged(stage.ticket)
        if any(isinstance(action, m.Write) and action.ticket == stage.ticket for action in actions):
            self._checksums[stage.ticket] = checksums
        else:  # it was given up meanwhile
            self._plane.clear(stage.partition, cells)  # before any of them is staged in again
        self._do(actions)
        self._engine.wake()  # the blocks that were staged may be free now

    async def _write(self, write: m.Write) -> None:
        remote = self._legs[write.target.handoff].remote
        to_cells = [grant.cell for grant in write.grants]
        checksums = self._checksums.pop(write.ticket)
        try:
            await self._plane.publish(write.partition, write.cells, remote, write.target.partition, to_cells)
        except TransferFailed as failure:
            logger.warning("handoff %s: %s", write.target.handoff.hex(), failure)
            self._do(self._publications.write_failed(write.ticket, time.perf_counter()))
        else:
            self._do(self._publications.written(write.ticket, checksums))
