"""Paged latent attention equals softmax attention over the keys a query may see, wherever their blocks lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models.attention import latent_attention
from moonshard.models.machines import XLA

KEYS = XLA.keys
pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
NUM_QUERIES, HEADS, FEATURES, RANK, LAYERS, SCALE = 4, 2, 12, 8, 2, 0.3
BLOCK_SIZE, COLUMNS = 16, 40
TOLERANCE = 2e-5


@jax.jit
def attend(queries, pages, layer, tables, positions):
    with jax.default_matmul_precision("highest"):
        return latent_attention(queries, pages, layer, tables, positions, value_rank=RANK, scale=SCALE)


def expected(queries, pages, layer, tables, positions):
    """Attention row by row and query by query, in float64."""
    out = np.zeros((*queries.shape[:3], RANK))
    for row, query in np.ndindex(positions.shape):
        last = positions[row, query]
        if last < 0:
            continue
        keys = pages[tables[row], layer].reshape(-1, FEATURES)[: last + 1].astype(np.float64)
        scores = queries[row, query].astype(np.float64) @ keys.T * SCALE
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[row, query] = weights / weights.sum(axis=-1, keepdims=True) @ keys[:, :RANK]
    return out


def case(contexts, block_size=BLOCK_SIZE, columns=COLUMNS, seed=0):
    """One row per context: its last queries, the rest padding; blocks scattered over the pages, none shared."""
    rng = np.random.default_rng(seed)
    n = len(contexts)
    pages = rng.normal(size=(n * columns + 3, LAYERS, block_size, FEATURES)).astype(np.float32)
    tables = rng.permutation(n * columns + 3)[: n * columns].reshape(n, columns).astype(np.int32)
    queries = 2 * rng.normal(size=(n, NUM_QUERIES, HEADS, FEATURES)).astype(np.float32)
    positions = np.asarray(contexts)[:, None] - NUM_QUERIES + np.arange(NUM_QUERIES)
    return queries, pages, 1, tables, np.maximum(positions, -1).astype(np.int32)


def run(queries, pages, layer, tables, positions):
    return np.asarray(attend(queries, pages, jnp.int32(layer), tables, positions))


@pytest.mark.parametrize(
    "contexts",
    [
        (1, BLOCK_SIZE - 1, BLOCK_SIZE),
        (BLOCK_SIZE + 1, KEYS - 1, KEYS),
        (KEYS + 1, 1, 2 * KEYS),
        (2 * KEYS + 1, 33, COLUMNS * BLOCK_SIZE),
        (2, 3, 4),
    ],
)
def test_attention_equals_plain_softmax_over_the_visible_keys(contexts):
    given = case(contexts)
    np.testing.assert_allclose(run(*given), expected(*given), atol=TOLERANCE)


@pytest.mark.parametrize(("block_size", "columns"), [(1, 5), (64, 7), (300, 2)])
def test_any_block_size_and_table_width_will_do(block_size, columns):
    given = case((1, block_size * columns // 2, block_size * columns), block_size, columns)
    np.testing.assert_allclose(run(*given), expected(*given), atol=TOLERANCE)


def test_padded_queries_give_zeros_even_alone():
    queries, pages, layer, tables, positions = case((1, 2, 300))
    assert (run(queries, pages, layer, tables, positions)[0, :3] == 0).all()
    assert (run(queries, pages, layer, tables, np.full_like(positions, -1)) == 0).all()


def test_what_lies_beyond_a_rows_position_never_matters():
    contexts = (5, 257, 31)
    queries, pages, layer, tables, positions = case(contexts)
    clean = run(queries, pages, layer, tables, positions)
    visible = np.zeros(pages.shape[0] * BLOCK_SIZE, bool)
    for table, context in zip(tables, contexts, strict=True):
        visible.reshape(-1, BLOCK_SIZE)[table] |= (np.arange(COLUMNS * BLOCK_SIZE) < context).reshape(-1, BLOCK_SIZE)
    dirty = np.where(visible.reshape(-1, 1, BLOCK_SIZE, 1), pages, np.float32(1e30))
    for row, context in enumerate(contexts):
        tables[row, -(-context // BLOCK_SIZE) :] = pages.shape[0]
    np.testing.assert_array_equal(run(queries, dirty, layer, tables, positions), clean)
