"""A worker: one engine behind gateway links, in one of three roles.

`both` prefills and decodes. `prefill` runs requests up to their first token and publishes their KV; `decode` takes KV
and decodes, and prefills too where it is asked to. It knows which link each request came over, and nothing of gRPC
streams or processes.
"""

import asyncio
import logging
import resource
import secrets

from moonshard.rpc import link_pb2
from moonshard.rpc.status import FailedPrecondition, InvalidArgument, NotFound, RequestError, Unavailable
from moonshard.serving.config.keys import Config, WorkerRole
from moonshard.serving.control.batching.queue import QueueTimeout, Rejected
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine, StepReport
from moonshard.serving.engine.loading import LoadedModel
from moonshard.serving.observe.rows.steps import RecordedSteps
from moonshard.serving.observe.spans.span import CANCELLED
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link, request_id_of
from moonshard.serving.worker.decode import DecodeHandoffConfig, DecodeHandoffs
from moonshard.serving.worker.prefill import PrefillHandoffs
from moonshard.serving.worker.prefix_feed import PrefixFeed
from moonshard.serving.worker.report import kv_transfer_message, load_message, partition_state, welcome_message
from moonshard.serving.worker.spans import FAILED, WorkerSpans

TICK_S = 0.1  # how late a lease's end, a place for a waiting reservation or what is newly cached may be noticed

MAX_REFUSAL_CHARS = 256  # of what a gateway says that the log repeats

logger = logging.getLogger(__name__)


class LinkFault(InvalidArgument):
    """Said by no gateway, and about no request: the link ends."""


def _cancel_epoch(cancel: link_pb2.Cancel) -> int:
    """None is said of a request that is no handoff. LinkFault: a cancel is not answered."""
    try:
        return handoff_wire.epoch_from(cancel.target_epoch, "target_epoch") if cancel.target_epoch else 0
    except InvalidArgument as error:
        raise LinkFault(error.message, field=error.field) from error


class Worker:
    """What is behind the link: the engine, the handoffs, and which link each request came over.

    `plane` is that of a worker whose role has handoffs; `recorded` is where its steps are recorded, None: nowhere; and
    `spans` are those of its requests, None: there are none.
    """

    def __init__(
        self,
        config: Config,
        role: WorkerRole,
        model: LoadedModel,
        compilations: CompilationCounter,
        plane: KvPlane | None,
        recorded: RecordedSteps | None = None,
        spans: WorkerSpans | None = None,
    ):
        self.role: WorkerRole = role
        self.epoch = secrets.token_bytes(16)
        self.is_draining = False
        self._config = config
        self._model = model
        self._compilations = compilations
        self._plane = plane
        self._recorded = recorded
        self._spans = spans or WorkerSpans()
        self._pool = model.block_pool()
        self._scheduler = Scheduler(model.scheduler_config(config), self._pool)
        self._open: dict[Link, PrefixFeed] = {}
        self._num_seen: dict[Link, int] = {}  # Run and Reserve messages
        self._links: dict[bytes, Link] = {}  # by request
        self.engine = Engine(
            scheduler=self._scheduler,
            executor=model.programs,
            encoder=StepEncoder(model.shapes, model.programs.bucket_for),
            on_step=self._on_step,
            on_expired=self._on_expired,
            before_prefill=self._before_prefill,
            on_prefill=self._on_prefill,
            on_done=None if recorded is None else recorded.trace(epoch=self.epoch, role=role),
            num_stages=model.num_stages,
        )
        self._prefill = None if plane is None or role != "prefill" else self._prefill_handoffs(plane)
        self._decode = None if plane is None or role != "decode" else self._decode_handoffs(plane)
        self._handoffs = self._prefill or self._decode  # no role has both
        self._ticking: asyncio.TimerHandle | None = None
        self._refusal: str | None = None  # the last one
        self._limits = wire.Limits(
            vocab_size=model.vocab_size,
            block_size=model.block_size,
            max_context_tokens=model.shapes.max_context_tokens,
        )

    def _prefill_handoffs(self, plane: KvPlane) -> PrefillHandoffs:
        return PrefillHandoffs(
            engine=self.engine,
            pool=self._pool,
            cache=self._scheduler.cache,
            plane=plane,
            epoch=handoff_wire.epoch_from(self.epoch),
            quarantine_s=self._config.kv.quarantine_s,
            spans=self._spans,
            on_fault=self.engine.fail,
        )

    def _decode_handoffs(self, plane: KvPlane) -> DecodeHandoffs:
        kv, gateway, num_cells = self._config.kv, self._config.gateway, plane.endpoint.num_cells
        config = DecodeHandoffConfig(
            lease_s=kv.lease_s,
            quarantine_s=kv.quarantine_s,
            max_cells_per_handoff=kv.slots_per_handoff or max(1, num_cells // 4),
            max_queued=gateway.max_queued_requests,
            queue_timeout_s=gateway.queue_timeout_s,
        )
        return DecodeHandoffs(
            config,
            engine=self.engine,
            pool=self._pool,
            cache=self._scheduler.cache,
            plane=plane,
            epoch=handoff_wire.epoch_from(self.epoch),
            on_join=self._links.__setitem__,
            spans=self._spans,
            on_fault=self.engine.fail,
        )

    # ---- its life

    def start(self) -> None:
        self.engine.start()
        self._tick()

    def start_behind(self) -> None:
        """Prepares the programs that were left for later, on threads that give way to what serves."""

        def failed(error: BaseException) -> None:
            logger.warning("a program could not be prepared, and larger ones take its steps: %s", error)

        self._model.preparation.start_behind(self._compilations.exempt_this_thread, failed)

    async def wait_idle(self) -> None:
        """Until no request and no handoff is left."""
        await self.engine.wait_idle()
        while self._num_handoffs:
            await asyncio.sleep(TICK_S)
            await self.engine.wait_idle()

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._model.preparation.stop()
        await self.engine.close()
        self._spans.close()
        if self._plane is not None:
            await asyncio.to_thread(self._plane.close)

    def fail(self) -> None:
        """Instead of `close`, where the engine has failed: what the device holds is unknown, and requests end so."""
        self._spans.close(FAILED)

    def begin_drain(self) -> None:
        """Take no new requests, and tell the gateways at once, so that they send them elsewhere."""
        self.is_draining = True
        for link in self._open:
            link.send(link_pb2.WorkerMessage(load=self.load(link)))

    def _tick(self) -> None:
        if self._handoffs is not None:
            self.engine.guard(self._handoffs.tick)
        self.engine.guard(self._tell_prefixes)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    # ---- links

    def open_link(self, link: Link) -> None:
        """Welcome a gateway. `close_link` undoes it."""
        self._open[link] = PrefixFeed(self._scheduler.cache, self._pool.num_partitions)
        self._num_seen[link] = 0
        link.send(link_pb2.WorkerMessage(welcome=self.welcome()))
        link.send(link_pb2.WorkerMessage(load=self.load()))

    def close_link(self, link: Link) -> None:
        """End all that came over it. Its handoffs first: room that a request leaves is none of theirs any more."""
        self._open.pop(link, None)
        self._num_seen.pop(link, None)
        if self._handoffs is not None:
            self._handoffs.close_link(link)
        for request_id in [id for id, owner in self._links.items() if owner is link]:
            self._end(request_id)

    def welcome(self) -> link_pb2.Welcome:
        endpoint = None if self._decode is None or self._plane is None else self._plane.endpoint
        return welcome_message(self._model, role=self.role, epoch=self.epoch, endpoint=endpoint)

    def receive(self, message: link_pb2.GatewayMessage, link: Link) -> None:
        """Do what a gateway says, or end the request that it names with an error.

        Raises:
            InvalidArgument: it is nothing that a gateway says, or is about no request that could be answered.
        """
        name, request_id = message.WhichOneof("message"), request_id_of(message)
        if name in ("run", "reserve"):
            self._num_seen[link] += 1
        try:
            match name:
                case "run" if message.run.HasField("target"):
                    self._run_for(message.run, link)
                case "run":
                    self._run(message.run, link)
                case "reserve":
                    self._reserve(message.reserve, link)
                case "cancel":
                    self._cancel(request_id, _cancel_epoch(message.cancel), link)
                case "tell_prefixes":
                    link.send(self._open[link].snapshot())
                case "refused":
                    self._refused(message.refused.message)
                case "landed" | "start" | "drained":
                    self._to_decode(name, message, link)
                case "credits":
                    self._prefills().credits(message.credits, link)
                case _:
                    raise LinkFault("hello was said, or nothing that this worker knows", field="message")
        except LinkFault:
            raise
        except Rejected as error:
            self._turn_down(request_id, wire.rejection(error), link)
        except RequestError as error:
            if not isinstance(error, InvalidArgument | NotFound | Unavailable):
                logger.warning("%s: %s", name, error.message)
            self._turn_down(request_id, error, link)

    def _turn_down(self, request_id: bytes, error: RequestError, link: Link) -> None:
        """A fault in what is said of it ends whatever there is of it: no output follows."""
        self._spans.end(request_id, error.code.name.lower())
        if isinstance(error, InvalidArgument):
            self._give_up(request_id, link)
        link.send(wire.failed(request_id, error))

    def _give_up(self, request_id: bytes, link: Link) -> None:
        """What came over this link; any other is left alone."""
        if self._links.get(request_id) is link:
            self._end(request_id)
        elif self._decode is not None:
            self._decode.cancel(request_id, link)
        elif self._prefill is not None:
            self._prefill.give_up(request_id, link)

    def _refused(self, reason: str) -> None:
        """Log why a gateway does not route here: once, for it knocks again every second."""
        reason = "".join(char if char.isprintable() else " " for char in reason[:MAX_REFUSAL_CHARS])
        if reason != self._refusal:
            logger.warning("a gateway refuses this worker: %s", reason)
        self._refusal = reason

    def _run(self, run: link_pb2.Run, link: Link) -> None:
        self._check_open()
        if self.role == "prefill":
            raise FailedPrecondition("a worker of role prefill does not decode; its runs have a target", field="role")
        request = wire.request_from(run, self._limits)
        resumed = wire.resumed_from(run, self._limits)
        self._spans.begin(run)
        self.engine.submit(request, resumed, wire.partition_from(run))
        self._links[request.id] = link

    def _run_for(self, run: link_pb2.Run, link: Link) -> None:
        handoffs = self._prefills()
        self._check_open()
        request = wire.request_from(run, self._limits)
        self._spans.begin(run)
        handoffs.run(run, request, link)

    def _reserve(self, reserve: link_pb2.Reserve, link: Link) -> None:
        handoffs = self._decodes()
        self._check_open()
        request = wire.request_from(reserve.run, self._limits)
        self._spans.begin(reserve.run)
        handoffs.reserve(reserve, request, link)

    def _to_decode(self, name: str, message: link_pb2.GatewayMessage, link: Link) -> None:
        handoffs = self._decodes()
        match name:
            case "landed":
                handoffs.landed(message.landed, link)
            case "start":
                wire.check_first_tokens(message.start, self._limits)
                handoffs.start(message.start, link)
            case "drained":
                handoffs.drained(message.drained)

    def _cancel(self, request_id: bytes, target_epoch: int, link: Link) -> None:
        """End a request that came over this link, or a leg of a handoff; any other is left alone."""
        if self._prefill is not None:
            self._prefill.cancel(request_id, target_epoch, link)
        else:
            self._give_up(request_id, link)

    def _end(self, request_id: bytes) -> None:
        del self._links[request_id]
        self._spans.end(request_id, CANCELLED)
        self.engine.cancel(request_id)
        if self._decode is not None:
            self._decode.left(request_id)

    def _check_open(self) -> None:
        if self.is_draining:
            raise Unavailable("this worker is shutting down", retry_after_s=1.0)

    def _prefills(self) -> PrefillHandoffs:
        if self._prefill is None:
            raise FailedPrecondition(f"a worker of role {self.role} publishes no KV", field="role")
        return self._prefill

    def _decodes(self) -> DecodeHandoffs:
        if self._decode is None:
            raise FailedPrecondition(f"a worker of role {self.role} takes no KV", field="role")
        return self._decode

    # ---- what others may know

    def load(self, link: Link | None = None) -> link_pb2.WorkerLoad:
        """As `link` is told it: `num_seen` counts what came over that one."""
        partitions = range(self._pool.num_partitions)
        return load_message(
            self.engine.counters(),
            free_blocks=[self._pool.num_free(partition) for partition in partitions],
            num_compilations=self._compilations.num_compilations,
            num_compilations_while_serving=self._compilations.num_while_serving,
            overlapped_steps=self.engine.num_overlapped_steps,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            draining=self.is_draining,
            kv_transfer=self._kv_transfer(),
            reserved_tokens=[self._reserved_tokens(partition) for partition in partitions],
            num_seen=0 if link is None else self._num_seen[link],
            num_lost_spans=self._spans.num_lost,
            num_lost_rows=0 if self._recorded is None else self._recorded.num_lost(),
        )

    def _reserved_tokens(self, partition: int) -> int:
        """Between a Reserve and its first step: nobody else counts it, for its gateway no longer does."""
        if self._decode is None:
            return 0
        return self._decode.reserved_tokens(partition) + self._scheduler.landed_tokens(partition)

    def inspect(self) -> link_pb2.Inspection:
        return link_pb2.Inspection(
            epoch=self.epoch,
            partitions=[self._partition_state(partition) for partition in range(self._pool.num_partitions)],
            load=self.load(),
        )

    @property
    def _num_handoffs(self) -> int:
        return 0 if self._handoffs is None else self._handoffs.num_handoffs

    def _kv_transfer(self) -> link_pb2.KvTransfer | None:
        if self._handoffs is None or self._plane is None:
            return None
        return kv_transfer_message(self._plane, self._handoffs.slab, self._handoffs.num_handoffs)

    def _partition_state(self, partition: int) -> link_pb2.PartitionState:
        return partition_state(
            self._pool.counts(partition),
            num_free_slots=self._scheduler.num_free_slots(partition),
            num_slots=self._model.pool.slots_per_partition,
        )

    # ---- what the engine says

    def _before_prefill(self, plan: PrefillPlan) -> None:
        if self._prefill is not None:
            self._prefill.launching(plan)

    def _on_prefill(self, plan: PrefillPlan) -> None:
        if self._prefill is not None:
            self._prefill.launched(plan)

    def _on_step(self, report: StepReport) -> None:
        """One message per link and step, whatever the number of its requests."""
        by_link: dict[Link, list[link_pb2.SequenceOutput]] = {}
        for item in report.emitted:
            request_id = item.output.sequence.request_id
            if item.phases is not None:
                self._spans.emitted(item)
            if self._prefill is not None and self._prefill.owns(request_id):
                self._prefill.emitted(item)
            else:
                by_link.setdefault(self._links[request_id], []).append(wire.sequence_output(item))
        for request_id in report.ended:
            if self._links.pop(request_id, None) is not None:  # else it is a handoff's, which is not over with it
                self._spans.end(request_id)
            if self._decode is not None:
                self._decode.left(request_id)
        if self._decode is not None:
            self._decode.admit()  # the one ahead may sit now, or one of several choices has left its slot
        load = self.load() if by_link else None
        for link, outputs in by_link.items():
            step = link_pb2.StepOutput(step=report.number, outputs=outputs, load=load)
            step.load.num_seen = self._num_seen[link]
            link.send(link_pb2.WorkerMessage(step=step))

    def _tell_prefixes(self) -> None:
        """Every tick and not with every step: what a router knows may be that old."""
        for link, feed in self._open.items():
            while (news := feed.news()) is not None:
                link.send(news)

    def _on_expired(self, request_id: bytes, error: QueueTimeout) -> None:
        refusal = wire.rejection(error)
        message = wire.failed(request_id, refusal)
        self._spans.end(request_id, refusal.code.name.lower())
        if self._prefill is not None and self._prefill.owns(request_id):
            self._prefill.turned_down(request_id, message)
        elif (link := self._links.pop(request_id, None)) is not None:
            link.send(message)
