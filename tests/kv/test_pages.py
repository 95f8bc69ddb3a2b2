"""Tokens land in the block and offset their table names, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.pages import allocate_pages, copy_blocks, read_blocks, write_tokens
from moonshard.sharding.rules import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

pytestmark = pytest.mark.xdist_group("jax")
BLOCKS, LAYERS, BLOCK_SIZE, FEATURES, COLUMNS = 12, 3, 4, 5, 4
NULL = BLOCKS
WRITE, READ, COPY = jax.jit(write_tokens), jax.jit(read_blocks), jax.jit(copy_blocks)


def filled(seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(BLOCKS, LAYERS, BLOCK_SIZE, FEATURES)).astype(dtype)


def test_allocated_pages_are_zero_in_the_asked_dtype():
    mesh = build_mesh(MeshShape())
    pages = allocate_pages(BLOCKS, LAYERS, BLOCK_SIZE, FEATURES, dtype="bfloat16", sharding=replicated(mesh))
    assert pages.shape == (BLOCKS, LAYERS, BLOCK_SIZE, FEATURES)
    assert pages.dtype == jnp.bfloat16
    assert not np.asarray(pages, np.float32).any()


def test_written_tokens_lie_at_their_positions_and_padding_lies_nowhere():
    rng = np.random.default_rng(1)
    tables = rng.permutation(BLOCKS)[: 2 * COLUMNS].reshape(2, COLUMNS).astype(np.int32)
    positions = np.asarray([[0, 3, 4, 15, -1], [-1, -7, 9, 10, 11]], np.int32)
    features = rng.normal(size=(2, 5, FEATURES)).astype(np.float32)
    expected = filled()
    for row, column in np.ndindex(positions.shape):
        position = positions[row, column]
        if position >= 0:
            block = tables[row, position // BLOCK_SIZE]
            expected[block, 1, position % BLOCK_SIZE] = features[row, column]
    written = WRITE(filled(), jnp.int32(1), tables, positions, features)
    np.testing.assert_array_equal(written, expected)


def test_what_is_written_to_the_null_page_is_dropped():
    tables = np.full((1, COLUMNS), NULL, np.int32)
    written = WRITE(filled(), jnp.int32(0), tables, np.asarray([[0, 5]], np.int32), np.ones((1, 2, FEATURES), "f4"))
    np.testing.assert_array_equal(written, filled())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_never_hold_what_is_not_finite(dtype):
    features = np.asarray([[[1.0, np.nan, np.inf, -np.inf, 3.4e38]]], np.float32)  # the last overflows bfloat16
    pages = jnp.zeros((BLOCKS, LAYERS, BLOCK_SIZE, FEATURES), jnp.dtype(dtype))
    written = WRITE(pages, jnp.int32(0), np.zeros((1, COLUMNS), np.int32), np.asarray([[2]], np.int32), features)
    found = np.asarray(written, np.float32)[0, 0, 2]
    assert found.tolist()[:4] == [1, 0, 0, 0]
    assert np.isfinite(found).all()


def test_blocks_are_read_in_the_order_asked():
    blocks = np.asarray([[3, 0, 3], [11, 5, 1]], np.int32)
    expected = filled()[blocks, 2].reshape(2, 3 * BLOCK_SIZE, FEATURES)
    np.testing.assert_array_equal(READ(filled(), jnp.int32(2), blocks), expected)
    clipped = READ(filled(), jnp.int32(2), np.asarray([[NULL]], np.int32))
    np.testing.assert_array_equal(clipped, filled()[None, -1, 2])


def test_copies_take_all_layers_and_a_null_destination_copies_nothing():
    expected = filled()
    expected[[7, 2]] = expected[[1, 7]]
    source, destination = np.asarray([1, 7, 4, 0], np.int32), np.asarray([7, 2, NULL, NULL], np.int32)
    np.testing.assert_array_equal(COPY(filled(), source, destination), expected)
