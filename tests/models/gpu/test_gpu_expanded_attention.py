"""The kernels of expanded attention for Hopper cards have float64's sums and no race, and lower for a card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models import weights
from moonshard.models.gpu import card
from moonshard.models.gpu.attention.expanded import attend, expanded_attention
from moonshard.models.gpu.attention.expanded_keys import KEYS, row_of
from moonshard.models.gpu.attention.expanded_queries import ROWS, seen_by
from moonshard.models.model import Batch
from moonshard.models.registry import open_model
from tests.agreement import FIXTURES
from tests.models.gpu.hopper import INTERPRETED, distance, lower, races

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
HEADS, NOPE, ROPE, VALUE, RANK, SCALE = 2, 128, 64, 128, 128, 0.07
LAYERS, LAYER, BLOCK_SIZE, COLUMNS = 2, 1, 16, 20
TOLERANCE = 1e-2  # of the norm, in bfloat16: keys and values are rounded, too
TILE = 32  # queries of a row


def exact(queries, pages, tables, positions, k_up, v_up) -> np.ndarray:
    """One query at a time in float64."""
    queries, pages, k_up, v_up = (np.asarray(values, np.float64) for values in (queries, pages, k_up, v_up))
    out = np.zeros((*queries.shape[:3], VALUE))
    for row, query in np.argwhere(positions >= 0):
        latents = pages[tables[row], LAYER].reshape(-1, RANK + ROPE)[: positions[row, query] + 1]
        keys = np.einsum("sr,hkr->hsk", latents[:, :RANK], k_up)
        rotary = np.broadcast_to(latents[:, RANK:], (HEADS, *latents[:, RANK:].shape))
        scores = np.einsum("hk,hsk->hs", queries[row, query], np.concatenate([keys, rotary], axis=-1)) * SCALE
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        values = np.einsum("sr,hvr->hsv", latents[:, :RANK], v_up)
        out[row, query] = np.einsum("hs,hsv->hv", weights / weights.sum(axis=-1, keepdims=True), values)
    return out


def case(sequences: list[tuple[int, int]], num_rows: int, seed: int = 0):
    """Sequences as (cached, new) tokens, in rows of `TILE` queries; rows beyond the last are padding.

    What lies in a block beyond a sequence's last token is no number, and its table names no block there.
    """
    rng = np.random.default_rng(seed)
    pages = rng.normal(size=(len(sequences) * COLUMNS, LAYERS, BLOCK_SIZE, RANK + ROPE))
    order = rng.permutation(len(pages)).reshape(len(sequences), COLUMNS)
    tables, positions = np.zeros((num_rows, COLUMNS), np.int32), np.full((num_rows, TILE), -1, np.int32)
    row = 0
    for (cached, new), own in zip(sequences, order, strict=True):
        end = cached + new
        used = -(-end // BLOCK_SIZE)
        pages[own[used - 1], LAYER, (end - 1) % BLOCK_SIZE + 1 :] = np.nan
        for start in range(cached, end, TILE):
            count = min(TILE, end - start)
            tables[row] = np.where(np.arange(COLUMNS) < used, own, 1 << 20)
            positions[row, :count] = range(start, start + count)
            row += 1
    queries = rng.normal(size=(num_rows, TILE, HEADS, NOPE + ROPE))
    k_up, v_up = (rng.normal(size=(HEADS, size, RANK)) * RANK**-0.5 for size in (NOPE, VALUE))
    queries, pages, k_up, v_up = (jnp.asarray(values, jnp.bfloat16) for values in (queries, pages, k_up, v_up))
    return queries, pages, tables, positions, k_up, v_up


@functools.cache
def program(panel_blocks: int | None):
    return jax.jit(
        functools.partial(attend, scale=SCALE, panel_blocks=panel_blocks, num_processors=3, interpret=INTERPRETED)
    )


def run(panel_blocks: int | None, queries, pages, tables, positions, k_up, v_up) -> np.ndarray:
    found = program(panel_blocks)(queries, pages, jnp.int32(LAYER), tables, positions, k_up, v_up)
    assert found.dtype == queries.dtype
    return np.asarray(found, np.float32)


@functools.cache
def example():
    """A fresh prompt beside a cached prefix with a chunk off the blocks, and what the kernels give for it."""
    given = case([(0, 70), (170, 100)], 8)
    return given, run(None, *given)


def expected_of(queries, pages, tables, positions, *up) -> np.ndarray:
    return exact(queries, jnp.nan_to_num(pages), np.where(tables < len(pages), tables, 0), positions, *up)


def test_the_kernels_have_the_sums_of_float64_and_no_race(capfd):
    example.cache_clear()
    given, found = example()
    one = case([(250, 1)], 8)
    for got, case_of in ((found, given), (run(None, *one), one)):
        assert distance(got, expected_of(*case_of)) < TOLERANCE
        assert not got[case_of[3] < 0].any()
    assert races("".join(capfd.readouterr())) == 0


def test_a_result_is_the_same_bits_whatever_is_beside_it_and_wherever_panels_end(capfd):
    (queries, pages, tables, positions, *up), whole = example()
    last = np.where(np.arange(8)[:, None] == 6, positions, -1)  # of the second sequence the last four queries alone
    assert last.max() == 269
    alone = run(None, queries, pages, tables, last, *up)
    assert (alone[6] == whole[6]).all()
    assert not alone[:6].any()
    assert (run(1, queries, pages, tables, positions, *up) == whole).all()
    assert races("".join(capfd.readouterr())) == 0


def test_blocks_that_none_of_a_warpgroups_queries_sees_are_left_out_and_those_that_all_see_are_not_masked():
    _, _, tables, positions, *_ = case([(0, 70), (170, 100), (5, 60)], 10)
    row = row_of(jnp.asarray(tables), jnp.asarray(positions))
    seen = seen_by(row)
    first, stop = (np.asarray(each).reshape(-1, ROWS, 1, 1) for each in (seen.first, seen.stop))
    keys = np.arange(int(row.num_blocks) * KEYS).reshape(1, 1, -1, KEYS)
    sees = (keys >= first) & (keys < stop)
    assert sees.sum() == (positions + 1).sum()
    some, is_there, index = sees.any(axis=(1, 3)), (stop > 0)[..., 0], np.arange(int(row.num_blocks))
    whole = (sees.all(axis=3) | ~is_there).all(axis=1) & is_there.any(axis=1)
    begin, end, whole_from, whole_to = np.asarray(seen.blocks).T[..., None]
    assert (((index >= begin) & (index < end)) == some).all()
    assert ((some & (index >= whole_from) & (index < whole_to)) == whole).all()
    assert some.sum() > whole.sum() > 0


@pytest.mark.parametrize(
    ("n", "columns", "heads", "head"),
    [
        pytest.param(64, 65, 64, 128, id="K2's heads, in panels"),
        pytest.param(8, 8, 64, 128, id="K2's heads, in one panel"),
        pytest.param(4, 8, 8, 64, id="small heads"),
    ],
)
def test_the_kernels_lower_for_a_card_at_full_size_without_copying_the_pages(n, columns, heads, head):
    shape, bf16, rank = jax.ShapeDtypeStruct, jnp.bfloat16, 512
    text = lower(
        functools.partial(expanded_attention, scale=SCALE),
        shape((n, 32, heads, head + 64), bf16),
        shape((1000, 3, 64, rank + 64), bf16),
        shape((), jnp.int32),
        shape((n, columns), jnp.int32),
        shape((n, 32), jnp.int32),
        shape((heads, head, rank), bf16),
        shape((heads, head, rank), bf16),
    )
    assert text.count("custom_call @mosaic_gpu") == 3 * (2 if n == 64 else 1)
    touching = [line for line in text.splitlines() if "tensor<1000x3x64x576" in line and "func.func" not in line]
    assert touching
    passing = ("gather", "call @", "stablehlo.while", "stablehlo.case", "stablehlo.return")
    assert all(any(word in line for word in passing) for line in touching), [line[:200] for line in touching]


@pytest.mark.parametrize(("dtype", "nope"), [("float32", 128), ("bfloat16", 96), ("bfloat16", 512)])
def test_where_the_kernels_do_not_fit_the_reference_serves_and_that_is_said_once(dtype, nope, caplog):
    card.say_once.cache_clear()
    queries, pages = jnp.ones((1, 1, 2, nope + 64), dtype), jnp.ones((2, 1, 16, 128 + 64), dtype)
    where = (jnp.int32(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    up = jnp.ones((2, nope, 128), dtype)
    for _ in range(2):
        found = expanded_attention(queries, pages, *where, up, up, scale=SCALE)
        assert np.allclose(np.asarray(found, np.float32), 128)
    assert len([record for record in caplog.records if "kernels for GPUs" in record.message]) == 1


@pytest.mark.parametrize(
    ("chunk_tokens", "is_given", "form"), [(64, True, "expanded"), (16, True, "absorbed"), (64, False, "absorbed")]
)
def test_a_long_prompt_is_expanded_where_a_kernel_is_given_for_it_and_no_other_step_is(chunk_tokens, is_given, form):
    _, model = open_model(FIXTURES / "kimi_k2")
    used = set()

    def absorbed(queries, *_, value_rank, scale):
        used.add("absorbed")
        return queries[..., :value_rank]

    def expanded(queries, pages, layer, block_tables, positions, k_up, v_up, *, scale):
        used.add("expanded")
        return jnp.zeros((*queries.shape[:3], v_up.shape[1]), queries.dtype)

    def run(loaded, pages, batch):
        how = {"attention": absorbed, "expanded": expanded if is_given else None, "chunk_tokens": chunk_tokens}
        return model.forward(loaded, pages, batch, **how)

    shape = jax.ShapeDtypeStruct
    loaded = jax.tree.map(lambda param: shape(param.shape, "float32"), model.declare(), is_leaf=weights.is_param)
    pages = shape((8, model.config.num_hidden_layers, 16, model.kv_groups("float32")[0].num_features), "float32")
    tokens, tables = jnp.zeros((4, 16), jnp.int32), jnp.zeros((4, 1, 4), jnp.int32)
    jax.eval_shape(run, loaded, pages, Batch(tokens=tokens, positions=tokens, block_tables=tables))
    assert used == {form}
