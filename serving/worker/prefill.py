"""A prefill worker's half of its handoffs: the process around `handoff.prefill`.

The side decides; here pages are exported right behind the step that computes them, copied into own cells, checksummed,
written into the decode worker's cells, and told. A request for a handoff runs in the engine as one that ends with its
first token. Whatever ends a handoff early ends its prefill too. Left out: how bytes travel (`transfer.plane`).
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.kv.transfer import TransferFailed
from moonshard.rpc import inference_pb2, link_pb2
from moonshard.rpc.status import FailedPrecondition, InvalidArgument, NotFound
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.plan import PrefillChunk, PrefillPlan
from moonshard.serving.control.request import FinishReason, Request
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import Emitted
from moonshard.serving.observe.spans.span import CANCELLED
from moonshard.serving.transfer.endpoint import Endpoint, endpoint_from, plan_to
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.spans import WorkerSpans

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True, slots=True)
class _Leg:
    """One handoff's part here, from Run until everything was published and told, or given up."""

    link: Link
    request: Request  # as the client asked; the engine is given one that ends with its first token
    target: m.Target
    remote: Endpoint
    arrived_s: float
    partition: int | None = None  # of this worker, once a step for it was launched or is about to be
    num_finished: int = 0  # blocks whose KV launched steps complete
    outputs: dict[int, link_pb2.SequenceOutput] = field(default_factory=dict)  # by choice
    staged_s: float | None = None  # when the first block was
    first_tokens_s: float | None = None
    is_published: bool = False
    is_given_up: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_published and self.first_tokens_s is not None

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
        plane: KvPlane,
        epoch: int,
        quarantine_s: float,
        spans: WorkerSpans,
        on_fault: Callable[[BaseException], None],
    ):
        self.slab = BlockPool(plane.num_partitions, plane.endpoint.num_cells, 1)
        self._engine = engine
        self._pool = pool
        self._cache = cache
        self._plane = plane
        self._spans = spans
        self._epoch = epoch
        self._side = PrefillSide(epoch, pool, self.slab, quarantine_s, on_restore=plane.clear)
        self._legs: dict[bytes, _Leg] = {}
        self._checksums: dict[int, tuple[int, ...]] = {}  # of staged pieces, by ticket
        self._background = Background(on_fault)

    @property
    def num_handoffs(self) -> int:
        return max(len(self._legs), self._side.num_runs)

    def owns(self, handoff: bytes) -> bool:
        return handoff in self._legs

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
        if not handoff_wire.is_duration(target.lease_s):
            raise InvalidArgument(f"a lease of {target.lease_s:g} s is none", field="lease_s")
        if (target.handoff, target.writer_epoch, target.session) != (request.id, self._epoch, remote.session):
            raise FailedPrecondition("this target is for another handoff or another process", field="target")
        num_blocks = self._pool.num_blocks_for(len(request.prompt))
        max_held = len(request.prompt) // self._pool.block_size
        if target.num_blocks != num_blocks or target.num_blocks_held > max_held:
            raise FailedPrecondition(f"this target is not for a prompt of {num_blocks} blocks", field="target")
        if len(target.grants) > num_blocks:
            raise InvalidArgument(f"{len(target.grants)} grants for {num_blocks} blocks", field="grants")
        if request.id in self._legs:
            return
        if self._side.holds(request.id):
            raise FailedPrecondition("this handoff is being given up", field="handoff")
        self._legs[request.id] = _Leg(
            link=link, request=request, target=target, remote=remote, arrived_s=time.perf_counter()
        )
        try:
            self._engine.submit(replace(request, max_tokens=1), partition=wire.partition_from(run))
        except BaseException:
            del self._legs[request.id]
            raise

    def credits(self, credits: link_pb2.Credits, link: Link) -> None:
        """Raises NotFound for a handoff that did not come over this link, or is over."""
        message = handoff_wire.credits_from(credits)
        leg = self._legs.get(message.handoff)
        if leg is None or leg.link is not link:
            raise NotFound("there is no such handoff here", field="handoff")
        self._do(self._side.credits(message))

    def give_up(self, handoff: bytes, link: Link) -> None:
        """One that came over this link; nothing is said of any other."""
        leg = self._legs.get(handoff)
        if leg is not None and leg.link is link:
            self.cancel(handoff, leg.target.epoch, link)

    def cancel(self, handoff: bytes, target_epoch: int, link: Link) -> None:
        """Give up; says Drained when that is true, at once for a handoff that is not here.

        One that came over another link is left alone.
        """
        leg = self._legs.get(handoff)
        if leg is not None and leg.link is not link:
            return
        if leg is not None:
            self._stop(leg)
        for action in self._side.cancel(handoff, target_epoch):
            if isinstance(action, m.Drained) and leg is None:
                link.send(link_pb2.WorkerMessage(drained=handoff_wire.drained_message(action)))
            else:
                self._do((action,))
        self._sweep()

    def close_link(self, link: Link) -> None:
        for handoff, leg in tuple(self._legs.items()):
            if leg.link is link:
                self.cancel(handoff, leg.target.epoch, link)

    def turned_down(self, handoff: bytes, message: link_pb2.WorkerMessage) -> None:
        """The queue was too long for a request of ours: nothing of it had begun."""
        self._legs.pop(handoff).link.send(message)

    # ---- what the engine says

    def launching(self, plan: PrefillPlan) -> None:
        """A prefill step is about to be launched: what earlier steps wrote of its prompts need not wait for it.

        A prompt may also be admitted behind blocks that this very step writes for another: these wait.
        """
        written = {(chunk.slot.partition, block) for chunk in plan.chunks for block in self._written(chunk)}
        for leg, chunk in self._chunks(plan):
            if leg.partition is None:
                self._begin(leg, chunk)
                blocks = chunk.block_table[: chunk.start // self._pool.block_size]
                known = ((chunk.slot.partition, block) for block in blocks)
                num_earlier = sum(1 for _ in itertools.takewhile(lambda place: place not in written, known))
                self._finish(leg, chunk, num_earlier)

    def _written(self, chunk: PrefillChunk) -> tuple[int, ...]:
        """The blocks that the chunk's tokens lie in."""
        end = chunk.start + len(chunk.tokens)
        return chunk.block_table[chunk.start // self._pool.block_size : self._pool.num_blocks_for(end)]

    def launched(self, plan: PrefillPlan) -> None:
        """A prefill step was launched: what it completes may be exported right behind it."""
        for leg, chunk in self._chunks(plan):
            end = chunk.start + len(chunk.tokens)
            self._finish(leg, chunk, leg.target.num_blocks if chunk.samples else end // self._pool.block_size)

    def _chunks(self, plan: PrefillPlan) -> Iterator[tuple[_Leg, PrefillChunk]]:
        for chunk in plan.chunks:
            leg = self._legs.get(chunk.request.id)
            if leg is not None and not leg.is_given_up and chunk.sequence.choice == 0:
                yield leg, chunk

    def _begin(self, leg: _Leg, chunk: PrefillChunk) -> None:
        now_s = time.perf_counter()
        target = replace(leg.target, lease_s=leg.target.lease_s - (now_s - leg.arrived_s))
        self._side.run(target, chunk.slot.partition, now_s)
        leg.partition = chunk.slot.partition

    def _finish(self, leg: _Leg, chunk: PrefillChunk, num_finished: int) -> None:
        fresh = range(leg.num_finished, num_finished)
        leg.num_finished = max(leg.num_finished, num_finished)
        self._do(self._side.finished(leg.target.handoff, [(index, chunk.block_table[index]) for index in fresh]))

    def emitted(self, emitted: Emitted) -> None:
        """A first token; all of a request's are told together."""
        leg = self._legs[emitted.output.sequence.request_id]
        output = wire.sequence_output(emitted)
        if emitted.output.finish is FinishReason.LENGTH and leg.request.max_tokens > 1:
            output.finish_reason = inference_pb2.FINISH_REASON_UNSPECIFIED
        leg.outputs[output.choice] = output
        if len(leg.outputs) == leg.request.n and not leg.is_given_up:
            self._tell_first_tokens(leg)

    def _tell_first_tokens(self, leg: _Leg) -> None:
        leg.first_tokens_s = time.perf_counter()
        first = m.FirstTokens(
            handoff=leg.target.handoff, writer_epoch=self._epoch, target_epoch=leg.target.epoch, tokens=()
        )
        outputs = [leg.outputs[choice] for choice in range(leg.request.n)]
        message = handoff_wire.first_tokens_message(first, outputs)
        leg.link.send(link_pb2.WorkerMessage(first_tokens=message))
        self._sweep()

    # ---- time

    def tick(self) -> None:
        actions = self._side.expire(time.perf_counter())
        for action in actions:  # before the first of them frees the engine to launch another's next chunk
            if isinstance(action, m.Stop):
                self._legs[action.handoff].is_given_up = True
        self._do(actions)
        self._sweep()

    # ---- what the side asks

    def _do(self, actions: tuple[m.PrefillAction, ...]) -> None:
        for action in actions:
            match action:
                case m.CopyIn():
                    self._export(action)
                case m.Write():
                    self._background.spawn(self._write(action))
                case m.Stop():
                    self._stop(self._legs[action.handoff])
                case m.Manifest():
                    self._tell_chunk(action)
                case m.Drained():
                    self._tell(action.handoff, drained=handoff_wire.drained_message(action))
                case m.Failed():
                    self._spans.end(action.handoff, action.cause.name.lower())
                    self._tell(action.handoff, failed=handoff_wire.failed_message(action.handoff, action.cause))
                case m.FirstTokens():
                    raise ValueError("first tokens come from the engine")

    def _tell(self, handoff: bytes, **message: Any) -> None:
        self._legs[handoff].link.send(link_pb2.WorkerMessage(**message))

    def _tell_chunk(self, manifest: m.Manifest) -> None:
        leg = self._legs[manifest.handoff]
        phases = leg.phases(time.perf_counter()) if manifest.is_last else None
        leg.is_published = manifest.is_last
        if leg.is_published and leg.staged_s is not None:
            self._spans.phase(manifest.handoff, "transfer", leg.staged_s)
        leg.link.send(link_pb2.WorkerMessage(chunk=handoff_wire.manifest_message(manifest, phases)))
        self._sweep()

    def _stop(self, leg: _Leg) -> None:
        leg.is_given_up = True
        self._engine.cancel(leg.request.id)

    def _export(self, stage: m.CopyIn) -> None:
        """At once: the pages are read in launch order, before anything decided later can write them."""
        blocks = [block for block, _ in stage.pairs]
        self._engine.export(stage.partition, blocks, lambda pages: self._background.spawn(self._stage(stage, pages)))

    async def _stage(self, stage: m.CopyIn, pages: np.ndarray) -> None:
        cells = [cell for _, cell in stage.pairs]
        handoff = self._side.handoff_of(stage.ticket)
        if (leg := self._legs.get(handoff)) is not None and leg.staged_s is None:
            leg.staged_s = time.perf_counter()
        checksums = await self._plane.stage(stage.partition, cells, pages)
        actions = self._side.staged(stage.ticket)
        if any(isinstance(action, m.Write) for action in actions):  # else it was given up meanwhile
            self._checksums[stage.ticket] = checksums
        else:
            self._plane.clear(stage.partition, cells)  # before any of them is staged in again
        self._do(actions)
        self._engine.wake()  # the blocks that were staged may be free now
        self._sweep()

    async def _write(self, write: m.Write) -> None:
        remote = self._legs[write.target.handoff].remote
        to_cells = [grant.cell for grant in write.grants]
        checksums = self._checksums.pop(write.ticket)
        try:
            await self._plane.publish(write.partition, write.cells, remote, write.target.partition, to_cells)
        except TransferFailed as failure:
            self._on_write_failed(write, failure)
        else:
            self._do(self._side.written(write.ticket, checksums))
        self._sweep()

    def _on_write_failed(self, write: m.Write, failure: TransferFailed) -> None:
        logger.warning("handoff %s: %s", write.target.handoff.hex(), failure)
        self._do(self._side.write_failed(write.ticket, time.perf_counter()))

    def _sweep(self) -> None:
        """Forget the handoffs that are over. Their blocks came back as they were staged: the beginning first."""
        for handoff, leg in tuple(self._legs.items()):
            if (leg.is_done or leg.is_given_up) and not self._side.knows(handoff):
                del self._legs[handoff]
                self._spans.end(handoff, None if leg.is_done else CANCELLED)
                if leg.partition is not None:
                    self._cache.renew(leg.partition, leg.request.block_names)
