"""The backend for CPUs sums what each token's experts give, in every form, whatever the sizes and the balance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.experts import moe
from moonshard.models.native import library
from moonshard.models.native.experts import grouped_experts

CHOSEN = library.chosen()
FORMS = () if CHOSEN is None else CHOSEN.forms
pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(CHOSEN is None, reason="there are no kernels here"),
]
BACKEND = jax.jit(grouped_experts, static_argnames="form")
NUM_LAYERS = 2
SKEWS = st.sampled_from(["even", "one expert", "half invalid", "none valid", "others' experts"])


def case(t: int, k: int, e: int, d: int, f: int, dtype, skew: str, seed: int):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
    if skew == "one expert":
        chosen = np.tile(chosen[:1], (t, 1))
    if skew == "others' experts":
        chosen = np.where(rng.random(chosen.shape) < 0.5, e, chosen).astype(np.int32)
    valid = rng.random(t) < {"half invalid": 0.5, "none valid": -1}.get(skew, 2)
    experts = moe.Experts(
        gate_up=jnp.asarray(rng.normal(size=(NUM_LAYERS, e, 2, f, d)) / d**0.5, dtype),
        down=jnp.asarray(rng.normal(size=(NUM_LAYERS, e, d, f)) / f**0.5, dtype),
    )
    routing = moe.Routing(
        weights=jnp.asarray(rng.random((t, k)), jnp.float32), experts=jnp.asarray(chosen), margin=jnp.zeros(t)
    )
    return rng.normal(size=(t, d)).astype(np.float32), routing, jnp.asarray(valid), experts


def brute_force(x, routing, valid, experts, layer):
    """In float64, token by token."""
    out = np.zeros(x.shape)
    for token, choice in np.ndindex(routing.experts.shape):
        expert = int(routing.experts[token, choice])
        if valid[token] and expert < experts.down.shape[1]:
            gate, up = np.asarray(experts.gate_up[layer, expert], np.float64) @ x[token]
            hidden = gate * (1 + np.tanh(gate / 2)) / 2 * up
            out[token] += float(routing.weights[token, choice]) * (
                np.asarray(experts.down[layer, expert], np.float64) @ hidden
            )
    return out


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 30), st.integers(1, 4), st.integers(4, 9), st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    SKEWS,
    st.integers(0, NUM_LAYERS - 1),
    st.integers(0),
)
def test_chosen_experts_are_summed_whatever_the_sizes_and_the_balance(form, sizes, dtype, skew, layer, seed):
    x, routing, valid, experts = case(*sizes, dtype=dtype, skew=skew, seed=seed)
    result = np.asarray(BACKEND(x, routing, valid, experts, np.int32(layer), form=form))
    np.testing.assert_allclose(result, brute_force(x, routing, valid, experts, layer), rtol=1e-5, atol=1e-5)
    assert not result[~np.asarray(valid)].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("skew", ["even", "one expert"])
def test_what_threads_share_and_what_takes_several_blocks_of_tokens_is_the_same(form, skew):
    x, routing, valid, experts = case(150, 4, 8, 200, 130, jnp.float32, skew, 0)
    result = BACKEND(x, routing, valid, experts, np.int32(1), form=form)
    np.testing.assert_allclose(result, brute_force(x, routing, valid, experts, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_gives_the_same_bits_in_every_batch(form):
    x, routing, valid, experts = case(100, 4, 8, 200, 130, jnp.float32, "even", 0)
    whole = np.asarray(BACKEND(x, routing, valid, experts, np.int32(1), form=form))
    for t in (1, 2, 7, 50):
        some = jax.tree.map(lambda leaf, t=t: leaf[:t], (x, routing, valid))
        np.testing.assert_array_equal(BACKEND(*some, experts, np.int32(1), form=form), whole[:t])


@pytest.mark.parametrize("form", FORMS)
def test_it_gives_what_the_reference_gives_and_an_invalid_token_of_nan_harms_no_other(form):
    x, routing, valid, experts = case(40, 3, 8, 64, 48, jnp.float32, "half invalid", 1)
    expected = jax.jit(moe.blocks)(x, routing, valid, experts, np.int32(0))
    x[~np.asarray(valid)] = np.nan
    result = np.asarray(BACKEND(x, routing, valid, experts, np.int32(0), form=form))
    np.testing.assert_allclose(result, np.where(valid[:, None], expected, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-10, 1.0, 30.0, 3000.0])
def test_the_gate_holds_over_the_whole_range_of_floats(form, size):
    x, routing, valid, experts = case(8, 1, 4, 64, 48, jnp.float32, "even", 2)
    x *= np.float32(size)
    result = np.asarray(BACKEND(x, routing, valid, experts, np.int32(0), form=form), np.float64)
    expected = brute_force(x, routing, valid, experts, 0)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
