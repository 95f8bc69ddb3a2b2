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
from moonshard.models import kimi, moe, weights
from moonshard.models.checkpoint import Checkpoint
from moonshard.sharding.experts import ExpertPlacement, place_experts
from moonshard.sharding.mesh import BY_PARTITION, build_mesh, partition_spec
from moonshard.sharding.place import Place
from moonshard.sharding.rules import DECODE, PREFILL, Rules
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES, LOGIT_TOLERANCE

pytestmark = pytest.mark.xdist_group("jax")
CONFIG = kimi.KimiConfig.of(Checkpoint.open(FIXTURES / "kimi_k2"))
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
    (MeshShape(tensor=4), CONTEXT_PARALLEL),
    (MeshShape(data=2, tensor=2), CONTEXT_PARALLEL),
    (MeshShape(expert=2, tensor=2), Rules(heads=(), kv_tokens=("tensor",))),
]


def a_batch(seed: int = 0) -> kimi.Batch:
    """Rows of their own block each, some of them partly or wholly padding."""
    random = np.random.default_rng(seed)
    lengths = np.array([16, 1, 16, 7, 0, 16, 3, 16])
    positions = np.where(np.arange(TOKENS) < lengths[:, None], np.arange(TOKENS), -1)
    return kimi.Batch(
        tokens=jnp.asarray(random.integers(0, CONFIG.vocab_size, (ROWS, TOKENS)), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        block_tables=jnp.zeros((ROWS, 1), jnp.int32),
    )


def run(
    mesh_shape: MeshShape, rules: Rules, batch: kimi.Batch, placement: ExpertPlacement | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rows, t, v] and pages [rows, layers, block, features], one block to a row."""
    mesh, place = build_mesh(mesh_shape), Place(mesh=mesh_shape, rules=rules)
    params = kimi.declare(CONFIG, placement=placement)
    loaded = weights.load(params, Checkpoint.open(FIXTURES / "kimi_k2"), "float32", mesh, rules)
    specs = jax.tree.map(
        lambda param: partition_spec(mesh, param.axes, param.shape, rules), params, is_leaf=weights.is_param
    )
    shards = BlockShards(mesh, place, num_layers=CONFIG.num_hidden_layers, block_size=BLOCK)
    per_partition = ROWS // mesh_shape.num_partitions
    tables = np.tile(np.arange(per_partition, dtype=np.int32), mesh_shape.num_partitions)[:, None]
    pages = allocate_pages(
        ROWS,
        CONFIG.num_hidden_layers,
        BLOCK,
        CONFIG.latent_size,
        dtype="float32",
        sharding=jax.sharding.NamedSharding(mesh, shards.pages),
    )

    def on_each_device(loaded: Any, pages: Any, batch: kimi.Batch) -> tuple[Any, Any]:
        with jax.default_matmul_precision("highest"):
            hidden, pages, _ = kimi.forward(
                CONFIG, loaded, pages, batch, backend=moe.blocks, place=place, placement=placement
            )
            logits = kimi.unembed(loaded, hidden.reshape(-1, hidden.shape[-1]), place)
            return logits.reshape(*batch.tokens.shape, -1), pages

    program = jax.jit(
        jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(specs, shards.pages, BY_PARTITION),
            out_specs=(BY_PARTITION, shards.pages),
            check_vma=False,
        )
    )
    logits, pages = program(loaded, pages, replace(batch, block_tables=jnp.asarray(tables)))
    return np.asarray(logits), np.asarray(pages)


@functools.cache
def alone() -> tuple[np.ndarray, np.ndarray]:
    return run(MeshShape(), PREFILL, a_batch())


@pytest.mark.parametrize(("mesh", "rules"), FORMS, ids=lambda each: str(each).split("(")[0])
def test_a_parallel_form_gives_the_logits_and_pages_of_one_device(mesh: MeshShape, rules: Rules):
    batch = a_batch()
    is_real = np.asarray(batch.positions) >= 0
    logits, pages = run(mesh, rules, batch)
    assert np.abs(logits - alone()[0])[is_real].max() < LOGIT_TOLERANCE
    assert np.abs(pages - alone()[1]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        (MeshShape(), PREFILL),
        (MeshShape(expert=4), PREFILL),
        (MeshShape(expert=2, tensor=2), DECODE),
        (MeshShape(data=2, tensor=2), DECODE),
    ],
    ids=lambda each: str(each).split("(")[0],
)
def test_copies_of_hot_experts_placed_by_load_change_no_logit(mesh: MeshShape, rules: Rules):
    loads = np.random.default_rng(2).pareto(1.0, (CONFIG.num_moe_layers, CONFIG.n_routed_experts))
    placement = place_experts(loads, CONFIG.n_routed_experts + 8, Place(mesh=mesh, rules=rules).num_parts("experts"))
    assert placement.num_copies.max() > 2
    batch = a_batch()
    logits, pages = run(mesh, rules, batch, placement)
    is_real = np.asarray(batch.positions) >= 0
    assert np.abs(logits - alone()[0])[is_real].max() < LOGIT_TOLERANCE
    assert np.abs(pages - alone()[1]).max() < LOGIT_TOLERANCE
