"""The tier in this process's own memory: a slab, and which block each of its cells has.

It ends with the process. What it holds is what the worker itself wrote or fetched a moment ago, so nothing is checked:
the tiers below, whose bytes others could have changed, are.
"""

import threading
from collections import Counter
from collections.abc import Sequence

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes, Slab
from moonshard.kv.store.retention import Lru, Policy
from moonshard.kv.store.tier import MissCause, TierCounters


class HostTier:
    """As many blocks as fit into `max_bytes`; which are lost first is the policy's, by default the least recently used.

    Memory is taken as cells are first written. ValueError where not even one block fits.
    """

    name = "host"
    is_shared = False

    def __init__(self, *, block_bytes: int, max_bytes: int, policy: Policy | None = None):
        num_cells = max_bytes // block_bytes
        if num_cells < 1:
            raise ValueError(f"{max_bytes} bytes hold no block of {block_bytes}")
        self.block_bytes = block_bytes
        self._slab = Slab(num_cells, block_bytes)
        self._free = list(range(num_cells))[::-1]
        self._used = dict[BlockName, int]()
        self._policy: Policy = policy or Lru()
        self._lock = threading.Lock()  # held while one block is copied at the longest: whoever counts waits for it
        self._counts = Counter[str]()

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            counts, num_held = self._counts.copy(), len(self._used)
        return TierCounters(
            num_hits=counts["hits"],
            num_misses={MissCause.ABSENT: counts["absent"]} if counts["absent"] else {},
            num_kept=counts["kept"],
            num_not_kept=counts["not kept"],
            num_evicted=counts["evicted"],
            bytes_read=counts["hits"] * self.block_bytes,
            bytes_written=counts["kept"] * self.block_bytes,
            bytes_held=num_held * self.block_bytes,
        )

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        with self._lock:
            self._policy.link(names)
            return [name in self._used for name in names]

    def has(self, names: Sequence[BlockName]) -> Sequence[bool | None]:
        return self.find(names)

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        with self._lock:
            self._policy.touch(names)
        return [self._copy(name, row) for name, row in zip(names, out, strict=True)]

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        with self._lock:
            self._policy.touch(names)
        parents = (None, *names)
        return [self._put(*each) for each in zip(names, parents, blocks, strict=False)]

    def held(self) -> list[BlockName]:
        return []

    def upkeep(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """It keeps nothing any more."""
        with self._lock:
            self._free = []
            for name in self._used:
                self._policy.remove(name)
            self._used.clear()

    def _copy(self, name: BlockName, out: Bytes) -> bool:
        with self._lock:
            cell = self._used.get(name)
            self._counts["absent" if cell is None else "hits"] += 1
            if cell is not None:
                self._slab.copy_cell(cell, out)
            return cell is not None

    def _put(self, name: BlockName, parent: BlockName | None, block: Bytes) -> bool:
        """Not where the block before it is not: it would not be found."""
        with self._lock:
            if name in self._used:
                return True
            cell = self._free_cell(parent) if parent is None or parent in self._used else None
            if cell is None:
                self._counts["not kept"] += 1
                return False
            self._slab.cell(cell)[:] = block
            self._used[name] = cell
            self._policy.insert(name, parent)
            self._counts["kept"] += 1
            return True

    def _free_cell(self, parent: BlockName | None) -> int | None:
        """A cell for a block behind `parent`; None where only that could make room."""
        if self._free:
            return self._free.pop()
        before = None if parent is None else self._policy.retained(parent)
        lost = self._policy.evict()
        if lost is None:
            return None
        if before is not None and lost == parent:
            self._policy.insert(lost, before.parent)
            return None
        self._counts["evicted"] += 1
        return self._used.pop(lost)
