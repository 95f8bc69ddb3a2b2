"""From a configuration to a device side that is ready to serve: read, place, size the pool, prepare the programs.

Everything slow about starting a worker, and everything that can be wrong with its model folder, happens here and before
the worker answers; but programs that only make small steps faster may be left for later. Runs on a thread of its own;
`progress` tells how far it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from moonshard.kv.blocks import BlockPool
from moonshard.models import kimi, moe, weights
from moonshard.models.checkpoint import Checkpoint
from moonshard.models.expert_loads import read_loads
from moonshard.models.footprint import pieces
from moonshard.models.spec import ModelError
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, experts_of, mesh_of, rules_of
from moonshard.serving.control.batching.scheduler import SchedulerConfig
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.engine.compiled.preparation import Preparation
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.stage import Stage, StageModel
from moonshard.serving.engine.steps import StepShapes
from moonshard.serving.transfer.endpoint import slab_layout
from moonshard.sharding.budget import stage_layers
from moonshard.sharding.experts import ExpertPlacement, place_experts
from moonshard.sharding.layout import Layout
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.rules import MeshError
from moonshard.sharding.shard import Shard

DEFAULT_MAX_CONTEXT_TOKENS = 8192
MAX_AUTO_POOL_BYTES = 1 << 30  # on CPU, where the pool shares memory with everything else
HARMLESS_SLOT_BYTES = 1 << 26  # of so few nothing is asked
SLOT_BYTES_PER_TOKEN = 9  # of a slot's rows: logits, counts, and whether the prompt has it
Q_TILE = 32  # queries per row of a prefill step: a sequence's chunk is padded to a multiple

Progress = Callable[[str], None]
Prepares = Literal["all", "needed", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """How many slots and blocks a worker has, and in how many partitions."""

    num_partitions: int
    slots_per_partition: int
    blocks_per_partition: int

    @property
    def num_slots(self) -> int:
        return self.num_partitions * self.slots_per_partition


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """All a worker needs to serve, and what it tells a gateway about it."""

    programs: Programs
    pool: PoolShape
    shapes: StepShapes
    block_size: int
    vocab_size: int
    dtype: str
    fingerprint: str
    layout: Layout  # of a block on its way between workers
    preparation: Preparation  # of `programs.others`, where they were left for later
    load_s: float
    compile_s: float

    @property
    def num_stages(self) -> int:
        return len(self.programs.stages)

    @property
    def block_bytes(self) -> int:
        """Of a whole block of all groups."""
        blocks = [group.block for group in self.layout.groups]
        return sum(b.num_layers * b.block_size * b.num_features * b.itemsize_bytes for b in blocks)

    def block_pool(self) -> BlockPool:
        return BlockPool(self.pool.num_partitions, self.pool.blocks_per_partition, self.block_size)

    def scheduler_config(self, config: Config) -> SchedulerConfig:
        return SchedulerConfig(
            slots_per_partition=self.pool.slots_per_partition,
            chunk_tokens=self.shapes.prefill_buckets[-1],
            short_share=config.prefill.short_share,
            q_tile=self.shapes.q_tile,
            has_prefix_cache=config.kv.prefix_cache,
            num_microbatches=min(self.num_stages, self.pool.slots_per_partition),
            max_context_tokens=self.shapes.max_context_tokens,
            max_queued_requests=config.gateway.max_queued_requests,
            queue_timeout_s=config.gateway.queue_timeout_s,
        )


@contextmanager
def _mesh_by_its_key(role: WorkerRole) -> Iterator[None]:
    """MeshErrors, which begin with `mesh`, under the configuration's name for it: `decode.mesh.tensor = 3 ...`."""
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
) -> LoadedModel:
    """Reads the weights and prepares programs: all, those without which nothing is served, or none.

    Of what is left, steps take none until it has been prepared by `LoadedModel.preparation`; a launch of a program that
    is not there compiles it.

    Raises:
        CheckpointError, ModelError, MeshError: the folder, the model or the mesh cannot be served; one message.
    """
    with _mesh_by_its_key(role):
        return _load_model(config, role, progress, timings or Timings(), store, prepares)


def _load_model(
    config: Config,
    role: WorkerRole,
    progress: Progress,
    timings: Timings,
    store: ProgramStore | None,
    prepares: Prepares,
) -> LoadedModel:
    begun_s = timings.now_s
    shard = shard_of(config, role)
    with timings.phase("devices"):
        dtype = resolve_dtype(config.model.dtype)
        platform = build_mesh(shard.mesh).devices.flat[0].platform  # a MeshError before anything is read
    with timings.phase("headers"):
        checkpoint, model = open_model(config.model.path)
        progress("loading weights")
        weights.check_shapes(kimi.declare(model), checkpoint)
        placement = _place_experts(config, role, checkpoint, model, shard)
        choose_sizes(config, model, dtype, role)  # for its errors: with the weights there will only be less room
    parts = _load_stages(checkpoint, model, shard, placement, dtype, backend_for(platform), progress, timings)
    load_s = timings.now_s - begun_s
    with timings.phase("pages"):
        shapes, pool = choose_sizes(config, model, dtype, role)
        sizes = {"blocks_per_partition": pool.blocks_per_partition, "block_size": config.kv.block_size}
        programs = Programs(shapes, [Stage(part, shapes, **sizes, dtype=dtype) for part in parts])
    begun_s = timings.now_s
    preparation = Preparation(programs, store, timings)
    if prepares != "all":
        programs.only_needed()
    wanted = {"all": (*programs.needed, *programs.others), "needed": programs.needed, "none": ()}[prepares]
    with timings.phase("programs", str(len(wanted))):
        preparation.prepare(wanted, lambda done, total: progress(f"preparing programs {done}/{total}"))
    return LoadedModel(
        programs=programs,
        pool=pool,
        shapes=shapes,
        block_size=config.kv.block_size,
        vocab_size=model.vocab_size,
        dtype=dtype,
        fingerprint=checkpoint.fingerprint,
        layout=slab_layout(model.kv_groups(dtype), config.kv.block_size, shard, [len(part.layers) for part in parts]),
        preparation=preparation,
        load_s=load_s,
        compile_s=timings.now_s - begun_s,
    )


def _place_experts(
    config: Config, role: WorkerRole, checkpoint: Checkpoint, model: kimi.KimiConfig, shard: Shard
) -> ExpertPlacement | None:
    """Where the experts of all MoE layers lie; None: each once, in order.

    Raises:
        ModelError: the file of loads cannot be read, or is another checkpoint's.
        MeshError: the devices cannot share the experts and their copies equally.
    """
    path, num_redundant = experts_of(config, role)
    if path is None:
        return None
    loads = read_loads(path, checkpoint.fingerprint, (model.num_moe_layers, model.n_routed_experts))
    try:
        return place_experts(loads, model.n_routed_experts + num_redundant, shard.num_parts("experts"))
    except ValueError as error:
        raise MeshError(f"redundant_experts = {num_redundant}: {error}") from error


def _load_stages(
    checkpoint: Checkpoint,
    model: kimi.KimiConfig,
    shard: Shard,
    placement: ExpertPlacement | None,
    dtype: str,
    backend: moe.Backend,
    progress: Progress,
    timings: Timings,
) -> list[StageModel]:
    """Every stage with its weights on its own mesh. Returns once these are there."""
    stages, found = split_stages(model, shard), []
    begun_s, read_s = timings.now_s, list[float]()
    for index, layers in enumerate(stages):
        which = f" of stage {index + 1} of {len(stages)}" if len(stages) > 1 else ""
        mesh = build_mesh(shard.mesh, index)
        own = None if placement is None else placement.of_layers(model.moe_layers(layers))
        loaded = weights.load(
            kimi.declare(model, layers, own),
            checkpoint,
            dtype,
            mesh,
            shard.rules,
            progress=lambda done, total, which=which: progress(f"loading weights{which} {done}/{total}"),
            on_read=read_s.append,
        )
        found.append(
            StageModel(
                config=model, layers=layers, weights=loaded, mesh=mesh, shard=shard, backend=backend, placement=own
            )
        )
    jax.block_until_ready([part.weights for part in found])
    timings.divide(begun_s, reading=sum(read_s), placing=timings.now_s - begun_s - sum(read_s))
    return found


def split_stages(model: kimi.KimiConfig, shard: Shard) -> tuple[range, ...]:
    """The layers of each stage. MeshError where there are more stages than layers."""
    try:
        return stage_layers(pieces(model, "bf16"), shard.mesh, shard.rules)
    except MeshError:
        raise
    except ValueError as error:
        raise MeshError(f"mesh.pipe = {shard.mesh.pipe}: {error}") from error


def open_model(folder: Path) -> tuple[Checkpoint, kimi.KimiConfig]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, kimi.KimiConfig.of(checkpoint)


def shard_of(config: Config, role: WorkerRole) -> Shard:
    """The mesh of a role, under its table of rules."""
    return Shard(mesh=mesh_of(config, role), rules=rules_of(config, role))


def backend_for(platform: str) -> moe.Backend:
    """The kernels on GPUs, plain XLA elsewhere. Either runs the experts of one device."""
    if platform != "gpu":
        return moe.blocks
    from moonshard.models.moe_grouped import grouped  # Pallas, only where it runs

    return grouped


def resolve_dtype(name: str) -> str:
    """`auto` is float32 on CPU, where bfloat16 products are slower, and bfloat16 elsewhere."""
    if name != "auto":
        return name
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def choose_sizes(
    config: Config, model: kimi.KimiConfig, dtype: str, role: WorkerRole = "both"
) -> tuple[StepShapes, PoolShape]:
    """The pool, and the context that it and the model allow.

    Raises:
        ModelError: the configured context is longer than the model's or than the pool.
        ConfigError: the pool is larger than the memory there is.
    """
    shard, block_size = shard_of(config, role), config.kv.block_size
    (group,) = model.kv_groups(dtype)
    block = _BlockBytes.of(model, group.bytes_per_token * block_size, shard)
    if config.kv.num_blocks is not None:
        _check_pool_fits(config.kv.num_blocks, shard, block)
    _check_slots_fit(config, model, role)
    num_blocks = config.kv.num_blocks or _auto_blocks(config, model, shard, block, role)
    pool_tokens = num_blocks * block_size
    wanted = config.model.max_context_tokens
    for limit, what in ((model.max_position_embeddings, "max_position_embeddings"), (pool_tokens, "the KV pool")):
        if wanted is not None and wanted > limit:
            raise ModelError(f"model.max_context_tokens = {wanted} is more than {what} of {limit} tokens")
    context = wanted or min(model.max_position_embeddings, DEFAULT_MAX_CONTEXT_TOKENS, pool_tokens)
    shapes = step_shapes(config, context, role)
    pool = PoolShape(
        num_partitions=shapes.num_partitions,
        slots_per_partition=shapes.slots_per_partition,
        blocks_per_partition=num_blocks,
    )
    return shapes, pool


def step_shapes(config: Config, context_tokens: int, role: WorkerRole) -> StepShapes:
    """The sizes of a worker's programs, for sequences of up to `context_tokens`."""
    partitions = mesh_of(config, role).num_partitions
    max_slots = config.prefill.max_slots if role == "prefill" else config.decode.max_slots
    slots_per_partition = max_slots // partitions
    return StepShapes(
        num_partitions=partitions,
        slots_per_partition=slots_per_partition,
        blocks_per_sequence=-(-context_tokens // config.kv.block_size),
        max_context_tokens=context_tokens,
        q_tile=Q_TILE,
        prefill_buckets=buckets(config.prefill.chunk_tokens, Q_TILE),
        decode_buckets=() if role == "prefill" else buckets(slots_per_partition),
        transfer_buckets=() if role == "both" else buckets(max(1, config.prefill.chunk_tokens // config.kv.block_size)),
    )


def buckets(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two times `smallest`, and last `largest`, rounded up to a multiple of `smallest`."""
    largest = -(-largest // smallest) * smallest
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return (*sizes, largest) if largest > smallest else (smallest,)


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockBytes:
    """What one block of a partition takes."""

    everywhere: int  # on all its devices together, which hold it whole each, or context-parallel a part each
    on_a_device: int  # on one of the stage with most layers

    @classmethod
    def of(cls, model: kimi.KimiConfig, whole: int, shard: Shard) -> "_BlockBytes":
        """`whole` as one device has it that has all layers. MeshError where the model cannot be cut so."""
        num_parts = shard.num_parts("kv_tokens")
        num_layers = max(map(len, split_stages(model, shard)))
        return cls(
            everywhere=whole * shard.mesh.tensor // num_parts,
            on_a_device=whole * num_layers // model.num_hidden_layers // num_parts,
        )


def _auto_blocks(config: Config, model: kimi.KimiConfig, shard: Shard, block: _BlockBytes, role: WorkerRole) -> int:
    """Of each partition, in half of the free memory: a device's, or the machine's up to `MAX_AUTO_POOL_BYTES`.

    Of the machine's no more than all slots could fill with the longest context: the kernel takes half a second to give
    a GiB, which a small model's start would wait for.
    """
    device_bytes = _free_device_bytes(shard.mesh.num_devices)
    if device_bytes is not None:
        return max(1, device_bytes // 2 // block.on_a_device)
    half_bytes = min(MAX_AUTO_POOL_BYTES, free_memory_bytes() // 2)
    context = config.model.max_context_tokens or min(model.max_position_embeddings, DEFAULT_MAX_CONTEXT_TOKENS)
    shapes = step_shapes(config, context, role)
    fillable = shapes.slots_per_partition * shapes.blocks_per_sequence
    return max(1, min(fillable, half_bytes // (block.everywhere * shard.mesh.num_partitions)))


def _check_slots_fit(config: Config, model: kimi.KimiConfig, role: WorkerRole) -> None:
    """ConfigError where the rows of the vocabulary's length that each slot has are more than the memory there is."""
    own, key = (config.prefill, "prefill") if role == "prefill" else (config.decode, "decode")
    needed = own.max_slots * model.vocab_size * SLOT_BYTES_PER_TOKEN
    device_bytes = _free_device_bytes(own.mesh.num_devices)
    free_bytes = free_memory_bytes() if device_bytes is None else device_bytes * own.mesh.num_devices
    if needed > max(free_bytes, HARMLESS_SLOT_BYTES):
        what = f"{own.max_slots} slots of a vocabulary of {model.vocab_size} tokens"
        took = f"take {needed / 1024**3:.2f} GiB, and {free_bytes / 1024**3:.2f} GiB are available"
        raise ConfigError([f"{key}.max_slots: {what} {took}"])


def _check_pool_fits(num_blocks: int, shard: Shard, block: _BlockBytes) -> None:
    """ConfigError where it cannot: the allocation itself would fail in XLA's words, or be promised and then killed."""
    device_bytes, partitions = _free_device_bytes(shard.mesh.num_devices), shard.mesh.num_partitions
    if device_bytes is None:
        needed, free_bytes = num_blocks * partitions * block.everywhere, free_memory_bytes()
        what = f"{block.everywhere} bytes for each of {partitions} partitions"
    else:
        needed, free_bytes = num_blocks * block.on_a_device, device_bytes
        what = f"{block.on_a_device} bytes on a device"
    if needed > free_bytes:
        raise ConfigError(
            [
                f"kv.num_blocks: {num_blocks} blocks of {what} "
                f"take {needed / 1024**3:.2f} GiB, and {free_bytes / 1024**3:.2f} GiB are available"
            ]
        )


def _free_device_bytes(num_devices: int) -> int | None:
    """Of the device with least. None for devices that live in the machine's memory."""
    found = [device.memory_stats() for device in jax.devices()[:num_devices]]
    free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in found if stats and "bytes_limit" in stats]
    return min(free, default=None)


def free_memory_bytes() -> int:
    """What the kernel would give without swapping (`MemAvailable` of proc(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 2 * MAX_AUTO_POOL_BYTES
