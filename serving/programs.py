"""The jitted programs of a worker: prefill, decode, and the small ones that load a slot, copy, export and land blocks.

Each takes the donated state and one packed array and gives the state back; an export only reads the pages, so that they
stay where they are. A program is written for one device and runs on all of the mesh under `shard_map`: state and packed
array are cut by partition, so that every device sees its own partition's alone; along `tensor` devices repeat it, and
draw the same tokens. Programs are compiled for every bucket before the worker is ready; nothing compiles afterwards.
No scheduler object comes here.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moonshard.kv.block_shards import BlockShards
from moonshard.kv.pages import Pages, allocate_pages, copy_blocks, gather_blocks, scatter_blocks
from moonshard.models import kimi, moe, sampling
from moonshard.models.sampling import Draws, RowSampling, SlotState
from moonshard.models.spec import matmul_precision
from moonshard.serving.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, Logprobs
from moonshard.serving.steps import Step, StepKind, StepLayout, StepShapes
from moonshard.sharding.mesh import BY_PARTITION
from moonshard.sharding.place import Place


class DeviceState(NamedTuple):
    """All that changes from step to step on the device."""

    pages: Pages
    slots: SlotState


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight, and what it gives, still on the device.

    Packed tokens; an export's blocks; of a land, one number that is there once the blocks are. None for the kinds whose
    end nobody waits for.
    """

    step: Step
    result: jax.Array | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's tokens on the host, in the order in which its plan names who draws."""

    tokens: np.ndarray  # [rows] int32
    logprobs: np.ndarray  # [rows] f32
    top_ids: np.ndarray  # [rows, top] int32
    top_logprobs: np.ndarray  # [rows, top] f32

    def logprobs_of(self, row: int, num_top: int) -> Logprobs:
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        return Logprobs(chosen=float(self.logprobs[row]), top=tuple(top))


class Programs:
    """The device side of one worker: weights, state, and the compiled programs that move one to the next."""

    def __init__(
        self,
        config: kimi.KimiConfig,
        weights: Any,
        shapes: StepShapes,
        mesh: Mesh,
        place: Place,
        *,
        blocks_per_partition: int,
        block_size: int,
        dtype: str,
        backend: moe.Backend = moe.blocks,
    ):
        """`weights` lie on the mesh as the rules of `place` say."""
        self.shapes = shapes
        self._weights = weights
        (group,) = config.kv_groups(dtype)
        self._shards = BlockShards(mesh, place, num_layers=group.num_layers, block_size=block_size)
        pages = allocate_pages(
            shapes.num_partitions * blocks_per_partition,
            group.num_layers,
            block_size,
            group.num_features,
            dtype=dtype,
            sharding=NamedSharding(mesh, self._shards.pages),
        )
        num_slots = shapes.num_partitions * shapes.slots_per_partition
        slots = sampling.empty_slots(num_slots, config.vocab_size, MAX_LOGIT_BIAS, MAX_STOP_TOKENS)
        self._state = DeviceState(pages=pages, slots=jax.device_put(slots, NamedSharding(mesh, BY_PARTITION)))
        self._programs: dict[tuple[StepKind, int], Callable[..., Any]] = {
            (kind, bucket): self._program(config, kind, bucket, mesh, place, backend, matmul_precision(dtype))
            for kind, bucket in shapes.programs
        }

    @property
    def state(self) -> DeviceState:
        """For inspection between steps; the next launch donates it."""
        return self._state

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Runs every program once on padding, which compiles it, or loads it from the persistent cache."""
        for done, (kind, bucket) in enumerate(self._programs):
            progress(done, len(self._programs))
            packed, _ = self.shapes.layout(kind, bucket).blank(self.shapes.num_partitions)
            payload = self._blank_payload(bucket) if kind is StepKind.LAND else None
            self.fetch(self.launch(Step(-1, kind, bucket, packed, payload=payload)))
        progress(len(self._programs), len(self._programs))
        jax.block_until_ready(self._state)

    def launch(self, step: Step) -> Launched:
        """Enqueues a step and returns without waiting for it."""
        program = self._programs[step.kind, step.bucket]
        match step.kind:
            case StepKind.EXPORT:
                result = program(self._state.pages, step.metadata)
            case StepKind.LAND:
                assert step.payload is not None  # as the encoder makes them
                payload = self._shards.spread(step.payload, step.partition)
                self._state, result = program(self._state, step.metadata, payload)
            case _:
                self._state, result = program(self._weights, self._state, step.metadata)
        return Launched(step, result)

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """Waits for a step's tokens, or an export's blocks, or the end of a land. None where there is nothing to see.

        The blocks are an array of their own, which no later step changes; of one device on CPU it is the device's, not
        copied again.
        """
        if launched.result is None:
            return None
        match launched.step.kind:
            case StepKind.EXPORT:
                return self._shards.collect(launched.result, launched.step.partition)
            case StepKind.LAND:
                launched.result.block_until_ready()
                return None
            case _:
                return _drawn(np.asarray(launched.result)[list(launched.step.draws)])

    def _blank_payload(self, bucket: int) -> np.ndarray:
        _, *block = self._state.pages.shape
        return np.zeros((bucket, *block), self._state.pages.dtype)

    def _program(
        self,
        config: kimi.KimiConfig,
        kind: StepKind,
        bucket: int,
        mesh: Mesh,
        place: Place,
        backend: moe.Backend,
        precision: str,
    ) -> Callable[..., Any]:
        """The jitted program of one kind and bucket."""
        layout = self.shapes.layout(kind, bucket)
        specs: Any = (self._shards.pages, BY_PARTITION)
        state = DeviceState(*specs)
        weights = jax.tree.map(lambda leaf: leaf.sharding.spec, self._weights)
        over_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        match kind:
            case StepKind.EXPORT:
                body = over_mesh(
                    functools.partial(_export, self._shards, layout),
                    in_specs=(self._shards.pages, BY_PARTITION),
                    out_specs=self._shards.payload,
                )
                return jax.jit(body)
            case StepKind.LAND:
                body = over_mesh(
                    functools.partial(_land, self._shards, layout),
                    in_specs=(state, BY_PARTITION, self._shards.payload),
                    out_specs=(state, PartitionSpec()),
                )
                return jax.jit(body, donate_argnums=0)
            case StepKind.PREFILL:
                step, result = functools.partial(_prefill, config, backend, place), BY_PARTITION
            case StepKind.DECODE:
                step, result = functools.partial(_decode, config, backend, place), BY_PARTITION
            case StepKind.LOAD:
                step, result = _load, None
            case StepKind.COPY:
                step, result = _copy, None
        body = over_mesh(
            functools.partial(_run, step, layout, precision),
            in_specs=(weights, state, BY_PARTITION),
            out_specs=(state, result),
        )
        return jax.jit(body, donate_argnums=1)


def _drawn(packed: np.ndarray) -> Drawn:
    top = (packed.shape[1] - 2) // 2
    return Drawn(
        tokens=packed[:, 0],
        logprobs=np.ascontiguousarray(packed[:, 1]).view(np.float32),
        top_ids=packed[:, 2 : 2 + top],
        top_logprobs=np.ascontiguousarray(packed[:, 2 + top :]).view(np.float32),
    )


def _run(
    step: Callable[..., Any], layout: StepLayout, precision: str, weights: Any, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array | None]:
    with jax.default_matmul_precision(precision):
        return step(weights, state, layout.unpack(packed[0]))


def _export(shards: BlockShards, layout: StepLayout, pages: Pages, packed: jax.Array) -> jax.Array:
    return shards.own_part(gather_blocks(pages, layout.unpack(packed[0])["source"]))


def _land(
    shards: BlockShards, layout: StepLayout, state: DeviceState, packed: jax.Array, payload: jax.Array
) -> tuple[DeviceState, jax.Array]:
    pages = scatter_blocks(state.pages, layout.unpack(packed[0])["destination"], shards.whole(payload))
    return state._replace(pages=pages), jnp.int32(0)  # all that a step gives is there at once


def _prefill(
    config: kimi.KimiConfig,
    backend: moe.Backend,
    place: Place,
    weights: Any,
    state: DeviceState,
    f: dict[str, jax.Array],
):
    batch = kimi.Batch(tokens=f["tokens"], positions=f["positions"], block_tables=f["block_tables"])
    logits, pages = kimi.prefill(config, weights, state.pages, batch, f["sample_from"], backend, place)
    draws, slots = sampling.draw(logits, _row_sampling(f), state.slots, f["sample_slot"], MAX_LOGPROBS)
    return DeviceState(pages=pages, slots=slots), _pack(draws)


def _decode(
    config: kimi.KimiConfig,
    backend: moe.Backend,
    place: Place,
    weights: Any,
    state: DeviceState,
    f: dict[str, jax.Array],
):
    tokens = state.slots.last_token.at[f["slot"]].get(mode="clip")
    batch = kimi.Batch(tokens=tokens[:, None], positions=f["positions"][:, None], block_tables=f["block_tables"])
    logits, pages = kimi.decode(config, weights, state.pages, batch, backend, place)
    draws, slots = sampling.draw(logits, _row_sampling(f), state.slots, f["slot"], MAX_LOGPROBS)
    return DeviceState(pages=pages, slots=slots), _pack(draws)


def _load(weights: Any, state: DeviceState, f: dict[str, jax.Array]):
    del weights
    slots = sampling.load_slot(
        state.slots,
        f["slot"],
        f["history"],
        f["num_prompt"],
        f["num_history"],
        f["bias_ids"],
        f["bias_values"],
        f["stop_ids"],
    )
    return state._replace(slots=slots), None


def _copy(weights: Any, state: DeviceState, f: dict[str, jax.Array]):
    del weights
    return state._replace(pages=copy_blocks(state.pages, f["source"], f["destination"])), None


def _row_sampling(f: dict[str, jax.Array]) -> RowSampling:
    return RowSampling(
        temperature=f["temperature"],
        top_p=f["top_p"],
        top_k=f["top_k"],
        min_p=f["min_p"],
        repetition_penalty=f["repetition_penalty"],
        presence_penalty=f["presence_penalty"],
        frequency_penalty=f["frequency_penalty"],
        seed=f["seed"],
        choice=f["choice"],
        position=f["sample_position"],
        has_bias=f["has_bias"] != 0,
        bans_stops=f["bans_stops"] != 0,
        wants_logprobs=f["wants_logprobs"] != 0,
    )


def _pack(draws: Draws) -> jax.Array:
    """[rows, 1 + 1 + top + top] int32: token, bits of its log-probability, likeliest ids, bits of theirs."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    columns = (draws.tokens[:, None], bits(draws.logprobs)[:, None], draws.top_ids, bits(draws.top_logprobs))
    return jnp.concatenate(columns, axis=1)
