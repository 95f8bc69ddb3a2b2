"""The one function through which an activation meets a weight matrix.

Only this function knows how a weight is stored and with which scales: to add a quantised weight, add a kind of leaf
here, and no line of a forward pass changes (as in jax-llm-examples).
"""

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

    `accumulate` is the type of the result; None: that of the arguments. `precision` None: as the context says.
    """
    return jnp.einsum(equation, x, weight, preferred_element_type=accumulate, precision=precision)
