"""One stage of a worker: consecutive layers on a mesh of their own, with their pages and their compiled programs.

A worker without a pipeline is one stage, the first and the last at once. The first turns tokens into activations; the
last draws the next tokens and holds the slots' state. A program is written for one device and runs on all of the
stage's under `shard_map`: state and packed array are cut by partition, so that a device sees its own partition's alone;
the devices along `tensor` all see the same, and draw the same tokens. Programs and the state that they take are settled
before any array is made, so that a step can be lowered from shapes alone. Left out: what goes from one stage to the
next, which is `serving.programs`' business.
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
from moonshard.serving.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS
from moonshard.serving.steps import StepKind, StepLayout, StepShapes
from moonshard.sharding.arrays import Array, Int
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.mesh import BY_PARTITION
from moonshard.sharding.place import Place

Fields = dict[str, jax.Array]


class DeviceState(NamedTuple):
    """All that changes from step to step on a stage's devices."""

    pages: Pages
    last_token: Int[Array, "slots"] | None  # of a first stage that is not the last: the next decode step's input
    slots: SlotState | None  # of the last stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StageModel:
    """What a stage computes, and where. `weights` lie on the mesh as the rules of `place` say."""

    config: kimi.KimiConfig
    layers: range
    weights: Any
    mesh: Mesh
    place: Place
    backend: moe.Backend
    placement: ExpertPlacement | None = None  # that the weights were declared with

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_hidden_layers


class Blueprint:
    """A stage before anything is allocated: its programs, and the state that they take. Weights may be abstract."""

    def __init__(
        self, model: StageModel, shapes: StepShapes, *, blocks_per_partition: int, block_size: int, dtype: str
    ):
        self.model = model
        self.shapes = shapes
        self.shards = BlockShards(model.mesh, model.place, num_layers=len(model.layers), block_size=block_size)
        self.by_partition = NamedSharding(model.mesh, BY_PARTITION)
        self._num_blocks = shapes.num_partitions * blocks_per_partition
        self._block_size = block_size
        self._dtype = dtype

    @property
    def has_inputs(self) -> bool:
        """Whether the stage keeps input tokens that another stage draws: it is the first, and not the last."""
        return self.model.is_first and not self.model.is_last

    def empty_state(self) -> DeviceState:
        """Allocates pages and slots."""
        model, num_slots = self.model, self.shapes.num_partitions * self.shapes.slots_per_partition
        (group,) = model.config.kv_groups(self._dtype)
        pages = allocate_pages(
            self._num_blocks,
            len(model.layers),
            self._block_size,
            group.num_features,
            dtype=self._dtype,
            sharding=NamedSharding(model.mesh, self.shards.pages),
        )
        slots = sampling.empty_slots(num_slots, model.config.vocab_size, MAX_LOGIT_BIAS, MAX_STOP_TOKENS)
        last_token = jax.device_put(jnp.zeros(num_slots, jnp.int32), self.by_partition) if self.has_inputs else None
        return DeviceState(
            pages=pages,
            last_token=last_token,
            slots=jax.device_put(slots, self.by_partition) if model.is_last else None,
        )

    def lower(self, kind: StepKind, bucket: int, hidden: jax.ShapeDtypeStruct | None) -> jax.stages.Lowered:
        """A prefill or a decode as `Stage.run` would launch it. `hidden` are the activations of the stage before."""
        row = self.shapes.layout(kind, bucket).size
        packed = jax.ShapeDtypeStruct((self.shapes.num_partitions, row), jnp.int32)
        given = () if hidden is None else (_placed(hidden, self.by_partition),)
        return self.program(kind, bucket).lower(self.model.weights, self._abstract_state(), packed, *given)

    def _abstract_state(self) -> Any:
        def place(spec: PartitionSpec, part: Any) -> Any:
            return jax.tree.map(lambda leaf: _placed(leaf, NamedSharding(self.model.mesh, spec)), part)

        return jax.tree.map(place, self._specs(), jax.eval_shape(self.empty_state))

    def _specs(self) -> Any:
        """How each part of the state is cut over the mesh: a `DeviceState` of partition specs."""
        specs: Any = (
            self.shards.pages,
            BY_PARTITION if self.has_inputs else None,
            BY_PARTITION if self.model.is_last else None,
        )
        return DeviceState(*specs)

    # ---- programs

    def program(self, kind: StepKind, bucket: int) -> Any:
        """Jitted. Donates the state, which an export only reads."""
        layout, shards, state = self.shapes.layout(kind, bucket), self.shards, self._specs()
        match kind:
            case StepKind.EXPORT:
                body = functools.partial(_export, shards, layout)
                return self._jitted(body, (shards.pages, BY_PARTITION), shards.payload)
            case StepKind.LAND:
                body = functools.partial(_land, shards, layout)
                return self._jitted(body, (state, BY_PARTITION, shards.payload), (state, PartitionSpec()), donated=0)
            case _:
                step = functools.partial(_BODIES[kind], self.model)
                body = functools.partial(_run, step, layout, matmul_precision(self._dtype))
                weights = jax.tree.map(lambda leaf: leaf.sharding.spec, self.model.weights)
                hidden = (BY_PARTITION,) if kind in _DRAWING and not self.model.is_first else ()
                result = BY_PARTITION if kind in _DRAWING else None
                return self._jitted(body, (weights, state, BY_PARTITION, *hidden), (state, result), donated=1)

    def note_program(self, kind: StepKind, bucket: int) -> Any:
        """Jitted: writes what the last stage drew into the first one's input tokens, which it donates."""
        body = functools.partial(
            _note, "slot" if kind is StepKind.DECODE else "sample_slot", self.shapes.layout(kind, bucket)
        )
        return self._jitted(body, (BY_PARTITION,) * 3, BY_PARTITION, donated=0)

    def _jitted(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, donated: int | tuple[()] = ()
    ) -> Callable[..., Any]:
        """Over the mesh. What comes out is placed in the very words of `out_specs`.

        jax may spell an equal placement otherwise, and it stands in what the persistent cache is asked for: a program
        would be another one for each program that can have run before it.
        """
        mesh = self.model.mesh
        over = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
        return jax.jit(over, donate_argnums=donated, out_shardings=placed)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class Stage:
    """A blueprint with its state and its programs. Methods enqueue work and return without waiting for it."""

    def __init__(
        self, model: StageModel, shapes: StepShapes, *, blocks_per_partition: int, block_size: int, dtype: str
    ):
        blueprint = Blueprint(
            model, shapes, blocks_per_partition=blocks_per_partition, block_size=block_size, dtype=dtype
        )
        self.model = model
        self.shards = blueprint.shards
        self._by_partition = blueprint.by_partition
        self.state = blueprint.empty_state()
        self._programs: dict[tuple[StepKind, int], Callable[..., Any]] = {
            key: blueprint.program(*key) for key in shapes.programs
        }
        self._notes: dict[tuple[StepKind, int], Callable[..., Any]] = {
            key: blueprint.note_program(*key) for key in shapes.programs if key[0] in _DRAWING and blueprint.has_inputs
        }

    def run(self, kind: StepKind, bucket: int, packed: np.ndarray, hidden: jax.Array | None) -> jax.Array:
        """A prefill or a decode. Returns the activations, or on the last stage the packed draws, of all partitions.

        `hidden` are the activations of the stage before, on any mesh; None on the first.
        """
        given = () if hidden is None else (jax.device_put(hidden, self._by_partition),)
        self.state, result = self._programs[kind, bucket](self.model.weights, self.state, packed, *given)
        return result

    def note(self, kind: StepKind, bucket: int, packed: np.ndarray, draws: jax.Array) -> None:
        """On the first stage: take what the last one drew as the input of the slots' next decode step."""
        given = jax.device_put(draws, self._by_partition)
        self.state = self.state._replace(last_token=self._notes[kind, bucket](self.state.last_token, packed, given))

    def change(self, kind: StepKind, packed: np.ndarray) -> None:
        """A load or a copy."""
        self.state, _ = self._programs[kind, 0](self.model.weights, self.state, packed)

    def export(self, bucket: int, packed: np.ndarray) -> jax.Array:
        """This stage's layers of blocks, still on the devices, for `shards.collect`."""
        return self._programs[StepKind.EXPORT, bucket](self.state.pages, packed)

    def land(self, bucket: int, packed: np.ndarray, blocks: np.ndarray | jax.Array, partition: int) -> jax.Array:
        """`blocks` are this stage's layers of them, as `shards.spread` takes them.

        Returns a number that is ready once they have landed.
        """
        payload = self.shards.spread(blocks, partition)
        self.state, done = self._programs[StepKind.LAND, bucket](self.state, packed, payload)
        return done


def _run(
    step: Callable[..., Any],
    layout: StepLayout,
    precision: str,
    weights: Any,
    state: DeviceState,
    packed: jax.Array,
    *hidden: jax.Array,
) -> tuple[DeviceState, jax.Array | None]:
    with jax.default_matmul_precision(precision):
        return step(weights, state, layout.unpack(packed[0]), *hidden)


def _prefill(
    model: StageModel, weights: Any, state: DeviceState, f: Fields, hidden: jax.Array | None = None
) -> tuple[DeviceState, jax.Array]:
    batch = kimi.Batch(tokens=f["tokens"], positions=f["positions"], block_tables=f["block_tables"])
    hidden, pages = _forward(model, weights, state, batch, hidden)
    if not model.is_last:
        return state._replace(pages=pages), hidden
    logits = kimi.unembed(weights, hidden.reshape(-1, hidden.shape[-1])[f["sample_from"]], model.place)
    return _draw(state._replace(pages=pages), logits, f, f["sample_slot"])


def _decode(
    model: StageModel, weights: Any, state: DeviceState, f: Fields, hidden: jax.Array | None = None
) -> tuple[DeviceState, jax.Array]:
    batch = kimi.Batch(
        tokens=_inputs(state, f["slot"])[:, None], positions=f["positions"][:, None], block_tables=f["block_tables"]
    )
    hidden, pages = _forward(model, weights, state, batch, hidden)
    if not model.is_last:
        return state._replace(pages=pages), hidden
    logits = kimi.unembed(weights, hidden.reshape(-1, hidden.shape[-1]), model.place)
    return _draw(state._replace(pages=pages), logits, f, f["slot"])


def _inputs(state: DeviceState, slot: jax.Array) -> jax.Array:
    """Each row's input token; zeros behind the first stage, which embeds none."""
    tokens = state.slots.last_token if state.last_token is None and state.slots is not None else state.last_token
    return jnp.zeros_like(slot) if tokens is None else tokens.at[slot].get(mode="clip")


def _forward(
    model: StageModel, weights: Any, state: DeviceState, batch: kimi.Batch, hidden: jax.Array | None
) -> tuple[jax.Array, Pages]:
    hidden, pages, _ = kimi.forward(
        model.config,
        weights,
        state.pages,
        batch,
        hidden=hidden,
        backend=model.backend,
        place=model.place,
        placement=model.placement,
    )
    return hidden, pages


def _draw(state: DeviceState, logits: jax.Array, f: Fields, slot: jax.Array) -> tuple[DeviceState, jax.Array]:
    assert state.slots is not None  # of the last stage
    draws, slots = sampling.draw(logits, _row_sampling(f), state.slots, slot, MAX_LOGPROBS)
    return state._replace(slots=slots), _pack(draws)


def _note(
    slot: str, layout: StepLayout, last_token: Int[Array, "slots"], packed: jax.Array, draws: jax.Array
) -> Int[Array, "slots"]:
    rows = layout.unpack(packed[0])[slot]
    return last_token.at[rows].set(draws[:, 0], mode="drop")


def _load(model: StageModel, weights: Any, state: DeviceState, f: Fields) -> tuple[DeviceState, None]:
    del model, weights
    if state.last_token is not None:
        token = f["history"][jnp.maximum(f["num_history"] - 1, 0)]
        state = state._replace(last_token=state.last_token.at[f["slot"]].set(token, mode="drop"))
    if state.slots is not None:
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
        state = state._replace(slots=slots)
    return state, None


def _copy(model: StageModel, weights: Any, state: DeviceState, f: Fields) -> tuple[DeviceState, None]:
    del model, weights
    return state._replace(pages=copy_blocks(state.pages, f["source"], f["destination"])), None


def _export(shards: BlockShards, layout: StepLayout, pages: Pages, packed: jax.Array) -> jax.Array:
    return shards.own_part(gather_blocks(pages, layout.unpack(packed[0])["source"]))


def _land(
    shards: BlockShards, layout: StepLayout, state: DeviceState, packed: jax.Array, payload: jax.Array
) -> tuple[DeviceState, jax.Array]:
    pages = scatter_blocks(state.pages, layout.unpack(packed[0])["destination"], shards.whole(payload))
    return state._replace(pages=pages), jnp.int32(0)  # all outputs of a program are ready at once


_DRAWING = (StepKind.PREFILL, StepKind.DECODE)
_BODIES: dict[StepKind, Callable[..., Any]] = {
    StepKind.PREFILL: _prefill,
    StepKind.DECODE: _decode,
    StepKind.LOAD: _load,
    StepKind.COPY: _copy,
}


def _row_sampling(f: Fields) -> RowSampling:
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
