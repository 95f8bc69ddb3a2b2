"""A compiled step copies and transposes no weight and no page pool, and gathers only what is listed here.

Read from the optimised HLO of steps whose weights and pages have sizes of their own, so that a copy of one is known by
its number of elements. Where XLA multiplies, of many rows or without kernels, it slices a layer's weights out of their
stack once a step, which is a copy too; but nothing is transposed. On a checkpoint with Kimi K2's proportions that takes
3.5 of the 198 ms of a chunk of 512 beside kernels, which widens bfloat16 on the way; without them a quarter of what the
operations of a decode step with one sequence take, and 7% of one with eight and of a chunk. Layers that are unrolled
are sliced alike, and compile twelve times as long; kernels for as many rows are slower than the slice and the product.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jaxtyping
import pytest

from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.machines import XLA
from moonshard.models.native import library
from moonshard.models.registry import model_of
from moonshard.models.spec import Param
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.loading.model import backend_for, machine_for
from moonshard.serving.engine.steps import StepKind, StepShapes
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.slow]
# No size is a product or a multiple of others that a step's activations might have too.
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 136,
    "intermediate_size": 328,
    "moe_intermediate_size": 88,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 11,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 104,
    "kv_lora_rank": 152,
    "qk_nope_head_dim": 56,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "vocab_size": 1912,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
BLOCKS, BLOCK_SIZE = 211, 16
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\w+)\[(?P<dims>[\d,]*)\]\S* (?P<opcode>[\w-]+)\("
)
TRANSPOSES = ("copy", "transpose")
MOVES = (*TRANSPOSES, "dynamic-slice", "slice", "concatenate")
SMALL = 2048  # elements: below, nothing is a matrix of a layer


class Instruction(NamedTuple):
    name: str
    opcode: str
    num_elements: int


@pytest.fixture(autouse=True)
def shapes_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering works on trees of shapes, which the checks of annotations would refuse."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "bucket"), [(StepKind.DECODE, 8), (StepKind.PREFILL, 512)], ids=("decode", "prefill"))
@pytest.mark.skipif(library.chosen() is None, reason="there are no kernels here")
def test_with_kernels_no_weight_and_no_page_is_copied_out_of_where_it_lies(kind: StepKind, bucket: int, held: str):
    found = list(compiled(kind, bucket, held, in_place=True))
    known = sizes(held)
    moved = [each for each in found if each.opcode in (MOVES if kind is StepKind.DECODE else TRANSPOSES)]
    assert not [(each, known[each.num_elements]) for each in moved if each.num_elements in known]
    # Of the table of embeddings, a row for each token; nothing of the pages.
    gathered = {each.num_elements for each in found if each.opcode == "gather" and each.num_elements > SMALL}
    assert gathered <= {bucket * CONFIG["hidden_size"]}


@pytest.mark.parametrize(("kind", "bucket"), [(StepKind.DECODE, 8), (StepKind.PREFILL, 512)], ids=("decode", "prefill"))
def test_without_kernels_nothing_is_transposed_that_a_product_reads(kind: StepKind, bucket: int):
    found = list(compiled(kind, bucket, "float32", in_place=False))
    known = sizes("float32")
    moved = [each for each in found if each.opcode in TRANSPOSES]
    assert not [(each, known[each.num_elements]) for each in moved if each.num_elements in known]


def stage(held: str, *, in_place: bool) -> StageModel:
    model, mesh = model_of(CONFIG), build_mesh(MeshShape())

    def held_as(param: Param) -> Param:  # as `weights.load` decides
        is_matrix = len(param.tensor_shape or param.shape[param.stacked :]) > 1
        return replace(param, dtype=held if is_matrix else "float32")

    params = jax.tree.map(held_as, model.declare(), is_leaf=weights.is_param)
    return StageModel(
        model=model,
        layers=range(model.config.num_hidden_layers),
        weights=weights.abstract(params, "float32", mesh),
        mesh=mesh,
        shard=ALONE,
        backend=backend_for("cpu") if in_place else moe.blocks,
        machine=machine_for("cpu") if in_place else XLA,
    )


def compiled(kind: StepKind, bucket: int, held: str, *, in_place: bool) -> Iterator[Instruction]:
    """The instructions of a compiled step, those inside fusions too."""
    shapes = StepShapes(
        num_partitions=1,
        slots_per_partition=8,
        columns_per_sequence=2048 // BLOCK_SIZE,
        max_context_tokens=2048,
        q_tile=64,
        prefill_buckets=(512,),
        decode_buckets=(8,),
        transfer_buckets=(1,),
    )
    part = stage(held, in_place=in_place)
    blueprint = Blueprint(part, shapes, blocks_per_partition=BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
    text = blueprint.lower((kind, bucket)).compile().as_text()
    assert text is not None
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            dims = [int(dim) for dim in match["dims"].split(",") if dim]
            yield Instruction(match["name"], match["opcode"], math.prod(dims))


def sizes(held: str) -> dict[int, str]:
    """Elements of each weight, of a layer of it, and of the pages and a layer of them; and what has them."""
    known = dict[int, str]()
    for path, leaf in jax.tree_util.tree_flatten_with_path(stage(held, in_place=False).weights)[0]:
        name = jax.tree_util.keystr(path)
        known |= {leaf.size: name, leaf.size // leaf.shape[0]: f"a layer of {name}"}
    layers, features = CONFIG["num_hidden_layers"], CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]
    pages = BLOCKS * BLOCK_SIZE * features
    return {size: name for size, name in known.items() if size > SMALL} | {
        pages: "a layer of pages",
        pages * layers: "pages",
    }
