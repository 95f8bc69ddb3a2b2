"""A file's bytes, mapped read-only: they come in as they are touched, and leave this process again once they were read.

Nothing is read but the pages that are touched. Else Linux reads around each of them as much as it is told to read ahead
of files, 8 MiB on some machines, and of a folder as large as memory much is thrown away before its turn comes: one was
read 2.6 times. What is about to be touched as a whole is announced (`expect`), and read in large pieces.

Mapped pages count as this process's memory for as long as they stay mapped, although the system keeps one copy for
all. A worker that has read its weights needs none of them.
"""

import mmap
import os
import weakref
from pathlib import Path

import numpy as np

PIECE_BYTES = 128 << 10  # the least that Linux reads ahead at once, unless a machine's owner set it lower


class MappedFile:
    """The file at `path`, which is not empty. OSError where it cannot be mapped."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def expect(self, start: int, end: int) -> None:
        """Has bytes `start` to `end` read in the background."""
        for piece in range(start, end, PIECE_BYTES):
            length = min(PIECE_BYTES, end - piece)
            os.posix_fadvise(self._descriptor, piece, length, os.POSIX_FADV_WILLNEED)  # without Python's lock

    def release(self, start: int, end: int) -> None:
        """Takes bytes `start` to `end` out of this process's memory, as far as they are whole pages; what touches them
        later finds them again.
        """
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
