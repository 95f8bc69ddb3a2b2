"""A tier in memory that outlives workers and does what its script says: for tests of what is around tiers."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.tier import TierCounters


@dataclass
class KeptTier:
    """`held` events keep every call of that kind waiting until they are set; blocks in `broken` do not come; one that
    `is_off` has nothing and keeps nothing.
    """

    block_bytes: int
    name: str = "store"
    is_shared: bool = True
    is_off: bool = False
    kept: dict[BlockName, bytes] = field(default_factory=dict)
    broken: set[BlockName] = field(default_factory=set)
    find_may_go: threading.Event = field(default_factory=threading.Event)
    fetch_may_go: threading.Event = field(default_factory=threading.Event)
    is_fetching: threading.Event = field(default_factory=threading.Event)
    num_fetched: int = 0
    num_writes: int = 0
    num_asked_to_write: int = 0  # times that a writer looked what is here

    def __post_init__(self):
        self.find_may_go.set()
        self.fetch_may_go.set()

    @property
    def counters(self) -> TierCounters:
        return TierCounters(num_hits=self.num_fetched, bytes_held=len(self.kept) * self.block_bytes)

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        self.find_may_go.wait()
        return [name in self.kept and not self.is_off for name in names]

    def has(self, names: Sequence[BlockName]) -> Sequence[bool | None]:
        self.num_asked_to_write += 1
        return [None] * len(names) if self.is_off else self.find(names)

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        self.is_fetching.set()
        self.fetch_may_go.wait()
        return [self._copy(name, row) for name, row in zip(names, out, strict=True)]

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        self.num_writes += 1
        if self.is_off:
            return [False] * len(names)
        for name, block in zip(names, blocks, strict=True):
            self.kept.setdefault(name, block.tobytes())
        return [True] * len(names)

    def held(self) -> list[BlockName]:
        return list(self.kept)

    def upkeep(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """It is kept."""

    def _copy(self, name: BlockName, out: Bytes) -> bool:
        if name in self.broken or name not in self.kept or self.is_off:
            out[:] = 255
            return False
        out[:] = np.frombuffer(self.kept[name], np.uint8)
        self.num_fetched += 1
        return True
