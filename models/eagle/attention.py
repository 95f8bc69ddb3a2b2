"""Attention over paged keys and values, of heads that share them in groups, as Llama has it.

A head's features are its values, then its keys: [k k]. A layer of the pages has as many whole heads as fit in it; where
not one does, the features of all heads lie one after another in as many layers as that takes. Over layers with whole
heads the kernel of `models.native` attends, as over latents whose values are a part of them; else keys are read some
blocks at a time, as `models.attention` reads latents. Einsum alphabet as in `weights`; n row, t query, s key, r the
heads of a group.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, read_blocks, write_tokens
from moonshard.models.attention import Partial
from moonshard.models.machines import XLA, Machine
from moonshard.models.native import attention as native_attention
from moonshard.sharding.arrays import Array, Float, Int

type Heads = Float[Array, "n t g k"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedHeads:
    """Where the heads of one layer of a model lie, in pages whose tokens have so many features a layer."""

    num_heads: int
    head_dim: int
    num_features: int
    first_layer: int = 0

    @property
    def per_layer(self) -> int:
        """Whole heads of a layer; 0: heads lie across layers."""
        return min(self.num_heads, self.num_features // (2 * self.head_dim))

    @property
    def num_layers(self) -> int:
        if self.per_layer:
            return -(-self.num_heads // self.per_layer)
        return -(-2 * self.num_heads * self.head_dim // self.num_features)

    @property
    def _width(self) -> int:
        """Features of a layer that its heads take."""
        return self.per_layer * 2 * self.head_dim or self.num_features

    def write(
        self, pages: Pages, tables: Int[Array, "n m"], positions: Int[Array, "n t"], keys: Heads, values: Heads
    ) -> Pages:
        both = jnp.concatenate([values, keys], axis=-1)
        flat = _filled(both.reshape(*both.shape[:2], -1), self.num_layers * self._width)
        for index, part in enumerate(jnp.split(flat, self.num_layers, axis=-1)):
            layer = jnp.int32(self.first_layer + index)
            pages = write_tokens(pages, layer, tables, positions, _filled(part, self.num_features))
        return pages

    def read(self, pages: Pages, blocks: Int[Array, "n b"]) -> tuple[Heads, Heads]:
        """The keys and values of whole blocks, in order."""
        layers = [jnp.int32(self.first_layer + index) for index in range(self.num_layers)]
        parts = [read_blocks(pages, layer, blocks)[..., : self._width] for layer in layers]
        flat = jnp.concatenate(parts, axis=-1)[..., : 2 * self.num_heads * self.head_dim]
        both = flat.reshape(*flat.shape[:2], self.num_heads, 2 * self.head_dim)
        values, keys = jnp.split(both, 2, axis=-1)
        return keys, values


def _filled(x: Float[Array, "n t f"], num_features: int) -> Float[Array, "n t g"]:
    """With 0 behind it."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, num_features - x.shape[-1])))


def grouped_attention(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    heads: PagedHeads,
    machine: Machine = XLA,
) -> Float[Array, "n t h k"]:
    """Of queries over all that the pages have of these heads up to each one's own position.

    Args:
        positions: of the queries; below 0: padding, whose result is zero.

    Returns:
        The mixed values, in the queries' dtype.
    """
    if machine.reads_in_place and heads.per_layer:
        return _by_kernel(queries, pages, block_tables, positions, heads)
    n, t, h, k = queries.shape
    block_size = pages.shape[2]
    per_step = max(1, min(machine.keys // block_size, block_tables.shape[1]))
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % per_step)))  # beyond every position: masked
    grouped = queries.reshape(n, t, heads.num_heads, h // heads.num_heads, k)
    num_tokens = per_step * block_size

    def step(index: Int[Array, ""], found: Partial) -> Partial:
        blocks = jax.lax.dynamic_slice_in_dim(tables, index * per_step, per_step, axis=1)
        keys, values = (each.astype(queries.dtype) for each in heads.read(pages, blocks))
        visible = (index * num_tokens + jnp.arange(num_tokens))[None, None] <= positions[..., None]
        scores = jnp.einsum("ntgrk,nsgk->ntgrs", grouped, keys, preferred_element_type=jnp.float32) * k**-0.5
        scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)

        def mix(weights: Float[Array, "n t g r s"]) -> Float[Array, "n t g r k"]:
            weights = weights.astype(queries.dtype)
            return jnp.einsum("ntgrs,nsgk->ntgrk", weights, values, preferred_element_type=jnp.float32)

        return found.with_keys(scores, mix)

    num_steps = (jnp.max(positions) + num_tokens) // num_tokens
    none = Partial.of_no_keys((n, t, heads.num_heads, h // heads.num_heads), k)
    return jax.lax.fori_loop(0, num_steps, step, none).values().astype(queries.dtype).reshape(n, t, h, k)


def _by_kernel(
    queries: Float[Array, "n t h k"],
    pages: Pages,
    block_tables: Int[Array, "n m"],
    positions: Int[Array, "n t"],
    heads: PagedHeads,
) -> Float[Array, "n t h k"]:
    """Layer by layer: a query is 0 at all features but its own head's keys, and takes its own head's values."""
    k, group = heads.head_dim, queries.shape[2] // heads.num_heads
    found = []
    for layer in range(heads.num_layers):
        first = layer * heads.per_layer
        num = min(heads.per_layer, heads.num_heads - first)
        wide = []
        for place in range(num):
            begin = (2 * place + 1) * k
            own = queries[:, :, (first + place) * group : (first + place + 1) * group]
            wide.append(jnp.pad(own, ((0, 0), (0, 0), (0, 0), (begin, heads.num_features - begin - k))))
        where = (pages, jnp.int32(heads.first_layer + layer), block_tables, positions)
        rank = 2 * (num - 1) * k + k
        mixed = native_attention.latent_attention(jnp.concatenate(wide, axis=2), *where, value_rank=rank, scale=k**-0.5)
        found += [
            mixed[:, :, place * group : (place + 1) * group, 2 * place * k : (2 * place + 1) * k]
            for place in range(num)
        ]
    return jnp.concatenate(found, axis=2)
