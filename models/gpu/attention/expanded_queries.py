"""Which blocks of keys the queries of `expanded` see: by warpgroups, and by the tiles that two of them share.

Nothing is computed of a block that none of a warpgroup's queries sees.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from moonshard.models.gpu.attention.expanded_keys import KEYS, Row
from moonshard.sharding.arrays import Array, Int

ROWS = 64  # queries of a warpgroup
NUM_COMPUTING = 2
TILE = NUM_COMPUTING * ROWS
NOWHERE = 1 << 30  # beyond every block


class Seen(NamedTuple):
    """What each query sees of the row of keys, and each warpgroup's queries of its blocks."""

    first: Int[Array, "q"]
    stop: Int[Array, "q"]  # 0: padding
    blocks: Int[Array, "warpgroups 4"]  # those that some see, from and to; those that all see whole, from and to


def seen_by(row: Row) -> Seen:
    """For queries one after another, padded to whole tiles."""
    first, stop = (jnp.pad(each.reshape(-1), (0, -each.size % TILE)) for each in (row.first, row.stop))
    starts, stops = first.reshape(-1, ROWS), stop.reshape(-1, ROWS)
    is_there = stops > 0
    begin = jnp.where(is_there, starts, NOWHERE).min(axis=1) // KEYS
    end = (stops.max(axis=1) + (KEYS - 1)) // KEYS
    whole_from = jnp.where(is_there, starts, 0).max(axis=1) // KEYS  # a sequence begins with a block
    whole_to = jnp.where(is_there, stops, NOWHERE).min(axis=1) // KEYS
    blocks = jnp.stack([begin, end, whole_from, whole_to], axis=1)
    return Seen(first, stop, blocks.astype(jnp.int32))


class Tile(NamedTuple):
    """Which queries of which head, which blocks of this panel they see, and which of these a warpgroup's own do."""

    head: Any
    rows: Any  # of the warpgroup
    panel_first: Any  # block
    panel_stop: Any
    begin: Any  # of both
    stop: Any
    own: tuple[Any, Any, Any, Any]  # as `Seen.blocks`

    @property
    def own_begin(self) -> Any:
        return jnp.minimum(jnp.maximum(self.own[0], self.begin), self.stop)

    @property
    def own_stop(self) -> Any:
        return jnp.maximum(jnp.minimum(self.own[1], self.stop), self.own_begin)


def tile_of(num_queries: int, num_blocks: int, blocks: Any, panel: Any, warpgroup: Any) -> Tile:
    """A program's, of a panel of `num_blocks` blocks, where `blocks` are those of `Seen`.

    The tiles of a head follow one another, so that its keys are read from the cache; the longest come first.
    """
    program, num_tiles = jax.lax.axis_index("tile"), jnp.int32(num_queries // TILE)
    head, tile = jax.lax.div(program, num_tiles), num_tiles - 1 - jax.lax.rem(program, num_tiles)
    first = panel * num_blocks
    shares = [[blocks[tile * NUM_COMPUTING + each, column] for column in range(4)] for each in range(2)]
    own = tuple(jnp.where(warpgroup == 0, one, other) for one, other in zip(*shares, strict=True))
    return Tile(
        head=head,
        rows=pl.ds((tile * NUM_COMPUTING + warpgroup) * ROWS, ROWS),
        panel_first=first,
        panel_stop=first + num_blocks,
        begin=jnp.maximum(jnp.minimum(shares[0][0], shares[1][0]), first),
        stop=jnp.minimum(jnp.maximum(shares[0][1], shares[1][1]), first + num_blocks),
        own=(own[0], own[1], own[2], own[3]),
    )
