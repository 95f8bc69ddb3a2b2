"""The device array of KV pages, block-major: one block of one shard is one contiguous byte range.

`pages[block, layer, offset, feature]`. Blocks are addressed by the ids of `kv.blocks`; an id that is not below the
number of blocks is the null page: what is written there is dropped, and a read gives the last block, which must be
masked. Layer-major pages would suit the scan over layers better, and cost a transfer one range per block and layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moonshard.sharding.arrays import Array, Float, Int

Pages = Float[Array, "blocks layers block_size features"]


def allocate_pages(
    num_blocks: int,
    num_layers: int,
    block_size: int,
    num_features: int,
    *,
    dtype: str,
    sharding: jax.sharding.NamedSharding,
    zeros: Callable[..., Any] = jnp.zeros,
) -> Pages:
    """Zeroed pages, made on their devices. `zeros` gives a device's own part, from its shape and dtype."""
    part = sharding.shard_shape((num_blocks, num_layers, block_size, num_features))
    made = jax.shard_map(
        lambda: zeros(part, jnp.dtype(dtype)), mesh=sharding.mesh, in_specs=(), out_specs=sharding.spec, check_vma=False
    )
    return jax.jit(made, out_shardings=sharding)()


class TokenCut(NamedTuple):
    """Which tokens of every block these pages have, where blocks are cut over several devices: context parallel."""

    part: Int[Array, ""]  # of `num_parts`, in the order of the tokens
    num_parts: int


def write_tokens(
    pages: Pages,
    layer: Int[Array, ""],
    block_tables: Int[Array, "n blocks_per_row"],
    positions: Int[Array, "n t"],
    features: Float[Array, "n t features"],
    cut: TokenCut | None = None,
) -> Pages:
    """Writes each token's features at its position; positions below 0 are padding and go to the null page.

    So do tokens that `cut` assigns to other devices' pages. Values that are not finite are written as 0: blocks are
    reused, and a masked key's weight of 0 times NaN would still be NaN.
    """
    num_blocks, _, own_size, _ = pages.shape
    part, num_parts = (0, 1) if cut is None else cut
    block_size = own_size * num_parts
    columns = jnp.clip(positions // block_size, 0, block_tables.shape[1] - 1)
    offsets = positions % block_size - part * own_size
    is_own = (positions >= 0) & (offsets >= 0) & (offsets < own_size)
    blocks = jnp.where(is_own, jnp.take_along_axis(block_tables, columns, axis=1), num_blocks)
    features = features.astype(pages.dtype)
    features = jnp.where(jnp.isfinite(features), features, 0)
    return pages.at[blocks, layer, offsets].set(features, mode="drop")


def read_blocks(
    pages: Pages, layer: Int[Array, ""], blocks: Int[Array, "n b"]
) -> Float[Array, "n b*block_size features"]:
    """The features of whole blocks, in order."""
    found = pages.at[blocks, layer].get(mode="clip")
    return found.reshape(blocks.shape[0], -1, pages.shape[-1])


def copy_blocks(pages: Pages, source: Int[Array, "b"], destination: Int[Array, "b"]) -> Pages:
    """Copies whole blocks; a copy to the null page is dropped."""
    return pages.at[destination].set(pages.at[source].get(mode="clip"), mode="drop")


def copy_blocks_in_turn(pages: Pages, source: Int[Array, "b"], destination: Int[Array, "b"]) -> Pages:
    """Copies whole blocks one after another, in place, and none from the first copy to the null page on.

    A pair may read what one before it has written, which `copy_blocks` would read as it was. On a CPU a copy of one
    block costs one block, and not as many as could be copied.
    """
    is_dropped = destination >= pages.shape[0]

    def copy(index: Int[Array, ""], pages: Pages) -> Pages:
        block = jax.lax.dynamic_index_in_dim(pages, source[index])
        return jax.lax.dynamic_update_index_in_dim(pages, block, destination[index], 0)

    num_copies = jnp.where(jnp.any(is_dropped), jnp.argmax(is_dropped), len(destination))
    return jax.lax.fori_loop(0, num_copies, copy, pages)


def gather_blocks(pages: Pages, source: Int[Array, "b"]) -> Float[Array, "b layers block_size features"]:
    """Whole blocks as an array of their own, in the order asked."""
    return pages.at[source].get(mode="clip")


def scatter_blocks(
    pages: Pages, destination: Int[Array, "b"], payload: Float[Array, "b layers block_size features"]
) -> Pages:
    """Overwrites whole blocks; for the null page nothing is written. Every finite value keeps its bits.

    Values that are not finite are written as 0, as in `write_tokens`. ValueError for a payload of another shape or
    dtype than the pages': it would be cast or broadcast without a word.
    """
    if payload.dtype != pages.dtype or payload.shape[1:] != pages.shape[1:]:
        raise ValueError(f"blocks of {payload.dtype}{payload.shape[1:]} in pages of {pages.dtype}{pages.shape[1:]}")
    return pages.at[destination].set(jnp.where(jnp.isfinite(payload), payload, 0), mode="drop")
