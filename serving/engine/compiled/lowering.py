"""The step that serves, lowered and compiled from shapes alone: no weight is made and no page allocated.

The code that serves, `compiled.blueprint`, builds it for as many devices as the mesh has; virtual ones of the CPU will
do. What a device then holds before and after the step, as XLA plans it, stands beside what the budget counts from the
same shapes; that they agree is the test of the budget. Weights are in bf16, as they are served. Temporaries on a GPU
cannot be told from this: on CPU XLA widens bf16 to float32 on the way, and experts do not run in the GPU's kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax

from moonshard.models.machines import MACHINES
from moonshard.models.model import Model
from moonshard.serving.config.keys import Config, rules_of
from moonshard.serving.engine.capacity.sizes import DEFAULT_MAX_CONTEXT_TOKENS, shard_of, step_shapes
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.loading import model as loading
from moonshard.serving.engine.steps import StepKind, StepShapes
from moonshard.sharding.budget import StageBudget, budget
from moonshard.sharding.shard import Shard

GPU = MACHINES["gpu"]
DTYPE, ITEM_BYTES = "bfloat16", 2
INT_BYTES = LOGIT_BYTES = 4

StepRole = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Bytes of one device. The state, which a step changes in place, counts on both sides."""

    arguments: int
    outputs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredStage:
    """The largest step of a role on one stage."""

    num_layers: int
    num_blocks: int  # of a partition's pages
    program: jax.stages.Lowered
    counted: StepBytes  # by the budget


def abstract_stages(model: Model, shard: Shard, dtype: str) -> list[StageModel]:
    """A worker's stages, with shapes for weights, computed as XLA has them on a GPU. MeshError as `lower_stages`."""
    return loading.abstract_stages(model, shard, dtype, machine=GPU)


def lower_stages(config: Config, model: Model, role: StepRole) -> Iterator[LoweredStage]:
    """The largest step of a role, stage by stage, of a worker with room for its longest context in every slot.

    Raises:
        MeshError: the model cannot be cut so, or there are too few devices.
    """
    shard = shard_of(config, role)
    context_tokens = min(model.config.max_position_embeddings, DEFAULT_MAX_CONTEXT_TOKENS)
    shapes = step_shapes(config, context_tokens, role, model.kv_groups(DTYPE), GPU)
    is_prefill = role == "prefill"
    kind, sizes = (StepKind.PREFILL, shapes.prefill_buckets) if is_prefill else (StepKind.DECODE, shapes.decode_buckets)
    num_blocks, block_size = shapes.slots_per_partition * shapes.columns_per_sequence, config.kv.block_size
    num_groups = len(shapes.groups)
    budgets = budget(model.pieces("bf16"), shard.mesh, rules_of(config, role), 0, lambda mesh, rules: 0).stages
    for stage, its_budget in zip(abstract_stages(model, shard, DTYPE), budgets, strict=True):
        blueprint = Blueprint(stage, shapes, blocks_per_partition=num_blocks, block_size=block_size, dtype=DTYPE)
        program = blueprint.lower((kind, sizes[-1]))
        block_bytes = int(its_budget.kv_bytes_per_token * block_size) // num_groups  # a block is of one group
        page_bytes = block_bytes * num_blocks
        counted = _count(stage, shapes, kind, sizes[-1], its_budget, page_bytes)
        yield LoweredStage(num_layers=len(stage.layers), num_blocks=num_blocks, program=program, counted=counted)


def _count(
    stage: StageModel, shapes: StepShapes, kind: StepKind, bucket: int, its_budget: StageBudget, page_bytes: int
) -> StepBytes:
    """What all arrays of the step take on a device: weights, pages, logits, packed step, activations."""
    slots = shapes.slots_per_partition
    stream = bucket * stage.model.config.hidden_size * ITEM_BYTES  # from stage to stage
    inputs = slots * INT_BYTES if stage.is_first and kind is StepKind.DECODE else 0
    logits = slots * shapes.q_len * stage.model.config.vocab_size * LOGIT_BYTES if stage.is_last else 0
    step = shapes.layout(kind, bucket).size * INT_BYTES
    given = step + inputs + (0 if stage.is_first else stream)
    return StepBytes(
        arguments=int(its_budget.weight_bytes) + page_bytes + logits + given,
        outputs=page_bytes + logits + (INT_BYTES if stage.is_last and kind is StepKind.DECODE else stream),
    )
