"""A slab whose blocks are cut as a layout says: one owner's region after another's, and within each, cell after cell.

Between meshes that differ, bytes are written where the receiving devices want them, so that no device reads what
another one carries. The host sees whole blocks all the same: they are cut here as they are staged, and put together as
they are copied out. With one owner a cell is a block as it stands.
"""

from collections.abc import Mapping
from typing import NamedTuple

from numpy.typing import NDArray

from moonshard.kv.slab import Bytes, Slab
from moonshard.sharding.layout import GroupLayout, Tile


class Region(NamedTuple):
    """One owner's part of a slab: where cell 0 begins, and how far it is to the next."""

    address: int
    cell_bytes: int


class SlabShards:
    """Views of a slab, one for each owner. `group` tiles the block without replicas.

    ValueError where a cell of the slab has not exactly the bytes of a block.
    """

    def __init__(self, slab: Slab, group: GroupLayout):
        block = group.block
        token_bytes = block.num_features * block.itemsize_bytes
        self.cell_bytes = block.num_layers * block.block_size * token_bytes
        if slab.cell_bytes != self.cell_bytes:
            raise ValueError(f"slots of {slab.cell_bytes} bytes for blocks of {self.cell_bytes}")
        self._slab = slab
        self._block_shape = (block.num_layers, block.block_size, token_bytes)
        self._parts: list[tuple[tuple[slice, ...], NDArray]] = []
        regions, start = {}, 0
        for shard in group.shards:
            cut = _cut(shard.tile, block.itemsize_bytes)
            shape = tuple(part.stop - part.start for part in cut)
            num_bytes = shape[0] * shape[1] * shape[2]
            whole = slab.bytes[start : start + slab.num_cells * num_bytes]
            self._parts.append((cut, whole.reshape(slab.num_cells, *shape)))
            regions[shard.owner] = Region(address=slab.address + start, cell_bytes=num_bytes)
            start += slab.num_cells * num_bytes
        self.regions: Mapping[int, Region] = regions

    def fill_cell(self, index: int, block: Bytes) -> None:
        """Write a whole block [cell_bytes] into a cell. IndexError where there is no such cell."""
        self._check(index)
        whole = block.reshape(self._block_shape)
        for cut, part in self._parts:
            part[index] = whole[cut]

    def copy_cell(self, index: int, out: Bytes) -> None:
        """Copy a cell as a whole block into `out` [cell_bytes]. IndexError where there is no such cell."""
        self._check(index)
        whole = out.reshape(self._block_shape)
        for cut, part in self._parts:
            whole[cut] = part[index]

    def clear_cell(self, index: int) -> None:
        """Nothing of what it held is left. IndexError where there is no such cell."""
        self._check(index)
        for _, part in self._parts:
            part[index] = 0

    def _check(self, index: int) -> None:
        if not 0 <= index < self._slab.num_cells:
            raise IndexError(f"slot {index} of {self._slab.num_cells}")


def _cut(tile: Tile, itemsize_bytes: int) -> tuple[slice, slice, slice]:
    """Where a tile lies in a block's bytes [layers, tokens, features * itemsize]."""
    features = slice(tile.features.start * itemsize_bytes, tile.features.stop * itemsize_bytes)
    return slice(*tile.layers), slice(*tile.tokens), features
