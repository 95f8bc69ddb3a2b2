"""Multi-head latent attention over pages, absorbed: queries meet the latent itself, K and V are never expanded.

For decoding and short chunks; those of many tokens are `models.expanded_attention`'s. A row is a run of `t` queries of
one sequence: a tile of a prompt's chunk, or one decode slot. Keys are read a few blocks at a time and their softmaxes
merged as they come, so the work follows the longest context in the batch and not the length of the block table. Where
the tokens of every block are cut over devices (context parallel), each attends over its own with all heads, and the
partial softmaxes are merged.
Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C, for the absorbed form; online softmax as in
FlashAttention (arXiv 2205.14135), section 3.1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, TokenCut, read_blocks
from moonshard.models.machines import XLA
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.shard import Shard


class Partial(NamedTuple):
    """Attention over some of the keys, not normalised yet: partial softmaxes of disjoint keys can be merged."""

    peak: Float[Array, "*q"]  # of each query and head the largest score; -inf where no key was seen
    total: Float[Array, "*q"]  # sum of exp(score - peak)
    mixed: Float[Array, "*q r"]  # sum of exp(score - peak) * value

    @classmethod
    def of_no_keys(cls, shape: tuple[int, ...], rank: int) -> "Partial":
        return cls(
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, rank), jnp.float32),
        )

    def with_keys(
        self, scores: Float[Array, "*q s"], mix: Callable[[Float[Array, "*q s"]], Float[Array, "*q r"]]
    ) -> "Partial":
        """Of further keys too: `scores` are -inf where one is not seen, `mix` sums up their values by weights."""
        peak = jnp.maximum(self.peak, scores.max(axis=-1))
        finite = _finite(peak)
        weights, decay = jnp.exp(scores - finite[..., None]), jnp.exp(self.peak - finite)
        mixed = self.mixed * decay[..., None] + mix(weights)
        return Partial(peak, self.total * decay + weights.sum(axis=-1), mixed)

    def values(self) -> Float[Array, "*q r"]:
        """The values of all keys, weighted; 0 where none was seen."""
        return _normalise(self.mixed, self.total)


def latent_attention(
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
    keys_per_step: int = XLA.keys,
) -> Float[Array, "n t h r"]:
    """Attention of absorbed queries over the paged latents.

    Args:
        queries: query in latent space, `[q_nope · W_uk | q_rope]`, f = r + rope.
        positions: absolute position of each query; a query sees keys at positions up to its own. Below 0: padding,
            whose result is zero.
        value_rank: r; the first r features of a key are its value.
        keys_per_step: tokens read per step of the online softmax.

    Returns:
        The weighted latents, to be multiplied by W_uv, in the queries' dtype.
    """
    where = (pages, layer, block_tables, positions)
    partial = partial_attention(queries, *where, value_rank=value_rank, scale=scale, keys_per_step=keys_per_step)
    return partial.values().astype(queries.dtype)


def partial_attention(
    queries: Float[Array, "n t h f"],
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    *,
    value_rank: int,
    scale: float,
    keys_per_step: int = XLA.keys,
    cut: TokenCut | None = None,
) -> Partial:
    """As `latent_attention`, over the tokens that these pages have of each block."""
    own_size = pages.shape[2]
    part, num_parts = (0, 1) if cut is None else cut
    block_size = own_size * num_parts
    blocks_per_step = max(1, min(keys_per_step // own_size, block_tables.shape[1]))
    tokens_per_step = blocks_per_step * block_size
    tables = _pad_columns(block_tables, blocks_per_step)
    n, t, h, _ = queries.shape
    offsets = (jnp.arange(blocks_per_step)[:, None] * block_size + part * own_size + jnp.arange(own_size)).reshape(-1)

    def step(index: Int[Array, ""], found: Partial) -> Partial:
        blocks = jax.lax.dynamic_slice_in_dim(tables, index * blocks_per_step, blocks_per_step, axis=1)
        keys = read_blocks(pages, layer, blocks).astype(queries.dtype)
        key_positions = index * tokens_per_step + offsets
        visible = key_positions[None, None, :] <= positions[:, :, None]
        scores = jnp.einsum("nthf,nsf->nths", queries, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
        values = keys[..., :value_rank]

        def mix(weights: Float[Array, "n t h s"]) -> Float[Array, "n t h r"]:
            weights = weights.astype(queries.dtype)
            return jnp.einsum("nths,nsr->nthr", weights, values, preferred_element_type=jnp.float32)

        return found.with_keys(scores, mix)

    num_steps = (jnp.max(positions) + tokens_per_step) // tokens_per_step
    return jax.lax.fori_loop(0, num_steps, step, Partial.of_no_keys((n, t, h), value_rank))


def merge_over(shard: Shard, partial: Partial) -> Float[Array, "n t own_h r"]:
    """Merges what the devices along `kv_tokens` have of every head's attention. Each device keeps its own heads.

    Source: the merge of online softmaxes, as above; over devices as in Helix (arXiv 2507.07120), section 2.
    """
    peak = shard.max(partial.peak, shard.axes("kv_tokens"))
    decay = jnp.exp(partial.peak - _finite(peak))
    together = jnp.concatenate([partial.mixed, partial.total[..., None]], axis=-1) * decay[..., None]
    together = shard.sum_own_heads(together)
    return _normalise(together[..., :-1], together[..., -1])


def _finite(peak: Float[Array, "*q"]) -> Float[Array, "*q"]:
    """0 where no key was seen, so that -inf minus -inf does not occur."""
    return jnp.where(jnp.isfinite(peak), peak, 0.0)


def _normalise(mixed: Float[Array, "*q r"], total: Float[Array, "*q"]) -> Float[Array, "*q r"]:
    return mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]


def _pad_columns(tables: Int[Array, "n m"], multiple: int) -> Int[Array, "n m2"]:
    """Repeats nothing, reads nothing new: the added columns lie beyond every position and are masked."""
    missing = -tables.shape[1] % multiple
    return jnp.pad(tables, ((0, 0), (0, missing)))
