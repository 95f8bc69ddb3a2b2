"""Paged latent attention of long chunks for CPUs: keys and values are expanded once a step, from where latents lie.

It takes the place of `models.expanded_attention.expanded_attention`, which is its reference, and reads W_uk and W_uv in
their stacks. Consecutive rows whose blocks are the same are a chunk, and share what is expanded. Sums are float32, and
a query's result is the same, bit by bit, in whatever batch, with whatever other queries, and on however many threads.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages
from moonshard.models.native.library import target
from moonshard.models.native.weights import Weight, operands
from moonshard.sharding.arrays import Array, Float, Int


def expanded_attention(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    k_up: Weight,
    v_up: Weight,
    up_layer: Int[Array, ""],
    *,
    scale: float,
    form: str | None = None,
) -> Float[Array, "n t h v"]:
    """As `models.expanded_attention.expanded_attention`, with layer `up_layer` of the stacks `k_up` [l h nope r] and
    `v_up` [l h v r].

    The pages are float32 or bfloat16; so are both stacks, or they are in one format.

    Args:
        form: the instruction set; None: the best that there is.

    Raises:
        LibraryError: no library, or no such form.
    """
    out = jax.ShapeDtypeStruct((*queries.shape[:3], v_up.shape[2]), jnp.float32)
    call = jax.ffi.ffi_call(target("expanded_attention", form), out, vmap_method="sequential")
    of_k, of_v = operands(k_up), operands(v_up)
    values = call(
        queries.astype(jnp.float32),
        pages,
        layer.astype(jnp.int32),
        block_tables.astype(jnp.int32),
        positions.astype(jnp.int32),
        of_k.values,
        of_k.scales,
        of_v.values,
        of_v.scales,
        up_layer.astype(jnp.int32),
        scale=np.float32(scale),
        k_up_rows=of_k.block_rows,
        k_up_columns=of_k.block_columns,
        v_up_rows=of_v.block_rows,
        v_up_columns=of_v.block_columns,
    )
    return values.astype(queries.dtype)
