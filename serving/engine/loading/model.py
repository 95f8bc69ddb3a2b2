"""From a configuration to a device side that is ready to serve: read, place, size the pool, prepare the programs.

Everything slow about starting a worker, and everything that can be wrong with its model folder, happens here and before
the worker answers; but programs that only make small steps faster may be left for later. Programs are made from shapes
alone, while another thread reads the weights. Runs on a thread of its own; `progress` tells how far it is.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax

from moonshard.kv.blocks import BlockPool
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.experts.loads import read_loads
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.text_part import not_read
from moonshard.models.machines import MACHINES, Machine
from moonshard.models.model import ExpandedAttention, Model, PagedAttention
from moonshard.models.native import library
from moonshard.models.native.experts import grouped_experts
from moonshard.models.registry import open_model
from moonshard.serving.config.keys import Config, WorkerRole, experts_of
from moonshard.serving.control.batching.scheduler import SchedulerConfig
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.engine.capacity.sizes import (
    PoolShape,
    WeightBytes,
    choose_sizes,
    resolve_dtype,
    shard_of,
    split_stages,
)
from moonshard.serving.engine.capacity.slab_layout import owners_by_stage, slab_layout
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.preparation import Preparation
from moonshard.serving.engine.compiled.prepared import PreparedPrograms
from moonshard.serving.engine.compiled.reading import Progress, Reading
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.loading.draft import OpenDraft, open_draft_of
from moonshard.serving.engine.loading.holding import fingerprint_of, holding_of, tell_how_weights_are_held
from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.stage import Stage
from moonshard.serving.engine.steps import StepShapes
from moonshard.sharding.experts import ExpertPlacement, place_experts
from moonshard.sharding.layout import Layout
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.rules import MeshError
from moonshard.sharding.shard import Shard

logger = logging.getLogger(__name__)

Prepares = Literal["all", "first", "needed", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """All a worker needs to serve, and what it tells a gateway about it."""

    programs: Programs
    pool: PoolShape
    shapes: StepShapes
    block_size: int
    vocab_size: int
    dtype: str
    kernels: str  # that its steps run: see `kernels_of`
    fingerprint: str
    draft_fingerprint: str  # of the draft model whose KV blocks have too; empty: there is none
    layout: Layout  # of a block on its way between workers
    preparation: Preparation  # of `programs.others`, where they were left for later
    load_s: float
    compile_s: float

    @property
    def num_stages(self) -> int:
        return self.programs.num_stages

    @property
    def held(self) -> tuple[frozenset[int], ...]:
        """Of each partition the owners of the layout whose devices are this process's."""
        stages = [blueprint.shards for blueprint in self.programs.prepared.blueprints]
        owners = owners_by_stage(self.layout.groups[0], [stage.num_layers for stage in stages])
        return tuple(
            frozenset(
                owner
                for stage, own in zip(stages, owners, strict=True)
                for part, owner in enumerate(own)
                if part in stage.own_parts(partition)
            )
            for partition in range(self.pool.num_partitions)
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block, whichever KV group it is of."""
        block = self.layout.groups[0].block
        return block.num_layers * block.block_size * block.num_features * block.itemsize_bytes

    def block_pool(self) -> BlockPool:
        pool = self.pool
        return BlockPool(pool.num_partitions, pool.blocks_per_partition, self.block_size, self.shapes.groups)

    def scheduler_config(self, config: Config) -> SchedulerConfig:
        return SchedulerConfig(
            slots_per_partition=self.pool.slots_per_partition,
            chunk_tokens=self.shapes.prefill_buckets[-1],
            short_share=config.prefill.short_share,
            q_tile=self.shapes.q_tile,
            q_len=self.shapes.q_len,
            has_prefix_cache=config.kv.prefix_cache and self.shapes.groups.is_plain,
            has_next_token_kv=self.shapes.num_ahead > 0,
            num_microbatches=min(self.num_stages, self.pool.slots_per_partition),
            max_context_tokens=self.shapes.max_context_tokens,
            max_queued_requests=config.gateway.max_queued_requests,
            queue_timeout_s=config.gateway.queue_timeout_s,
        )


@contextmanager
def _mesh_by_its_key(role: WorkerRole) -> Iterator[None]:
    """Renames MeshErrors, whose messages begin with `mesh`, to the configuration's key.

    So `mesh.tensor = 3 ...` becomes `decode.mesh.tensor = 3 ...`.
    """
    try:
        yield
    except MeshError as error:
        raise MeshError(f"{'prefill' if role == 'prefill' else 'decode'}.{error}") from error


def load_model(
    config: Config,
    role: WorkerRole,
    progress: Progress,
    *,
    timings: Timings | None = None,
    store: ProgramStore | None = None,
    prepares: Prepares = "all",
    machine: Machine | None = None,
    on_thread_ahead: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Reads the weights and prepares programs: all, those without which nothing is served, these and those
    of a first short request, or none.

    Of what is left, steps take none until it has been prepared by `LoadedModel.preparation`; a launch of a program that
    is not there compiles it. `machine`: what is best computed at once; None: as `models.machines` has it.
    `on_thread_ahead`: called on the thread that goes on preparing programs for as long as weights are read.

    Raises:
        CheckpointError, ModelError, MeshError: the folder, the model or the mesh cannot be served; one message.
    """
    with _mesh_by_its_key(role):
        return _load_model(config, role, progress, timings or Timings(), store, prepares, machine, on_thread_ahead)


def _load_model(
    config: Config,
    role: WorkerRole,
    progress: Progress,
    timings: Timings,
    store: ProgramStore | None,
    prepares: Prepares,
    machine: Machine | None,
    on_thread_ahead: Callable[[], None],
) -> LoadedModel:
    begun_s = timings.now_s
    shard = shard_of(config, role)
    with timings.phase("devices"):
        dtype = resolve_dtype(config.model.dtype)
        platform = build_mesh(shard.mesh).devices.flat[0].platform  # a MeshError before anything is read
    with timings.phase("headers"):
        checkpoint, model = open_model(config.model.path)
        progress("loading weights")
        declared = model.declare()
        weights.check_shapes(declared, checkpoint)
        for level, line in not_read(checkpoint, weights.tensors_of(declared), model.config.num_hidden_layers):
            logger.log(level, "%s: %s", checkpoint.folder, line)
        placement = _place_experts(config, role, checkpoint, model, shard)
        machine = machine or machine_for(platform)
        holding = holding_of(config, machine)
        draft = open_draft_of(config, shard, model, checkpoint, dtype, holding)
        parts = abstract_stages(model, shard, dtype, placement, checkpoint, holding, machine, draft)
        tell_how_weights_are_held(config, holding, machine, platform, dtype, [part.weights for part in parts])
        taken = WeightBytes.of((part.weights, part.draft and part.draft.weights) for part in parts)
        draft_layers = sum(part.draft.num_page_layers for part in parts if part.draft is not None)
        shapes, pool = choose_sizes(config, model, dtype, role, taken, machine, draft_layers)
        sizes = {"blocks_per_partition": pool.blocks_per_partition, "block_size": config.kv.block_size}
        prepared = PreparedPrograms(shapes, [Blueprint(part, shapes, **sizes, dtype=dtype) for part in parts])
    _tell_what_was_decided(config, shapes, platform)
    preparation = Preparation(prepared, store, timings)
    if prepares != "all":
        prepared.only_needed()
    behind = {"all": prepared.others, "first": prepared.firsts, "needed": (), "none": ()}[prepares]
    wanted = () if prepares == "none" else (*prepared.needed, *behind)
    with Reading(progress) as reading:
        stages = reading.begin(lambda told: _load_stages(checkpoint, prepared, dtype, holding, draft, told, timings))
        prepared_s = timings.now_s
        with timings.phase("programs", str(len(wanted))):
            preparation.prepare(wanted, reading.count_programs, prepared.firsts if prepares == "needed" else ())
        if prepares in ("needed", "first"):
            preparation.start_ahead(on_thread_ahead, stages.done)
        compile_s = timings.now_s - prepared_s
        programs = Programs(prepared, stages.result())
        reading.tell_programs()
    return LoadedModel(
        programs=programs,
        pool=pool,
        shapes=shapes,
        block_size=config.kv.block_size,
        vocab_size=model.config.vocab_size,
        dtype=dtype,
        kernels=kernels_of(platform),
        fingerprint=fingerprint_of(checkpoint, model, dtype, holding),
        draft_fingerprint="" if draft is None else draft.fingerprint,
        layout=slab_layout(
            model.kv_groups(dtype),
            config.kv.block_size,
            shard,
            [blueprint.num_page_layers for blueprint in prepared.blueprints],
        ),
        preparation=preparation,
        load_s=timings.now_s - begun_s - compile_s,
        compile_s=compile_s,
    )


def _tell_what_was_decided(config: Config, shapes: StepShapes, platform: str) -> None:
    if config.kv.prefix_cache and not shapes.groups.is_plain:
        logger.warning("kv.prefix_cache: off, since the model has several KV groups or a window")
    if config.prefill.chunk_tokens is None:
        chunk_tokens, kind = shapes.prefill_buckets[-1], kind_for(platform)
        logger.info("prefill.chunk_tokens: %d, as the table has it for %s", chunk_tokens, kind)


def abstract_stages(
    model: Model,
    shard: Shard,
    dtype: str,
    placement: ExpertPlacement | None = None,
    source: Checkpoint | None = None,
    holding: weights.Holding | None = None,
    machine: Machine | None = None,
    draft: OpenDraft | None = None,
) -> list[StageModel]:
    """The stages of a worker, with shapes for weights, held as those of `source` would be. `draft`: of a single one.

    MeshError: it cannot be cut so, or there are too few devices.
    """
    found = []
    for index, layers in enumerate(split_stages(model, shard)):
        mesh = build_mesh(shard.mesh, index)
        platform = mesh.devices.flat[0].platform
        own = None if placement is None else placement.of_layers(model.config.moe_layers(layers))
        declared = model.declare(layers, own)
        held = weights.abstract(declared, dtype, mesh, shard.rules, source=source, holding=holding)
        found.append(
            StageModel(
                model=model,
                layers=layers,
                weights=held,
                mesh=mesh,
                shard=shard,
                backend=backend_for(platform, machine),
                placement=own,
                attention=attention_for(platform),
                expanded=expanded_for(platform),
                machine=machine or machine_for(platform),
                draft=None if draft is None else draft.behind(layers, held, mesh, shard),
            )
        )
    return found


def _place_experts(
    config: Config, role: WorkerRole, checkpoint: Checkpoint, model: Model, shard: Shard
) -> ExpertPlacement | None:
    """Where the experts of all MoE layers lie; None: each once, in order.

    Raises:
        ModelError: the file of loads cannot be read, or is another checkpoint's.
        MeshError: the devices cannot share the experts and their copies equally.
    """
    path, num_redundant = experts_of(config, role)
    if path is None:
        return None
    loads = read_loads(path, checkpoint.fingerprint, (model.config.num_moe_layers, model.config.n_routed_experts))
    try:
        return place_experts(loads, model.config.n_routed_experts + num_redundant, shard.num_parts("experts"))
    except ValueError as error:
        raise MeshError(f"redundant_experts = {num_redundant}: {error}") from error


def _load_stages(
    checkpoint: Checkpoint,
    prepared: PreparedPrograms,
    dtype: str,
    holding: weights.Holding | None,
    draft: OpenDraft | None,
    progress: Progress,
    timings: Timings,
) -> list[Stage]:
    """Every stage that is here, with its weights and its pages on its own mesh. Returns once these are there."""
    num_stages, found = len(prepared.blueprints), list[Any]()
    begun_s, read_s = timings.now_s, list[float]()
    here = [(index, blueprint) for index, blueprint in enumerate(prepared.blueprints) if blueprint.is_here]
    parts = [blueprint.part for _, blueprint in here]
    for (index, _), part in zip(here, parts, strict=True):
        which = f" of stage {index + 1} of {num_stages}" if num_stages > 1 else ""
        found.append(
            weights.load(
                part.declared(),
                checkpoint,
                dtype,
                part.mesh,
                part.shard.rules,
                holding=holding,
                progress=lambda done, total, which=which: progress(f"loading weights{which} {done}/{total}"),
                on_read=read_s.append,
            )
        )
    drafts = [
        None if draft is None else draft.load(target, part.mesh, part.shard)
        for part, target in zip(parts, found, strict=True)
    ]
    jax.block_until_ready((found, drafts))
    timings.divide(begun_s, reading=sum(read_s), placing=timings.now_s - begun_s - sum(read_s))
    with timings.phase("pages"):
        built = zip(here, found, drafts, strict=True)
        return [Stage(blueprint, loaded, prepared.of(index), own) for (index, blueprint), loaded, own in built]


def backend_for(platform: str, machine: Machine | None = None) -> moe.Backend:
    """The kernels on GPUs, and on CPUs where they are; else plain XLA. Each runs the experts of one device.

    `machine`: what is computed otherwise; None: as `models.machines` has it.
    """
    if platform == "gpu":
        from moonshard.models.gpu import card  # Pallas, only where it runs
        from moonshard.models.gpu.experts import backend

        return backend.grouped_experts if card.runs_kernels() else moe.blocks
    return grouped_experts if (machine or machine_for(platform)).reads_in_place else moe.blocks


def attention_for(platform: str) -> PagedAttention | None:
    """The kernel on GPUs that it is written for; None: as the model attends by itself."""
    if platform == "gpu":
        from moonshard.models.gpu import card  # Pallas, only where it runs
        from moonshard.models.gpu.attention import latent

        return latent.latent_attention if card.runs_kernels() else None
    return None


def expanded_for(platform: str) -> ExpandedAttention | None:
    """The kernel for long prompts on GPUs, once `card` says that it serves; None: `attention_for`'s does them."""
    if platform != "gpu":
        return None
    from moonshard.models.gpu import card  # Pallas, only where it runs

    if not (card.EXPANDS_PROMPTS and card.runs_kernels()):
        return None
    from moonshard.models.gpu.attention import expanded

    return expanded.expanded_attention


def kernels_of(platform: str) -> str:
    """What runs the parts of a step that kernels are written for: on CPUs the instruction set, or `xla`."""
    if platform == "gpu":
        return "xla" if attention_for(platform) is None else "pallas"
    return kind_for(platform)


def machine_for(platform: str) -> Machine:
    """What is best computed at once on this machine's devices."""
    return MACHINES[kind_for(platform)]


def kind_for(platform: str) -> str:
    """The kind of machine, as the table of `models.machines` has it."""
    found = library.chosen() if platform == "cpu" else None
    if found is not None:
        return found.best
    return "gpu" if platform == "gpu" else "xla"
