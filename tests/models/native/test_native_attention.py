"""Paged attention is a softmax in float64 over the keys that a query sees, in every form, whatever the sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models import attention
from moonshard.models.native import library
from moonshard.models.native.attention import latent_attention
from moonshard.models.native.library import LibraryError

CHOSEN = library.chosen()
FORMS = () if CHOSEN is None else CHOSEN.forms
pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(CHOSEN is None, reason="there are no kernels here"),
]
ATTEND = jax.jit(latent_attention, static_argnames=("value_rank", "scale", "form"))
LAYER, NUM_LAYERS, SCALE = np.int32(1), 3, 0.35
PART_KEYS = 256  # of the kernel: a longer context is cut over threads
HUGE = 3e38


def case(contexts, *, t=1, h=2, f=21, block_size=5, dtype=jnp.float32, seed=0):
    """Each row's last queries, those before its first token padding. What no query may see is huge, or no block."""
    rng = np.random.default_rng(seed)
    columns = 2 + max(contexts) // block_size
    pages = np.full((len(contexts) * columns + 2, NUM_LAYERS, block_size, f), HUGE, np.float32)
    tables = rng.permutation(len(pages))[: len(contexts) * columns].reshape(-1, columns).astype(np.int32)
    for table, context in zip(tables, contexts, strict=True):
        for position in range(context):
            pages[table[position // block_size], LAYER, position % block_size] = rng.normal(size=f)
        table[-(-context // block_size) :] = rng.choice([-(2**31), -1, len(pages), 2**31 - 1])
    queries = rng.normal(size=(len(contexts), t, h, f)).astype(np.float32)
    positions = np.asarray(contexts)[:, None] - t + np.arange(t)
    return queries, jnp.asarray(pages, dtype), LAYER, tables, np.maximum(positions, -1).astype(np.int32)


def expected(queries, pages, layer, tables, positions, rank):
    """The result, and a bound of a float32 computation's error."""
    pages = np.asarray(pages)
    out, bound = np.zeros((*queries.shape[:3], rank)), np.zeros(queries.shape[:3])
    for row, query in np.ndindex(positions.shape):
        seen = np.arange(positions[row, query] + 1)
        if not len(seen):
            continue
        size = pages.shape[2]
        keys = pages[tables[row][seen // size], layer, seen % size].astype(np.float64)
        wide = queries[row, query].astype(np.float64)
        scores = wide @ keys.T * SCALE
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[row, query] = weights / weights.sum(axis=-1, keepdims=True) @ keys[:, :rank]
        # A weight is off by as much as its score is, which is a sum; then sums of as many terms as there are keys.
        sizes = (np.abs(wide) @ np.abs(keys).T * SCALE).max(axis=-1)
        bound[row, query] = np.finfo(np.float32).eps * (4 * sizes + 16) * np.abs(keys[:, :rank]).max()
    return out, bound[..., None]


def check(arguments, rank, form):
    out, bound = expected(*arguments, rank=rank)
    result = np.asarray(ATTEND(*arguments, value_rank=rank, scale=SCALE, form=form))
    assert (np.abs(result - out) <= bound).all()
    return result


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(0, 20),
    st.integers(1, 64),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.integers(0, 99),
)
def test_attention_is_a_softmax_over_the_keys_that_a_query_sees(
    form, contexts, t, h, rank, rope, block_size, dtype, seed
):
    check(case(contexts, t=t, h=h, f=rank + rope, block_size=block_size, dtype=dtype, seed=seed), rank, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("contexts", "t", "h"),
    [((PART_KEYS,), 1, 8), ((PART_KEYS + 1, 63, 0), 4, 8), ((1700,), 2, 4), ((900, 5), 33, 8), ((64, 65), 1, 64)],
)
def test_a_long_context_that_threads_share_is_merged_right(form, dtype, contexts, t, h):
    check(case(contexts, t=t, h=h, f=576, block_size=64, dtype=dtype), 512, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_query_gives_the_same_bits_alone_and_among_others(form):
    """In whatever batch, whatever other queries its row has, and whether or not its keys are cut over threads."""
    for h, dtype in ((8, jnp.bfloat16), (4, jnp.float32)):
        contexts = (700, 3, 512, 90, 1300, 257, 64, 65, 700, 11, 12, 13)
        queries, pages, layer, tables, positions = case(contexts, t=20, h=h, f=75, block_size=16, dtype=dtype)
        together = np.asarray(ATTEND(queries, pages, layer, tables, positions, value_rank=64, scale=SCALE, form=form))
        for row, query in ((0, 19), (0, 3), (1, 18), (4, 0), (5, 17), (7, 19)):
            own, at = slice(row, row + 1), slice(query, query + 1)
            alone = ATTEND(
                queries[own, at], pages, layer, tables[own], positions[own, at], value_rank=64, scale=SCALE, form=form
            )
            np.testing.assert_array_equal(np.asarray(alone)[0, 0], together[row, query])


@pytest.mark.parametrize("form", FORMS)
def test_padding_gives_zeros_even_alone(form):
    queries, pages, layer, tables, _ = case((20, 7), t=3)
    padding = np.full((2, 3), -1, np.int32)
    assert (
        np.asarray(ATTEND(queries, pages, layer, tables, padding, value_rank=16, scale=SCALE, form=form)) == 0
    ).all()


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_any_size_give_a_softmax(form):
    """The largest come first, last, and far above all others."""
    queries, pages, layer, tables, positions = case((600,), h=3, f=16, block_size=8)
    queries[:] = 40 * np.sign(queries)
    check((queries, pages, layer, tables, positions), 16, form)


@pytest.mark.parametrize("form", FORMS)
def test_the_exponential_is_within_two_ulp_and_never_subnormal(form):
    x = -np.concatenate([np.linspace(0, 88, 2**20), np.geomspace(1e-30, 1e30, 2**16), [0] * 15, [np.inf]])
    x = x.astype(np.float32)
    call = jax.ffi.ffi_call(library.target("exponential", form), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    y, exact = np.asarray(call(x)), np.exp(x.astype(np.float64))
    is_normal = x >= -87.33
    ulp = np.spacing(exact[is_normal].astype(np.float32)).astype(np.float64)
    assert (np.abs(y[is_normal] - exact[is_normal]) <= 2 * ulp).all()
    assert (y[~is_normal] == 0).all()
    assert (y[x == 0] == 1).all()


def test_pages_are_neither_copied_nor_gathered():
    queries, pages, _, tables, positions = case((100, 37), block_size=16)

    def layers(queries, pages, tables, positions):
        def step(x, layer):
            return x + latent_attention(x, pages, layer, tables, positions, value_rank=21, scale=SCALE), None

        return jax.lax.scan(step, queries, jnp.arange(NUM_LAYERS))[0]

    text = jax.jit(layers).lower(queries, pages, tables, positions).compile().as_text() or ""
    shape = ",".join(map(str, pages.shape))
    made = [line for line in text.splitlines() if f" = f32[{shape}]" in line]
    assert "moonshard_attention" in text
    assert all("parameter(" in line or "get-tuple-element(" in line for line in made)


def test_it_takes_the_place_of_the_function_that_gathers_keys():
    arguments = case((40, 9), t=2)
    gathering = jax.jit(functools.partial(attention.latent_attention, value_rank=16, scale=SCALE))
    plain, result = gathering(*arguments), ATTEND(*arguments, value_rank=16, scale=SCALE)
    assert (result.shape, result.dtype) == (plain.shape, plain.dtype)
    np.testing.assert_allclose(result, plain, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_does_not_take_is_refused(monkeypatch):
    queries, pages, *rest = case((40, 9), t=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="takes pages of float or bfloat16"):
        ATTEND(queries, np.minimum(pages, 1e4).astype(np.float16), *rest, value_rank=16, scale=SCALE)
    monkeypatch.setattr("moonshard.models.native.library.chosen", lambda: None)
    with pytest.raises(LibraryError, match="no kernels here"):  # a rank that no program was made for yet
        ATTEND(queries, pages, *rest, value_rank=11, scale=SCALE)


def test_bfloat16_queries_give_bfloat16():
    queries, pages, layer, tables, positions = case((40, 9), t=2, dtype=jnp.bfloat16)
    narrow = jnp.asarray(queries, jnp.bfloat16)
    result = ATTEND(narrow, pages, layer, tables, positions, value_rank=16, scale=SCALE)
    out, _ = expected(np.asarray(narrow, np.float32), pages, layer, tables, positions, 16)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(result.astype(np.float32), out, atol=2**-6)
