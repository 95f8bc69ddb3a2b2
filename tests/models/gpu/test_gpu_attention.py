"""The attention kernel for Hopper cards has numpy's sums and no race when interpreted, and lowers for a card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models.gpu import card
from moonshard.models.gpu.attention.latent import MAX_SPLITS, attend, latent_attention, splits_for
from tests.models.gpu.hopper import INTERPRETED, distance, lower, races

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
RANK, ROTARY, SCALE = 128, 64, 0.07
LAYERS, LAYER = 2, 1
TOLERANCE = 5e-3  # of the norm, in bfloat16


def exact(queries, pages, tables, positions) -> np.ndarray:
    """One query at a time in float64."""
    queries, pages = (np.asarray(values, np.float64) for values in (queries, pages))
    out = np.zeros((*queries.shape[:3], RANK))
    for row, query in np.argwhere(positions >= 0):
        keys = pages[tables[row], LAYER].reshape(-1, queries.shape[-1])[: positions[row, query] + 1]
        scores = queries[row, query] @ keys.T * SCALE
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[row, query] = weights @ keys[:, :RANK] / weights.sum(axis=-1, keepdims=True)
    return out


def case(positions: list[list[int]], num_heads: int, block_size: int, seed: int = 0):
    """Random latents in shuffled blocks; beyond a row's last position the table names blocks that are not there."""
    rng = np.random.default_rng(seed)
    found = np.asarray(positions, np.int32)
    columns = -(-(found.max() + 1) // block_size)
    tables = rng.permutation(found.shape[0] * columns).reshape(found.shape[0], columns).astype(np.int32)
    shape = (tables.size, LAYERS, block_size, RANK + ROTARY)
    pages = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    queries = jnp.asarray(rng.normal(size=(*found.shape, num_heads, RANK + ROTARY)), jnp.bfloat16)
    seen = np.where(np.arange(columns)[None] * block_size <= found.max(axis=1)[:, None], tables, 1 << 20)
    return queries, pages, tables, seen.astype(np.int32), found


def run(num_splits: int | None, queries, pages, tables, positions, *, in_pairs: bool = False):
    numbers = {"value_rank": RANK, "scale": SCALE, "num_splits": num_splits, "in_pairs": in_pairs}
    call = functools.partial(attend, **numbers, interpret=INTERPRETED)
    return jax.jit(call)(queries, pages, jnp.int32(LAYER), tables, positions)


@pytest.mark.parametrize(
    ("positions", "num_heads", "block_size", "num_splits", "in_pairs"),
    [
        pytest.param([[200], [63]], 64, 64, 1, False, id="one query"),
        pytest.param([[199, 200], [-1, -1], [63, 64]], 5, 16, 3, False, id="splits, an empty row, and small blocks"),
        pytest.param([[197, 198, 199, 200]], 32, 128, 2, False, id="several tiles, and large blocks"),
        pytest.param([[0], [130]], 8, 32, 4, False, id="more splits than keys"),
        pytest.param([[330], [63], [-1]], 64, 64, 1, True, id="one query, in pairs, the last of them half there"),
        pytest.param([[329, 330], [-1, -1], [63, 64]], 32, 16, 2, True, id="splits of pairs"),
    ],
)
def test_the_kernel_has_the_sums_of_float64_and_no_race(positions, num_heads, block_size, num_splits, in_pairs, capfd):
    queries, pages, tables, seen, found = case(positions, num_heads, block_size)
    got = run(num_splits, queries, pages, seen, found, in_pairs=in_pairs)
    assert got.dtype == queries.dtype
    assert distance(got, exact(queries, pages, tables, found)) < TOLERANCE
    assert not np.asarray(got, np.float32)[found < 0].any()
    assert races("".join(capfd.readouterr())) == 0


@pytest.mark.parametrize("in_pairs", [False, True])
def test_a_query_sees_no_key_after_its_own(in_pairs):
    queries, pages, _, seen, found = case([[69, 70, 71]], 8, 64)
    before = np.asarray(run(1, queries, pages, seen, found, in_pairs=in_pairs), np.float32)
    block, offset = seen[0, 71 // 64], 71 % 64
    changed = pages.at[block, LAYER, offset].set(50)
    after = np.asarray(run(1, queries, changed, seen, found, in_pairs=in_pairs), np.float32)
    assert (before[:, :2] == after[:, :2]).all()
    assert (before[:, 2] != after[:, 2]).any()


@pytest.mark.parametrize(
    ("n", "t", "num_heads", "attention"),
    [
        *((*sizes, latent_attention) for sizes in [(1, 1, 64), (128, 1, 64), (64, 4, 64), (16, 2, 8), (64, 32, 64)]),
        *((*sizes, functools.partial(attend, in_pairs=True)) for sizes in [(1, 1, 64), (64, 4, 64)]),
    ],
)
def test_the_kernel_lowers_for_a_card_at_full_size_without_copying_a_page(n, t, num_heads, attention):
    shape, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    text = lower(
        functools.partial(attention, value_rank=512, scale=SCALE),
        shape((n, t, num_heads, 576), bf16),
        shape((1000, 3, 64, 576), bf16),
        shape((), jnp.int32),
        shape((n, 65), jnp.int32),
        shape((n, t), jnp.int32),
    )
    kernels = 1 if splits_for(-(-t * num_heads // 64) * n, 65 * 64) == 1 else 2
    assert text.count("custom_call @mosaic_gpu") == kernels
    touching = [
        line
        for line in text.splitlines()
        if "tensor<1000x3x64x576" in line and not line.lstrip().startswith("func.func")
    ]
    assert touching
    assert all("custom_call @mosaic_gpu" in line or "call @" in line for line in touching)


@pytest.mark.parametrize(
    ("dtype", "block_size", "rank"), [("float32", 64, 512), ("bfloat16", 12, 512), ("bfloat16", 64, 32)]
)
def test_where_the_kernel_does_not_fit_the_reference_serves_and_that_is_said_once(dtype, block_size, rank, caplog):
    card.say_once.cache_clear()
    queries, pages = jnp.ones((1, 1, 2, rank + 32), dtype), jnp.ones((2, 1, block_size, rank + 32), dtype)
    arguments = (queries, pages, jnp.int32(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    for _ in range(2):
        got = latent_attention(*arguments, value_rank=rank, scale=SCALE)
        assert np.allclose(np.asarray(got, np.float32), 1)
    assert len([record for record in caplog.records if "kernels for GPUs" in record.message]) == 1


def test_a_card_is_filled_where_there_are_few_tiles_and_not_cut_finer_where_there_are_many():
    assert splits_for(128, 4160) == 1
    assert splits_for(2048, 131072) == 1
    for num_tiles in (1, 16, 64):
        filled = num_tiles * splits_for(num_tiles, 4160)
        assert card.NUM_PROCESSORS / 4 < filled <= card.NUM_PROCESSORS
    assert splits_for(1, 64) == 1
    assert splits_for(1, 1 << 20) <= MAX_SPLITS
