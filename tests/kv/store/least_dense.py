"""Which block `HitDensity` lets go of, by brute force: all are looked at each time, and nothing is kept in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.lifetimes import NUM_CLASSES, Lifetimes, bin_of


@dataclass
class Seen:
    parent: BlockName | None
    num_uses: int
    used_at: int
    end_since: int = 0  # it was put among the ends last then


class LeastDense:
    def __init__(self, learn_every: int):
        self.blocks = dict[BlockName, Seen]()
        self._learn_every = learn_every
        self._lost = dict[BlockName, Seen]()  # the first was lost first
        self._lifetimes = [Lifetimes() for _ in range(NUM_CLASSES)]
        self._learnt = [Lifetimes().densities()] * NUM_CLASSES
        self._num_uses = self._now = self._num_ends = 0

    def insert(self, name: BlockName, parent: BlockName | None) -> None:
        self._now += 1
        lost = self._lost.pop(name, None)
        if lost is not None:
            self._note(lost)
        self.blocks[name] = Seen(parent, 0 if lost is None else min(lost.num_uses + 1, 3), self._now)
        self._mark_end(name)

    def link(self, chain: Sequence[BlockName]) -> None:
        for parent, name in pairwise(chain):
            if name in self.blocks and self.blocks[name].parent is None:
                self.blocks[name].parent = parent

    def touch(self, chain: Sequence[BlockName]) -> None:
        self.link(chain)
        here = [name for name in chain if name in self.blocks]
        for name in [*self._before(here[0])[::-1], *here] if here else []:
            block = self.blocks[name]
            self._note(block)
            block.num_uses, block.used_at = min(block.num_uses + 1, 3), self._now + len(here)
            self._mark_end(name)
        self._now += len(here)

    def evict(self) -> BlockName:
        firsts = list[tuple[float, int, int, BlockName]]()
        for num_uses in range(NUM_CLASSES):
            ends = [
                (block.used_at, -block.end_since, name)
                for name, block in self.blocks.items()
                if block.num_uses == num_uses and self.is_end(name)
            ]
            if ends:
                firsts.append((self._learnt[num_uses][bin_of(self._now - min(ends)[0])], *min(ends)))
        name = min(firsts)[-1]
        block = self.blocks.pop(name)
        if (before := self.blocks.get(block.parent or b"")) is not None:
            before.num_uses, before.used_at = max(before.num_uses, block.num_uses), max(before.used_at, block.used_at)
            self._mark_end(block.parent or b"")
        self._lost[name] = block
        while len(self._lost) > max(1, len(self.blocks)):
            gone = self._lost.pop(next(iter(self._lost)))
            self._lifetimes[gone.num_uses].unseen(self._now - gone.used_at)
        return name

    def is_end(self, name: BlockName) -> bool:
        return not any(block.parent == name for block in self.blocks.values())

    def _mark_end(self, name: BlockName) -> None:
        if self.is_end(name):
            self._num_ends += 1
            self.blocks[name].end_since = self._num_ends

    def _note(self, block: Seen) -> None:
        self._lifetimes[block.num_uses].used(self._now - block.used_at)
        self._num_uses += 1

    def learn(self) -> None:
        """After each move: then those that are used together are counted together."""
        if self._num_uses >= max(self._learn_every, len(self.blocks)):
            self._num_uses = 0
            self._learnt = [each.densities() for each in self._lifetimes]
            for each in self._lifetimes:
                each.forget()

    def _before(self, name: BlockName) -> list[BlockName]:
        found = list[BlockName]()
        while (parent := self.blocks[name].parent) is not None and parent in self.blocks:
            found.append(parent)
            name = parent
        return found
