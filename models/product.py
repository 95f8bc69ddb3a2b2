"""The one function through which an activation meets a weight matrix, but for the GPU kernels (`experts.grouped`).

A quantised weight is another kind of leaf that this function knows, so that a forward pass does not change for it (the
habit of jax-llm-examples). Such a format also touches how a folder is read (`folder.checkpoint`, `spec.Param`, whose
leaf has one source and one dtype today, and `weights`), the family's names and scales (`kimi.weights`, and
`kimi.config`, which refuses it today), and whoever cuts experts out of their stack or reads the shape of one
(`experts.moe`, `experts.grouped`, `experts.exchange`). The formats have names in `spec.WeightFormat` already, and their
bits in `kimi.footprint`.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moonshard.sharding.arrays import Array, Float


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    *,
    accumulate: DTypeLike | None = None,
    precision: jax.lax.Precision | None = None,
) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)`: activations first, the weight second.

    A weight is multiplied as the matrix that it is in memory, [its own dimensions, what is summed over], wherever the
    equation names them in that order. XLA on CPU takes only matrices as they lie: of a weight with two dimensions of
    its own it would make a transposed copy in every step.

    `accumulate` is the type of the result; None: that of the arguments. `precision` None: as the context says.
    """
    given, result = equation.split("->")
    of_x, of_weight = given.split(",")
    own = "".join(name for name in of_weight if name not in of_x)
    summed = of_weight.removeprefix(own)
    is_matrix = of_x.endswith(summed) and result == of_x.removesuffix(summed) + own
    if not is_matrix:
        return jnp.einsum(equation, x, weight, preferred_element_type=accumulate, precision=precision)
    shape, num_own = (
        (*x.shape[: len(of_x) - len(summed)], *weight.shape[: len(own)]),
        math.prod(weight.shape[: len(own)]),
    )
    rows, matrix = x.reshape(-1, math.prod(weight.shape[len(own) :])), weight.reshape(num_own, -1)
    found = jnp.einsum("xs,os->xo", rows, matrix, preferred_element_type=accumulate, precision=precision)
    return found.reshape(shape)
