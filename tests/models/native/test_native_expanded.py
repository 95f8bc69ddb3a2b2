"""Expanded attention is a softmax in float64 over the keys that a query sees, in every form, whatever the sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models import expanded_attention as reference
from moonshard.models.native import library
from moonshard.models.native.expanded_attention import expanded_attention
from tests.models.expanded_cases import SCALE, case, expected

CHOSEN = library.chosen()
FORMS = () if CHOSEN is None else CHOSEN.forms
pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(CHOSEN is None, reason="there are no kernels here"),
]
ATTEND = jax.jit(expanded_attention, static_argnames=("scale", "form"))
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])
REAL = (3, 64, 64, 64, 512)  # heads, then what a key, its rotary part, a value and a latent have in real models


def attend(given, form, *, pages=jnp.float32, weights=jnp.float32):
    """The result and what it is to be, both of the rounded pages and weights."""
    queries, wide, layer, tables, positions, *ups = given
    narrow = jnp.asarray(wide, pages)
    stacks = [jnp.asarray(np.stack([np.full_like(up, 1e30), up]), weights) for up in ups]
    found = ATTEND(queries, narrow, layer, tables, positions, *stacks, np.int32(1), scale=SCALE, form=form)
    rounded = (np.asarray(each, np.float32) for each in (narrow, *(stack[1] for stack in stacks)))
    wide, *ups = rounded
    return np.asarray(found), expected(queries, wide, layer, tables, positions, *ups)


def check(given, form, **dtypes):
    found, out = attend(given, form, **dtypes)
    scores = np.abs(given[0]).max() * np.sqrt(given[5].shape[2]) * 8  # a bound that hardly any score comes near
    assert (np.abs(found - out) <= np.finfo(np.float32).eps * (8 * scores + 64) * max(1, np.abs(out).max())).all()


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80)), min_size=1, max_size=4),
    st.tuples(*(st.integers(1, most) for most in (3, 20, 9, 70, 40))),
    st.integers(1, 40),
    st.integers(1, 64),
    st.integers(0, 3),
    st.tuples(DTYPES, DTYPES),
    st.integers(0, 99),
)
def test_attention_is_a_softmax_over_the_keys_that_a_query_sees(
    form, sequences, sizes, tile, block_size, padding_rows, dtypes, seed
):
    made = case(sequences, sizes=sizes, tile=tile, padding_rows=padding_rows, block_size=block_size, seed=seed)
    check(made, form, pages=dtypes[0], weights=dtypes[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.bfloat16,) * 2])
def test_long_chunks_of_real_sizes_are_attended_right(form, dtypes):
    made = case([(300, 130), (0, 65), (0, 64)], sizes=REAL, block_size=64)
    check(made, form, pages=dtypes[0], weights=dtypes[1])


@pytest.mark.parametrize("form", FORMS)
def test_a_query_gives_the_same_bits_in_whatever_chunk(form):
    """Alone, in a row of its own, and with other queries before, behind and of other sequences."""
    queries, pages, layer, tables, positions, *ups = case([(0, 200), (70, 90), (0, 5)], sizes=(2, 24, 8, 20, 48))
    stacks = [up[None] for up in ups]

    def run(rows, columns=slice(None)):
        given = (queries[rows, columns], pages, layer, tables[rows], positions[rows, columns], *stacks, np.int32(0))
        return np.asarray(ATTEND(*given, scale=SCALE, form=form))

    together = run(slice(None))
    for row, query in ((0, 0), (1, 7), (6, 7), (7, 31), (8, 3), (10, 4)):
        alone = run(slice(row, row + 1), slice(query, query + 1))
        np.testing.assert_array_equal(alone[0, 0], together[row, query])
    np.testing.assert_array_equal(run(slice(3, 9)), together[3:9])
    np.testing.assert_array_equal(run(np.arange(len(tables))[::-1]), together[::-1])


@pytest.mark.parametrize("form", FORMS)
def test_more_than_is_expanded_at_a_time_is_the_same(form):
    """32 MiB hold some heads of so many keys, not all."""
    made = case([(2500, 40), (2400, 33)], sizes=(14, 64, 8, 64, 16), block_size=64)
    check(made, form)


@pytest.mark.parametrize("form", FORMS)
def test_padding_gives_zeros_even_alone(form):
    queries, pages, layer, tables, positions, *ups = case([(0, 3), (0, 40)], padding_rows=1)
    where = (tables, positions, *(up[None] for up in ups), np.int32(0))
    out = np.asarray(ATTEND(queries, pages, layer, *where, scale=SCALE, form=form))
    assert (out[positions < 0] == 0).all()
    where = (tables, np.full_like(positions, -1), *(up[None] for up in ups), np.int32(0))
    assert (np.asarray(ATTEND(queries, pages, layer, *where, scale=SCALE, form=form)) == 0).all()


def test_it_takes_the_place_of_the_function_that_xla_compiles():
    queries, pages, layer, tables, positions, *ups = case([(9, 40), (0, 20)])
    where = (queries, pages, layer, tables, positions)
    plain = jax.jit(functools.partial(reference.expanded_attention, scale=SCALE))(*where, *ups)
    found = ATTEND(*where, *(up[None] for up in ups), np.int32(0), scale=SCALE)
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_take_is_refused():
    queries, pages, layer, tables, positions, *ups = case([(0, 3)])
    stacks = [up[None] for up in ups]
    narrow = np.minimum(pages, 1e4).astype(np.float16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="pages of float or bfloat16, weights of one format"):
        ATTEND(queries, narrow, layer, tables, positions, *stacks, np.int32(0), scale=SCALE)
    stacks[0] = stacks[0][:, :, :3]
    with pytest.raises(jax.errors.JaxRuntimeError, match="shape that does not fit the others"):
        ATTEND(queries, pages, layer, tables, positions, *stacks, np.int32(0), scale=SCALE)
