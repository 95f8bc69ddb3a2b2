"""Blocks whose bytes follow from their names, tiers of a few of them, and what their files say."""

import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from moonshard.kv.prefix import BlockName, block_names
from moonshard.kv.slab import Bytes
from moonshard.kv.store.retention import Lru, Policy
from moonshard.kv.store.ssd.extents import HEADER, Headers, extent_bytes, store_bytes
from moonshard.kv.store.ssd.files import FileTier

LAYOUT = b"a layout"
BLOCK_BYTES = 5000  # two sectors of pages, and no whole number of them
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def chain(number: int, length: int, start: int = 0) -> list[BlockName]:
    """Chains of one parity have their first two blocks in common."""
    tokens = [number % 2, number % 2, *[number + 10] * length]
    return block_names(b"", tokens[:length], 1)[start:]


@cache
def block(name: BlockName, block_bytes: int = BLOCK_BYTES) -> Bytes:
    return np.random.default_rng(list(name)).integers(0, 256, block_bytes, np.uint8)


def blocks(names: Sequence[BlockName], block_bytes: int = BLOCK_BYTES) -> Bytes:
    return np.array([block(name, block_bytes) for name in names], np.uint8).reshape(len(names), block_bytes)


def open_tier(
    path: Path, num_blocks: int, *, policy: Policy | None = None, block_bytes: int = BLOCK_BYTES, direct: bool = False
) -> FileTier:
    """Of as many blocks as that."""
    return FileTier.open(
        path,
        block_bytes=block_bytes,
        layout=LAYOUT,
        max_bytes=store_bytes(num_blocks, block_bytes),
        policy=policy or Lru(),
        direct=direct,
    )


def keep(tier: FileTier, names: Sequence[BlockName]) -> list[bool]:
    return tier.keep(names, blocks(names, tier.block_bytes))


def fetch(tier: FileTier, names: Sequence[BlockName]) -> list[bool]:
    """Never other bytes than were kept."""
    out = np.zeros((len(names), tier.block_bytes), np.uint8)
    came = tier.fetch(names, out)
    for name, row, is_here in zip(names, out, came, strict=True):
        assert not is_here or np.array_equal(row, block(name, tier.block_bytes))
    return came


def store_folder(path: Path) -> Path:
    return path / LAYOUT.hex()


def headers_on_disk(path: Path) -> Headers:
    return np.fromfile(store_folder(path) / "table", HEADER)


def extent_on_disk(path: Path, name: BlockName) -> int:
    return headers_on_disk(path)["name"].tolist().index(name)


def flip(file: Path, offset: int, bit: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))


def rot(path: Path, name: BlockName, offset: int = 0) -> None:
    """One bit of a block's payload."""
    flip(store_folder(path) / "payload", extent_on_disk(path, name) * extent_bytes(BLOCK_BYTES) + offset)


def left_behind(path: Path, copy: Path) -> Path:
    """A copy of what the files hold at this moment, as of a process that was killed: its lock is gone."""
    shutil.copytree(path, copy)
    return copy
