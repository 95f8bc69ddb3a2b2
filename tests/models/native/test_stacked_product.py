"""The product with a layer of a stack is what numpy has in float64, in every form, whatever the sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.native import library
from moonshard.models.native.stacked_product import reference, stacked_product

CHOSEN = library.chosen()
FORMS = () if CHOSEN is None else CHOSEN.forms
pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(CHOSEN is None, reason="there are no kernels here"),
]
PRODUCT = jax.jit(stacked_product, static_argnames=("form", "is_transposed"))
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])
NUM_LAYERS = 3


def case(n: int, groups: int, k: int, out: int, dtype, seed: int):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, groups, k)).astype(np.float32)
    return x, jnp.asarray(rng.normal(size=(NUM_LAYERS, groups, out, k)), dtype)


def multiply(x, stack, layer: int, form: str | None = None, *, is_transposed: bool):
    """x · stack[layer]ᵀ, of a stack that lies one way or the other."""
    given = jnp.swapaxes(stack, 2, 3) if is_transposed else stack
    return PRODUCT(x, given, np.int32(layer), form=form, is_transposed=is_transposed)


def check(result, x, weight):
    """The error of a float32 sum of k products is at most some roundings of the sum of their sizes."""
    wide, weight = x.astype(np.float64), np.asarray(weight, np.float64)
    expected, size = (np.einsum("ngk,gok->ngo", *each) for each in ((wide, weight), (np.abs(wide), np.abs(weight))))
    assert (np.abs(np.asarray(result) - expected) <= 8 * np.finfo(np.float32).eps * size).all()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)),
    DTYPES,
    st.integers(0, NUM_LAYERS - 1),
    st.integers(0),
)
def test_a_product_reads_its_own_layer_whatever_the_sizes(form, is_transposed, sizes, dtype, layer, seed):
    x, stack = case(*sizes, dtype=dtype, seed=seed)
    check(multiply(x, stack, layer, form, is_transposed=is_transposed), x, stack[layer])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(1, 1, 2048, 515), (8, 8, 64, 512), (65, 1, 1001, 130), (300, 2, 513, 67)])
def test_a_product_that_threads_share_and_that_is_cut_into_blocks_is_the_same(form, is_transposed, sizes):
    x, stack = case(*sizes, dtype=jnp.float32, seed=0)
    check(multiply(x, stack, 2, form, is_transposed=is_transposed), x, stack[2])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_gives_the_same_bits_in_every_batch(form, is_transposed):
    x, stack = case(64, 1, 515, 301, jnp.float32, 0)
    whole = np.asarray(multiply(x, stack, 1, form, is_transposed=is_transposed))
    for n in (1, 2, 5, 8, 33):
        np.testing.assert_array_equal(multiply(x[:n], stack, 1, form, is_transposed=is_transposed), whole[:n])


def test_an_index_beyond_the_stack_reads_the_nearest_layer_as_the_reference_does():
    x, stack = case(2, 1, 16, 8, jnp.float32, 0)
    for layer in (-7, NUM_LAYERS + 7):
        expected = reference(jnp.asarray(x), stack, jnp.int32(max(0, layer)))
        np.testing.assert_allclose(PRODUCT(x, stack, np.int32(layer)), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_activations_are_widened():
    x, stack = case(3, 1, 64, 48, jnp.bfloat16, 0)
    narrow = jnp.asarray(x, jnp.bfloat16)
    check(PRODUCT(narrow, stack, np.int32(1)), np.asarray(narrow, np.float32), stack[1])


def test_many_programs_at_once_all_end_and_are_right():
    """Each waits for its own threads only, however many others have the pool."""
    x, stack = case(4, 1, 512, 1024, jnp.float32, 0)

    def many(x, stack):
        return jax.lax.scan(lambda c, layer: (c + stacked_product(x, stack, layer).sum(), None), 0.0, jnp.arange(3))[0]

    over = jax.jit(jax.vmap(many, in_axes=(0, None)))
    parts = jax.device_put(np.stack([x] * 4))
    expected = sum(float((x.astype(np.float64)[:, 0] @ np.asarray(w, np.float64)[0].T).sum()) for w in stack)
    results = [over(parts, stack) for _ in range(20)]
    np.testing.assert_allclose(np.asarray(results), expected, rtol=1e-3)
