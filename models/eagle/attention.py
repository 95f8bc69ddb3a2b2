"""Attention over paged keys and values, of heads that share them in groups, as Llama has it.

A token's features are its keys, then its values: [g k | g k]. Pages whose tokens have fewer features a layer have them
in several layers, one after another. Keys are read some blocks at a time, as `models.attention` reads latents. Einsum
alphabet as in `weights`; n row, t query, s key, r the heads of a group.
"""

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, read_blocks
from moonshard.models.attention import Partial
from moonshard.models.machines import XLA
from moonshard.sharding.arrays import Array, Float, Int


def in_layers(features: Float[Array, "n t f"], per_layer: int) -> list[Float[Array, "n t l"]]:
    """The features as pages have them whose tokens have so many a layer; the last is filled with 0."""
    num_features = features.shape[-1]
    num_layers = -(-num_features // per_layer)
    padded = jnp.pad(features, ((0, 0), (0, 0), (0, num_layers * per_layer - num_features)))
    return jnp.split(padded, num_layers, axis=-1)


def _from_layers(
    pages: Pages, page_layer: int, blocks: Int[Array, "n b"], num_features: int
) -> Float[Array, "n b*block_size f"]:
    """Undoes `in_layers`."""
    num_layers = -(-num_features // pages.shape[-1])
    parts = [read_blocks(pages, jnp.int32(page_layer + index), blocks) for index in range(num_layers)]
    return jnp.concatenate(parts, axis=-1)[..., :num_features]


def grouped_attention(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    num_kv_heads: int,
    keys_per_step: int = XLA.keys,
    page_layer: int = 0,
) -> Float[Array, "n t h k"]:
    """Of queries over all that the pages have in these layers up to each one's own position.

    Args:
        positions: of the queries; below 0: padding, whose result is zero.
        keys_per_step: tokens read per step of the online softmax.
        page_layer: the first one.

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
        read = _from_layers(pages, page_layer, blocks, 2 * num_kv_heads * k).astype(queries.dtype)
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
