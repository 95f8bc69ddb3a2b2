"""A slab: the host memory that KV bytes are written into by another process, cut into equal cells.

Source and destination have one each, whatever carries the bytes between them. It is page-aligned, so that it can be
registered with a network card as well. Which cells are free is the caller's list. Never trust its contents: a remote
writer may change them at any time, even long after its transfer was given up.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 4096

Bytes = NDArray[np.uint8]


class SlabTooLarge(ValueError):
    """A start-up error: the machine has not that much memory left."""

    def __init__(self, num_cells: int, cell_bytes: int, available_bytes: int):
        super().__init__(
            f"a slab of {num_cells} slots of {cell_bytes} bytes takes {num_cells * cell_bytes / 1024**3:.2f} GiB, and "
            f"{available_bytes / 1024**3:.2f} GiB are available: configure fewer slots"
        )


class Slab:
    """`num_cells` cells of `cell_bytes` each, zeroed, at one address for as long as the slab lives."""

    def __init__(self, num_cells: int, cell_bytes: int, *, available_bytes: int | None = None):
        """`available_bytes` is what the machine has left, where the caller knows; more raises `SlabTooLarge`.

        Nothing else would: memory is promised here and taken when it is written to, when it is too late for an error.
        """
        if num_cells < 1 or cell_bytes < 1:
            raise ValueError(f"a slab needs slots with bytes in them, got {num_cells} of {cell_bytes}")
        if available_bytes is not None and num_cells * cell_bytes > available_bytes:
            raise SlabTooLarge(num_cells, cell_bytes, available_bytes)
        self.num_cells = num_cells
        self.cell_bytes = cell_bytes
        self.bytes = _aligned_zeros(num_cells * cell_bytes)
        self.address = self.bytes.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self.num_cells * self.cell_bytes

    def cell(self, index: int) -> Bytes:
        """A view of one cell, never a copy. IndexError where there is no such cell: a negative one neither."""
        self._check(index)
        return self.bytes[index * self.cell_bytes : (index + 1) * self.cell_bytes]

    def copy_cell(self, index: int, out: Bytes) -> None:
        """Copy a cell into `out` [cell_bytes]. IndexError where there is no such cell."""
        out[:] = self.cell(index)

    def cell_address(self, index: int) -> int:
        self._check(index)
        return self.address + index * self.cell_bytes

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether all of the range lies inside."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_cells:
            raise IndexError(f"slot {index} of {self.num_cells}")


def find_slab(slabs: Iterable[Slab], address: int, num_bytes: int) -> Slab | None:
    """The slab that holds the whole range; a range over two adjacent slabs is in neither."""
    return next((slab for slab in slabs if slab.covers(address, num_bytes)), None)


def _aligned_zeros(num_bytes: int) -> Bytes:
    padded = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -padded.ctypes.data % ALIGNMENT_BYTES
    return padded[start : start + num_bytes]
