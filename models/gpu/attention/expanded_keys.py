"""The keys of a step's sequences in one row, a panel of which is expanded at a time: what `expanded` reads.

A panel is bounded in bytes, whatever contexts are there. How much of it is used is known on the card alone, so it is
expanded by a kernel that ends with the last used block (`grouped_product`): XLA's product would always do all of it,
four times what a prompt of 2,048 tokens needs. Expanding in the attention kernel itself, for each 128 queries anew,
would do more products than the attention.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models.gpu.experts.grouped_product import grouped_product
from moonshard.models.gpu.experts.tiles import MAX_ROWS, Blocks
from moonshard.models.gpu.tensor_cores import Interpret
from moonshard.sharding.arrays import Array, Float, Int

KEYS = MAX_ROWS  # of a block, all of one sequence


class Row(NamedTuple):
    """Where the keys of each sequence lie in the row: a sequence begins with a block, and is zeros to a block's end."""

    tables: Int[Array, "n m"]  # of sequences, as many as there could be
    starts: Int[Array, "n"]
    num_keys: Int[Array, "n"]
    num_blocks: Int[Array, ""]  # of the whole row
    first: Int[Array, "n t"]  # where a query's sequence begins
    stop: Int[Array, "n t"]  # one past the last key that it sees; 0: padding


class Panel(NamedTuple):
    """Keys and values of all heads for some blocks of the row; the rotary part of keys is the end of latents."""

    latents: Float[Array, "p f"]
    keys: Float[Array, "p h_nope"]
    values: Float[Array, "p h_v"]


def row_of(block_tables: Int[Array, "n m"], positions: Int[Array, "n t"]) -> Row:
    """Neighbouring rows of queries with one block table are one sequence."""
    n = len(block_tables)
    is_new = jnp.any(block_tables[1:] != block_tables[:-1], axis=1)
    sequence_of = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_new, dtype=jnp.int32)])
    num_keys = jax.ops.segment_max(positions.max(axis=1) + 1, sequence_of, num_segments=n)
    num_keys = jnp.maximum(num_keys, 0)  # of those that there are not
    num_blocks = (num_keys + (KEYS - 1)) // KEYS
    starts = (jnp.cumsum(num_blocks) - num_blocks) * KEYS
    first = starts[sequence_of][:, None]
    tables = block_tables[jnp.searchsorted(sequence_of, jnp.arange(n)).clip(0, n - 1)]
    stop = jnp.where(positions >= 0, first + positions + 1, 0)
    return Row(tables, starts, num_keys, num_blocks.sum(), jnp.broadcast_to(first, positions.shape), stop)


def expand_panel(
    row: Row,
    index: Int[Array, ""],
    num_blocks: int,
    pages: Pages,
    layer: Int[Array, ""],
    k_up: Float[Array, "h nope r"],
    v_up: Float[Array, "h v r"],
    *,
    num_processors: int | None,
    interpret: Interpret,
) -> Panel:
    """Panel `index` of `num_blocks` blocks; those beyond the row are left unwritten."""
    latents = _gather(row, index * (num_blocks * KEYS), num_blocks * KEYS, pages, layer)
    num_used = jnp.clip(row.num_blocks - index * num_blocks, 0, num_blocks)
    where = jnp.stack([jnp.zeros_like(num_used), num_used]).astype(jnp.int32)
    blocks = Blocks(num_rows=KEYS, experts=jnp.zeros(num_blocks, jnp.int32), where=where)

    def expand(up: Float[Array, "h o r"], name: str) -> Float[Array, "p h_o"]:
        weights = up.reshape(1, 1, 1, -1, up.shape[2])
        return grouped_product(
            latents, weights, blocks, num_processors=num_processors, kernel_name=name, interpret=interpret
        )

    return Panel(latents, expand(k_up, "expand_keys"), expand(v_up, "expand_values"))


def _gather(row: Row, first: Int[Array, ""], count: int, pages: Pages, layer: Int[Array, ""]) -> Float[Array, "p f"]:
    """The latents of `count` keys of the row from `first` on; zeros where there is none, whatever lies there."""
    pool, _, block_size, num_features = pages.shape
    size = math.gcd(block_size, KEYS)  # keys of a piece, all in one block of the pages
    at = first + jnp.arange(0, count, size)
    sequence = jnp.searchsorted(row.starts, at, side="right") - 1
    offset = at - row.starts[sequence]
    column = jnp.minimum(offset // block_size, row.tables.shape[1] - 1)
    block = row.tables[sequence, column].clip(0, pool - 1)

    def piece(block: Int[Array, ""], within: Int[Array, ""]) -> Float[Array, "size f"]:
        return jax.lax.dynamic_slice(pages, (block, layer, within, 0), (1, 1, size, num_features))[0, 0]

    latents = jax.vmap(piece)(block, (offset % block_size).astype(block.dtype))
    is_there = offset[:, None] + jnp.arange(size) < row.num_keys[sequence][:, None]
    return jnp.where(is_there[..., None], latents, 0).reshape(count, num_features)
