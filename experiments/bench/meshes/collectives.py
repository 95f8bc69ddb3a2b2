"""Collectives of each role's step on each mesh, counted in the HLO of the very programs that a worker runs.

Programs are compiled and not run. XLA would take the loop over a stack of a single layer apart, and nobody could tell
its collectives from those around it: here, and only here, that pass is switched off.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonshard.experiments.bench.meshes.hlo import COLLECTIVES, LoopTurn, read_program
from moonshard.experiments.bench.meshes.tables import CASES, ROLES, WHERES, Case, Where, collective_name
from moonshard.experiments.common.running.measurement import Measurement
from moonshard.models.registry import open_model
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.capacity.sizes import choose_sizes, resolve_dtype
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.lowering import abstract_stages
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.steps import StepKind, StepShapes
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard

KEEP_LOOPS = {"xla_disable_hlo_passes": "simplify-while-loops"}
NUM_BLOCKS = 16  # of a pool that nothing is written into
LAYER_SCOPES = ("/attention/", "/feed_forward/")  # of a model's forward pass: a loop with both is one over layers

type Counts = dict[Where, Counter[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProgram:
    """One role's step on a mesh, stage by stage."""

    stages: tuple[Blueprint, ...]
    kind: StepKind
    bucket: int

    def count(self) -> Counts:
        """In a layer of either kind: of whichever stage has most. Outside the layers: of all stages together."""
        found: Counts = {where: Counter() for where in WHERES}
        for stage in self.stages:
            lowered = stage.lower((self.kind, self.bucket))
            turn = read_program(lowered.compile(compiler_options=KEEP_LOOPS).as_text() or "")
            of_stage = by_place(turn, stacks_of(stage.part))
            found = {
                where: before + of_stage[where] if where == "outside" else before | of_stage[where]
                for where, before in found.items()
            }
        return found


def measure_collectives(config: Config, cases: Sequence[Case] = CASES) -> list[Measurement]:
    """Counts the collectives of each role on each mesh. Needs as many devices as the largest mesh."""
    return [
        Measurement(
            level="meshes",
            name=collective_name(kind, where, role, case.name),
            unit="count",
            samples=(float(counts[kind]),),
        )
        for case in cases
        for role in ROLES
        for where, counts in step_program(config, case, role).count().items()
        for kind in COLLECTIVES
    ]


def step_program(config: Config, case: Case, role: str) -> StepProgram:
    """The largest step of a role, not yet compiled."""
    is_prefill = role == "prefill"
    table = case.rules or (config.prefill.rules if is_prefill else config.decode.rules)
    config = _on(config, case.mesh)
    _, model = open_model(config.model.path)
    dtype = resolve_dtype(config.model.dtype)
    shapes, _ = choose_sizes(config, model, dtype, "prefill" if is_prefill else "decode")
    kind, bucket = _largest(shapes, StepKind.PREFILL if is_prefill else StepKind.DECODE)
    block_size = config.kv.block_size
    stages = tuple(
        Blueprint(stage, shapes, blocks_per_partition=NUM_BLOCKS, block_size=block_size, dtype=dtype)
        for stage in abstract_stages(model, Shard(mesh=case.mesh, rules=table), dtype)
    )
    return StepProgram(stages=stages, kind=kind, bucket=bucket)


def stacks_of(model: StageModel) -> tuple[Where, ...]:
    """The stacks of layers that a stage has, in the order in which they run."""
    stacks: dict[Where, object] = {"a dense layer": model.weights.dense, "a sparse layer": model.weights.sparse}
    return tuple(where for where, stack in stacks.items() if stack is not None)


def by_place(program: LoopTurn, stacks: Sequence[Where]) -> Counts:
    """Every collective where it runs; the loops inside a layer are the rounds of its exchange of tokens.

    ValueError where the loops of layers are not as many as the stacks.
    """
    layers = [loop for loop in program.loops if all(map(loop.has_scope, LAYER_SCOPES))]
    if len(layers) != len(stacks):
        raise ValueError(f"{len(layers)} loops over layers in a program of {len(stacks)} stacks")
    others = [loop.total for loop in program.loops if not all(map(loop.has_scope, LAYER_SCOPES))]
    found: Counts = {"a dense layer": Counter(), "a sparse layer": Counter()}
    found |= {where: layer.counts for where, layer in zip(stacks, layers, strict=True)}
    found["a round of the exchange"] = sum((inner.total for layer in layers for inner in layer.loops), Counter())
    found["outside"] = sum(others, program.counts)
    return found


def _on(config: Config, mesh: MeshShape) -> Config:
    pool = replace(config.kv, num_blocks=NUM_BLOCKS)
    context = replace(config.model, max_context_tokens=None)
    roles = {"prefill": replace(config.prefill, mesh=mesh), "decode": replace(config.decode, mesh=mesh)}
    return replace(config, kv=pool, model=context, **roles)


def _largest(shapes: StepShapes, kind: StepKind) -> tuple[StepKind, int]:
    return max((program for program in shapes.programs if program[0] is kind), key=lambda program: program[1])
