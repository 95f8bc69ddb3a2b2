"""A worker: one engine behind gateway links, in one of three roles.

`both` prefills and decodes. `prefill` runs requests up to their first token and publishes their KV; `decode` takes KV
and decodes, and prefills too where it is asked to. The roles' verbs are in `roles`, and `links` finds the verb for a
message; here are the worker's life, its engine's events and what it says of itself.
"""

import asyncio
import functools
import logging
import resource
import secrets
from dataclasses import replace

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import Config, WorkerRole, processes_of
from moonshard.serving.constrained.compiling import Compiling
from moonshard.serving.constrained.grammars import load_grammars
from moonshard.serving.constrained.masks import Masks
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.drafting.fit import DraftFit
from moonshard.serving.control.drafting.worth import Worth
from moonshard.serving.control.plan import Plan, PrefillPlan
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.device import Executor, StepDone
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.observe.rows.steps import NO_STEPS, RecordedSteps
from moonshard.serving.transfer.plane import Plane
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire import requests as wire
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.drafting import MisfitWarning, drafters_of
from moonshard.serving.worker.links import Links
from moonshard.serving.worker.prefix_feed import PrefixFeed
from moonshard.serving.worker.report import load_message, partition_state, welcome_message
from moonshard.serving.worker.roles.aggregated import AggregatedRole
from moonshard.serving.worker.roles.compiled_first import CompiledFirst
from moonshard.serving.worker.roles.decode import DecodeRole
from moonshard.serving.worker.roles.prefill import PrefillRole
from moonshard.serving.worker.roles.role import Parts, Role, nothing_came
from moonshard.serving.worker.spans import FAILED, WorkerSpans
from moonshard.serving.worker.store.places import PlacesOf
from moonshard.serving.worker.store.store import WorkerStore

TICK_S = 0.1  # how late a lease's end, a place for a waiting reservation or what is newly cached may be noticed

logger = logging.getLogger(__name__)


class Worker:
    """What is behind the links: the engine, whose events it listens to, and the role.

    `plane` is the KV plane of a worker whose role has handoffs; None for `both`. `tiers` opens what there is below
    the device's pages.
    `executor`: what runs the model's steps; None: its programs.
    """

    def __init__(
        self,
        config: Config,
        role: WorkerRole,
        model: LoadedModel,
        compilations: CompilationCounter,
        plane: Plane | None,
        tiers: PlacesOf | None = None,
        *,
        executor: Executor | None = None,
        spans: WorkerSpans,
        recorded: RecordedSteps = NO_STEPS,
    ):
        self.epoch = secrets.token_bytes(16)
        self._model = model
        self._compilations = compilations
        self._recorded = recorded
        self._spans = spans
        self._pool = model.block_pool()
        self._prepares_first = config.worker.prepare == "first"
        self._compiling = Compiling(functools.partial(load_grammars, config.model.path, model.vocab_size))
        num_partitions = model.shapes.num_partitions
        num_draws = num_partitions * model.shapes.slots_per_partition
        masks = Masks(self._compiling.grammars, num_draws, num_partitions, model.shapes.q_len)
        self._worth, self._fit = Worth(), DraftFit()
        self._misfit_warning = MisfitWarning(self._fit)
        drafters = drafters_of(config.speculation, masks, self._worth, self._fit)
        prepared = model.programs.prepared
        num_processes = 1 if tiers is None else processes_of(config, role)
        self._scheduler = Scheduler(
            replace(model.scheduler_config(config), num_processes=num_processes),
            self._pool,
            drafters,
            weigh=self._worth.weigh,
            can_verify=prepared.can_verify,
        )
        self._record = recorded.trace(epoch=self.epoch, role=role)
        self.engine = Engine(
            scheduler=self._scheduler,
            executor=executor or model.programs,
            encoder=StepEncoder(model.shapes, prepared.bucket_for),
            events=self,
            masks=masks,
            num_stages=model.num_stages,
        )
        self._compiled_first = CompiledFirst(self._compiling, self.engine.fail)
        self._store = None if tiers is None else self._open_store(tiers)
        self.is_flushing = False  # at the end: no request is left, and blocks that tiers are to keep may be
        parts = Parts(
            engine=self.engine,
            scheduler=self._scheduler,
            pool=self._pool,
            spans=spans,
            limits=wire.Limits(
                vocab_size=model.vocab_size,
                block_size=model.block_size,
                max_context_tokens=model.shapes.max_context_tokens,
            ),
            epoch=handoff_wire.epoch_from(self.epoch),
            came=nothing_came if self._store is None else self._store.came,
        )
        self.role = _role(role, parts, plane, config)
        self._links = Links(
            self.role,
            spans,
            lambda: PrefixFeed(self._scheduler.cache),
            self._compiled_first,
            self._store,
        )
        self._ticking: asyncio.TimerHandle | None = None

    def _open_store(self, tiers: PlacesOf) -> WorkerStore:
        places = tiers(self.engine)
        return WorkerStore(engine=self.engine, scheduler=self._scheduler, pool=self._pool, places=places)

    # ---- its life

    def start(self) -> None:
        self.engine.start()
        self._tick()

    def start_behind(self) -> None:
        """Prepares the programs that were left for later, on threads that give way to what serves."""

        def failed(error: BaseException) -> None:
            logger.warning("a program could not be prepared, and larger ones take its steps: %s", error)

        self._model.preparation.start_behind(self._compilations.exempt_this_thread, failed)
        if self._prepares_first:
            self._compiling.read_ahead()

    async def wait_idle(self) -> None:
        """Until no request and no handoff is left, and then what waits for tiers is written."""
        await self.engine.wait_idle()
        while self.role.num_handoffs or self._compiled_first.num_waiting or self._num_fetching:
            await asyncio.sleep(TICK_S)
            await self.engine.wait_idle()
        if self._store is not None:
            self.is_flushing = True
            await self._store.flush()  # as long as a drain may take

    @property
    def _num_fetching(self) -> int:
        return 0 if self._store is None else self._store.num_waiting

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._model.preparation.stop()
        self._compiling.close()
        await self.engine.close()
        self._spans.close()
        await asyncio.to_thread(self.role.close)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    def fail(self) -> None:
        """Instead of `close`, where the engine has failed: what the device holds is unknown, and requests end so."""
        self._spans.close(FAILED)

    def begin_drain(self) -> None:
        """Take no new requests, and tell the gateways at once, so that they send them elsewhere."""
        self.role.is_draining = True
        for link in self._links:
            link.send(link_pb2.WorkerMessage(load=self.load(link)))

    def _tick(self) -> None:
        self.engine.guard(self.role.tick)
        self.engine.guard(self._links.tell_prefixes)
        if self._store is not None:
            self.engine.guard(self._store.tick)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    # ---- links

    def open_link(self, link: Link) -> None:
        """Welcome a gateway. `close_link` undoes it."""
        self._links.open(link)
        link.send(link_pb2.WorkerMessage(welcome=self.welcome()))
        link.send(link_pb2.WorkerMessage(load=self.load()))

    def close_link(self, link: Link) -> None:
        """End all that came over it."""
        self._links.close(link)
        self.role.close_link(link)

    def receive(self, message: link_pb2.GatewayMessage, link: Link) -> None:
        """Do what a gateway says. Raises InvalidArgument where the link is to end."""
        self._links.receive(message, link)

    # ---- what others may know

    @property
    def was_reached(self) -> bool:
        """Whether a gateway has ever had a link here."""
        return self._links.were_there

    def welcome(self) -> link_pb2.Welcome:
        return welcome_message(
            self._model,
            role=self.role.name,
            epoch=self.epoch,
            endpoint=self.role.endpoint,
            num_processes=self._scheduler.cache.spaces.num_processes,
        )

    def load(self, link: Link | None = None) -> link_pb2.WorkerLoad:
        """The load as `link` is told it: `num_seen` counts the messages of that link."""
        partitions = range(self._pool.num_partitions)
        return load_message(
            self.engine.counters(),
            free_blocks=[self._pool.num_free(partition) for partition in partitions],
            num_compilations=self._compilations.num_compilations,
            num_compilations_while_serving=self._compilations.num_while_serving,
            overlapped_steps=self.engine.num_overlapped_steps,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            draining=self.role.is_draining,
            kv_transfer=self.role.kv_transfer(),
            reserved_tokens=[self._coming_tokens(partition) for partition in partitions],
            kv_store=None if self._store is None else self._store.message,
            num_seen=0 if link is None else self._links.num_seen(link),
            num_lost_spans=self._spans.num_lost,
            num_lost_rows=self._recorded.num_lost(),
            num_model_drafts=self._fit.num_drafts,
            model_accepted_tokens=self._fit.num_accepted,
        )

    def _coming_tokens(self, partition: int) -> int:
        """Tokens of requests that are here and that the scheduler does not know of yet."""
        fetching = 0 if self._store is None else self._store.waiting_tokens(partition)
        return self.role.reserved_tokens(partition) + fetching

    def inspect(self) -> link_pb2.Inspection:
        return link_pb2.Inspection(
            epoch=self.epoch,
            partitions=[self._partition_state(partition) for partition in range(self._pool.num_partitions)],
            load=self.load(),
        )

    def _partition_state(self, partition: int) -> link_pb2.PartitionState:
        return partition_state(
            self._pool.counts(partition),
            num_free_slots=self._scheduler.num_free_slots(partition),
            num_slots=self._model.pool.slots_per_partition,
        )

    # ---- what the engine says

    def before_prefill(self, plan: PrefillPlan) -> None:
        self.role.before_prefill(plan)

    def on_prefill(self, plan: PrefillPlan) -> None:
        self.role.on_prefill(plan)

    def on_step(self, report: StepReport) -> None:
        """One message per link and step, whatever the number of its requests."""
        for item in report.emitted:
            if item.phases is not None:
                self._spans.emitted(item)
        by_link = self.role.outputs(report)
        if by_link:
            self._links.send_outputs(report.number, by_link, self.load())

    def on_turned_down(self, request_id: bytes, error: Rejected) -> None:
        refusal = wire.rejection(error)
        self._spans.end(request_id, refusal.code.name.lower())
        self.role.turned_down(request_id, wire.failed(request_id, refusal))

    def on_done(self, done: StepDone, plan: Plan | None) -> None:
        if plan is not None and self._model.shapes.q_len > 1:
            self._worth.note(plan, done.bucket, done.done_ns)
            self._misfit_warning.look()
        if self._store is not None:
            self._store.on_done(done, plan)
        self._record(done, plan)


def _role(name: WorkerRole, parts: Parts, plane: Plane | None, config: Config) -> Role:
    if plane is None:
        if name != "both":
            raise ValueError(f"a worker of role {name} moves KV")
        return AggregatedRole(parts)
    return PrefillRole(parts, plane, config.kv) if name == "prefill" else DecodeRole(parts, plane, config)
