"""The GPU kernels, run as plain jax operations, give the reference's sums, and they lower for a GPU at full size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moonshard.models.experts import grouped as moe_grouped
from moonshard.models.experts import moe
from moonshard.models.experts.grouped import Tiles, grouped
from moonshard.models.score import observe
from tests.agreement import FIXTURES, LOGIT_TOLERANCE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
LAYERS, NUM_EXPERTS, EMBED, WIDTH = 2, 8, 96, 48  # sides whose largest power of two is 32 and 16: several tiles each
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the norm
DENSE = jax.jit(moe.dense)
INTERPRETED = jax.jit(functools.partial(grouped, interpret=True))
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")


@functools.cache
def draw_experts(dtype: str) -> moe.Experts:
    rng = np.random.default_rng(1)
    gate_up = rng.normal(size=(LAYERS, NUM_EXPERTS, 2, WIDTH, EMBED)) * EMBED**-0.5
    down = rng.normal(size=(LAYERS, NUM_EXPERTS, EMBED, WIDTH)) * WIDTH**-0.5
    return moe.Experts(gate_up=jnp.asarray(gate_up, dtype), down=jnp.asarray(down, dtype))


def draw_routing(tokens: int, k: int, seed: int) -> moe.Routing:
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(NUM_EXPERTS)[:k] for _ in range(tokens)])
    return moe.Routing(
        weights=jnp.asarray(rng.random((tokens, k)), jnp.float32),
        experts=jnp.asarray(chosen, jnp.int32),
        margin=jnp.asarray(np.full(tokens, np.inf), jnp.float32),
    )


def distance(got, expected) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def expected_of(x, routing, valid, layer, dtype):
    """The expected sums in float32, from the same values, whatever their dtype."""
    x, experts = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), (x, draw_experts(dtype)))
    with jax.default_matmul_precision("highest"):
        return DENSE(x, routing, valid, experts, np.int32(layer))


def tokens_of(count: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(count).normal(size=(count, EMBED)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "k"), [(1, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((5, 1), (17, 3))), (70, 4)]
)
def test_the_kernels_give_the_references_sum(tokens, k, dtype):
    x, routing, valid = tokens_of(tokens, dtype), draw_routing(tokens, k, seed=k), np.ones(tokens, bool)
    for layer in range(LAYERS):
        got = INTERPRETED(x, routing, valid, draw_experts(dtype), np.int32(layer))
        assert got.dtype == x.dtype
        assert distance(got, expected_of(x, routing, valid, layer, dtype)) < TOLERANCE[dtype]


def test_no_token_is_dropped_when_all_choose_one_expert():
    x, valid = tokens_of(70, "float32"), np.ones(70, bool)
    routing = moe.Routing(
        weights=jnp.asarray(np.ones((70, 1)), jnp.float32),
        experts=jnp.asarray(np.full((70, 1), 5), jnp.int32),
        margin=jnp.asarray(np.zeros(70), jnp.float32),
    )
    got = INTERPRETED(x, routing, valid, draw_experts("float32"), np.int32(1))
    assert distance(got, expected_of(x, routing, valid, 1, "float32")) < TOLERANCE["float32"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_invalid_tokens_get_zero_and_take_no_block(share):
    x, routing = tokens_of(17, "float32"), draw_routing(17, 3, seed=0)
    valid = np.random.default_rng(2).random(17) < share
    x = jnp.asarray(np.where(valid[:, None], x, np.nan))  # a token that took part would spoil every sum it entered
    got = np.asarray(INTERPRETED(x, routing, valid, draw_experts("float32"), np.int32(0)))
    expected = np.asarray(expected_of(np.nan_to_num(x), routing, valid, 0, "float32"))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not got[~valid].any()


@pytest.mark.parametrize("rows", [16, 64])
def test_every_cut_into_tiles_gives_the_same_sum(rows):
    tiles = Tiles(rows=rows, columns=16, depth_bytes=64, num_warps=4, num_stages=2)
    x, routing, valid = tokens_of(33, "float32"), draw_routing(33, 8, seed=3), np.ones(33, bool)
    got = jax.jit(functools.partial(grouped, tiles=tiles, interpret=True))(
        x, routing, valid, draw_experts("float32"), np.int32(0)
    )
    assert distance(got, expected_of(x, routing, valid, 0, "float32")) < TOLERANCE["float32"]


def test_the_model_has_hugging_faces_logits_through_the_kernels():
    ref = np.load(FIXTURES / "kimi_k2" / "ref.npz")
    seen = observe(FIXTURES / "kimi_k2", ref["ids1"].tolist(), backend=functools.partial(grouped, interpret=True))
    np.testing.assert_allclose(seen.logits, ref["logits1"], atol=LOGIT_TOLERANCE)


def test_a_side_that_no_tile_divides_is_refused():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    experts = moe.Experts(gate_up=shape((1, 2, 2, 24, 32)), down=shape((1, 2, 32, 24)))
    routing = draw_routing(1, 1, seed=0)
    with pytest.raises(ValueError, match="24 features"):
        jax.eval_shape(grouped, shape((1, 32)), routing, np.ones(1, bool), experts, np.int32(0))


@pytest.mark.parametrize("num_pairs", [1, 8, 16, 128, 1024, 16384, 65536])
def test_a_block_holds_most_experts_whole_share(num_pairs):
    tiles = moe_grouped.tiles_for(num_pairs, 384)
    assert 16 <= tiles.rows <= 128
    assert tiles.rows & (tiles.rows - 1) == 0
    assert tiles.rows == 128 or tiles.rows >= 1.2 * (num_pairs // 384)


def lower_for_gpu(tokens: int, num_layers: int) -> str:
    """As on a card: Kimi K2's sides, bf16, `num_layers` of 384 experts; nothing is computed."""
    d, f, e, k = 7168, 2048, 384, 8
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    experts = moe.Experts(gate_up=shape((num_layers, e, 2, f, d), bf16), down=shape((num_layers, e, d, f), bf16))
    arguments = (
        shape((tokens, d), bf16),
        shape((tokens, k), jnp.float32),
        shape((tokens, k), jnp.int32),
        shape((tokens,), jnp.bool_),
        shape((), jnp.int32),
    )

    def run(experts, x, weights, chosen, valid, layer):
        routing = moe.Routing(weights=weights, experts=chosen, margin=jnp.zeros(tokens))
        return grouped(x, routing, valid, experts, layer)

    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(experts, *arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("tokens", [1, 64, 128, 2048, 8192])
def test_the_kernels_lower_for_a_gpu_at_full_size_without_copying_an_expert(tokens):
    lowered = lower_for_gpu(tokens, num_layers=2)
    assert lowered.count("__gpu$xla.gpu.triton") == 2
    touching = [line for line in lowered.splitlines() if "tensor<2x384x" in line and "func.func" not in line]
    assert touching
    assert all("custom_call @__gpu$xla.gpu.triton" in line for line in touching)


def test_float32_products_keep_float32_on_a_gpu():
    arguments = (tokens_of(3, "float32"), draw_routing(3, 2, seed=0), jnp.ones(3, bool), draw_experts("float32"))
    text = str(jax.make_jaxpr(grouped)(*arguments, jnp.int32(0)))
    _, *kernels = text.split("pallas_call[")
    assert len(kernels) == 2
    assert all("Precision.HIGHEST" in kernel and "Precision.DEFAULT" not in kernel for kernel in kernels)
