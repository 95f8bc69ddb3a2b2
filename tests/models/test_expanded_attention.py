"""Expanded attention is a softmax over the keys that a query sees, made of their latents, wherever their blocks lie."""

import jax
import numpy as np
import pytest

from moonshard.models.expanded_attention import expanded_attention, num_queries_to_expand
from moonshard.models.machines import XLA
from tests.models.expanded_cases import SCALE, TILE, case, expected

KEYS, QUERIES = XLA.expanded_keys, XLA.expanded_queries
pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]


@jax.jit
def attend(queries, pages, layer, tables, positions, k_up, v_up):
    with jax.default_matmul_precision("highest"):
        return expanded_attention(queries, pages, layer, tables, positions, k_up, v_up, scale=SCALE)


@pytest.mark.parametrize(
    ("sequences", "padding_rows"),
    [
        ([(0, 1)], 0),
        ([(0, TILE + 1), (0, TILE - 1), (5, 1)], 1),
        ([(0, QUERIES), (0, 1), (0, QUERIES + 1)], 0),
        ([(KEYS - 1, 2 * TILE), (KEYS, 3)], 2),
        ([(3, KEYS), (2 * KEYS + 7, 40)], 3),
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
