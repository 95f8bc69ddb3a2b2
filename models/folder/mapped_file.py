"""A file's bytes, mapped read-only: they come in as they are touched, and leave this process again once they were read.

Mapped pages count as this process's memory for as long as they stay mapped, although the system keeps one copy for
all. A worker that has read its weights needs none of them.
"""

import mmap
from pathlib import Path

import numpy as np


class MappedFile:
    """The file at `path`, which is not empty. OSError where it cannot be mapped."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, end: int) -> None:
        """Takes bytes `start` to `end` out of this process's memory, as far as they are whole pages; what touches them
        later finds them again.
        """
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
