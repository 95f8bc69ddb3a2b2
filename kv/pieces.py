"""The pieces of a block that are checked one by one, so that nobody needs more of a block than is his to check it.

A piece is what one shard of the sender and one of the receiver have in common (`sharding.reshard.pieces`): of several
processes, on either side, each has whole pieces. Who sends says what they are.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from moonshard.kv.slab import Bytes
from moonshard.kv.transfer import checksum
from moonshard.sharding.layout import BlockShape, LayoutMismatch, Tile, bytes_shape, cut_of, intersect, sizes

NUM_CACHED_CUTS = 256  # of a worker's partitions with its peers' layouts


class BlockPieces:
    """The pieces of blocks of which this process has a part, `own`; see `kv.transfer.Pieces`."""

    def __init__(self, block: BlockShape, own: Tile, pieces: tuple[Tile, ...]):
        """No `pieces`: the block as a whole.

        Raises:
            LayoutMismatch: those inside `own` do not make it up, or one is inside in part.
        """
        pieces = pieces or (block.tile,)
        self.num_pieces = len(pieces)
        self._shape = bytes_shape(own, block.itemsize_bytes)
        inside = _inside(own, pieces) if math.prod(self._shape) else []
        self._cuts = {index: cut_of(pieces[index], block.itemsize_bytes, own) for index in inside}

    def checksums(self, block: Bytes) -> Mapping[int, int]:
        """Of a block's part [bytes of `own`], by the piece's number."""
        whole = block.reshape(self._shape)
        return {index: checksum(np.ascontiguousarray(whole[cut])) for index, cut in self._cuts.items()}


pieces_of = lru_cache(maxsize=NUM_CACHED_CUTS)(BlockPieces)


def _inside(own: Tile, pieces: tuple[Tile, ...]) -> list[int]:
    tiles = np.array(pieces).reshape(-1, 3, 2)
    starts, stops = intersect(tiles, np.array([own]))
    is_shared = (starts < stops).all(axis=-1)[:, 0]
    is_whole = ((starts[:, 0] == tiles[..., 0]) & (stops[:, 0] == tiles[..., 1])).all(axis=-1)
    if (is_shared & ~is_whole).any():
        raise LayoutMismatch("pieces", f"{pieces[int(np.argmax(is_shared & ~is_whole))]} is in part outside {own}")
    inside = tiles[is_shared]
    starts, stops = intersect(inside, inside)
    overlaps = np.triu((starts < stops).all(axis=-1), k=1).any()
    if overlaps or sizes(inside).sum() != sizes(np.array([own])).sum():
        raise LayoutMismatch("pieces", f"{len(inside)} pieces do not make up {own}")
    return np.flatnonzero(is_shared).tolist()
