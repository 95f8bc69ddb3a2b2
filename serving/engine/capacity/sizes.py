"""The sizes of a worker: its mesh and stages, the buckets of its programs, its slots, and its pool of blocks.

From a configuration, a model and the memory there is; nothing is allocated. What does not fit is refused here, by the
key that says so, and not by whoever allocates it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from moonshard.kv.blocks import BlockGroup, BlockGroups
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Model
from moonshard.models.spec import KvGroup, ModelError, page_layers
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, decode_positions, mesh_of, rules_of
from moonshard.serving.engine.capacity.members import share_here, told_by_all
from moonshard.serving.engine.capacity.memory import MAX_AUTO_POOL_BYTES, free_device_bytes, free_memory_bytes
from moonshard.serving.engine.steps import StepShapes
from moonshard.sharding.budget import stage_layers
from moonshard.sharding.rules import MeshError
from moonshard.sharding.shard import Shard

DEFAULT_MAX_CONTEXT_TOKENS = 8192
HARMLESS_SLOT_BYTES = 1 << 26  # of so few nothing is asked
SLOT_BYTES_PER_TOKEN = 5  # of a slot's rows: counts, and whether the prompt has it
LOGIT_BYTES = 4  # of each position


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """How many slots and blocks a worker has, and in how many partitions."""

    num_partitions: int
    slots_per_partition: int
    blocks_per_partition: int

    @property
    def num_slots(self) -> int:
        return self.num_partitions * self.slots_per_partition


def shard_of(config: Config, role: WorkerRole) -> Shard:
    """The mesh of a role, under its table of rules."""
    return Shard(mesh=mesh_of(config, role), rules=rules_of(config, role))


def split_stages(model: Model, shard: Shard) -> tuple[range, ...]:
    """The layers of each stage. MeshError where there are more stages than layers."""
    try:
        return stage_layers(model.pieces("bf16"), shard.mesh, shard.rules)
    except MeshError:
        raise
    except ValueError as error:
        raise MeshError(f"mesh.pipe = {shard.mesh.pipe}: {error}") from error


def resolve_dtype(name: str) -> str:
    """`auto` is float32 on CPU, where bfloat16 products are slower, and bfloat16 elsewhere."""
    if name != "auto":
        return name
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """The bytes that a worker's weights will take, before they are read."""

    everywhere: int = 0  # on all its devices together
    on_a_device: int = 0  # on the one that has most

    @classmethod
    def of(cls, stages: Iterable[Any]) -> "WeightBytes":
        """Of the stages' abstract weights; what stands there twice, as tables that a draft borrows, is there once."""
        everywhere, most = 0, 0
        for tree in stages:
            leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
            parts = [(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize, x.sharding) for x in leaves]
            everywhere += sum(part * sharding.num_devices for part, sharding in parts)
            most = max(most, sum(part for part, _ in parts))
        return cls(everywhere=everywhere, on_a_device=most)


NO_WEIGHTS = WeightBytes()


def choose_sizes(
    config: Config,
    model: Model,
    dtype: str,
    role: WorkerRole = "both",
    weights: WeightBytes = NO_WEIGHTS,
    machine: Machine = XLA,
    draft_layers: int = 0,
) -> tuple[StepShapes, PoolShape]:
    """The pool, in the memory that `weights` will leave, and the context that it and the model allow.

    `draft_layers`: of a block's, a draft model's.

    Raises:
        ModelError: the configured context is longer than the model's or than the pool.
        ConfigError: the pool is larger than the memory there is.
    """
    shard, block_size = shard_of(config, role), config.kv.block_size
    groups, stages = model.kv_groups(dtype), split_stages(model, shard)
    if len({(group.num_features, group.dtype) for group in groups}) > 1:
        raise ModelError("KV groups whose tokens have different features have no blocks in common")
    block = _BlockBytes.of(groups, stages, block_size, shard, draft_layers)
    timeout_s = config.worker.gang_join_timeout_s
    share = share_here(timeout_s)
    if config.kv.num_blocks is not None:
        _check_pool_fits(config.kv.num_blocks, shard, block, weights, share)
    _check_slots_fit(config, model, role)
    num_blocks = config.kv.num_blocks
    if num_blocks is None:
        own = _auto_blocks(config, model, dtype, shard, block, role, weights, machine, share)
        num_blocks = min(map(int, told_by_all("blocks", str(own), timeout_s)))
    wanted, longest = config.model.max_context_tokens, model.config.max_position_embeddings
    num_columns = block_groups(config, groups, machine).num_columns(num_blocks)
    pool_tokens = longest if num_columns is None else num_columns * block_size
    if not pool_tokens:
        raise ConfigError([f"kv.num_blocks: {num_blocks} are fewer than the {len(groups)} KV groups of the model"])
    for limit, what in ((longest, "max_position_embeddings"), (pool_tokens, "the KV pool")):
        if wanted is not None and wanted > limit:
            raise ModelError(f"model.max_context_tokens = {wanted} is more than {what} of {limit} tokens")
    context = wanted or min(longest, DEFAULT_MAX_CONTEXT_TOKENS, pool_tokens)
    shapes = step_shapes(config, context, role, groups, machine)
    pool = PoolShape(
        num_partitions=shapes.num_partitions,
        slots_per_partition=shapes.slots_per_partition,
        blocks_per_partition=num_blocks,
    )
    return shapes, pool


def chunk_tokens_of(config: Config, machine: Machine) -> int:
    """The most prompt tokens of a step: as configured, or what is best on the machine, in whole blocks."""
    if config.prefill.chunk_tokens is not None:
        return config.prefill.chunk_tokens
    return -(-machine.chunk_tokens // config.kv.block_size) * config.kv.block_size


def block_groups(config: Config, groups: Sequence[KvGroup], machine: Machine) -> BlockGroups:
    """A model's KV groups as the bookkeeping sees them, of a worker that computes prompts in chunks so long."""
    step_tokens = prefill_buckets(chunk_tokens_of(config, machine), machine)[-1]
    block_size = config.kv.block_size
    found = (
        BlockGroup() if group.window is None else BlockGroup.sliding(group.window, step_tokens, block_size)
        for group in groups
    )
    return BlockGroups(tuple(found))


def step_shapes(
    config: Config, context_tokens: int, role: WorkerRole, groups: Sequence[KvGroup], machine: Machine
) -> StepShapes:
    """The sizes of a worker's programs, for sequences of up to `context_tokens`."""
    partitions = mesh_of(config, role).num_partitions
    max_slots = config.prefill.max_slots if role == "prefill" else config.decode.max_slots
    slots_per_partition, chunk_tokens = max_slots // partitions, chunk_tokens_of(config, machine)
    has_transfers = role != "both" or config.kv.store.enabled
    return StepShapes(
        num_partitions=partitions,
        slots_per_partition=slots_per_partition,
        columns_per_sequence=-(-context_tokens // config.kv.block_size),
        groups=block_groups(config, groups, machine),
        max_context_tokens=context_tokens,
        q_tile=machine.tile_tokens,
        q_len=decode_positions(config, role),
        num_ahead=0 if config.speculation.draft_model is None else config.speculation.most_tokens,
        prefill_buckets=prefill_buckets(chunk_tokens, machine),
        decode_buckets=() if role == "prefill" else buckets(slots_per_partition),
        transfer_buckets=buckets(max(1, chunk_tokens // config.kv.block_size)) if has_transfers else (),
    )


def prefill_buckets(chunk_tokens: int, machine: Machine) -> tuple[int, ...]:
    """The padded sizes of prefill steps: one token, then parts of a row from `few_tokens` on, then whole rows.

    A prompt that is cached to its end leaves one token. Behind 2,047 of them its step took 6.9 ms, and 9.0 ms padded to
    8, on the machine of the table in `models.machines`.
    """
    rows = buckets(chunk_tokens, machine.tile_tokens)
    return (1, *(size for size in buckets(rows[0], machine.few_tokens) if size < rows[0]), *rows)


def buckets(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two times `smallest`, and last `largest`, rounded up to a multiple of `smallest`."""
    largest = -(-largest // smallest) * smallest
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return (*sizes, largest) if largest > smallest else (smallest,)


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockBytes:
    """The bytes that one block of a partition takes."""

    everywhere: int  # on all its devices together, which hold it whole each, or context-parallel a part each
    on_a_device: int  # on one of the stage with most layers

    @classmethod
    def of(
        cls, groups: Sequence[KvGroup], stages: Sequence[range], block_size: int, shard: Shard, draft_layers: int
    ) -> "_BlockBytes":
        num_parts = shard.num_parts("kv_tokens")
        layer_bytes = groups[0].layer_bytes_per_token * block_size
        by_stage = [page_layers(groups, layers) for layers in stages]
        by_stage[-1] += draft_layers
        return cls(
            everywhere=sum(by_stage) * layer_bytes * shard.mesh.tensor // num_parts,
            on_a_device=max(by_stage) * layer_bytes // num_parts,
        )


def _auto_blocks(
    config: Config,
    model: Model,
    dtype: str,
    shard: Shard,
    block: _BlockBytes,
    role: WorkerRole,
    weights: WeightBytes,
    machine: Machine,
    share: float,
) -> int:
    """Blocks of each partition, so many that they take half of the free memory: a device's, or the machine's up to
    `MAX_AUTO_POOL_BYTES`, on which that share of all devices is.

    In the machine's memory no more than all slots could fill with the longest context: where no kernel makes the pool,
    the system takes half a second to give a GiB, which a small model's start would wait for.
    """
    device_bytes = free_device_bytes(shard.mesh.num_devices)
    if device_bytes is not None:
        return max(1, (device_bytes - weights.on_a_device) // 2 // block.on_a_device)
    half_bytes = min(MAX_AUTO_POOL_BYTES, max(0, free_memory_bytes() - int(weights.everywhere * share)) // 2)
    context = config.model.max_context_tokens or min(model.config.max_position_embeddings, DEFAULT_MAX_CONTEXT_TOKENS)
    shapes = step_shapes(config, context, role, model.kv_groups(dtype), machine)
    fillable = shapes.slots_per_partition * shapes.groups.num_blocks(shapes.columns_per_sequence)
    return max(1, min(fillable, int(half_bytes / (block.everywhere * shard.mesh.num_partitions * share))))


def _check_slots_fit(config: Config, model: Model, role: WorkerRole) -> None:
    """ConfigError where the slots' rows, each as long as the vocabulary, take more than the memory there is."""
    own, key = (config.prefill, "prefill") if role == "prefill" else (config.decode, "decode")
    token_bytes = SLOT_BYTES_PER_TOKEN + LOGIT_BYTES * decode_positions(config, role)
    needed = own.max_slots * model.config.vocab_size * token_bytes
    device_bytes = free_device_bytes(own.mesh.num_devices)
    free_bytes = free_memory_bytes() if device_bytes is None else device_bytes * own.mesh.num_devices
    if needed > max(free_bytes, HARMLESS_SLOT_BYTES):
        what = f"{own.max_slots} slots of a vocabulary of {model.config.vocab_size} tokens"
        took = f"take {needed / 1024**3:.2f} GiB, and {free_bytes / 1024**3:.2f} GiB are available"
        raise ConfigError([f"{key}.max_slots: {what} {took}"])


def _check_pool_fits(num_blocks: int, shard: Shard, block: _BlockBytes, weights: WeightBytes, share: float) -> None:
    """ConfigError where the pool does not fit: the allocation itself would fail with XLA's message, or would succeed
    and the process be killed later. `share` of all devices is in this machine's memory, where they have none.
    """
    device_bytes, partitions = free_device_bytes(shard.mesh.num_devices), shard.mesh.num_partitions
    if device_bytes is None:
        needed = int(num_blocks * partitions * block.everywhere * share)
        free_bytes = free_memory_bytes() - int(weights.everywhere * share)
        what = f"{block.everywhere} bytes for each of {partitions} partitions"
    else:
        needed, free_bytes = num_blocks * block.on_a_device, device_bytes - weights.on_a_device
        what = f"{block.on_a_device} bytes on a device"
    if needed > free_bytes:
        raise ConfigError(
            [
                f"kv.num_blocks: {num_blocks} blocks of {what} "
                f"take {needed / 1024**3:.2f} GiB, and {max(0, free_bytes) / 1024**3:.2f} GiB are available"
            ]
        )
