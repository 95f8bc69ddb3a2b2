"""Engines of one process on one device with the same weights, and KV blocks that go from one's pages to the other's.

The engine, the scheduler and the programs are those that serve. An engine's export and land carry blocks as bytes of
the host; here the two executors keep the gathered blocks on the device and give the engines a ticket for each block in
their place, so that what `kv.pages` gathers from one's pages is what it scatters into the other's. Staging, checksums
and the network are missing, and nothing takes their place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.models.experts import moe
from moonshard.models.model import Model, PagedAttention
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.plan import Plan, PrefillPlan
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.device import Executor, StepDone
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.programs import Drawn, Launched, Programs
from moonshard.serving.engine.steps import Step, StepKind, StepShapes
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE

NEVER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """The sizes that each of the two engines has: of its steps, its slots and its pages."""

    block_size: int
    q_tile: int  # queries per row of a prefill
    prefill_buckets: tuple[int, ...]  # padded tokens, ascending
    chunk_tokens: tuple[int, ...]  # that a prefill step may have, ascending; the last is also the largest bucket
    decode_buckets: tuple[int, ...]  # rows, ascending; the last are all slots
    num_blocks: int
    max_context_tokens: int

    def shapes(self, *, prefills: bool) -> StepShapes:
        """Of programs that decode and exchange blocks, and prefill too, or leave that to others."""
        return StepShapes(
            slots_per_partition=self.decode_buckets[-1],
            columns_per_sequence=-(-self.max_context_tokens // self.block_size),
            max_context_tokens=self.max_context_tokens,
            q_tile=self.q_tile,
            prefill_buckets=self.prefill_buckets if prefills else (),
            decode_buckets=self.decode_buckets,
            transfer_buckets=tuple(dict.fromkeys((1, max(1, self.chunk_tokens[-1] // self.block_size)))),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePair:
    """The device sides of two engines: the first can do everything, the second decodes and takes blocks in."""

    sizes: EngineSizes
    first: Programs
    second: Programs
    vocab_size: int


def build_pair(
    model: Model,
    loaded: Any,
    sizes: EngineSizes,
    backend: moe.Backend,
    dtype: str,
    attention: PagedAttention | None = None,
) -> EnginePair:
    """Compiles both. The weights `loaded`, which lie on a mesh of one device, are shared; each has pages of its own."""
    part = StageModel(
        model=model,
        layers=range(model.config.num_hidden_layers),
        weights=loaded,
        mesh=build_mesh(MeshShape()),
        shard=ALONE,
        backend=backend,
        attention=attention,
    )

    def compiled(prefills: bool) -> Programs:
        shapes = sizes.shapes(prefills=prefills)
        pages = {"blocks_per_partition": sizes.num_blocks, "block_size": sizes.block_size}
        programs = Programs.of([part], shapes, **pages, dtype=dtype)
        programs.prepared.compile()
        return programs

    pair = EnginePair(sizes=sizes, first=compiled(True), second=compiled(False), vocab_size=model.config.vocab_size)
    _compile_the_way(pair)
    return pair


@dataclass(slots=True)
class Way:
    """Gathered blocks between two executors, by ticket: the number of the export."""

    blocks: dict[int, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendingExecutor:
    """An executor whose exports stay on the device: what is fetched of one is its ticket, once for each block."""

    programs: Programs
    way: Way

    def launch(self, step: Step) -> Launched:
        return self.programs.launch(step)

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        step = launched.step
        if step.kind is not StepKind.EXPORT:
            return self.programs.fetch(launched)
        (gathered,) = launched.results  # of the only stage
        self.way.blocks[step.number] = gathered.block_until_ready()
        return np.full(step.bucket, step.number)


@dataclass(frozen=True, slots=True)
class Receiver:
    """An executor whose lands take tickets. A land has the blocks of one export, in its order: both are cut alike."""

    programs: Programs
    way: Way

    def launch(self, step: Step) -> Launched:
        if step.kind is not StepKind.LAND:
            return self.programs.launch(step)
        assert step.payload is not None  # as the encoder makes them
        gathered = self.way.blocks.pop(int(step.payload[0]))
        (stage,) = self.programs.stages
        return Launched(step, (stage.land(step.bucket, step.metadata, gathered, step.partition),))

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        return self.programs.fetch(launched)


def _compile_the_way(pair: EnginePair) -> None:
    """Compiles lands of blocks that already lie on the device: to jax a different program than from the host."""
    way = Way()
    sender, receiver = SendingExecutor(pair.first, way), Receiver(pair.second, way)
    for num_blocks in pair.first.shapes.transfer_buckets:
        blocks = range(num_blocks)
        export = StepEncoder(pair.first.shapes).encode_export(-1, 0, blocks)
        tickets = sender.fetch(sender.launch(export))
        assert isinstance(tickets, np.ndarray)
        land = StepEncoder(pair.second.shapes).encode_land(-1, 0, blocks, tickets)
        receiver.fetch(receiver.launch(land))


def ignore(*_told: object) -> None:
    """An event handler that does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """Who is told of an engine's events."""

    on_step: Callable[[StepReport], None]
    on_done: Callable[[StepDone, Plan | None], None] = ignore
    before_prefill: Callable[[PrefillPlan], None] = ignore
    on_prefill: Callable[[PrefillPlan], None] = ignore
    on_turned_down: Callable[[bytes, Rejected], None] = ignore


def build_engine(
    executor: Executor, shapes: StepShapes, pool: BlockPool, *, chunk_tokens: int, told: Listeners
) -> Engine:
    """Makes an engine on the running event loop, not started: no prefix cache, nobody is turned away or expires."""
    config = SchedulerConfig(
        slots_per_partition=shapes.slots_per_partition,
        chunk_tokens=chunk_tokens,
        q_tile=shapes.q_tile,
        max_context_tokens=shapes.max_context_tokens,
        max_queued_requests=1 << 30,
        queue_timeout_s=NEVER_S,
        has_prefix_cache=False,
    )
    return Engine(
        scheduler=Scheduler(config, pool),
        executor=executor,
        encoder=StepEncoder(shapes),
        events=told,
    )
