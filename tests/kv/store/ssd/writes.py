"""What a tier writes, seen on its way: written down, cut short, refused, or with something else done in between."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

RealWrite = Callable[[int, Sequence, int], int]


class Killed(BaseException):
    """The process ends here, and not by an exception: nothing of it may run any more."""


class Write(NamedTuple):
    file: str
    offset: int
    data: bytes


def name_of(descriptor: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))


class Writes:
    """Written down in their order, and done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.done = list[Write]()
        self.kill_at: tuple[int, int] | None = None  # which write, and how many of its bytes are still written
        self._real = os.pwritev
        monkeypatch.setattr(os, "pwritev", self._write)

    def _write(self, descriptor: int, buffers: Sequence, offset: int) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        if self.kill_at is not None and self.kill_at[0] == len(self.done):
            self._real(descriptor, [data[: self.kill_at[1]]], offset)
            raise Killed
        self.done.append(Write(name_of(descriptor), offset, data))
        return self._real(descriptor, buffers, offset)
