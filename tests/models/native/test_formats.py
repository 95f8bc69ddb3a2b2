"""Kernels take weights in the formats of folders: results are what numpy has of the exact values, in every form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.experts import moe
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.quantised import Quantised
from moonshard.models.native import library
from moonshard.models.native.experts import grouped_experts
from moonshard.models.native.stacked_product import stacked_product

CHOSEN = library.chosen()
FORMS = () if CHOSEN is None else CHOSEN.forms
pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(CHOSEN is None, reason="there are no kernels here"),
]
PRODUCT = jax.jit(stacked_product, static_argnames=("form", "is_transposed"))
BACKEND = jax.jit(grouped_experts, static_argnames="form")
NAMES = st.sampled_from(sorted(FORMATS))
# Of a block: as in a folder, and as cuts and views leave it.
BLOCKS = {"int4": ((1, 32), (1, 8), (1, 16)), "fp8": ((128, 128), (64, 64), (8, 16), (3, 5)), "int8": ((1, None),)}
BLOCK = st.integers(0, 3)


def random_weight(
    rng,
    name: str,
    shape: tuple[int, ...],
    which: int = 0,
    exponents: tuple[int, int] = (-6, -2),
    negative: float | None = None,
):
    """A stack of matrices of random codes, each of its scales of another size; and what it stands for, in float64.

    `negative`: the share of such scales; None: any, and often none, as folders have it.
    """
    format = FORMATS[name]
    rows, columns = BLOCKS[name][which % len(BLOCKS[name])]
    columns = columns or shape[-1]
    stored = (*shape[:-1], -(-shape[-1] // format.codes_per_item))
    of_scales = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    codes = rng.integers(0, 256, (*stored, format.values.dtype.itemsize), dtype=np.uint8)
    if name == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # not a number
    values = codes.view(format.values.dtype).reshape(stored)
    share = rng.choice([0, 0, 0.1, 0.5]) if negative is None else negative
    signs = np.where(rng.random(of_scales) < share, -1, 1)
    scales = (signs * rng.uniform(1, 2, of_scales) * 2.0 ** rng.integers(*exponents, of_scales)).astype(
        format.scales.dtype
    )
    wide = np.stack(
        [
            dequantise(format, *each, shape[-1], (rows, columns))
            for each in zip(values.reshape(-1, *stored[-2:]), scales.reshape(-1, *of_scales[-2:]), strict=True)
        ]
    ).reshape(shape)
    return Quantised(jnp.asarray(values), jnp.asarray(scales), name, (rows, columns), shape[-1]), wide


def dequantise(format, values, scales, num_columns: int, block):
    codes = np.asarray(format.decode(values), np.float32)[:, :num_columns]
    of_each = scales.astype(np.float32).repeat(block[0], 0)[: len(codes)].repeat(block[1], 1)[:, :num_columns]
    with np.errstate(over="ignore"):
        return (codes * of_each).astype(format.value_dtype).astype(np.float64)


def check(result, x, weight):
    """The error of a float32 sum of k products is at most some roundings of the sum of their sizes."""
    wide = x.astype(np.float64)
    expected, size = (np.einsum("ngk,gok->ngo", *each) for each in ((wide, weight), (np.abs(wide), np.abs(weight))))
    assert (np.abs(np.asarray(result) - expected) <= 8 * np.finfo(np.float32).eps * size).all()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 300), st.integers(1, 150)),
    NAMES,
    BLOCK,
    st.integers(0, 1),
    st.integers(0),
)
def test_a_product_reads_a_format_exactly_whatever_the_sizes(form, is_transposed, sizes, name, which, layer, seed):
    (n, groups, k, out), rng = sizes, np.random.default_rng(seed)
    x = rng.normal(size=(n, groups, k)).astype(np.float32)
    shape = (2, groups, k, out) if is_transposed else (2, groups, out, k)
    stack, wide = random_weight(rng, name, shape, which)
    result = PRODUCT(x, stack, np.int32(layer), form=form, is_transposed=is_transposed)
    check(result, x, np.swapaxes(wide, 2, 3)[layer] if is_transposed else wide[layer])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("exponents", [(-125, -100), (-20, 20), (100, 118), (119, 126)])
@pytest.mark.parametrize("which", [0, 2])
def test_every_value_is_exact_whatever_the_scale(form, name, exponents, which, is_transposed):
    """Ones that stand alone in a row of activations take the values themselves out of a weight."""
    rng = np.random.default_rng(exponents[0] + 128)
    stack, wide = random_weight(rng, name, (1, 1, 64, 2300), which, exponents, 0.02)  # some rows have no negative scale
    wide = wide[0, 0].astype(np.float32)
    wide[np.abs(wide) < np.finfo(np.float32).smallest_normal] = 0
    with np.errstate(invalid="ignore"):
        x = np.eye(64 if is_transposed else 2300, dtype=np.float32)[:, None]
        for n in (1, 9):  # in registers, and in the caches
            some = rng.permutation(len(x))[:n]
            found = np.asarray(PRODUCT(x[some], stack, np.int32(0), form=form, is_transposed=is_transposed))[:, 0]
            expected = wide[some] if is_transposed else wide[:, some].T
            is_whole = np.isfinite(wide).all(axis=0 if is_transposed else 1)  # 0 x infinity is not a number
            np.testing.assert_array_equal(found[:, is_whole], expected[:, is_whole])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_row_gives_the_same_bits_in_every_batch(form, name, is_transposed):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 1, 515)).astype(np.float32)
    stack, _ = random_weight(rng, name, (2, 1, 515, 301) if is_transposed else (2, 1, 301, 515))
    whole = np.asarray(PRODUCT(x, stack, np.int32(1), form=form, is_transposed=is_transposed))
    for n in (1, 2, 3, 4, 5, 8, 33):
        found = PRODUCT(x[:n], stack, np.int32(1), form=form, is_transposed=is_transposed)
        np.testing.assert_array_equal(found, whole[:n])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_more_rows_than_the_caches_hold_are_multiplied_some_at_a_time(form, name):
    """A block of 63 rows of so many numbers, as `csrc/common/tiles.h` has it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 1, 1030)).astype(np.float32)
    stack, wide = random_weight(rng, name, (1, 1, 67, 1030))
    check(PRODUCT(x, stack, np.int32(0), form=form), x, wide[0])


def chosen_experts(rng, t: int, k: int, e: int):
    experts = np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
    return moe.Routing(jnp.asarray(rng.random((t, k)), jnp.float32), jnp.asarray(experts), jnp.zeros(t))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.integers(1, 150), st.integers(1, 150)),
    NAMES,
    BLOCK,
    st.integers(0),
)
def test_chosen_experts_are_what_they_are_of_the_values_that_a_format_stands_for(form, sizes, name, which, seed):
    (t, k, e, d, f), rng = sizes, np.random.default_rng(seed)
    gate_up, wide_gate_up = random_weight(rng, name, (2, e, 2, f, d), which)
    down, wide_down = random_weight(rng, name, (2, e, d, f), which)
    x = (rng.normal(size=(t, d)) / d**0.5).astype(np.float32)
    routing, valid = chosen_experts(rng, t, k, e), jnp.asarray(rng.random(t) < 0.9)
    result = np.asarray(BACKEND(x, routing, valid, moe.Experts(gate_up, down), np.int32(1), form=form))
    expected, size = np.zeros(x.shape), 1e-30
    for token, choice in np.ndindex(routing.experts.shape):
        if valid[token]:
            expert = int(routing.experts[token, choice])
            gate, up = wide_gate_up[1, expert] @ x[token].astype(np.float64)
            added = float(routing.weights[token, choice]) * (
                wide_down[1, expert] @ (gate * (1 + np.tanh(gate / 2)) / 2 * up)
            )
            expected[token] += added
            size = max(size, np.abs(added).max())
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5 * size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_token_gives_the_same_bits_in_every_batch(form, name):
    rng = np.random.default_rng(0)
    gate_up, _ = random_weight(rng, name, (2, 8, 2, 130, 200))
    down, _ = random_weight(rng, name, (2, 8, 200, 130))
    x, routing = rng.normal(size=(100, 200)).astype(np.float32), chosen_experts(rng, 100, 4, 8)
    experts, valid = moe.Experts(gate_up, down), jnp.ones(100, bool)
    whole = np.asarray(BACKEND(x, routing, valid, experts, np.int32(1), form=form))
    for t in (1, 2, 7, 50):
        some = jax.tree.map(lambda leaf, t=t: leaf[:t], (x, routing, valid))
        np.testing.assert_array_equal(BACKEND(*some, experts, np.int32(1), form=form), whole[:t])
