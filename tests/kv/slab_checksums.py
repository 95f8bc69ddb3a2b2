"""The checksums that a manifest would carry, for tests that write into slabs themselves."""

from collections.abc import Sequence

from moonshard.kv.slab import Slab
from moonshard.kv.transfer import checksum


def checksums(slab: Slab, cells: Sequence[int]) -> tuple[int, ...]:
    """The checksums of whole cells, as they are now."""
    return tuple(checksum(slab.cell(cell)) for cell in cells)
