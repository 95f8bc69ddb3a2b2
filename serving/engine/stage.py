"""One stage of a worker: consecutive layers on a mesh of their own, with their pages and their compiled programs.

A worker without a pipeline is one stage, the first and the last at once. The first turns tokens into activations; the
last draws the next tokens and holds the slots' state. A program is written for one device and runs on all of the
stage's under `shard_map`: state and packed array are cut by partition, so that a device sees its own partition's alone;
the devices along `tensor` all see the same, and draw the same tokens. Programs and the state that they take are settled
before any array is made, so that a step can be lowered from shapes alone. What goes from one stage to the next is
`engine.programs`'.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moonshard.kv.block_shards import BlockShards
from moonshard.kv.pages import Pages, allocate_pages, copy_blocks, copy_blocks_in_turn, gather_blocks, scatter_blocks
from moonshard.models import sampling
from moonshard.models.experts import moe
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Batch, ExpandedAttention, Model, PagedAttention
from moonshard.models.native.zeros import zeros
from moonshard.models.sampling import SlotState
from moonshard.models.spec import matmul_precision, page_layers
from moonshard.serving.control.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from moonshard.serving.engine import draws
from moonshard.serving.engine.draws import DRAWN_COLUMNS, Fields
from moonshard.serving.engine.steps import ProgramKey, StepKind, StepLayout, StepShapes
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.mesh import BY_PARTITION
from moonshard.sharding.shard import Shard


class DeviceState(NamedTuple):
    """All that changes from step to step on a stage's devices. Each program takes, and donates, what it changes."""

    pages: Pages
    last_token: Int[Array, "slots"] | None  # of the first stage: what each slot's next decode step reads
    logits: Float[Array, "slots v"] | None  # of the last stage: of the rows that the last step left to draw for
    slots: SlotState[Array] | None  # of the last stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StageModel:
    """What a stage computes, and where. `weights` lie on the mesh as the rules of `shard` say; they may be abstract."""

    model: Model
    layers: range
    weights: Any
    mesh: Mesh
    shard: Shard
    backend: moe.Backend
    placement: ExpertPlacement | None = None  # that the weights were declared with
    attention: PagedAttention | None = None  # kernels for GPUs
    expanded: ExpandedAttention | None = None  # likewise, for many tokens of a sequence; None: `attention` does it all
    machine: Machine = XLA

    def declared(self) -> Any:
        """The parameters that `weights` are of, in the same tree."""
        return self.model.declare(self.layers, self.placement)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.model.config.num_hidden_layers


class Blueprint:
    """A stage before anything is allocated: its programs, and the state that they take. Weights may be abstract.

    Its decode programs compute one position of a row, and emit one token: ValueError for shapes with more.
    """

    def __init__(self, part: StageModel, shapes: StepShapes, *, blocks_per_partition: int, block_size: int, dtype: str):
        if shapes.q_len != 1:
            raise ValueError(f"decode programs have rows of 1 position, not {shapes.q_len}")
        self.part = part
        self.shapes = shapes
        self._groups = part.model.kv_groups(dtype)
        self.num_page_layers = page_layers(self._groups, part.layers)
        self.shards = BlockShards(part.mesh, part.shard, num_layers=self.num_page_layers, block_size=block_size)
        self.by_partition = NamedSharding(part.mesh, BY_PARTITION)
        self._num_blocks = shapes.num_partitions * blocks_per_partition
        self._block_size = block_size
        self._dtype = dtype

    def empty_state(self) -> DeviceState:
        """Allocates pages and slots. Pages that kernels made take memory as they are written."""
        part, num_slots = self.part, self.shapes.num_partitions * self.shapes.slots_per_partition
        vocab_size = part.model.config.vocab_size
        pages = allocate_pages(
            self._num_blocks,
            self.num_page_layers,
            self._block_size,
            self._groups[0].num_features,
            dtype=self._dtype,
            sharding=NamedSharding(part.mesh, self.shards.pages),
            zeros=zeros if part.machine.reads_in_place else jnp.zeros,
        )
        last_token = logits = slots = None
        if part.is_first:
            last_token = jax.device_put(np.zeros(num_slots, np.int32), self.by_partition)
        if part.is_last:
            logits = jax.device_put(np.zeros((num_slots, vocab_size), np.float32), self.by_partition)
            empty = sampling.empty_slots(num_slots, vocab_size, MAX_LOGIT_BIAS, MAX_STOP_TOKENS)
            slots = jax.device_put(empty, self.by_partition)
        return DeviceState(pages=pages, last_token=last_token, logits=logits, slots=slots)

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """A program as `Stage` would launch it."""
        return self.program(key).lower(*self.arguments(key))

    def arguments(self, key: ProgramKey) -> tuple[Any, ...]:
        """What a program is given, as shapes and where they lie."""
        kind, bucket = key
        state, row = self._abstract_state(), self.shapes.layout(kind, bucket).size
        packed = self._cut(self.shapes.num_partitions, row)
        match kind:
            case StepKind.PREFILL | StepKind.DECODE:
                hidden = () if self.part.is_first else (self._stream(kind, bucket),)
                return (self.part.weights, state.pages, state.logits, state.last_token, packed, *hidden)
            case StepKind.DRAW:
                return (state.slots, state.last_token, state.logits, packed)
            case StepKind.NOTE:
                return (state.last_token, packed, self._cut(self._num_rows, DRAWN_COLUMNS))
            case StepKind.LOAD:
                return (state.slots, state.last_token, packed)
            case StepKind.COPY | StepKind.EXPORT:
                return (state.pages, packed)
            case StepKind.LAND:
                return (state.pages, packed, self._payload(bucket))

    def result_tree(self, key: ProgramKey) -> Any:
        """The tree structure of what a program returns, known without tracing it."""
        state, leaf = self._abstract_state(), 0
        match key[0]:
            case StepKind.PREFILL | StepKind.DECODE:
                found: Any = (state.pages, state.logits, leaf)
            case StepKind.DRAW:
                found = (state.slots, state.last_token, leaf)
            case StepKind.LOAD:
                found = (state.slots, state.last_token)
            case StepKind.LAND:
                found = (state.pages, leaf)
            case StepKind.COPY:
                found = state.pages
            case StepKind.EXPORT | StepKind.NOTE:
                found = leaf
        return jax.tree.structure(found)

    @property
    def _num_rows(self) -> int:
        return self.shapes.num_partitions * self.shapes.slots_per_partition

    def _cut(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_partition)

    def _stream(self, kind: StepKind, bucket: int) -> jax.ShapeDtypeStruct:
        """The shape of the activations that come from the stage before."""
        tile = self.shapes.prefill_tile(bucket) if kind is StepKind.PREFILL else 1
        rows = self.shapes.num_partitions * bucket // tile
        return self._cut(rows, tile, self.part.model.config.hidden_size, dtype=self._dtype)

    def _payload(self, bucket: int) -> jax.ShapeDtypeStruct:
        """Blocks of one partition, as `shards.spread` places them."""
        shape = (bucket, self.num_page_layers, self._block_size, self._groups[0].num_features)
        return self.shards.abstract_payload(shape, self._dtype)

    def _abstract_state(self) -> Any:
        def sharded(spec: PartitionSpec, part: Any) -> Any:
            return jax.tree.map(lambda leaf: _placed(leaf, NamedSharding(self.part.mesh, spec)), part)

        return jax.tree.map(sharded, self._specs, self._state_shapes)

    @functools.cached_property
    def _state_shapes(self) -> DeviceState:
        return jax.eval_shape(self.empty_state)

    @property
    def _specs(self) -> Any:
        """How each part of the state is cut over the mesh: a `DeviceState` of partition specs."""
        first = BY_PARTITION if self.part.is_first else None
        last = BY_PARTITION if self.part.is_last else None
        specs: Any = (self.shards.pages, first, last, last)
        return DeviceState(*specs)

    # ---- programs

    def made_of(self, key: ProgramKey) -> tuple[object, ...]:
        """Everything that decides what a program is, besides its arguments and the code.

        Of the sharding rules only what they cut on this mesh counts, so that workers of either role share the programs
        that are the same for both.
        """
        part, shard = self.part, self.part.shard
        cuts = tuple((field.name, shard.axes(field.name)) for field in dataclasses.fields(shard.rules))
        layout = self.shapes.layout(*key).fields
        forms = (part.backend, part.attention, part.expanded, part.machine)
        computed = (part.model, part.layers, part.placement, *forms)
        return (*key, *computed, shard.mesh, cuts, layout, self._dtype)

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """The keys of all programs that the stage runs."""
        is_first, is_last = self.part.is_first, self.part.is_last
        own = [key for key in self.shapes.programs if key[0] is not StepKind.DRAW or is_last]
        own = [key for key in own if key[0] is not StepKind.LOAD or is_first or is_last]
        return (*own, (StepKind.NOTE, 0)) if is_first and not is_last else tuple(own)

    def program(self, key: ProgramKey) -> Any:
        """The jitted function of a key. It donates the state that it changes."""
        kind, bucket = key
        layout, shards, state = self.shapes.layout(kind, bucket), self.shards, self._specs
        packed = BY_PARTITION
        match kind:
            case StepKind.EXPORT:
                return self._jitted(functools.partial(_export, shards, layout), (shards.pages, packed), shards.payload)
            case StepKind.LAND:
                body = functools.partial(_land, shards, layout)
                given = (shards.pages, packed, shards.payload)
                return self._jitted(body, given, (shards.pages, PartitionSpec()), donated=(0,))
            case StepKind.COPY:
                body = functools.partial(_copy, layout, copy_blocks_in_turn if self._is_on_cpu else copy_blocks)
                return self._jitted(body, (shards.pages, packed), shards.pages, donated=(0,))
            case StepKind.LOAD:
                slots = (state.slots, state.last_token)
                return self._jitted(functools.partial(draws.load, layout), (*slots, packed), slots, donated=(0, 1))
            case StepKind.NOTE:
                body = functools.partial(draws.note, layout)
                return self._jitted(body, (packed, packed, packed), packed, donated=(0,))
            case StepKind.DRAW:
                body, slots = functools.partial(draws.draw, layout, self._draw_tile), (state.slots, state.last_token)
                given = (*slots, state.logits, packed)
                return self._jitted(body, given, (*slots, BY_PARTITION), donated=(0, 1))
            case StepKind.PREFILL | StepKind.DECODE:
                return self._step_program(_READINGS[kind], layout)

    def _step_program(self, reading: "_Reading", layout: StepLayout) -> Any:
        """The model's own: it reads tokens and writes pages, and on the last stage logits."""
        part, state = self.part, self._specs
        body = functools.partial(_run, part, reading, layout, matmul_precision(self._dtype))
        weights = jax.tree.map(lambda leaf: leaf.sharding.spec, part.weights)
        hidden = () if part.is_first else (BY_PARTITION,)
        given = (weights, state.pages, state.logits, state.last_token, BY_PARTITION, *hidden)
        result = PartitionSpec() if part.is_last else BY_PARTITION
        return self._jitted(body, given, (state.pages, state.logits, result), donated=(1, 2))

    @property
    def _draw_tile(self) -> int:
        """How many rows are drawn at once. A CPU draws row by row, so that a row costs only what it asks for; elsewhere
        all are drawn together.
        """
        return 1 if self._is_on_cpu else self.shapes.slots_per_partition

    @property
    def _is_on_cpu(self) -> bool:
        return self.part.mesh.devices.flat[0].platform == "cpu"

    def _jitted(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, donated: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """The function jitted over the mesh, with results placed exactly as `out_specs` spells it.

        jax may spell an equal sharding otherwise, and the spelling is part of the persistent cache's key: a program
        would then be another one depending on which program ran before it.
        """
        mesh = self.part.mesh
        over = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
        return jax.jit(over, donate_argnums=donated, out_shardings=placed)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class Stage:
    """A blueprint with its weights, its state and its programs. Methods enqueue work and return without waiting for it.

    `programs` may change meanwhile. One that was not prepared is compiled by its first launch.
    """

    def __init__(self, blueprint: Blueprint, weights: Any, programs: Mapping[ProgramKey, Callable[..., Any]]):
        self.blueprint = blueprint
        self.shards = blueprint.shards
        self.weights = weights
        self.programs = programs
        self.state = blueprint.empty_state()
        self._by_partition = blueprint.by_partition

    def run(self, kind: StepKind, bucket: int, packed: np.ndarray, hidden: jax.Array | None) -> jax.Array:
        """A prefill or a decode. Returns the activations, or on the last stage a number that is ready once it has run.

        `hidden` are the activations of the stage before, on any mesh; None on the first.
        """
        given = () if hidden is None else (jax.device_put(hidden, self._by_partition),)
        state, program = self.state, self.programs[kind, bucket]
        pages, logits, result = program(self.weights, state.pages, state.logits, state.last_token, packed, *given)
        self.state = state._replace(pages=pages, logits=logits)
        return result

    def draw(self, packed: np.ndarray) -> jax.Array:
        """On the last stage: the packed draws of all partitions, from what the step before left."""
        state = self.state
        slots, last_token, drawn = self.programs[_DRAW](state.slots, state.last_token, state.logits, packed)
        self.state = state._replace(slots=slots, last_token=last_token)
        return drawn

    def note(self, packed: np.ndarray, draws: jax.Array) -> None:
        """On the first stage: what the last one drew becomes the input of the slots' next decode step."""
        given = jax.device_put(draws, self._by_partition)
        self.state = self.state._replace(last_token=self.programs[_NOTE](self.state.last_token, packed, given))

    def load(self, packed: np.ndarray) -> None:
        state = self.state
        if (program := self.programs.get(_LOAD)) is not None:  # a stage in the middle keeps nothing of a slot
            slots, last_token = program(state.slots, state.last_token, packed)
            self.state = state._replace(slots=slots, last_token=last_token)

    def copy(self, packed: np.ndarray) -> None:
        self.state = self.state._replace(pages=self.programs[_COPY](self.state.pages, packed))

    def export(self, bucket: int, packed: np.ndarray) -> jax.Array:
        """This stage's layers of blocks, still on the devices, for `shards.collect`."""
        return self.programs[StepKind.EXPORT, bucket](self.state.pages, packed)

    def land(self, bucket: int, packed: np.ndarray, blocks: np.ndarray | jax.Array, partition: int) -> jax.Array:
        """`blocks` are this stage's layers of them, as `shards.spread` takes them.

        Returns a number that is ready once they have landed.
        """
        payload = self.shards.spread(blocks, partition)
        pages, done = self.programs[StepKind.LAND, bucket](self.state.pages, packed, payload)
        self.state = self.state._replace(pages=pages)
        return done


_DRAW, _NOTE, _LOAD, _COPY = ((kind, 0) for kind in (StepKind.DRAW, StepKind.NOTE, StepKind.LOAD, StepKind.COPY))


def _run(
    part: StageModel,
    reading: "_Reading",
    layout: StepLayout,
    precision: str,
    weights: Any,
    pages: Pages,
    logits: jax.Array | None,
    last_token: jax.Array | None,
    packed: jax.Array,
    *hidden: jax.Array,
) -> tuple[Pages, jax.Array | None, jax.Array]:
    """Runs a stage's layers; returns the pages with their KV. On the last stage also returns the logits of the rows
    that are drawn for, written over the first of `logits`, and a number: all outputs of a program are ready at once. On
    other stages there are no logits, and the activations come instead of the number.
    """
    f = layout.unpack(packed[0])
    with jax.default_matmul_precision(precision):
        out, pages, _ = part.model.forward(
            weights,
            pages,
            reading.batch(last_token, f),
            hidden=hidden[0] if hidden else None,
            backend=part.backend,
            shard=part.shard,
            placement=part.placement,
            machine=part.machine,
            chunk_tokens=reading.chunk_tokens(f),
            attention=part.attention,
            expanded=part.expanded,
        )
        if logits is None:
            return pages, None, out
        drawn_for = reading.drawn_for(out.reshape(-1, out.shape[-1]), f)
        found = part.model.unembed(weights, drawn_for, part.shard, machine=part.machine)
    return pages, jax.lax.dynamic_update_slice(logits, found, (0, 0)), jnp.int32(0)


class _Reading(NamedTuple):
    """How a kind of step reads its fields: what it runs over, and for which of the resulting rows tokens are drawn."""

    batch: Callable[[jax.Array | None, Fields], Batch]
    drawn_for: Callable[[jax.Array, Fields], jax.Array]
    chunk_tokens: Callable[[Fields], int]  # the most tokens that one sequence may have in the step


def _prefill_batch(last_token: jax.Array | None, f: Fields) -> Batch:
    del last_token
    return Batch(tokens=f["tokens"], positions=f["positions"], block_tables=f["block_tables"])


def _decode_batch(last_token: jax.Array | None, f: Fields) -> Batch:
    slot = f["slot"]  # behind the first stage, which embeds, no token is looked at
    tokens = jnp.zeros_like(slot) if last_token is None else last_token.at[slot].get(mode="clip")
    return Batch(tokens=tokens[:, None], positions=f["positions"][:, None], block_tables=f["block_tables"])


_READINGS = {
    StepKind.PREFILL: _Reading(_prefill_batch, lambda rows, f: rows[f["sample_from"]], lambda f: f["tokens"].size),
    StepKind.DECODE: _Reading(_decode_batch, lambda rows, f: rows, lambda f: 1),
}


def _copy(
    layout: StepLayout, copy: Callable[[Pages, jax.Array, jax.Array], Pages], pages: Pages, packed: jax.Array
) -> Pages:
    f = layout.unpack(packed[0])
    return copy(pages, f["source"], f["destination"])


def _export(shards: BlockShards, layout: StepLayout, pages: Pages, packed: jax.Array) -> jax.Array:
    return shards.own_part(gather_blocks(pages, layout.unpack(packed[0])["source"]))


def _land(
    shards: BlockShards, layout: StepLayout, pages: Pages, packed: jax.Array, payload: jax.Array
) -> tuple[Pages, jax.Array]:
    pages = scatter_blocks(pages, layout.unpack(packed[0])["destination"], shards.whole(payload))
    return pages, jnp.int32(0)  # all outputs of a program are ready at once
