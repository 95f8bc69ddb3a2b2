"""What the least recently used block is, by brute force: every block has the time of its last use."""

from collections.abc import Sequence
from itertools import pairwise

from moonshard.kv.prefix import BlockName


class OldestFirst:
    """Of a chain that is used, and of what is before it, each block is used after those behind it."""

    def __init__(self):
        self.used_at = dict[BlockName, int]()
        self._parents = dict[BlockName, BlockName]()  # of all that were ever seen, here or not
        self._now = 0

    def learn(self, chain: Sequence[BlockName]) -> None:
        for parent, name in pairwise(chain):
            if name in self.used_at and name not in self._parents:
                self._parents[name] = parent
                self.use(chain)

    def use(self, chain: Sequence[BlockName]) -> None:
        self._parents |= {name: parent for parent, name in pairwise(chain) if name in self.used_at}
        first = next((name for name in chain if name in self.used_at), None)
        self._stamp([name for name in reversed(chain) if name in self.used_at])
        if first is not None:
            self._stamp(self._before(first))

    def insert(self, name: BlockName, parent: BlockName | None) -> None:
        self.used_at[name] = 0
        self._stamp([name])
        self._parents.pop(name, None)
        if parent is not None:
            self._parents[name] = parent
            self._stamp(self._before(name))

    def keep(self, chain: Sequence[BlockName], limit: int) -> set[BlockName]:
        """Gives what had to go, which may be of the chain itself."""
        self.use(chain)
        parents = dict(zip(chain[1:], chain, strict=False))
        for name in [name for name in reversed(chain) if name not in self.used_at]:
            self.insert(name, parents.get(name))
        self.learn(chain)
        return {self.evict() for _ in range(len(self.used_at) - limit)}

    def evict(self) -> BlockName:
        oldest = min(self.used_at, key=self.used_at.__getitem__)
        self.remove(oldest)
        return oldest

    def remove(self, name: BlockName) -> None:
        del self.used_at[name]
        self._parents.pop(name, None)

    def ends_chain(self, name: BlockName) -> bool:
        return not any(self._parents.get(other) == name for other in self.used_at)

    def _before(self, name: BlockName) -> list[BlockName]:
        before = list[BlockName]()
        while (above := self._parents.get(name)) is not None and above in self.used_at:
            before.append(above)
            name = above
        return before

    def _stamp(self, names: Sequence[BlockName]) -> None:
        for name in names:
            self._now += 1
            self.used_at[name] = self._now
