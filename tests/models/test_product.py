"""A product is the einsum that it is called by, and takes a weight as it lies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models.product import product

SIZES = {"n": 2, "t": 3, "d": 8, "r": 5, "h": 4, "k": 6, "v": 7, "g": 2, "f": 9, "e": 3, "b": 4}
MATRICES = [
    *("td,ed->te", "ntd,rd->ntr", "ntr,hkr->nthk", "ntd,gfd->ntgf", "ntf,df->ntd", "nthv,dhv->ntd"),
    *("bd,vd->bv", "td,egfd->tegf", "td,gfd->tgf"),
]
OTHERS = ["nthk,hkr->nthr", "nthr,hvr->nthv", "tef,edf->td", "ntf,ndf->ntd", "ntd,ngfd->ntgf"]


def operands(equation: str) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    names = equation.split("->")[0].split(",")
    x, weight = (random.standard_normal([SIZES[name] for name in each], np.float32) for each in names)
    return jnp.asarray(x), jnp.asarray(weight)


@pytest.mark.parametrize("equation", MATRICES + OTHERS)
def test_a_product_is_its_einsum(equation: str):
    x, weight = operands(equation)
    expected = np.einsum(equation, np.asarray(x, np.float64), np.asarray(weight, np.float64))
    np.testing.assert_allclose(product(equation, x, weight), expected, atol=1e-4)
    half = product(equation, x.astype("bfloat16"), weight.astype("bfloat16"), accumulate=jnp.float32)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, atol=0.3)


@pytest.mark.parametrize("equation", MATRICES)
def test_a_weight_is_multiplied_as_a_matrix_that_nothing_transposes(equation: str):
    text = jax.jit(lambda x, weight: product(equation, x, weight)).lower(*operands(equation)).as_text()
    assert "stablehlo.transpose" not in text
    (of_x, of_weight), *others = re.findall(r"stablehlo.dot_general.*: \(tensor<(\S+)xf32>, tensor<(\S+)xf32>\)", text)
    assert not others
    assert (of_x.count("x"), of_weight.count("x")) == (1, 1)  # of two dimensions each
