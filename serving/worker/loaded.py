"""A worker's model on its devices, and the worker around it: all of the process that needs jax.

Apart from `process`, which opens the port before jax is imported: that takes longer than all else of a start whose
programs and files are at hand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from moonshard.kv.store.stack import TierStack
from moonshard.serving.config.keys import Config, WorkerRole, processes_of
from moonshard.serving.deploy.startup import ProcessStart
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.device import Executor
from moonshard.serving.engine.loading.model import LoadedModel, Progress, load_model
from moonshard.serving.gang.executor import GangExecutor
from moonshard.serving.gang.leader import Gang
from moonshard.serving.gang.members import loaded_as
from moonshard.serving.gang.plane import GangPlane
from moonshard.serving.gang.tiers.places import places_of
from moonshard.serving.observe.rows.steps import RecordedSteps
from moonshard.serving.observe.spans.export import SpanExport
from moonshard.serving.transfer.plane import KvPlane, Plane
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.serving.worker.store.opening import open_tiers
from moonshard.serving.worker.store.places import PlacesOf, alone
from moonshard.serving.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that takes a while, of which `worker` makes a worker on the event loop."""

    model: LoadedModel
    plane: Plane | None
    tiers: PlacesOf | None
    stack: TierStack | None  # of this process, from which `tiers` are made
    compilations: CompilationCounter
    executor: Executor | None = None  # what runs the model's steps; None: its programs, by themselves

    def led_by(self, gang: Gang) -> "Loaded":
        """The same, whose steps the followers of a gang run too, now that they have loaded.

        Raises:
            ConfigError: they have loaded something else.
            GangFault: their parts of the KV are not a whole.
        """
        gang.check_alike(loaded_as(self.model))
        plane = self.plane
        if isinstance(plane, KvPlane):
            plane = GangPlane(plane, gang.orders, gang.ready)
        tiers = None if self.stack is None else places_of(gang, self.stack, self.model)
        return replace(self, executor=GangExecutor(self.model.programs, gang), plane=plane, tiers=tiers)

    def worker(self, config: Config, role: WorkerRole, export: SpanExport | None, recorded: RecordedSteps) -> Worker:
        """The worker, not started; whatever is compiled from now on is a fault."""
        spans = WorkerSpans(export, role=role)
        made = Worker(
            config,
            role,
            self.model,
            self.compilations,
            self.plane,
            self.tiers,
            executor=self.executor,
            spans=spans,
            recorded=recorded,
        )
        self.compilations.mark_serving()
        return made


def load(
    config: Config,
    role: WorkerRole,
    open_plane: Callable[[LoadedModel], KvPlane],
    progress: Progress,
    start: ProcessStart,
) -> Loaded:
    """Raises what `load_model`, `open_plane` and `open_tiers` raise, and what `progress` does."""
    compilations = CompilationCounter()
    compilations.start()
    model, plane, stack = load_parts(config, role, open_plane, progress, start, compilations.exempt_this_thread)
    tiers = None if stack is None else alone(stack, model.layout.groups[0].block, model.shapes.num_partitions)
    return Loaded(model, plane, tiers, stack, compilations)


def load_parts(
    config: Config,
    role: WorkerRole,
    open_plane: Callable[[LoadedModel], KvPlane],
    progress: Progress,
    start: ProcessStart,
    on_thread_ahead: Callable[[], None] = lambda: None,
) -> tuple[LoadedModel, KvPlane | None, TierStack | None]:
    """What a process of a worker has, whether it leads or follows: its part of the model, of the KV plane, of tiers.

    `on_thread_ahead`: as of `load_model`. Raises as `load`.
    """
    num_processes = processes_of(config, role)
    model = load_model(
        config,
        role,
        progress,
        timings=start.timings,
        store=None if start.programs is None else ProgramStore(start.programs),
        prepares="all" if num_processes > 1 else config.worker.prepare,
        on_thread_ahead=on_thread_ahead,
    )
    with start.timings.phase("kv plane"):
        plane = None if role == "both" else open_plane(model)
    stack = None
    if config.kv.store.enabled:
        with start.timings.phase("kv store"):
            stack = open_tiers(config.kv.store, role, model, num_processes)
    return model, plane, stack
