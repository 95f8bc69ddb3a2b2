"""A stage before anything is allocated: what it computes, the state that its programs take, and the programs.

A program is written for one device and runs on all of the stage's under `shard_map`: state and packed array are cut by
partition, so that a device sees its own partition's alone; the devices along `tensor` all see the same, and draw the
same tokens. Programs and the state that they take are settled before any array is made, so that a step can be lowered
from shapes alone. What a program does is `compiled.bodies`'.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moonshard.kv.block_shards import BlockShards
from moonshard.kv.pages import Pages, allocate_pages, copy_blocks, copy_blocks_in_turn
from moonshard.models import sampling
from moonshard.models.native.zeros import zeros
from moonshard.models.sampling import SlotState
from moonshard.models.spec import matmul_precision, page_layers
from moonshard.serving.control.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from moonshard.serving.engine import draws
from moonshard.serving.engine.compiled import bodies, guessing
from moonshard.serving.engine.compiled.stage_model import StageDraft, StageModel
from moonshard.serving.engine.scoring import program
from moonshard.serving.engine.steps import GUESS_AFTER, STEP_BEFORE, ProgramKey, StepKind, StepLayout, StepShapes
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.mesh import BY_PARTITION, is_here, placed, spans_processes


class DeviceState(NamedTuple):
    """All that changes from step to step on a stage's devices. Each program takes, and donates, what it changes."""

    pages: Pages
    last_token: Int[Array, "slots"] | None  # of the first stage: what each slot's next decode step reads
    logits: Float[Array, "positions slots v"] | None  # of the last stage: what the last step left to draw from
    slots: SlotState[Array] | None  # of the last stage


class Blueprint:
    """A stage before anything is allocated: its programs, and the state that they take. Weights may be abstract."""

    def __init__(self, part: StageModel, shapes: StepShapes, *, blocks_per_partition: int, block_size: int, dtype: str):
        self.part = part
        self.shapes = shapes
        self.is_here = is_here(part.mesh)  # else all of it is other processes'
        self._groups = part.model.kv_groups(dtype)
        self.num_page_layers = page_layers(self._groups, part.layers)
        if part.draft is not None:
            self.num_page_layers += part.draft.num_page_layers
        self.shards = BlockShards(part.mesh, part.shard, num_layers=self.num_page_layers, block_size=block_size)
        self.by_partition = NamedSharding(part.mesh, BY_PARTITION)
        self._told = PartitionSpec() if spans_processes(part.mesh) else BY_PARTITION  # of what the host reads
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
            last_token = placed(np.zeros(num_slots, np.int32), self.by_partition)
        if part.is_last:
            positions = self.shapes.num_partitions * self.shapes.q_len
            shape = (positions, self.shapes.slots_per_partition, vocab_size)
            logits = placed(np.zeros(shape, np.float32), self.by_partition)
            empty = sampling.empty_slots(num_slots, vocab_size, MAX_LOGIT_BIAS, MAX_STOP_TOKENS)
            slots = placed(empty, self.by_partition)
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
            case StepKind.PREFILL | StepKind.DECODE | StepKind.VERIFY:
                hidden = () if self.part.is_first else (self.stream(kind, bucket),)
                return (self.part.weights, state.pages, state.logits, state.last_token, packed, *hidden)
            case StepKind.DRAW | StepKind.ACCEPT:
                return (state.slots, state.last_token, state.logits, packed, self.any_token(kind))
            case StepKind.NOTE:
                return (state.last_token, packed, self.newest)
            case StepKind.LOAD:
                return (state.slots, state.last_token, packed)
            case StepKind.COPY | StepKind.EXPORT:
                return (state.pages, packed)
            case StepKind.LAND:
                return (state.pages, packed, self._payload(bucket))
            case StepKind.SCORE:
                return (self.part.weights, packed, self.stream(StepKind.PREFILL, bucket))
            case StepKind.GUESS_PREFILL | StepKind.GUESS_DECODE | StepKind.GUESS_VERIFY:
                return self._given_to_guess(kind, bucket)

    def _given_to_guess(self, kind: StepKind, bucket: int) -> tuple[Any, ...]:
        draft = self._draft
        behind = STEP_BEFORE[kind]
        state = self._abstract_state()
        given = self._cut(self.shapes.num_partitions, self.shapes.layout(behind, bucket).size)
        own = self._cut(self.shapes.num_partitions, self.shapes.layout(kind, bucket).size)
        features = self.stream(behind, bucket, draft.model.feature_size)
        positions = self.shapes.q_len if kind is StepKind.GUESS_VERIFY else 0
        columns = draws.DRAWN_COLUMNS * (positions or 1) + (1 if positions else 0)
        drawn = state.last_token if kind is StepKind.GUESS_PREFILL else self._draws(columns)
        return (draft.weights, state.pages, drawn, features, given, own)

    @property
    def _draft(self) -> StageDraft:
        assert self.part.draft is not None  # else no program asks
        return self.part.draft

    def result_tree(self, key: ProgramKey) -> Any:
        """The tree structure of what a program returns, known without tracing it."""
        state, leaf = self._abstract_state(), 0
        match key[0]:
            case StepKind.PREFILL | StepKind.DECODE | StepKind.VERIFY:
                found: Any = (state.pages, state.logits, leaf, None if self.part.draft is None else leaf)
            case StepKind.DRAW | StepKind.ACCEPT:
                found = (state.slots, state.last_token, leaf, None if self.part.is_first else leaf)
            case StepKind.LOAD:
                found = (state.slots, state.last_token)
            case StepKind.LAND | StepKind.GUESS_PREFILL | StepKind.GUESS_DECODE | StepKind.GUESS_VERIFY:
                found = (state.pages, leaf)
            case StepKind.COPY:
                found = state.pages
            case StepKind.EXPORT | StepKind.NOTE | StepKind.SCORE:
                found = leaf
        return jax.tree.structure(found)

    def any_token(self, kind: StepKind) -> jax.ShapeDtypeStruct:
        """The shape of the masks of all draws of a kind: bits of 32-bit words."""
        num_rows = self._num_rows * (self.shapes.q_len if kind is StepKind.ACCEPT else 1)
        return self._cut(num_rows, -(-self.part.model.config.vocab_size // 32), dtype=jnp.uint32)

    @property
    def _num_rows(self) -> int:
        return self.shapes.num_partitions * self.shapes.slots_per_partition

    def _draws(self, columns: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.part.mesh, self._told)
        return jax.ShapeDtypeStruct((self._num_rows, columns), jnp.int32, sharding=sharding)

    def _cut(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_partition)

    @property
    def newest(self) -> jax.ShapeDtypeStruct:
        """The shape of the rows' newest tokens, which come from the last stage to the first."""
        return self._cut(self._num_rows)

    def stream(self, kind: StepKind, bucket: int, num_features: int | None = None) -> jax.ShapeDtypeStruct:
        """The shape of the activations that come from the stage before, or of so many features of each token."""
        tile = self.shapes.prefill_tile(bucket) if kind is StepKind.PREFILL else 1
        length = self.shapes.q_len if kind is StepKind.VERIFY else tile
        rows = self.shapes.num_partitions * bucket // tile
        return self._cut(rows, length, num_features or self.part.model.config.hidden_size, dtype=self._dtype)

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
        draft = () if part.draft is None else (part.draft.model, self.shapes.num_ahead)
        computed = (part.model, part.layers, part.placement, *forms, *draft)
        return (*key, *computed, shard.mesh, cuts, layout, self._dtype)

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """The keys of all programs that the stage runs here."""
        if not self.is_here:
            return ()
        is_first, is_last = self.part.is_first, self.part.is_last
        behind_logits = {StepKind.DRAW, StepKind.ACCEPT, StepKind.SCORE, *GUESS_AFTER.values()}
        own = [key for key in self.shapes.programs if is_last or key[0] not in behind_logits]
        own = [key for key in own if key[0] is not StepKind.LOAD or is_first or is_last]
        return (*own, (StepKind.NOTE, 0)) if is_first and not is_last else tuple(own)

    def program(self, key: ProgramKey) -> Any:
        """The jitted function of a key. It donates the state that it changes."""
        kind, bucket = key
        layout, shards, state = self.shapes.layout(kind, bucket), self.shards, self._specs
        packed = BY_PARTITION
        match kind:
            case StepKind.EXPORT:
                return self._jitted(
                    functools.partial(bodies.export, shards, layout), (shards.pages, packed), shards.payload
                )
            case StepKind.LAND:
                body = functools.partial(bodies.land, shards, layout)
                given = (shards.pages, packed, shards.payload)
                return self._jitted(body, given, (shards.pages, PartitionSpec()), donated=(0,))
            case StepKind.COPY:
                body = functools.partial(bodies.copy, layout, copy_blocks_in_turn if self._is_on_cpu else copy_blocks)
                return self._jitted(body, (shards.pages, packed), shards.pages, donated=(0,))
            case StepKind.LOAD:
                slots = (state.slots, state.last_token)
                return self._jitted(functools.partial(draws.load, layout), (*slots, packed), slots, donated=(0, 1))
            case StepKind.NOTE:
                body = functools.partial(draws.note, layout)
                return self._jitted(body, (packed, packed, packed), packed, donated=(0,))
            case StepKind.DRAW | StepKind.ACCEPT:
                drawn = draws.draw if kind is StepKind.DRAW else draws.accept
                body, slots = functools.partial(drawn, layout, self._draw_tile), (state.slots, state.last_token)
                given = (*slots, state.logits, packed, BY_PARTITION)
                newest = None if self.part.is_first else BY_PARTITION
                found, placed_as = (*slots, BY_PARTITION, newest), (*slots, self._told, newest)
                return self._jitted(body, given, found, donated=(0, 1), placed_as=placed_as)
            case StepKind.PREFILL | StepKind.DECODE | StepKind.VERIFY:
                return self._step_program(bodies.INPUTS[kind], layout)
            case StepKind.SCORE:
                precision, tile = matmul_precision(self._dtype), self.shapes.score_tile(bucket)
                body = functools.partial(program.score, self.part, layout, tile, precision)
                given = (self._weight_specs, packed, BY_PARTITION)
                return self._jitted(body, given, BY_PARTITION, placed_as=self._told)
            case StepKind.GUESS_PREFILL | StepKind.GUESS_DECODE | StepKind.GUESS_VERIFY:
                return self._guess_program(kind, bucket)

    def _guess_program(self, kind: StepKind, bucket: int) -> Any:
        """The draft model's: it reads what the step before left, and writes pages of its own layers."""
        behind = STEP_BEFORE[kind]
        layouts = (self.shapes.layout(behind, bucket), self.shapes.layout(kind, bucket))
        body = guessing.behind_prefill if kind is StepKind.GUESS_PREFILL else guessing.behind_decode
        how = (self.part, layouts, self.shapes.num_ahead, matmul_precision(self._dtype))
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, self._draft.weights)
        given = (specs, self.shards.pages, *[BY_PARTITION] * 4)
        made, found = functools.partial(body, *how), (self.shards.pages, BY_PARTITION)
        return self._jitted(made, given, found, donated=(1,), placed_as=(self.shards.pages, self._told))

    def _step_program(self, read: bodies.StepInput, layout: StepLayout) -> Any:
        """The model's own: it reads tokens and writes pages, and on the last stage logits."""
        part, state = self.part, self._specs
        body = functools.partial(bodies.run, part, read, layout, matmul_precision(self._dtype))
        hidden = () if part.is_first else (BY_PARTITION,)
        given = (self._weight_specs, state.pages, state.logits, state.last_token, BY_PARTITION, *hidden)
        result = PartitionSpec() if part.is_last and not read.gives_rows else BY_PARTITION
        features = None if part.draft is None else BY_PARTITION
        return self._jitted(body, given, (state.pages, state.logits, result, features), donated=(1, 2))

    @property
    def _weight_specs(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.part.weights)

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
        self,
        body: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        donated: tuple[int, ...] = (),
        placed_as: Any = None,
    ) -> Callable[..., Any]:
        """The function jitted over the mesh, with results placed exactly as `placed_as`, by default `out_specs`, spells
        it.

        jax may spell an equal sharding otherwise, and the spelling is part of the persistent cache's key: a program
        would then be another one depending on which program ran before it.
        """
        mesh = self.part.mesh
        over = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        specs = out_specs if placed_as is None else placed_as
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.jit(over, donate_argnums=donated, out_shardings=shardings)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
