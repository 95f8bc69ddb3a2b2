"""Paged latent attention for CPUs: keys are read once, where they lie, for scores and values and by all heads.

It takes the place of `models.attention.latent_attention`, which is its reference and gathers them. Sums are float32,
and a query's result is the same, bit by bit, in whatever batch, with whatever other queries of its row, and on however
many threads. What lies beyond a row's positions, in its table or its last block, never matters.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages
from moonshard.models.native.library import target
from moonshard.sharding.arrays import Array, Float, Int


def latent_attention(
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
    form: str | None = None,
) -> Float[Array, "n t h r"]:
    """As `models.attention.latent_attention`. The pages are float32 or bfloat16.

    Args:
        form: the instruction set; None: the best that there is.

    Raises:
        LibraryError: no library, or no such form.
    """
    out = jax.ShapeDtypeStruct((*queries.shape[:3], value_rank), jnp.float32)
    call = jax.ffi.ffi_call(target("attention", form), out, vmap_method="sequential")
    mixed = call(
        queries.astype(jnp.float32),
        pages,
        layer.astype(jnp.int32),
        block_tables.astype(jnp.int32),
        positions.astype(jnp.int32),
        scale=np.float32(scale),
    )
    return mixed.astype(queries.dtype)
