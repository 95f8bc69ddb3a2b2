"""Which block is the next to go: policies that know names and links alone, no bytes, no files, no clock.

Blocks hang in chains, and what is behind a lost block cannot be used: so a chain is lost from its end, whatever else a
policy weighs. A policy learns which block is before which from the chains that it is shown. What it knows survives a
restart as an order and one byte a block, which the caller stores.

Two are here. `Lru`: what was not used for longest. `S3Fifo`: what was used once while it was new, which in a store that
sees every prompt once is nearly all of it. Neither is locked.
Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), section 4 and algorithm 1.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from moonshard.kv.prefix import BlockName

_MAX_FREQUENCY = 3
_SMALL_SHARE = 10  # one in so many
_IS_MAIN = 128  # in the stored byte


class Retained(NamedTuple):
    """What is stored of one block for the next process."""

    parent: BlockName | None  # the block before it, where that is known
    usage: int  # one byte, in the policy's own code


@runtime_checkable
class Policy(Protocol):
    """Every method takes time for the blocks it is given, and, where it says so, for those before them."""

    def insert(self, name: BlockName, parent: BlockName | None) -> None:
        """A block that is new here. Of a chain insert the end first."""
        ...

    def link(self, chain: Sequence[BlockName]) -> None:
        """Learns which block is before which; some of them may not be here. It is no use of them."""
        ...

    def touch(self, chain: Sequence[BlockName]) -> None:
        """These blocks were used; those that are not here are skipped."""
        ...

    def evict(self) -> BlockName | None:
        """Lets go of one block, never of one before another that is here; None: there is none."""
        ...

    def remove(self, name: BlockName) -> None:
        """The block is gone, for other reasons than `evict`."""
        ...

    def order(self) -> list[BlockName]:
        """All that are here, in the order that `restore` wants them in."""
        ...

    def retained(self, name: BlockName) -> Retained | None:
        """None: it is not here."""
        ...

    def restore(self, blocks: Iterable[tuple[BlockName, Retained]]) -> None:
        """Into a policy that is empty, in the order in which it gave them, or roughly."""
        ...


class Lru:
    """The least recently used block goes first. A use of a block is a use of all that are before it.

    So a block is always younger than those behind it, and the oldest is the end of a chain. Inserting and touching take
    time for the blocks before as well.
    """

    def __init__(self):
        self._parents = OrderedDict[BlockName, BlockName | None]()  # of what is here, the oldest first

    def insert(self, name: BlockName, parent: BlockName | None) -> None:
        self._parents[name] = parent
        self._renew_up_from(parent)

    def link(self, chain: Sequence[BlockName]) -> None:
        if self._learn(chain):
            self.touch(chain)  # else what is before could be older than what is behind it

    def touch(self, chain: Sequence[BlockName]) -> None:
        self._learn(chain)
        here = [name for name in chain if name in self._parents]
        for name in reversed(here):
            self._parents.move_to_end(name)
        if here:
            self._renew_up_from(self._parents[here[0]])

    def evict(self) -> BlockName | None:
        return self._parents.popitem(last=False)[0] if self._parents else None

    def remove(self, name: BlockName) -> None:
        del self._parents[name]

    def order(self) -> list[BlockName]:
        return list(self._parents)

    def retained(self, name: BlockName) -> Retained | None:
        return Retained(self._parents[name], 0) if name in self._parents else None

    def restore(self, blocks: Iterable[tuple[BlockName, Retained]]) -> None:
        """The given order may be from before the last uses: what is before a block is made younger than it."""
        parents = {name: retained.parent for name, retained in blocks}
        youngest_first = dict[BlockName, None]()
        for name in reversed(parents):
            unplaced, above = list[BlockName](), name
            while above in parents and above not in youngest_first and len(unplaced) < len(parents):  # or a circle
                unplaced.append(above)
                above = parents[above]
            for each in reversed(unplaced):
                youngest_first[each] = None
        for name in reversed(youngest_first):
            self._parents[name] = parents[name]

    def _learn(self, chain: Sequence[BlockName]) -> bool:
        unknown = [link for link in pairwise(chain) if self._parents.get(link[1], link) is None]
        for parent, name in unknown:
            self._parents[name] = parent
        return bool(unknown)

    def _renew_up_from(self, name: BlockName | None) -> None:
        renewed = set[BlockName]()
        while name is not None and name in self._parents and name not in renewed:  # or it is a circle, of no hashes
            self._parents.move_to_end(name)
            renewed.add(name)
            name = self._parents[name]


@dataclass(slots=True)
class _Block:
    parent: BlockName | None
    is_main: bool
    frequency: int = 0


class S3Fifo:
    """Two queues and the names of the lately lost: what is new has to be used while in the small queue to get on.

    A tenth of all is for the small queue. From its old end a block moves to the main queue if it was used more than
    once, and is lost otherwise. In the main queue each use gives another round, three at most. A block that comes back
    soon after it was lost goes to the main queue directly.

    In the queues are ends of chains alone. A block that has others behind it belongs to its queue and waits outside it,
    and comes in at the old end once they are gone. Without chains it is the algorithm of the paper, but that room is
    made for a block that is in its queue already. Lost names are forgotten with the process.
    """

    def __init__(self):
        self._blocks = dict[BlockName, _Block]()
        self._num_behind = dict[BlockName, int]()  # of a name, here or not: the blocks here that it is before
        self._small = OrderedDict[BlockName, None]()  # ends of chains, the oldest first
        self._main = OrderedDict[BlockName, None]()
        self._ghosts = OrderedDict[BlockName, None]()
        self._num_small = 0  # with those that wait outside

    def insert(self, name: BlockName, parent: BlockName | None) -> None:
        was_lost = name in self._ghosts
        self._ghosts.pop(name, None)
        self._blocks[name] = _Block(None, is_main=was_lost)
        self._num_small += not was_lost
        if name not in self._num_behind:
            self._queue_of(name)[name] = None
        if parent is not None:
            self._hang(name, parent)

    def link(self, chain: Sequence[BlockName]) -> None:
        for parent, name in pairwise(chain):
            if (block := self._blocks.get(name)) is not None and block.parent is None:
                self._hang(name, parent)

    def touch(self, chain: Sequence[BlockName]) -> None:
        self.link(chain)
        for name in chain:
            if (block := self._blocks.get(name)) is not None:
                block.frequency = min(block.frequency + 1, _MAX_FREQUENCY)

    def evict(self) -> BlockName | None:
        while (queue := self._next_queue()) is not None:
            name = next(iter(queue))
            if not self._gets_on(name):
                self.remove(name)
                self._ghosts[name] = None
                while len(self._ghosts) > max(1, len(self._blocks)):
                    self._ghosts.popitem(last=False)
                return name
        return self._break_circle()

    def remove(self, name: BlockName) -> None:
        self._queue_of(name).pop(name, None)
        block = self._blocks.pop(name)
        self._num_small -= not block.is_main
        if block.parent is not None:
            self._come_off(block.parent)

    def order(self) -> list[BlockName]:
        return [*self._small, *self._main, *(name for name in self._blocks if name in self._num_behind)]

    def retained(self, name: BlockName) -> Retained | None:
        block = self._blocks.get(name)
        return None if block is None else Retained(block.parent, block.frequency + _IS_MAIN * block.is_main)

    def restore(self, blocks: Iterable[tuple[BlockName, Retained]]) -> None:
        for name, (parent, usage) in blocks:
            frequency = min(usage & ~_IS_MAIN, _MAX_FREQUENCY)
            block = self._blocks[name] = _Block(parent, is_main=bool(usage & _IS_MAIN), frequency=frequency)
            self._num_small += not block.is_main
            if parent is not None:
                self._num_behind[parent] = self._num_behind.get(parent, 0) + 1
        for name in self._blocks:
            if name not in self._num_behind:
                self._queue_of(name)[name] = None

    def _next_queue(self) -> OrderedDict[BlockName, None] | None:
        share = max(1, len(self._blocks) // _SMALL_SHARE)
        if self._small and (self._num_small > share or not self._main):
            return self._small
        return self._main or None

    def _gets_on(self, name: BlockName) -> bool:
        """Whether the oldest of a queue stays, and if so, where it does."""
        block = self._blocks[name]
        if block.is_main and block.frequency:
            block.frequency -= 1
            self._main.move_to_end(name)
            return True
        if not block.is_main and block.frequency > 1:
            del self._small[name]
            block.is_main, block.frequency = True, 0
            self._num_small -= 1
            self._main[name] = None
            return True
        return False

    def _break_circle(self) -> BlockName | None:
        """Hashes form none. Names that are no hashes could, and then no block of theirs is the end of a chain."""
        name = next(iter(self._blocks), None)
        if name is not None:
            self.remove(name)
        return name

    def _hang(self, name: BlockName, parent: BlockName) -> None:
        self._blocks[name].parent = parent
        self._num_behind[parent] = self._num_behind.get(parent, 0) + 1
        if parent in self._blocks:
            self._queue_of(parent).pop(parent, None)

    def _come_off(self, parent: BlockName) -> None:
        self._num_behind[parent] -= 1
        if self._num_behind[parent]:
            return
        del self._num_behind[parent]
        if parent in self._blocks:
            queue = self._queue_of(parent)
            queue[parent] = None
            queue.move_to_end(parent, last=False)

    def _queue_of(self, name: BlockName) -> OrderedDict[BlockName, None]:
        return self._main if self._blocks[name].is_main else self._small
