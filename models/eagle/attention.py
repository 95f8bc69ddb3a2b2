"""Attention over paged keys and values, of heads that share them in groups, as Llama has it.

A token's features are its keys, then its values: [g k | g k]. Keys are read some blocks at a time, as
`models.attention` reads latents. Einsum alphabet as in `weights`; n row, t query, s key, r the heads of a group.
"""

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, read_blocks
from moonshard.models.attention import Partial
from moonshard.models.machines import XLA
from moonshard.sharding.arrays import Array, Float, Int


def grouped_attention(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    num_kv_heads: int,
    keys_per_step: int = XLA.keys,
) -> Float[Array, "n t h k"]:
    """Of queries over all that the first layer of the pages has up to each one's own position.

    Args:
        positions: of the queries; below 0: padding, whose result is zero.
        keys_per_step: tokens read per step of the online softmax.

    Returns:
        The mixed values, in the queries' dtype.
    """
    n, t, h, k = queries.shape
    block_size = pages.shape[2]
    per_step = max(1, min(keys_per_step // block_size, block_tables.shape[1]))
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % per_step)))  # beyond every position: masked
    grouped = queries.reshape(n, t, num_kv_heads, h // num_kv_heads, k)
    num_tokens = per_step * block_size

    def step(index: Int[Array, ""], found: Partial) -> Partial:
        blocks = jax.lax.dynamic_slice_in_dim(tables, index * per_step, per_step, axis=1)
        read = read_blocks(pages, jnp.int32(0), blocks).astype(queries.dtype)
        keys, values = jnp.moveaxis(read.reshape(n, num_tokens, 2, num_kv_heads, k), 2, 0)
        visible = (index * num_tokens + jnp.arange(num_tokens))[None, None] <= positions[..., None]
        scores = jnp.einsum("ntgrk,nsgk->ntgrs", grouped, keys, preferred_element_type=jnp.float32) * k**-0.5
        scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)

        def mix(weights: Float[Array, "n t g r s"]) -> Float[Array, "n t g r k"]:
            weights = weights.astype(queries.dtype)
            return jnp.einsum("ntgrs,nsgk->ntgrk", weights, values, preferred_element_type=jnp.float32)

        return found.with_keys(scores, mix)

    num_steps = (jnp.max(positions) + num_tokens) // num_tokens
    none = Partial.of_no_keys((n, t, num_kv_heads, h // num_kv_heads), k)
    return jax.lax.fori_loop(0, num_steps, step, none).values().astype(queries.dtype).reshape(n, t, h, k)
