"""x · Wᵀ, or x · W, with a weight that stays in its stack of layers: read once, where it lies, by some tens of rows.

More rows are multiplied as well, in the same order; beyond some (`models.machines`) XLA's own product is as fast, its
copy included.
Sums are float32 whatever the weight is, and a row's result is the same in every batch.
"""

import jax
import jax.numpy as jnp

from moonshard.models.formats.quantised import Quantised
from moonshard.models.native.library import target
from moonshard.models.native.weights import Weight, operands
from moonshard.sharding.arrays import Array, Float, Int


def stacked_product(
    x: Float[Array, "n g k"],
    stack: Weight,
    layer: Int[Array, ""],
    *,
    is_transposed: bool = False,
    form: str | None = None,
) -> Float[Array, "n g out"]:
    """`x · stack[layer]ᵀ` in float32, of every group (such as a head) its own.

    Args:
        stack: [l g out k], float32, bfloat16, or in a format, whose values are those that it stands for in float32.
        is_transposed: the stack is [l g k out] instead, and the product x · stack[layer].
        form: the instruction set; None: the best that there is.

    Raises:
        LibraryError: no library, or no such form.
    """
    out = jax.ShapeDtypeStruct((*x.shape[:2], stack.shape[3 if is_transposed else 2]), jnp.float32)
    call = jax.ffi.ffi_call(target("stacked_product", form), out, vmap_method="sequential")
    values, scales, block_rows, block_columns = operands(stack)
    attributes = {"block_rows": block_rows, "block_columns": block_columns}
    given = (x.astype(jnp.float32), values, scales, layer.astype(jnp.int32))
    return call(*given, is_transposed=is_transposed, **attributes)


def reference(
    x: Float[Array, "n g k"], stack: Weight, layer: Int[Array, ""], *, is_transposed: bool = False
) -> Float[Array, "n g out"]:
    """The same as XLA has it, on any platform."""
    stack = stack.widened(jnp.float32) if isinstance(stack, Quantised) else stack
    weight = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    equation = "ngk,gko->ngo" if is_transposed else "ngk,gok->ngo"
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)
