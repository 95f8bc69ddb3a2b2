"""Which home knows how much of a prompt: the names of blocks that workers said they have, put together.

A home is a small number that the router gives a worker's partition. Names form chains, and a worker forgets the end of
a chain before its beginning, so whoever knows a block is taken to know what comes before it. What a worker says is
ordered by numbers: what comes twice changes nothing, and after a gap, or from another process, all must be told anew.
Pure. What a worker keeps, and forgets, is decided in `kv.prefix`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonshard.kv.prefix import BlockName


class PrefixIndex:
    """The names of blocks and the homes that know them. Every operation costs O(1) per name."""

    def __init__(self) -> None:
        self._homes: dict[BlockName, int | set[int]] = {}  # most names are known to one home alone
        self._names: dict[int, set[BlockName]] = {}

    def __len__(self) -> int:
        """The number of names that at least one home knows."""
        return len(self._homes)

    def add(self, home: int, name: BlockName) -> None:
        known = self._homes.get(name)
        if known is None:
            self._homes[name] = home
        elif isinstance(known, set):
            known.add(home)
        elif known != home:
            self._homes[name] = {known, home}
        self._names.setdefault(home, set()).add(name)

    def remove(self, home: int, name: BlockName) -> None:
        """Does nothing where the home does not know the name."""
        names = self._names.get(home)
        if names is None or name not in names:
            return
        names.remove(name)
        known = self._homes[name]
        if isinstance(known, set) and len(known) > 1:
            known.remove(home)
        else:
            del self._homes[name]

    def purge(self, home: int) -> None:
        for name in tuple(self._names.get(home, ())):
            self.remove(home, name)
        self._names.pop(home, None)

    def known(self, home: int) -> frozenset[BlockName]:
        return frozenset(self._names.get(home, ()))

    def num_names(self, home: int) -> int:
        return len(self._names.get(home, ()))

    def num_known(self, names: Sequence[BlockName]) -> dict[int, int]:
        """How many of the first names each home knows; homes that know none are not in it.

        What stands behind a name that a home does not know is of no use to it: such ends are left where two prompts
        that begin alike came at once, and the beginning that was kept is the one that was forgotten first. Homes that
        differ from one block to the next without there being fewer are not looked at one by one: that takes too long.
        """
        num_found = self._num_found(names)
        found: dict[int, int] = {}
        for index in range(num_found - 1, -1, -1):
            known = self._homes.get(names[index])
            if known is None:
                found = {}
                continue
            homes = known if isinstance(known, set) else (known,)
            is_like_next = next(iter(homes)) in found
            if is_like_next and len(homes) == len(found):
                continue  # the same as one block further on
            if len(homes) <= len(found):
                found = {home: num for home, num in found.items() if home in homes}
            for home in homes:
                found.setdefault(home, index + 1)
        return found

    def _num_found(self, names: Sequence[BlockName]) -> int:
        """How many of the first names any home knows: found by bisection, since what is known begins a chain."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._homes:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """A home has this name now, or no longer has it."""

    home: int
    name: BlockName
    is_known: bool


@dataclass(slots=True)
class PrefixSubscriber:
    """Keeps an index by what one process says of its blocks. `homes` are the homes of its partitions."""

    index: PrefixIndex
    homes: tuple[int, ...]
    _epoch: int | None = None
    _next: int | None = None  # number of its next event; None: a snapshot must come first
    _in_parts: int | None = None  # the next event after a snapshot of which parts are to come

    def events(self, epoch: int, first: int, said: Iterable[PrefixChange]) -> bool:
        """Takes events, numbered from that number on. False: some before them are missing, and a snapshot is needed."""
        if epoch != self._epoch:
            self._begin(epoch)
            self._next = 0
        if self._next is None or first > self._next:
            self._next = None
            return False
        number = first
        for one in said:
            if number == self._next:
                (self.index.add if one.is_known else self.index.remove)(one.home, one.name)
                self._next += 1
            number += 1
        return True

    def snapshot(
        self,
        epoch: int,
        next_number: int,
        names: Iterable[tuple[int, BlockName]],
        *,
        goes_on: bool = False,
        has_more: bool = False,
    ) -> None:
        """Takes all that its homes know after the events before that number; a part of it, where it `goes_on` from the
        part before, or `has_more`. A snapshot older than what was heard is ignored, and so is a part without the one
        before it.
        """
        if goes_on:
            if (epoch, next_number) != (self._epoch, self._in_parts):
                return
        elif epoch == self._epoch and self._next is not None and next_number < self._next:
            return
        else:
            self._begin(epoch)
        for home, name in names:
            self.index.add(home, name)
        self._next, self._in_parts = (None, next_number) if has_more else (next_number, None)

    def gone(self) -> None:
        """The process ended: nothing of it is known any more."""
        for home in self.homes:
            self.index.purge(home)
        self._epoch = self._next = self._in_parts = None

    def _begin(self, epoch: int) -> None:
        self.gone()
        self._epoch = epoch
