"""Tokens reach the devices that hold their experts, however they are spread, and nothing but them travels."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moonshard.models.experts import moe
from moonshard.models.experts.exchange import capacity_for, exchanged
from moonshard.sharding.mesh import build_mesh, partition_spec
from moonshard.sharding.rules import DECODE, PREFILL, Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
NUM_EXPERTS, TOP_K, WIDTH, FFW, NUM_LAYERS = 16, 2, 24, 12, 2
TOKENS = 256  # of all devices together
DENSE = jax.jit(moe.dense)
AXES = {
    "gate_up": ("layers", "experts", None, "expert_ffw", "embed"),
    "down": ("layers", "experts", "embed", "expert_ffw"),
}
MESHES = [
    (MeshShape(expert=4), PREFILL),
    (MeshShape(expert=8), PREFILL),
    (MeshShape(tensor=4), DECODE),
    (MeshShape(expert=2, tensor=2), PREFILL),
    (MeshShape(expert=2, tensor=2), DECODE),
    (MeshShape(expert=4, tensor=2), DECODE),  # of which those along `tensor` need unlike numbers of rounds
    (MeshShape(data=2, expert=2, tensor=2), DECODE),
]
FEW = (MESHES[1], MESHES[3], MESHES[5], MESHES[6])
ALL = [pytest.param(*each, marks=[] if each in FEW else pytest.mark.slow) for each in MESHES]


def spread(how: str) -> np.ndarray:
    """Chosen experts [t, k], spread over the devices as the test wants."""
    random = np.random.default_rng(0)
    match how:
        case "even":
            return np.stack([random.choice(NUM_EXPERTS, TOP_K, replace=False) for _ in range(TOKENS)])
        case "one device":
            return np.stack([random.permutation(TOP_K) for _ in range(TOKENS)]) % (NUM_EXPERTS // 8)
        case _:
            return np.full((TOKENS, TOP_K), NUM_EXPERTS - 1)


@functools.cache
def program(mesh_shape: MeshShape, rules: Rules) -> Any:
    """x [t d], routing, valid [t], experts: the sum over the chosen experts [t d]."""
    mesh, shard = build_mesh(mesh_shape), Shard(mesh=mesh_shape, rules=rules)
    shapes = {"gate_up": (NUM_LAYERS, NUM_EXPERTS, 2, FFW, WIDTH), "down": (NUM_LAYERS, NUM_EXPERTS, WIDTH, FFW)}
    specs = moe.Experts(**{name: partition_spec(mesh, AXES[name], shapes[name], rules) for name in AXES})
    rows = PartitionSpec(("data", "expert"))
    backend = exchanged(moe.blocks, shard)

    def on_each_device(x: Any, routing: moe.Routing, valid: Any, experts: Any) -> Any:
        return shard.sum(backend(x, routing, valid, experts, jnp.int32(1)), ("tensor",))

    return jax.jit(
        jax.shard_map(on_each_device, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False)
    )


def arguments(chosen: np.ndarray) -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    routing = moe.Routing(
        weights=jnp.asarray(random.random(chosen.shape), jnp.float32),
        experts=jnp.asarray(chosen, jnp.int32),
        margin=jnp.asarray(np.zeros(len(chosen)), jnp.float32),
    )
    experts = moe.Experts(
        gate_up=jnp.asarray(random.normal(size=(NUM_LAYERS, NUM_EXPERTS, 2, FFW, WIDTH)), jnp.float32),
        down=jnp.asarray(random.normal(size=(NUM_LAYERS, NUM_EXPERTS, WIDTH, FFW)), jnp.float32),
    )
    x = jnp.asarray(random.normal(size=(len(chosen), WIDTH)), jnp.float32)
    return x, routing, jnp.asarray(random.random(len(chosen)) < 0.8), experts


@pytest.mark.parametrize("how", ["even", "one device", "one expert"])
@pytest.mark.parametrize(("mesh", "rules"), ALL, ids=lambda each: str(each).split("(")[0])
def test_every_token_gets_the_sum_of_its_experts_however_they_are_spread(mesh: MeshShape, rules: Rules, how: str):
    x, routing, valid, experts = arguments(spread(how))
    expected = DENSE(x, routing, valid, experts, np.int32(1))
    found = program(mesh, rules)(x, routing, valid, experts)
    assert np.abs(np.asarray(expected)).max() > 1
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-5 * np.abs(np.asarray(expected)).max()


@pytest.mark.parametrize(("num_devices", "num_rounds"), [(4, 2), (8, 3)])
def test_where_all_tokens_choose_one_device_they_do_not_fit_into_one_round(num_devices: int, num_rounds: int):
    num_own = TOKENS // num_devices
    assert -(-num_own // capacity_for(num_own, TOP_K, num_devices)) == num_rounds


def test_a_buffer_has_room_for_somewhat_more_than_a_fair_share_and_for_no_more_than_there_is():
    assert capacity_for(1024, 8, 32) == 1024 * 8 // 32 * 3 // 2 + 1
    assert capacity_for(4, 8, 8) == 4


@pytest.mark.parametrize("rules", [PREFILL, DECODE])
def test_tokens_are_sent_all_to_all_and_no_device_holds_all_experts(rules: Rules):
    mesh = MeshShape(expert=4, tensor=2)
    x, routing, valid, experts = arguments(spread("even"))
    flat, tree = jax.tree.flatten((x, routing, valid, experts))
    compiled = jax.jit(lambda *leaves: program(mesh, rules)(*jax.tree.unflatten(tree, leaves))).lower(*flat).compile()
    text = compiled.as_text() or ""
    assert "all-to-all" in text
    assert "all-gather" not in text
    held = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    leading = {dims[1] for dims in held if len(dims) >= 4 and dims[0] == NUM_LAYERS}
    assert leading == {NUM_EXPERTS // (4 if rules is PREFILL else 8)}
