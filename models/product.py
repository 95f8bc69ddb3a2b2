"""The one function through which an activation meets a weight matrix.

How a weight is stored, and with which scales, is this function's business alone: a quantised weight is another kind of
leaf here, and no line of a forward pass changes for it (the habit of jax-llm-examples).
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
