"""A step lowered from shapes alone is the one that serves, and takes the bytes that the budget counts."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from moonshard.models import weights
from moonshard.serving.config.keys import Config, DecodeConfig, ModelConfig, PrefillConfig
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.lowering import StepRole, lower_stages
from moonshard.serving.engine.compiled.preparation import digest_of
from moonshard.serving.engine.stage import Stage
from moonshard.serving.engine.steps import ProgramKey, Step, StepKind
from moonshard.sharding.rules import DECODE, PREFILL, DecodeRules, Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.agreement import reference
from tests.engine_room import uncompiled_programs
from tests.sizes import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
POINTER_BYTES = 8  # XLA counts among the outputs a pointer to each
CONTEXT_PARALLEL = DecodeRules(kv_tokens=("tensor",))


@pytest.fixture(autouse=True)
def shapes_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering works on trees of shapes, which the checks of annotations would refuse."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("mesh", "role", "rules"),
    [
        pytest.param(MeshShape(tensor=2), "decode", DecodeRules(), marks=pytest.mark.slow),
        pytest.param(MeshShape(expert=2, tensor=2), "decode", DecodeRules(), marks=pytest.mark.slow),
        (MeshShape(pipe=2), "prefill", DecodeRules()),
        (MeshShape(data=2, tensor=2), "decode", CONTEXT_PARALLEL),
    ],
    ids=("tensor", "expert and tensor", "pipe", "context parallel"),
)
def test_xla_holds_exactly_what_the_budget_counts(mesh: MeshShape, role: StepRole, rules: DecodeRules):
    config = Config(
        model=ModelConfig(path=Path(), name="lowered"),
        prefill=PrefillConfig(mesh=mesh, max_slots=4, chunk_tokens=64),
        decode=DecodeConfig(mesh=mesh, max_slots=4, rules=rules),
    )
    for stage in lower_stages(config, reference().model, role):
        found = stage.program.compile().memory_analysis()
        assert found is not None
        assert found.argument_size_in_bytes == stage.counted.arguments
        num_outputs = len(jax.tree.leaves(stage.program.out_info))
        assert found.output_size_in_bytes == stage.counted.outputs + num_outputs * POINTER_BYTES
        assert found.output_size_in_bytes == pytest.approx(stage.counted.outputs, rel=0.01)


def test_a_step_lowered_from_shapes_is_the_one_that_serves():
    shard = Shard(mesh=MeshShape(expert=2, tensor=2, pipe=2), rules=DecodeRules())
    programs = uncompiled_programs(shard=shard)
    for stage in programs.stages:
        sizes = {"blocks_per_partition": NUM_BLOCKS, "block_size": BLOCK_SIZE, "dtype": "float32"}
        params = stage.blueprint.part.declared()
        shapes_alone = weights.abstract(params, "float32", stage.blueprint.part.mesh, shard.rules)
        abstract = Blueprint(replace(stage.blueprint.part, weights=shapes_alone), programs.shapes, **sizes)
        for key in stage.blueprint.keys:
            served = stage.blueprint.program(key).lower(*arrays_of(stage, key))
            assert abstract.lower(key).as_text() == served.as_text(), key
            assert jax.tree.structure(served.out_info) == abstract.result_tree(key), key


def arrays_of(stage: Stage, key: ProgramKey) -> tuple[object, ...]:
    """What a launch would give: the stage's weights, and other arrays as the program is told of them."""

    def array(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    return jax.tree.map(array, stage.blueprint.arguments(key))


def test_on_one_device_workers_of_either_role_run_the_same_programs():
    """So that one finds in the store what another has left there."""

    def digests(rules: Rules) -> list[str]:
        (stage,) = uncompiled_programs(shard=Shard(rules=rules)).stages
        return [digest_of(stage.blueprint, key) for key in stage.blueprint.keys]

    found = digests(PREFILL)
    assert found == digests(DECODE)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(data=2, expert=2, tensor=2)], ids=str)
def test_no_step_says_otherwise_where_state_lies(mesh: MeshShape):
    """A program that is compiled behind one step is the one that is asked for behind any other."""
    programs = uncompiled_programs(shard=Shard(mesh=mesh))

    def placed() -> list[object]:
        return [leaf.sharding for leaf in jax.tree.leaves(programs.stages[0].state)]

    before = [repr(one) for one in placed()]
    for kind, bucket in ((StepKind.LOAD, 0), (StepKind.COPY, 0), (StepKind.DECODE, NUM_SLOTS)):
        packed, _ = programs.shapes.layout(kind, bucket).blank(mesh.num_partitions)
        programs.fetch(programs.launch(Step(-1, kind, bucket, packed)))
        assert [repr(one) for one in placed()] == before, kind
