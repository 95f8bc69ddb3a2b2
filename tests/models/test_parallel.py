"""A model over a mesh says what it says on one device: logits and pages, in every parallel form."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.block_shards import BlockShards
from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.family import Kimi
from moonshard.models.kimi.forward import expands, forward, unembed
from moonshard.models.kimi.weights import declare
from moonshard.models.model import Batch
from moonshard.serving.engine.capacity.sizes import split_stages
from moonshard.sharding.experts import ExpertPlacement, place_experts
from moonshard.sharding.mesh import BY_PARTITION, build_mesh, partition_spec
from moonshard.sharding.rules import DECODE, PREFILL, Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.agreement import FIXTURES, LOGIT_TOLERANCE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
CONFIG = KimiConfig.from_hugging_face(Checkpoint.open(FIXTURES / "kimi_k2").config)
ROWS, TOKENS, BLOCK = 8, 16, 16
CONTEXT_PARALLEL = Rules(kv_tokens=("tensor",))
FORMS = [
    (MeshShape(tensor=2), PREFILL),
    (MeshShape(tensor=4), PREFILL),
    (MeshShape(tensor=2), DECODE),
    (MeshShape(expert=2), PREFILL),
    (MeshShape(expert=4), PREFILL),
    (MeshShape(expert=8), PREFILL),
    (MeshShape(data=2), PREFILL),
    (MeshShape(data=2, expert=2), PREFILL),
    (MeshShape(data=2, tensor=2), PREFILL),
    (MeshShape(expert=2, tensor=2), PREFILL),
    (MeshShape(expert=2, tensor=2), DECODE),
    (MeshShape(data=2, expert=2, tensor=2), DECODE),
    (MeshShape(pipe=2), PREFILL),
    (MeshShape(pipe=3), PREFILL),  # of 4 layers: unequally many
    (MeshShape(pipe=4), PREFILL),
    (MeshShape(data=2, tensor=2, pipe=2), PREFILL),
    (MeshShape(expert=4, pipe=2), DECODE),
    (MeshShape(tensor=4), CONTEXT_PARALLEL),
    (MeshShape(data=2, tensor=2), CONTEXT_PARALLEL),
    (MeshShape(expert=2, tensor=2), Rules(heads=(), kv_tokens=("tensor",))),
]


FEW = [  # every axis, cut once as deep as there are devices and once beside the others, and every table's own rules
    *((MeshShape(tensor=4), PREFILL), (MeshShape(expert=8), PREFILL)),
    *((MeshShape(data=2, expert=2, tensor=2), DECODE), (MeshShape(data=2, tensor=2, pipe=2), PREFILL)),
    *((MeshShape(tensor=4), CONTEXT_PARALLEL), FORMS[-1]),
]
ALL = [pytest.param(*form, marks=[] if form in FEW else pytest.mark.slow) for form in FORMS]


def a_batch(seed: int = 0) -> Batch:
    """A batch whose rows have a block each, some of them partly or wholly padding."""
    random = np.random.default_rng(seed)
    lengths = np.array([16, 1, 16, 7, 0, 16, 3, 16])
    positions = np.where(np.arange(TOKENS) < lengths[:, None], np.arange(TOKENS), -1)
    return Batch(
        tokens=jnp.asarray(random.integers(0, CONFIG.vocab_size, (ROWS, TOKENS)), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        block_tables=jnp.zeros((ROWS, 1, 1), jnp.int32),
    )


def run(
    mesh: MeshShape,
    rules: Rules,
    batch: Batch,
    placement: ExpertPlacement | None = None,
    chunk_tokens: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rows, t, v] and pages [rows, layers, block, features], one block to a row."""
    per_partition = ROWS // mesh.num_partitions
    tables = np.tile(np.arange(per_partition, dtype=np.int32), mesh.num_partitions)[:, None]
    batch = replace(batch, block_tables=jnp.asarray(tables)[:, None])
    shard, found, pages = Shard(mesh=mesh, rules=rules), None, []
    for index, layers in enumerate(split_stages(Kimi(CONFIG), shard)):
        found, own_pages = run_stage(shard, index, layers, batch, found, placement, chunk_tokens)
        pages.append(np.asarray(own_pages))
    return np.asarray(found), np.concatenate(pages, axis=1)


def run_stage(
    shard: Shard,
    index: int,
    layers: range,
    batch: Batch,
    hidden: jax.Array | None,
    placement: ExpertPlacement | None,
    chunk_tokens: int | None,
) -> tuple[jax.Array, jax.Array]:
    """What the stage gives to the next one (or the logits), and the stage's pages."""
    mesh, is_last = build_mesh(shard.mesh, index), layers.stop == CONFIG.num_hidden_layers
    own = None if placement is None else placement.of_layers(CONFIG.moe_layers(layers))
    params = declare(CONFIG, layers, own)
    loaded = weights.load(params, Checkpoint.open(FIXTURES / "kimi_k2"), "float32", mesh, shard.rules)
    specs = jax.tree.map(
        lambda param: partition_spec(mesh, param.axes, param.shape, shard.rules), params, is_leaf=weights.is_param
    )
    shards = BlockShards(mesh, shard, num_layers=len(layers), block_size=BLOCK)
    sharding = jax.sharding.NamedSharding(mesh, shards.pages)
    pages = allocate_pages(ROWS, len(layers), BLOCK, CONFIG.latent_size, dtype="float32", sharding=sharding)

    def on_each_device(loaded: Any, pages: Any, batch: Batch, *hidden: Any) -> tuple[Any, Any]:
        with jax.default_matmul_precision("highest"):
            given = hidden[0] if hidden else None
            how = {"shard": shard, "placement": own, "chunk_tokens": chunk_tokens}
            out, pages, _ = forward(CONFIG, loaded, pages, batch, hidden=given, backend=moe.blocks, **how)
            if is_last:
                logits = unembed(loaded, out.reshape(-1, out.shape[-1]), shard)
                out = logits.reshape(*batch.tokens.shape, -1)
            return out, pages

    given = () if hidden is None else (jax.device_put(hidden, jax.sharding.NamedSharding(mesh, BY_PARTITION)),)
    in_specs = (specs, shards.pages, BY_PARTITION, *(BY_PARTITION for _ in given))
    out_specs = (BY_PARTITION, shards.pages)
    program = jax.shard_map(on_each_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(program)(loaded, pages, batch, *given)


@functools.cache
def alone() -> tuple[np.ndarray, np.ndarray]:
    return run(MeshShape(), PREFILL, a_batch())


@pytest.mark.parametrize(("mesh", "rules"), ALL, ids=lambda each: str(each).split("(")[0])
def test_a_parallel_form_gives_the_logits_and_pages_of_one_device(mesh: MeshShape, rules: Rules):
    batch = a_batch()
    is_real = np.asarray(batch.positions) >= 0
    logits, pages = run(mesh, rules, batch)
    assert np.abs(logits - alone()[0])[is_real].max() < LOGIT_TOLERANCE
    assert np.abs(pages - alone()[1]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        (MeshShape(data=2, tensor=2, pipe=2), PREFILL),
        pytest.param(MeshShape(), PREFILL, marks=pytest.mark.slow),
        pytest.param(MeshShape(expert=2, tensor=2), DECODE, marks=pytest.mark.slow),
        pytest.param(MeshShape(tensor=4), CONTEXT_PARALLEL, marks=pytest.mark.slow),
    ],
    ids=lambda each: str(each).split("(")[0],
)
def test_long_chunks_whose_keys_are_expanded_give_the_same_logits_and_pages(mesh: MeshShape, rules: Rules):
    batch = a_batch()
    is_real = np.asarray(batch.positions) >= 0
    assert expands(CONFIG, 64, Shard(mesh=mesh, rules=rules)) == (rules is not CONTEXT_PARALLEL)
    logits, pages = run(mesh, rules, batch, chunk_tokens=64)
    assert np.abs(logits - alone()[0])[is_real].max() < LOGIT_TOLERANCE
    assert np.abs(pages - alone()[1]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        (MeshShape(expert=2, tensor=2), DECODE),
        pytest.param(MeshShape(), PREFILL, marks=pytest.mark.slow),
        pytest.param(MeshShape(expert=4), PREFILL, marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, tensor=2), DECODE, marks=pytest.mark.slow),
        pytest.param(MeshShape(expert=2, pipe=2), DECODE, marks=pytest.mark.slow),
    ],
    ids=lambda each: str(each).split("(")[0],
)
def test_copies_of_hot_experts_placed_by_load_change_no_logit(mesh: MeshShape, rules: Rules):
    loads = np.random.default_rng(2).pareto(1.0, (CONFIG.num_moe_layers, CONFIG.n_routed_experts))
    placement = place_experts(loads, CONFIG.n_routed_experts + 8, Shard(mesh=mesh, rules=rules).num_parts("experts"))
    assert placement.num_copies.max() > 2
    batch = a_batch()
    logits, pages = run(mesh, rules, batch, placement)
    is_real = np.asarray(batch.positions) >= 0
    assert np.abs(logits - alone()[0])[is_real].max() < LOGIT_TOLERANCE
    assert np.abs(pages - alone()[1]).max() < LOGIT_TOLERANCE
