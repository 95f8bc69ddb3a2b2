"""A slab whose blocks are cut as a layout says: one owner's region after another's, and within each, cell after cell.

Between meshes that differ, bytes are written where the receiving devices want them, so that no device reads what
another one carries. The host sees blocks all the same, whole or as much of them as this process has: they are cut here
as they are staged, and put together as they are copied out. With one owner a cell is a block as it stands.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonshard.kv.slab import Bytes, Slab
from moonshard.sharding.layout import GroupLayout, ShardLayout, Span, Tile, bytes_shape, cut_of, sizes


class Region(NamedTuple):
    """One owner's part of a slab: where cell 0 begins, and how far it is to the next."""

    address: int
    cell_bytes: int


def own_tile(group: GroupLayout, held: Collection[int] | None) -> Tile:
    """What the owners in `held` (None: all) have of a block together. ValueError where that is no product of ranges.

    Nobody has no layers.
    """
    shards = _held(group, held)
    if not shards:
        return group.block.tile._replace(layers=Span(0, 0))
    tiles = np.array([shard.tile for shard in shards])
    spans = zip(tiles[..., 0].min(axis=0).tolist(), tiles[..., 1].max(axis=0).tolist(), strict=True)
    own = Tile(*(Span(*span) for span in spans))
    if sizes(np.array([own])).sum() != sizes(tiles).sum():
        raise ValueError(f"owners {[shard.owner for shard in shards]} have no part of a block that is in one piece")
    return own


class SlabShards:
    """Views of a slab, or of some of its bytes, one for each owner. `group` tiles the block without replicas.

    A block here is what the owners in `held` have of one; None: all of it.
    """

    def __init__(
        self,
        slab: Slab,
        group: GroupLayout,
        held: Collection[int] | None = None,
        *,
        start: int = 0,
        num_cells: int | None = None,
    ):
        """In the slab's bytes from `start` on, by default all of its cells.

        ValueError where these are not exactly the bytes of so many blocks, and as `own_tile` raises it.
        """
        self.num_cells = slab.num_cells if num_cells is None else num_cells
        self.own = own_tile(group, held)
        self.block_shape = bytes_shape(self.own, group.block.itemsize_bytes)
        self.cell_bytes = math.prod(self.block_shape)
        if num_cells is None and slab.cell_bytes != self.cell_bytes:
            raise ValueError(f"slots of {slab.cell_bytes} bytes for blocks of {self.cell_bytes}")
        self._parts: list[tuple[tuple[slice, ...], NDArray]] = []
        regions = {}
        for shard in _held(group, held):
            shape = bytes_shape(shard.tile, group.block.itemsize_bytes)
            num_bytes = shape[0] * shape[1] * shape[2]
            whole = slab.bytes[start : start + self.num_cells * num_bytes]
            cut = cut_of(shard.tile, group.block.itemsize_bytes, self.own)
            self._parts.append((cut, whole.reshape(self.num_cells, *shape)))
            regions[shard.owner] = Region(address=slab.address + start, cell_bytes=num_bytes)
            start += self.num_cells * num_bytes
        self.regions: Mapping[int, Region] = regions

    def fill_cell(self, index: int, block: Bytes) -> None:
        """Write a block [cell_bytes] into a cell. IndexError where there is no such cell."""
        self._check(index)
        whole = block.reshape(self.block_shape)
        for cut, part in self._parts:
            part[index] = whole[cut]

    def copy_cell(self, index: int, out: Bytes) -> None:
        """Copy a cell as a block into `out` [cell_bytes]. IndexError where there is no such cell."""
        self._check(index)
        whole = out.reshape(self.block_shape)
        for cut, part in self._parts:
            whole[cut] = part[index]

    def clear_cell(self, index: int) -> None:
        """Nothing of what it held is left. IndexError where there is no such cell."""
        self._check(index)
        for _, part in self._parts:
            part[index] = 0

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_cells:
            raise IndexError(f"slot {index} of {self.num_cells}")


def cut_by_partition(
    slab: Slab, group: GroupLayout, held: Sequence[Collection[int]], num_cells: int
) -> tuple[SlabShards, ...]:
    """The slab as so many cells for each partition, of which `held` says which owners are here.

    ValueError where it has not the bytes.
    """
    cell_bytes = [num_held_bytes(group, owners) for owners in held]
    if num_cells * sum(cell_bytes) > slab.num_bytes:
        raise ValueError(f"{slab.num_bytes} bytes for {num_cells} slots of {sum(cell_bytes)} bytes")
    starts = np.cumsum([0, *cell_bytes])[:-1] * num_cells
    return tuple(
        SlabShards(slab, group, owners, start=start, num_cells=num_cells)
        for owners, start in zip(held, starts.tolist(), strict=True)
    )


def num_held_bytes(group: GroupLayout, held: Collection[int]) -> int:
    """How many bytes of a block these owners have. ValueError as `own_tile` raises it."""
    return math.prod(bytes_shape(own_tile(group, held), group.block.itemsize_bytes))


def _held(group: GroupLayout, held: Collection[int] | None) -> list[ShardLayout]:
    return [shard for shard in group.shards if held is None or shard.owner in held]
