"""Tokens land in the block and offset their table names, and nowhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.pages import (
    allocate_pages,
    copy_blocks,
    copy_blocks_in_turn,
    gather_blocks,
    read_blocks,
    scatter_blocks,
    write_tokens,
)
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

pytestmark = pytest.mark.xdist_group("jax")
BLOCKS, LAYERS, BLOCK_SIZE, FEATURES, COLUMNS = 12, 3, 4, 5, 4
NULL = BLOCKS
WRITE, READ = jax.jit(write_tokens), jax.jit(read_blocks)
GATHER, SCATTER = jax.jit(gather_blocks), jax.jit(scatter_blocks)


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


@pytest.mark.parametrize("num_copies", range(5))
@pytest.mark.parametrize("copied", [copy_blocks, copy_blocks_in_turn])
def test_copies_take_all_layers_and_a_null_destination_copies_nothing(copied, num_copies):
    source, destination = np.asarray([1, 8, 4, 0], np.int32), np.asarray([7, 2, 11, 3], np.int32)
    destination[num_copies:] = [NULL, 2**31 - 1, NULL, NULL][num_copies:]
    expected = filled()
    expected[destination[:num_copies]] = expected[source[:num_copies]]
    np.testing.assert_array_equal(jax.jit(copied)(filled(), source, destination), expected)


@pytest.mark.parametrize(("copied", "read"), [(copy_blocks, 7), (copy_blocks_in_turn, 1)])
def test_what_a_copy_reads_of_another_in_the_same_step(copied, read):
    pages = jax.jit(copied)(filled(), np.asarray([1, 7], np.int32), np.asarray([7, 2], np.int32))
    np.testing.assert_array_equal(pages[2], filled()[read])
    np.testing.assert_array_equal(pages[7], filled()[1])


def test_gathered_blocks_come_in_the_order_asked():
    np.testing.assert_array_equal(GATHER(filled(), np.asarray([7, 0, 7, NULL])), filled()[[7, 0, 7, BLOCKS - 1]])


def test_scattered_blocks_land_where_they_are_sent_and_a_null_destination_takes_nothing():
    payload, expected = filled(seed=1)[:4], filled()
    expected[[9, 2]] = payload[[0, 2]]
    destination = np.asarray([9, NULL, 2, 2**31 - 1], np.int32)
    np.testing.assert_array_equal(SCATTER(filled(), destination, payload), expected)


def bit_patterns(dtype: jnp.dtype) -> np.ndarray:
    """Blocks of every kind of value: all there are of 16 bits, or every top half over some low halves of 32."""
    top = np.arange(2**16, dtype=np.uint16)
    if dtype.itemsize == 2:
        return top.view(dtype).reshape(4, 4, 64, 64)
    low = np.random.default_rng(0).permutation(top).astype(np.uint32)
    return (top.astype(np.uint32) << 16 | low).view(dtype).reshape(4, 4, 64, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_left_and_landed_have_their_bits_and_zeros_for_what_is_not_finite(dtype):
    payload = bit_patterns(jnp.dtype(dtype))
    is_finite = np.isfinite(payload.astype(np.float32))
    assert 0 < (~is_finite).sum() < payload.size / 100
    destination = np.asarray([3, 0, 5, 1], np.int32)
    pages = SCATTER(jnp.ones((6, 4, 64, 64), dtype), destination, payload)
    found = np.asarray(GATHER(pages, destination))
    bits = np.dtype(f"u{payload.itemsize}")
    np.testing.assert_array_equal(found.view(bits), np.where(is_finite, payload.view(bits), 0))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, LAYERS, BLOCK_SIZE, FEATURES), "bfloat16"),
        ((1, 1, BLOCK_SIZE, FEATURES), "float32"),
        ((1, LAYERS, BLOCK_SIZE, 1), "float32"),
    ],
)
def test_blocks_of_other_pages_are_refused(shape, dtype):
    with pytest.raises((ValueError, TypeError), match=r"blocks of|payload"):  # a shape is told by the annotation first
        SCATTER(filled(), np.zeros(1, np.int32), jnp.zeros(shape, dtype))


def test_scattering_into_donated_pages_leaves_them_where_they_are():
    scatter = functools.partial(jax.jit, donate_argnums=0)(scatter_blocks)
    pages = jnp.ones((BLOCKS, LAYERS, BLOCK_SIZE, FEATURES))
    place = pages.unsafe_buffer_pointer()
    for _ in range(3):
        exported = np.asarray(GATHER(pages, np.asarray([1, 2])))  # a reader in flight is no reason to move
        pages = scatter(pages, np.asarray([2, 1], np.int32), exported)
        assert pages.unsafe_buffer_pointer() == place
