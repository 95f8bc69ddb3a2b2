"""Tiers that keep blocks by name alone, and how long it would take to fetch from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.hit_density import HitDensity
from moonshard.kv.store.retention import Lru, Policy, S3Fifo
from moonshard.kv.store.tier import TierCounters

TierName = Literal["host", "ssd", "store"]
RetentionName = Literal["lru", "s3_fifo", "hit_density"]
RETENTION: Mapping[RetentionName, Callable[[], Policy]] = {"lru": Lru, "s3_fifo": S3Fifo, "hit_density": HitDensity}

# ms for a block, and for a fetch: 36 MB over PCIe at 24 GB/s, from a disk at 6 GB/s, over 100 Gb/s at 10 GB/s
FETCH_MS: Mapping[TierName, tuple[float, float]] = {"host": (1.5, 0.2), "ssd": (6.0, 0.5), "store": (3.6, 2.0)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    name: TierName
    num_blocks: int  # of 512 tokens, that it keeps
    block_ms: float  # that fetching takes for each block
    fixed_ms: float  # and for each fetch
    retention: RetentionName = "lru"

    @property
    def is_shared(self) -> bool:
        """One for all workers; of others each has its own."""
        return self.name == "store"

    def fetch_s(self, num_blocks: int) -> float:
        return (self.fixed_ms + self.block_ms * num_blocks) / 1e3


def tier_of(text: str, retention: RetentionName = "lru") -> TierConfig:
    """From NAME:BLOCKS[:BLOCK_MS[:FIXED_MS]][:RETENTION]. ValueError where it is not that."""
    first, *parts = text.split(":")
    names: dict[str, TierName] = {each: each for each in FETCH_MS}
    policies: dict[str, RetentionName] = {each: each for each in RETENTION}
    if (name := names.get(first)) is None:
        raise ValueError(f"{first!r} is none of {', '.join(names)}")
    own_retention = policies.get(parts[-1]) if parts else None
    if own_retention is not None:
        parts.pop()
    if not 1 <= len(parts) <= 3:
        raise ValueError("expected NAME:BLOCKS[:BLOCK_MS[:FIXED_MS]][:RETENTION]")
    if not parts[0].isascii() or not parts[0].isdigit() or int(parts[0]) < 1:
        raise ValueError(f"{parts[0]!r} is no number of blocks")
    block_ms, fixed_ms = (*map(_milliseconds, parts[1:]), *FETCH_MS[name][len(parts) - 1 :])
    return TierConfig(
        name=name, num_blocks=int(parts[0]), block_ms=block_ms, fixed_ms=fixed_ms, retention=own_retention or retention
    )


def _milliseconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"{text!r} is no number of milliseconds, and no policy of {', '.join(RETENTION)}")
    return found


class _Names:
    """Blocks of no bytes, so that a name is all there is to keep."""

    block_bytes = 0

    def __init__(self, config: TierConfig):
        self.config = config
        self.name: str = config.name
        self.is_shared = config.is_shared
        self._here = set[BlockName]()
        self._policy = RETENTION[config.retention]()
        self._num_read = self._num_written = self._num_evicted = 0

    @property
    def counters(self) -> TierCounters:
        return TierCounters(num_hits=self._num_read, num_kept=self._num_written, num_evicted=self._num_evicted)

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        self._policy.link(names)
        return [name in self._here for name in names]

    def has(self, names: Sequence[BlockName]) -> Sequence[bool | None]:
        return self.find(names)

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        del out
        self._policy.touch(names)
        found = [name in self._here for name in names]
        self._num_read += sum(found)
        return found

    def held(self) -> list[BlockName]:
        return []

    def upkeep(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """Nothing is open."""


class MemoryNames(_Names):
    """Keeps what the tier in a worker's memory does (`kv.store.host`): room is made for a block before it is there."""

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        del blocks
        self._policy.touch(names)
        return [self._put(*each) for each in zip(names, (None, *names), strict=False)]

    def _put(self, name: BlockName, parent: BlockName | None) -> bool:
        """Not where the block before it is not: it would not be found."""
        if name in self._here:
            return True
        if (parent is not None and parent not in self._here) or not self._make_room(parent):
            return False
        self._here.add(name)
        self._policy.insert(name, parent)
        self._num_written += 1
        return True

    def _make_room(self, parent: BlockName | None) -> bool:
        """For a block behind `parent`; False where only that could."""
        if len(self._here) < self.config.num_blocks:
            return True
        before = None if parent is None else self._policy.retained(parent)
        lost = self._policy.evict()
        if lost is None:
            return False
        if before is not None and lost == parent:
            self._policy.insert(lost, before.parent)
            return False
        self._here.remove(lost)
        self._num_evicted += 1
        return True


class FileNames(_Names):
    """Keeps what the tier in files does (`kv.store.ssd.space`): a chain comes as a whole, and then what has to goes."""

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        del blocks
        self._policy.touch(names)
        parents = dict(zip(names[1:], names, strict=False))
        new = {name for name in names if name not in self._here}
        for name in reversed(names):
            if name in new:
                self._policy.insert(name, parents.get(name))
        self._here.update(new)
        self._policy.link(names)
        lost = self._evict_to_limit()
        self._num_written += len(new - lost)
        self._num_evicted += len(lost - new)
        return [name in self._here for name in names]

    def _evict_to_limit(self) -> set[BlockName]:
        lost = set[BlockName]()
        for _ in range(len(self._here) - self.config.num_blocks):
            if (name := self._policy.evict()) is None:
                break
            self._here.remove(name)
            lost.add(name)
        return lost


NamesTier = MemoryNames | FileNames


def new_tier(config: TierConfig) -> NamesTier:
    return FileNames(config) if config.name == "ssd" else MemoryNames(config)
