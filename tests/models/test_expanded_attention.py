"""Expanded attention is a softmax over the keys that a query sees, made of their latents, wherever their blocks lie."""

import jax
import numpy as np
import pytest

from moonshard.models.expanded_attention import (
    KEYS_PER_STEP,
    QUERIES_PER_STEP,
    expanded_attention,
    num_queries_to_expand,
)

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
HEADS, NOPE, ROPE, VALUE, RANK, TILE, LAYERS, SCALE = 2, 6, 4, 5, 8, 32, 2, 0.3


@jax.jit
def attend(queries, pages, layer, tables, positions, k_up, v_up):
    with jax.default_matmul_precision("highest"):
        return expanded_attention(queries, pages, layer, tables, positions, k_up, v_up, scale=SCALE)


def case(sequences, *, padding_rows=0, block_size=16, seed=0) -> tuple[np.ndarray, ...]:
    """Chunks of sequences, (first position, number of tokens), in rows of `TILE` as a prefill step has them.

    Blocks are scattered; what no query may see is huge, or no block.
    """
    rng = np.random.default_rng(seed)
    columns = 2 + max(start + count for start, count in sequences) // block_size
    pages = np.full((len(sequences) * columns + 2, LAYERS, block_size, RANK + ROPE), 1e30, np.float32)
    blocks, tables, positions = rng.permutation(len(pages)).astype(np.int32), [], []
    for index, (start, count) in enumerate(sequences):
        table = blocks[index * columns : (index + 1) * columns].copy()
        for position in range(start + count):
            pages[table[position // block_size], 1, position % block_size] = rng.normal(size=RANK + ROPE)
        table[-(-(start + count) // block_size) :] = len(pages)
        rows = -(-count // TILE)
        tables += [table] * rows
        at = np.arange(rows * TILE)
        positions += list(np.where(at < count, start + at, -1).reshape(rows, TILE))
    tables += [np.zeros(columns, np.int32)] * padding_rows
    positions += [np.full(TILE, -1)] * padding_rows
    queries = (2 * rng.normal(size=(len(tables), TILE, HEADS, NOPE + ROPE))).astype(np.float32)
    k_up, v_up = (rng.normal(size=(HEADS, own, RANK)).astype(np.float32) for own in (NOPE, VALUE))
    return queries, pages, np.array(1), np.array(tables, np.int32), np.array(positions, np.int32), k_up, v_up


def expected(queries, pages, layer, tables, positions, k_up, v_up):
    """Query by query, in float64."""
    out = np.zeros((*queries.shape[:3], VALUE))
    for row, query in np.ndindex(positions.shape):
        seen = np.arange(positions[row, query] + 1)
        if not len(seen):
            continue
        size = pages.shape[2]
        latents = pages[tables[row][seen // size], layer, seen % size].astype(np.float64)
        keys = np.einsum("sr,hkr->hsk", latents[:, :RANK], k_up.astype(np.float64))
        keys = np.concatenate([keys, np.broadcast_to(latents[:, RANK:], (HEADS, len(seen), ROPE))], axis=2)
        scores = np.einsum("hk,hsk->hs", queries[row, query].astype(np.float64), keys) * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = weights / weights.sum(axis=1, keepdims=True) @ latents[:, :RANK]
        out[row, query] = np.einsum("hr,hvr->hv", mixed, v_up.astype(np.float64))
    return out


@pytest.mark.parametrize(
    ("sequences", "padding_rows"),
    [
        ([(0, 1)], 0),
        ([(0, TILE + 1), (0, TILE - 1), (5, 1)], 1),
        ([(0, QUERIES_PER_STEP), (0, 1), (0, QUERIES_PER_STEP + 1)], 0),
        ([(KEYS_PER_STEP - 1, 2 * TILE), (KEYS_PER_STEP, 3)], 2),
        ([(3, KEYS_PER_STEP), (2 * KEYS_PER_STEP + 7, 40)], 3),
    ],
)
def test_every_query_attends_to_its_own_sequence_up_to_its_position(sequences, padding_rows):
    given = case(sequences, padding_rows=padding_rows)
    np.testing.assert_allclose(attend(*given), expected(*given), atol=5e-5)


@pytest.mark.parametrize("block_size", [1, 48, 300])
def test_any_block_size_will_do(block_size):
    given = case([(290, 40), (0, 20)], block_size=block_size)
    np.testing.assert_allclose(attend(*given), expected(*given), atol=5e-5)


def test_rows_of_a_sequence_may_lie_in_any_order_and_apart():
    queries, pages, layer, tables, positions, *up = case([(250, 90), (0, 200)])
    order = np.random.default_rng(1).permutation(len(tables))
    given = (queries[order], pages, layer, tables[order], positions[order], *up)
    np.testing.assert_allclose(attend(*given), expected(*given), atol=5e-5)


def test_padding_gives_zeros_even_alone():
    queries, pages, layer, tables, positions, *up = case([(0, 3), (0, 40)], padding_rows=1)
    out = np.asarray(attend(queries, pages, layer, tables, positions, *up))
    assert (out[positions < 0] == 0).all()
    assert (np.asarray(attend(queries, pages, layer, tables, np.full_like(positions, -1), *up)) == 0).all()


def test_from_as_many_queries_on_expanding_is_less_work():
    """Multiplications for one key and head, counted as the two forms have them."""
    for rank, nope, value in ((512, 128, 128), (512, 64, 64), (32, 16, 16)):
        least, rope = num_queries_to_expand(rank, nope, value), 64
        assert least is not None
        for queries, is_less in ((least, True), (least - 1, False)):
            expanded = rank * (nope + value) + queries * (nope + rope + value)
            assert (expanded <= queries * (rank + rope + rank)) == is_less
    assert num_queries_to_expand(64, 64, 64) is None
