"""The one function through which an activation meets a weight matrix, but for the GPU kernels (`experts.grouped`).

A quantised weight is another kind of leaf that this function knows, so that a forward pass does not change for it (the
habit of jax-llm-examples). Such a format also touches how a folder is read (`folder.checkpoint`, `spec.Param`, whose
leaf has one source and one dtype today, and `weights`), the family's names and scales (`kimi.weights`, and
`kimi.config`, which refuses it today), and whoever cuts experts out of their stack or reads the shape of one
(`experts.moe`, `experts.grouped`, `experts.exchange`). The formats have names in `spec.WeightFormat` already, and their
bits in `kimi.footprint`.
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
