"""Paged latent attention for CPUs: keys are read once, where they lie, for scores and values and by all heads.

It takes the place of `models.attention.latent_attention`, which is its reference and gathers them. Sums are float32,
and a query's result is the same, bit by bit, in whatever batch, with whatever other queries of its row, and on however
many threads. What lies beyond a row's positions, in its table or its last block, never matters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages
from moonshard.models import attention
from moonshard.models.native.library import chosen, target
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
    """As `models.attention.latent_attention`, and by it where there are no kernels, and for pages of another dtype.

    Args:
        form: the instruction set; None: the best that there is.

    Raises:
        LibraryError: no such form.
    """
    reference = functools.partial(attention.latent_attention, value_rank=value_rank, scale=scale)
    arguments = (queries, pages, layer, block_tables, positions)
    if form is None and (chosen() is None or pages.dtype not in (jnp.float32, jnp.bfloat16)):
        return reference(*arguments)
    kernel = functools.partial(_attend, target("attention", form), value_rank=value_rank, scale=scale)
    return jax.lax.platform_dependent(*arguments, cpu=kernel, default=reference)


def _attend(
    name: str,
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
) -> Float[Array, "n t h r"]:
    out = jax.ShapeDtypeStruct((*queries.shape[:3], value_rank), jnp.float32)
    mixed = jax.ffi.ffi_call(name, out, vmap_method="sequential")(
        queries.astype(jnp.float32),
        pages,
        layer.astype(jnp.int32),
        block_tables.astype(jnp.int32),
        positions.astype(jnp.int32),
        scale=np.float32(scale),
    )
    return mixed.astype(queries.dtype)
