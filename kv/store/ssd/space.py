"""Which block is in which extent, which extents are free, and who has to go for a new one: decided, not done.

A block is written into an extent that nobody is told of until all of it is there:

    free --reserve--> pending --commit--> kept --evict, drop--> free
                      pending --abandon--> free, or retired: not used again by this process, unless it was for room

A policy may give up a block while it is pending: then it is not kept, and its extent is free when its writer is done.
Readers hold nothing. Each use of an extent has a number, so that whoever read other bytes than were expected can tell
whether the extent was taken from the block meanwhile. Not locked; does no I/O: the tier does both.
"""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.retention import Policy, Retained
from moonshard.kv.store.ssd.extents import HEADER, NO_PARENT, Headers, are_sound, no_headers, seal

_NOTHING = no_headers(1)[0]


class Place(NamedTuple):
    """Where a block was when it was looked for."""

    row: int  # in what was asked for
    name: BlockName
    extent: int
    use: int  # of the extent
    checksum: int


class Pending(NamedTuple):
    """A block to be written."""

    row: int
    name: BlockName
    extent: int


class Reserved(NamedTuple):
    pending: list[Pending]  # extents ascend
    num_refused: int  # there is no room for them, or they have to go for those before them
    num_evicted: int


class Space:
    """`headers` are those of the table, one an extent; those that say nothing sound are free extents.

    `num_touched`: the first so many extents are within the payload file as it is. They are used before any other.
    """

    def __init__(self, headers: Headers, *, block_bytes: int, num_touched: int, policy: Policy):
        self._headers = headers
        self._block_bytes = block_bytes
        self._policy = policy
        self._kept = dict[BlockName, int]()
        self._pending = set[BlockName]()
        self._uses = np.zeros(len(headers), np.uint32)
        is_free = self._restore(num_touched)
        self._free: list[int] = np.flatnonzero(is_free[:num_touched]).tolist()  # a heap: the first first, for long runs
        self._fresh = num_touched  # the first that was never used
        self._end = len(headers)
        self._num_bad = 0  # extents that are never tried again
        self._without_room = list[int]()  # extents that the disk had no room for
        self._next_order = int(headers["order"].max(initial=0)) + 1

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def limit(self) -> int:
        """How many blocks there can be."""
        return self._end - self._num_bad - len(self._without_room)

    @property
    def lacks_room(self) -> bool:
        """Whether there are fewer than there could be since the disk was full."""
        return bool(self._without_room) or self._end < len(self._headers)

    @property
    def num_touched(self) -> int:
        """Extents behind these were never used."""
        return self._fresh

    @property
    def names(self) -> list[BlockName]:
        """Of all blocks that are here."""
        return list(self._kept)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._kept

    # ---- readers

    def link(self, chain: Sequence[BlockName]) -> None:
        self._policy.link(chain)

    def touch(self, chain: Sequence[BlockName]) -> None:
        self._policy.touch(chain)

    def places(self, names: Sequence[BlockName]) -> list[Place]:
        """Of those that are here."""
        here = [(row, name, self._kept[name]) for row, name in enumerate(names) if name in self._kept]
        extents = [extent for _, _, extent in here]
        numbers = zip(self._uses[extents].tolist(), self._headers["checksum"][extents].tolist(), strict=True)
        return [Place(*place, *number) for place, number in zip(here, numbers, strict=True)]

    def places_in(self, extents: range) -> list[Place]:
        """Of the blocks in these extents."""
        names: list[BlockName] = self._headers["name"][extents.start : extents.stop].tolist()
        found = self.places(names)
        return [place for place in found if place.extent == extents.start + place.row]

    def has(self, place: Place) -> bool:
        """Whether the block is still where it was, without a break."""
        return self._kept.get(place.name) == place.extent and int(self._uses[place.extent]) == place.use

    def drop(self, place: Place) -> None:
        """The block cannot be read."""
        del self._kept[place.name]
        self._policy.remove(place.name)
        self._free_extent(place.extent)

    # ---- writers

    def reserve(self, names: Sequence[BlockName]) -> Reserved:
        """Extents for the blocks of a chain that are not here yet; others are evicted for them.

        Not for a block that another call is writing.
        """
        rows = {name: row for row, name in enumerate(names) if name not in self._kept and name not in self._pending}
        self._policy.touch(names)  # whoever made them again has a use for them
        for name, row in reversed(rows.items()):
            self._policy.insert(name, names[row - 1] if row else None)
        self._policy.link(names)
        self._pending.update(rows)
        num_evicted = self._evict_to_limit()
        admitted = [(name, row) for name, row in rows.items() if name in self._pending]
        extents = self._take(len(admitted))
        for name, _ in admitted[len(extents) :]:  # their extents are of blocks that were given up while being written
            self._forget_pending(name)
        pending = [Pending(row, name, extent) for (name, row), extent in zip(admitted, extents, strict=False)]
        return Reserved(pending, len(rows) - len(pending), num_evicted)

    def fill_headers(self, written: Sequence[Pending], checksums: Sequence[int]) -> None:
        """The blocks are in their extents: this is what their headers say."""
        headers = no_headers(len(written))
        headers["length"] = self._block_bytes
        headers["checksum"] = np.array(checksums, np.uint64)
        headers["order"] = self._next_order + np.arange(len(written))
        headers["name"] = _column([name for _, name, _ in written])
        _set_retained(headers, [self._policy.retained(name) for _, name, _ in written])
        seal(headers)
        self._headers[[extent for _, _, extent in written]] = headers
        self._next_order += len(written)

    def commit(self, written: Sequence[Pending]) -> list[Pending]:
        """Their headers are written too. Gives those that are kept now; the others were given up meanwhile."""
        kept = list[Pending]()
        for pending in written:
            if pending.name in self._pending:
                self._pending.remove(pending.name)
                self._kept[pending.name] = pending.extent
                kept.append(pending)
            else:
                self._free_extent(pending.extent)
        return kept

    def abandon(self, pending: Pending, *, is_bad: bool = False, is_without_room: bool = False) -> None:
        """The block was not written. A bad extent is not tried again, one without room once there may be some."""
        if pending.name in self._pending:
            self._forget_pending(pending.name)
        if is_bad:
            self._num_bad += 1
            self._headers[pending.extent] = _NOTHING
        elif is_without_room:
            self._without_room.append(pending.extent)
            self._headers[pending.extent] = _NOTHING
        else:
            self._free_extent(pending.extent)

    def give_up_fresh(self) -> None:
        """The disk is full: only extents that were used before are used from now on."""
        self._end = self._fresh

    def has_room_again(self) -> None:
        """The disk may be full no longer: whatever it had no room for is tried again."""
        self._end = len(self._headers)
        for extent in self._without_room:
            self._free_extent(extent)
        self._without_room.clear()

    # ---- what the table says

    def headers_of(self, extents: Sequence[int]) -> Headers:
        """A copy."""
        return self._headers[np.asarray(extents, np.intp)]

    def all_headers(self) -> Headers:
        """A copy of those that may say something: no extent behind them was ever used."""
        return self._headers[: self._fresh].copy()

    def order(self) -> tuple[list[BlockName], int]:
        """All blocks, the next to go first, and the number of the first: none that comes later has any of theirs."""
        names, first_order = self._policy.order(), self._next_order
        self._next_order += len(names)
        return names, first_order

    def note_order(self, names: Sequence[BlockName], first_order: int) -> None:
        """Writes into the headers what the policy knows of these blocks, the next to go first."""
        here = [(self._kept[name], name, order) for order, name in enumerate(names, first_order) if name in self._kept]
        extents = [extent for extent, _, _ in here]
        headers = self._headers[extents]
        headers["order"] = np.array([order for _, _, order in here], np.uint64)
        _set_retained(headers, [self._policy.retained(name) for _, name, _ in here])
        seal(headers)
        self._headers[extents] = headers

    def _restore(self, num_touched: int) -> NDArray[np.bool_]:
        """Knows again what the headers say; gives which extents are free."""
        sound = np.flatnonzero(are_sound(self._headers[:num_touched], self._block_bytes))
        sound = sound[np.argsort(self._headers["order"][sound], kind="stable")]
        found = self._headers[sound]
        names: list[BlockName] = found["name"].tolist()
        self._kept = dict(zip(names, sound.tolist(), strict=True))  # of two with one name, the one that came later
        parents: list[BlockName] = found["parent"].tolist()
        retained = (
            Retained(None if parent == NO_PARENT else parent, usage)
            for parent, usage in zip(parents, found["usage"].tolist(), strict=True)
        )
        self._policy.restore(dict(zip(names, retained, strict=True)).items())
        is_free = np.ones(len(self._headers), np.bool_)
        is_free[list(self._kept.values())] = False
        self._headers[is_free] = _NOTHING
        return is_free

    def _evict_to_limit(self) -> int:
        num_evicted = 0
        while len(self._kept) + len(self._pending) > self.limit:
            name = self._policy.evict()
            if name is None:
                break
            if (extent := self._kept.pop(name, None)) is None:
                self._pending.remove(name)
            else:
                num_evicted += 1
                self._free_extent(extent)
        return num_evicted

    def _take(self, num: int) -> list[int]:
        """As many as there are, in ascending order."""
        extents = [heapq.heappop(self._free) for _ in range(min(num, len(self._free)))]
        num_fresh = min(num - len(extents), self._end - self._fresh)
        extents += range(self._fresh, self._fresh + num_fresh)
        self._fresh += num_fresh
        self._uses[extents] += 1
        return extents

    def _free_extent(self, extent: int) -> None:
        self._headers[extent] = _NOTHING
        heapq.heappush(self._free, extent)

    def _forget_pending(self, name: BlockName) -> None:
        self._pending.remove(name)
        self._policy.remove(name)


def _set_retained(headers: Headers, retained: Sequence[Retained | None]) -> None:
    """None: it was given up meanwhile, and nobody will read what its header says."""
    known = [(NO_PARENT, 0) if block is None else (block.parent or NO_PARENT, block.usage) for block in retained]
    headers["parent"] = _column([parent for parent, _ in known])
    headers["usage"] = [usage for _, usage in known]


def _column(names: Sequence[BlockName]) -> NDArray[Any]:
    return np.array(names, HEADER["name"])
