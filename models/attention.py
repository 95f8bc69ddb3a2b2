"""Multi-head latent attention over pages, absorbed: queries meet the latent itself, K and V are never expanded.

One function serves prefill and decode. A row is a run of `t` queries of one sequence: a tile of a prompt's chunk, or
one decode slot. Keys are read a few blocks at a time and their softmaxes merged as they come, so the work follows the
longest context in the batch and not the length of the block table.
Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C, for the absorbed form; online softmax as in
FlashAttention (arXiv 2205.14135), section 3.1.
"""

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, read_blocks
from moonshard.sharding.arrays import Array, Float, Int

KEYS_PER_STEP = 256  # tokens read per step of the online softmax


def latent_attention(
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
) -> Float[Array, "n t h r"]:
    """Attention of absorbed queries over the paged latents.

    Args:
        queries: query in latent space, `[q_nope · W_uk | q_rope]`, f = r + rope.
        positions: absolute position of each query; a query sees keys at positions up to its own. Below 0: padding,
            whose result is zero.
        value_rank: r; the first r features of a key are its value.

    Returns:
        The weighted latents, to be multiplied by W_uv, in the queries' dtype.
    """
    block_size = pages.shape[2]
    blocks_per_step = max(1, min(KEYS_PER_STEP // block_size, block_tables.shape[1]))
    keys_per_step = blocks_per_step * block_size
    tables = _pad_columns(block_tables, blocks_per_step)
    n, t, h, _ = queries.shape

    def step(index, carry):
        peak, total, mixed = carry
        blocks = jax.lax.dynamic_slice_in_dim(tables, index * blocks_per_step, blocks_per_step, axis=1)
        keys = read_blocks(pages, layer, blocks).astype(queries.dtype)
        key_positions = index * keys_per_step + jnp.arange(keys_per_step)
        visible = key_positions[None, None, :] <= positions[:, :, None]
        scores = jnp.einsum("nthf,nsf->nths", queries, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        safe_peak = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)
        weights = jnp.exp(scores - safe_peak[..., None])
        decay = jnp.exp(peak - safe_peak)
        values = jnp.einsum(
            "nths,nsr->nthr",
            weights.astype(queries.dtype),
            keys[..., :value_rank],
            preferred_element_type=jnp.float32,
        )
        return new_peak, total * decay + weights.sum(axis=-1), mixed * decay[..., None] + values

    start = (
        jnp.full((n, t, h), -jnp.inf, jnp.float32),
        jnp.zeros((n, t, h), jnp.float32),
        jnp.zeros((n, t, h, value_rank), jnp.float32),
    )
    num_steps = (jnp.max(positions) + keys_per_step) // keys_per_step
    _, total, mixed = jax.lax.fori_loop(0, num_steps, step, start)
    return (mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).astype(queries.dtype)


def _pad_columns(tables: Int[Array, "n m"], multiple: int) -> Int[Array, "n m2"]:
    """Repeats nothing, reads nothing new: the added columns lie beyond every position and are masked."""
    missing = -tables.shape[1] % multiple
    return jnp.pad(tables, ((0, 0), (0, missing)))
