"""The kernels of routed experts for Hopper cards have the reference's sums and no race, and lower for a card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models.experts import moe
from moonshard.models.gpu import card
from moonshard.models.gpu.experts.backend import grouped_experts, multiply, rows_for
from moonshard.models.gpu.experts.grouped_product import CUT_OF_MANY_ROWS
from moonshard.models.gpu.experts.tiles import Cut
from tests.models.gpu.hopper import INTERPRETED, distance, lower, races

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
LAYERS, NUM_EXPERTS, EMBED, WIDTH = 2, 4, 256, 128
TOLERANCE = 1e-2  # of the norm, in bfloat16
PROCESSORS = 3  # so that each has several products


@functools.cache
def draw_experts(dtype: str = "bfloat16") -> moe.Experts:
    rng = np.random.default_rng(1)
    gate_up = rng.normal(size=(LAYERS, NUM_EXPERTS, 2, WIDTH, EMBED)) * EMBED**-0.5
    down = rng.normal(size=(LAYERS, NUM_EXPERTS, EMBED, WIDTH)) * WIDTH**-0.5
    return moe.Experts(gate_up=jnp.asarray(gate_up, dtype), down=jnp.asarray(down, dtype))


def draw_tokens(count: int, k: int):
    rng = np.random.default_rng(count)
    chosen = np.stack([rng.permutation(NUM_EXPERTS)[:k] for _ in range(count)])
    routing = moe.Routing(
        weights=jnp.asarray(rng.random((count, k)), jnp.float32),
        experts=jnp.asarray(chosen, jnp.int32),
        margin=jnp.asarray(np.full(count, np.inf), jnp.float32),
    )
    return jnp.asarray(rng.normal(size=(count, EMBED)), jnp.bfloat16), routing


def expected_of(x, routing, valid, layer):
    x, experts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (x, draw_experts()))
    with jax.default_matmul_precision("highest"):
        return jax.jit(moe.dense)(x, routing, valid, experts, layer)


@pytest.mark.parametrize(
    ("tokens", "k", "num_rows", "cut"),
    [
        (5, 2, 16, None),
        (70, 3, 64, Cut(columns=128, depth=64, num_stages=2)),
        (90, 2, 128, CUT_OF_MANY_ROWS),
    ],
)
def test_the_kernels_have_the_references_sums_and_no_race(tokens, k, num_rows, cut, capfd):
    x, routing = draw_tokens(tokens, k)
    valid = np.arange(tokens) % 7 != 3
    x = jnp.asarray(np.where(valid[:, None], np.asarray(x, np.float32), np.nan), jnp.bfloat16)  # would spoil sums
    run = functools.partial(multiply, num_rows=num_rows, cut=cut, num_processors=PROCESSORS, interpret=INTERPRETED)
    got = np.asarray(jax.jit(run)(x, routing, valid, draw_experts(), jnp.int32(1)), np.float32)
    expected = expected_of(jnp.nan_to_num(x), routing, valid, jnp.int32(1))
    assert distance(got, expected) < TOLERANCE
    assert not got[~valid].any()
    assert races("".join(capfd.readouterr())) == 0


def test_no_token_is_dropped_when_all_choose_one_expert():
    x, _ = draw_tokens(40, 1)
    routing = moe.Routing(
        weights=jnp.ones((40, 1), jnp.float32), experts=jnp.full((40, 1), 2, jnp.int32), margin=jnp.zeros(40)
    )
    valid = np.ones(40, bool)
    run = functools.partial(multiply, num_rows=16, num_processors=PROCESSORS, interpret=INTERPRETED)
    got = jax.jit(run)(x, routing, valid, draw_experts(), jnp.int32(0))
    assert distance(got, expected_of(x, routing, valid, jnp.int32(0))) < TOLERANCE


@pytest.mark.parametrize("num_pairs", [1, 8, 16, 128, 1024, 16384, 65536])
def test_a_block_holds_most_experts_whole_share(num_pairs):
    rows = rows_for(num_pairs, 384)
    assert 16 <= rows <= 128
    assert rows & (rows - 1) == 0
    assert rows == 128 or rows >= 1.2 * (num_pairs // 384)


@pytest.mark.parametrize("tokens", [1, 128, 2048, 8192])
def test_the_kernels_lower_for_a_card_at_full_size_without_copying_an_expert(tokens):
    d, f, e, k, layers = 7168, 2048, 384, 8, 2
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    experts = moe.Experts(gate_up=shape((layers, e, 2, f, d), bf16), down=shape((layers, e, d, f), bf16))

    def run(experts, x, weights, chosen, valid, layer):
        routing = moe.Routing(weights=weights, experts=chosen, margin=jnp.zeros(tokens))
        return grouped_experts(x, routing, valid, experts, layer)

    text = lower(
        run,
        experts,
        shape((tokens, d), bf16),
        shape((tokens, k), jnp.float32),
        shape((tokens, k), jnp.int32),
        shape((tokens,), jnp.bool_),
        shape((), jnp.int32),
    )
    assert text.count("custom_call @mosaic_gpu") == 2
    touching = [
        line for line in text.splitlines() if "tensor<2x384x" in line and not line.lstrip().startswith("func.func")
    ]
    assert touching
    assert all("stablehlo.reshape" in line or "broadcast_in_dim" in line or "call @" in line for line in touching)


def test_where_the_kernels_do_not_fit_the_portable_loop_serves_and_that_is_said_once(caplog):
    card.say_once.cache_clear()
    x, routing = draw_tokens(6, 2)
    arguments = (x.astype(jnp.float32), routing, jnp.ones(6, bool), draw_experts("float32"), jnp.int32(0))
    for _ in range(2):
        assert distance(grouped_experts(*arguments), moe.blocks(*arguments)) < 1e-6
    assert len([record for record in caplog.records if "kernels for GPUs" in record.message]) == 1
