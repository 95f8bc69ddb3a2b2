"""What training puts in the place of pages and of the expert loop gives the same values, and the right gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models import training
from moonshard.models.experts import moe
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.forward import attend_paged, forward
from moonshard.models.kimi.weights import declare
from moonshard.models.model import Batch
from moonshard.models.weights import initialise
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from tests.experiments.training.rehearsal import SHAPE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
CONFIG = KimiConfig.from_hugging_face(SHAPE)
BLOCK_SIZE, RANK, SCALE = 16, 8, 0.3
NUM_EXPERTS, EMBED, WIDTH, LAYERS = 4, 8, 12, 2
RNG = np.random.default_rng(1)
EXPERTS = moe.Experts(
    gate_up=RNG.normal(size=(LAYERS, NUM_EXPERTS, 2, WIDTH, EMBED)).astype(np.float32) * 0.3,
    down=RNG.normal(size=(LAYERS, NUM_EXPERTS, EMBED, WIDTH)).astype(np.float32) * 0.3,
)


def batch_of(num_rows, num_tokens):
    """Rows from position 0 on, each with blocks of its own."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    positions = np.tile(np.arange(num_tokens, dtype=np.int32), (num_rows, 1))
    tokens = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(num_rows, num_tokens), dtype=np.int32)
    tables = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks)
    return Batch(
        tokens=jnp.asarray(tokens), positions=jnp.asarray(positions), block_tables=jnp.asarray(tables)[:, None]
    )


def draw(num_rows, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    queries = 2 * rng.normal(size=(num_rows, num_tokens, 2, 12))
    return queries.astype(np.float32), rng.normal(size=(num_rows, num_tokens, 12)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("how", "rows_at_once"))
def _attend(how, queries, features, pages, batch, **options):
    return how(queries, features, pages, jnp.int32(0), batch, value_rank=RANK, scale=SCALE, **options)[0]


def attend(how, queries, features, pages, batch, **options):
    with jax.default_matmul_precision("highest"):
        return np.asarray(_attend(how, queries, features, pages, batch, **options))


@pytest.mark.parametrize("num_tokens", [1, 100, 128, 300, training.LONG_ROW_TOKENS])
@pytest.mark.parametrize("rows_at_once", [1, 2])
def test_causal_rows_are_what_pages_give(num_tokens, rows_at_once):
    (queries, features), batch = draw(3, num_tokens), batch_of(3, num_tokens)
    pages = np.zeros((batch.block_tables.size, 1, BLOCK_SIZE, 12), np.float32)
    paged = attend(attend_paged, queries, features, pages, batch)
    causal = attend(training.attend_causal, queries, features, training.no_pages(), batch, rows_at_once=rows_at_once)
    np.testing.assert_allclose(causal, paged, atol=2e-5)


def test_a_token_sees_what_stands_before_it_and_not_what_its_position_says():
    (queries, features), batch = draw(2, 200), batch_of(2, 200)
    clean = attend(training.attend_causal, queries, features, training.no_pages(), batch)
    gapped = Batch(
        tokens=batch.tokens,
        positions=jnp.asarray(np.asarray(batch.positions) * 37 - 500),
        block_tables=batch.block_tables,
    )
    np.testing.assert_array_equal(attend(training.attend_causal, queries, features, training.no_pages(), gapped), clean)
    later = features.copy()
    later[:, 150:] += 100.0
    changed = attend(training.attend_causal, queries, later, training.no_pages(), batch)
    np.testing.assert_array_equal(changed[:, :150], clean[:, :150])
    assert (np.abs(changed[:, 150:] - clean[:, 150:]) > 1e-3).any(axis=(2, 3)).all()


LONG = pytest.param(training.LONG_ROW_TOKENS, marks=pytest.mark.slow)


@pytest.mark.parametrize("num_tokens", [130, LONG])
def test_the_gradient_of_causal_rows_is_that_of_plain_softmax(num_tokens):
    queries, features = draw(2, num_tokens)
    batch = batch_of(2, num_tokens)

    def plain(queries, features):
        scores = jnp.einsum("nthf,nsf->nhts", queries, features) * SCALE
        scores = jnp.where(jnp.tril(jnp.ones((num_tokens, num_tokens), bool)), scores, -jnp.inf)
        return jnp.einsum("nhts,nsr->nthr", jax.nn.softmax(scores), features[..., :RANK])

    def causal(queries, features):
        pages, layer = training.no_pages(), jnp.int32(0)
        return training.attend_causal(queries, features, pages, layer, batch, value_rank=RANK, scale=SCALE)[0]

    with jax.default_matmul_precision("highest"):
        gradients = [
            jax.jit(jax.grad(lambda q, f, how=how: (how(q, f) ** 2).sum(), argnums=(0, 1)))(queries, features)
            for how in (causal, plain)
        ]
    for ours, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-3)


@functools.partial(jax.jit, static_argnums=0)
def _values_and_gradients(backend, x, weights, experts, chosen, valid, target):
    def loss(x, weights, experts):
        routing = moe.Routing(weights=weights, experts=chosen, margin=jnp.zeros(len(chosen)))
        out = backend(x, routing, valid, experts, jnp.int32(1))
        return (jnp.where(valid[:, None], out, 0) * target).sum(), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weights, experts)


@pytest.mark.parametrize("skew", ["none", "one expert", "invalid"])
@pytest.mark.parametrize("num_tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 600)), 150])
def test_all_blocks_give_the_values_and_gradients_of_all_experts(num_tokens, skew):
    rng = np.random.default_rng(num_tokens)
    chosen = np.stack([rng.permutation(NUM_EXPERTS)[:2] for _ in range(num_tokens)])
    chosen = np.tile(chosen[:1], (num_tokens, 1)) if skew == "one expert" else chosen
    valid = rng.random(num_tokens) < (0.5 if skew == "invalid" else 1.1)
    x, weights = rng.normal(size=(num_tokens, EMBED)), rng.random((num_tokens, 2))
    target = rng.normal(size=(num_tokens, EMBED)).astype(np.float32)
    given = (x.astype(np.float32), weights.astype(np.float32), EXPERTS, chosen, valid, target)
    with jax.default_matmul_precision("highest"):
        (_, ours), ours_back = _values_and_gradients(training.all_blocks, *given)
        (_, expected), expected_back = _values_and_gradients(moe.dense, *given)
    np.testing.assert_allclose(np.asarray(ours)[valid], np.asarray(expected)[valid], atol=1e-4)
    for one, other in zip(jax.tree.leaves(ours_back), jax.tree.leaves(expected_back), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.slow
def test_the_pass_that_trains_is_the_pass_that_serves():
    weights = initialise(declare(CONFIG), 0, "float32", build_mesh(MeshShape()))
    batch = batch_of(2, 140)
    pages = jnp.zeros((batch.block_tables.size, CONFIG.num_hidden_layers, BLOCK_SIZE, CONFIG.latent_size))
    with jax.default_matmul_precision("highest"):
        served, _, _ = jax.jit(lambda w, p, b: forward(CONFIG, w, p, b))(weights, pages, batch)
        trained, _, _ = jax.jit(
            lambda w, b: forward(
                CONFIG,
                w,
                training.no_pages(),
                b,
                backend=training.all_blocks,
                attend=training.attend_causal,
                unrolled=True,
            )
        )(weights, batch)
    np.testing.assert_allclose(trained, served, atol=1e-4)
