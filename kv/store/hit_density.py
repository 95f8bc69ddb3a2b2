"""A policy that lets go of what is least likely to be used for the time it takes room, learnt from what was used.

Blocks are of classes: those that were used again never, once, twice and more often. Of a class the one goes first that
was not used for longest. Which class has to give up one, the hit density of each at that age says (`lifetimes`). Lost
names are remembered for a while: what comes back would have been used, so that what is learnt does not depend on what
was kept. As long as nothing is learnt, the least recently used block goes.

Of a chain the end alone can go, and what is used, is used with all that is before it. Time is counted in blocks that
were used or are new. What was learnt, and lost names, are forgotten with the process; how often a block was used, and
roughly how long that is ago, is stored.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil
from typing import NamedTuple

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.lifetimes import NUM_BINS, NUM_CLASSES, Lifetimes, bin_of, first_age
from moonshard.kv.store.retention import Retained

LEARN_EVERY = 4096  # uses, or as many as there are blocks if that is more
_MOST_USES = NUM_CLASSES - 1
_UNLEARNT = Lifetimes().densities()


@dataclass(slots=True)
class _Block:
    parent: BlockName | None
    num_uses: int
    used_at: int


class _End(NamedTuple):
    """As heaps order them: of those that were used last at one time, the one that has become an end last is first, so
    that one chain is lost and not a little of each.
    """

    used_at: int
    number: int  # less than that of any that came before
    name: BlockName


class _Ends:
    """Ends of chains of one class."""

    def __init__(self) -> None:
        self._heap = list[_End]()  # and what is an end no longer
        self._ends = dict[BlockName, _End]()
        self._next_number = 0

    def put(self, name: BlockName, used_at: int) -> None:
        self._next_number -= 1
        end = self._ends[name] = _End(used_at, self._next_number, name)
        heapq.heappush(self._heap, end)
        if len(self._heap) > 2 * len(self._ends) + NUM_BINS:
            self._heap = sorted(self._ends.values())

    def drop(self, name: BlockName) -> None:
        """Does nothing where it is no end of this class."""
        self._ends.pop(name, None)

    def first(self) -> _End | None:
        """The one that was not used for longest."""
        while self._heap and self._ends.get(self._heap[0].name) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class HitDensity:
    def __init__(self) -> None:
        self._blocks = dict[BlockName, _Block]()
        self._num_behind = dict[BlockName, int]()  # of a name, here or not: the blocks here that it is before
        self._ends = [_Ends() for _ in range(NUM_CLASSES)]
        self._ghosts = OrderedDict[BlockName, _Block]()  # as they were when they were lost
        self._lifetimes = [Lifetimes() for _ in range(NUM_CLASSES)]
        self._densities = [_UNLEARNT] * NUM_CLASSES  # [classes][bins]
        self._num_unlearnt = 0  # uses since then
        self._now = 0

    def insert(self, name: BlockName, parent: BlockName | None) -> None:
        self._now += 1
        num_uses = 0
        if (lost := self._ghosts.pop(name, None)) is not None:
            self._note(lost.num_uses, self._now - lost.used_at, 1)
            num_uses = min(lost.num_uses + 1, _MOST_USES)
        self._blocks[name] = _Block(None, num_uses, self._now)
        if name not in self._num_behind:
            self._put_end(name)
        if parent is not None:
            self._hang(name, parent)
        self._learn_at_times()

    def link(self, chain: Sequence[BlockName]) -> None:
        for parent, name in pairwise(chain):
            if (block := self._blocks.get(name)) is not None and block.parent is None:
                self._hang(name, parent)

    def touch(self, chain: Sequence[BlockName]) -> None:
        self.link(chain)
        here = [name for name in chain if name in self._blocks]
        if here:
            since, self._now = self._now, self._now + len(here)
            self._use([*reversed(self._before(here[0])), *here], since)
            self._learn_at_times()

    def evict(self) -> BlockName | None:
        name = self._least_dense() or next(iter(self._blocks), None)  # names that are no hashes may form a circle
        if name is None:
            return None
        block = self._blocks[name]
        self.remove(name)
        self._ghosts[name] = block
        while len(self._ghosts) > max(1, len(self._blocks)):
            _, ghost = self._ghosts.popitem(last=False)
            self._lifetimes[ghost.num_uses].unseen(self._now - ghost.used_at)
        return name

    def remove(self, name: BlockName) -> None:
        block = self._blocks.pop(name)
        self._ends[block.num_uses].drop(name)
        if block.parent is not None:
            self._come_off(block.parent, block)

    def order(self) -> list[BlockName]:
        return sorted(self._blocks, key=lambda name: self._blocks[name].used_at)

    def retained(self, name: BlockName) -> Retained | None:
        block = self._blocks.get(name)
        return None if block is None else Retained(block.parent, self._usage(block))

    def restore(self, blocks: Iterable[tuple[BlockName, Retained]]) -> None:
        for name, (parent, usage) in blocks:
            age_bin, num_uses = divmod(usage, NUM_CLASSES)
            self._blocks[name] = _Block(parent, num_uses, self._now - ceil(first_age(min(age_bin, NUM_BINS - 1))))
            if parent is not None:
                self._num_behind[parent] = self._num_behind.get(parent, 0) + 1
        for name in reversed(self._blocks):
            if name not in self._num_behind:
                self._put_end(name)

    def _usage(self, block: _Block) -> int:
        return block.num_uses + NUM_CLASSES * bin_of(self._now - block.used_at)

    # ---- which goes

    def _least_dense(self) -> BlockName | None:
        firsts = ((num_uses, ends.first()) for num_uses, ends in enumerate(self._ends))
        found = [(self._density(num_uses, end.used_at), end) for num_uses, end in firsts if end is not None]
        return min(found)[1].name if found else None

    def _density(self, num_uses: int, used_at: int) -> float:
        return self._densities[num_uses][bin_of(self._now - used_at)]

    # ---- what is used

    def _use(self, chain: Sequence[BlockName], since: int) -> None:
        """Ages are those until `since`. Most of a chain was used together before, and is of one class."""
        blocks = [self._blocks[name] for name in chain]
        for (num_uses, used_at), alike in groupby(blocks, key=lambda block: (block.num_uses, block.used_at)):
            used = list(alike)
            self._note(num_uses, since - used_at, len(used))
            for block in used:
                block.num_uses, block.used_at = min(num_uses + 1, _MOST_USES), self._now
        for name in chain:
            if name not in self._num_behind:
                self._drop_end(name)
                self._put_end(name)

    def _note(self, num_uses: int, age: int, num_blocks: int) -> None:
        self._lifetimes[num_uses].used(age, num_blocks)
        self._num_unlearnt += num_blocks

    def _learn_at_times(self) -> None:
        if self._num_unlearnt >= max(LEARN_EVERY, len(self._blocks)):
            self._num_unlearnt = 0
            self._densities = [each.densities() for each in self._lifetimes]
            for each in self._lifetimes:
                each.forget()

    # ---- what is before what

    def _before(self, name: BlockName) -> list[BlockName]:
        """The blocks that are before it, the nearest first."""
        found = list[BlockName]()
        parent = self._blocks[name].parent
        while parent in self._blocks and len(found) < len(self._blocks):  # or they form a circle
            found.append(parent)
            parent = self._blocks[parent].parent
        return found

    def _hang(self, name: BlockName, parent: BlockName) -> None:
        self._blocks[name].parent = parent
        self._num_behind[parent] = self._num_behind.get(parent, 0) + 1
        self._drop_end(parent)

    def _come_off(self, parent: BlockName, lost: _Block) -> None:
        """What is before a block was used at least as often, and as late."""
        self._num_behind[parent] -= 1
        is_end = not self._num_behind[parent]
        if is_end:
            del self._num_behind[parent]
        if (block := self._blocks.get(parent)) is not None:
            block.num_uses, block.used_at = max(block.num_uses, lost.num_uses), max(block.used_at, lost.used_at)
            if is_end:
                self._put_end(parent)

    def _put_end(self, name: BlockName) -> None:
        block = self._blocks[name]
        self._ends[block.num_uses].put(name, block.used_at)

    def _drop_end(self, name: BlockName) -> None:
        for ends in self._ends:
            ends.drop(name)
