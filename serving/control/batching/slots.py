"""Who holds which slot and which blocks: the occupancies of a partition, in the order of their sequences.

Stands between the block pool, which knows no sequences, and the scheduler, which decides who enters and who leaves.
Entering takes a slot and blocks together or neither; leaving gives back both. When an occupancy may leave is decided in
`partition` and `scheduler`.
"""

import heapq
from bisect import insort
from collections.abc import Iterator, Mapping

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.batching.sequence import Occupancy, Sequence
from moonshard.serving.control.request import SlotId


class Slots:
    """Iterates in their order, over a copy, so that members may leave meanwhile."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, partition: int, num_slots: int):
        self.partition = partition
        self.num_slots = num_slots
        self._pool = pool
        self._cache = cache
        self._occupancies: list[Occupancy] = []
        self._free_slots = list(range(num_slots))  # a heap

    def __iter__(self) -> Iterator[Occupancy]:
        return iter(tuple(self._occupancies))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free(self.partition)

    def enter(self, sequence: Sequence, num_blocks: int, shared: Mapping[int, int]) -> Occupancy | None:
        """An occupancy that has `shared` blocks, by place, held by reference; None where a slot or blocks are
        lacking.
        """
        own = self._pool.allocate(self.partition, num_blocks - len(shared)) if self._free_slots else None
        if own is None:
            return None
        self._pool.retain(self.partition, tuple(shared.values()))
        fresh = iter(own)
        blocks = tuple(shared[place] if place in shared else next(fresh) for place in range(num_blocks))
        return self.occupy(sequence, blocks)

    def enter_behind(self, sequence: Sequence, num_blocks: int, found: tuple[int, ...]) -> Occupancy | None:
        """As `enter`, but the occupancy begins with blocks that the prefix cache found, which may be free ones."""
        if not self._free_slots or self.num_free_blocks < self._pool.num_needed(self.partition, num_blocks, found):
            return None
        self._cache.hold(self.partition, found)
        own = self._pool.allocate(self.partition, num_blocks - len(found))
        assert own is not None  # as was just seen
        return self.occupy(sequence, found + own)

    def note(self, occupancy: Occupancy) -> tuple[int, ...]:
        """Tell the prefix cache which blocks have been completed since the last call; returns them."""
        num_complete = occupancy.num_complete_tokens // self._pool.block_size if self._cache.is_on else 0
        if num_complete <= occupancy.num_noted:
            return ()
        names = occupancy.sequence.names(num_complete, self._pool.block_size)
        fresh = range(occupancy.num_noted, num_complete)
        for index in fresh:
            parent = names[index - 1] if index else None
            self._cache.note(self.partition, occupancy.blocks[index], names[index], parent)
        occupancy.num_noted = num_complete
        return tuple(occupancy.blocks[index] for index in fresh)

    def occupy(self, sequence: Sequence, blocks: tuple[int, ...]) -> Occupancy:
        """An occupancy with blocks that are held already and go over to it. The caller has seen that a slot is free."""
        slot = SlotId(self.partition, heapq.heappop(self._free_slots))
        occupancy = Occupancy(sequence=sequence, slot=slot, blocks=blocks)
        insort(self._occupancies, occupancy, key=lambda occupancy: occupancy.sequence.order)
        return occupancy

    def leave(self, occupancy: Occupancy) -> None:
        """Give back the slot and the blocks. The last block first: it is the least likely to be asked for again."""
        self._occupancies.remove(occupancy)
        self._pool.release(self.partition, occupancy.blocks[::-1])
        self._cache.renew(self.partition, occupancy.sequence.names(occupancy.num_noted, self._pool.block_size))
        heapq.heappush(self._free_slots, occupancy.slot.index)

    def grow(self, occupancy: Occupancy, q_len: int = 1) -> int:
        """Take blocks for the KV of the next `q_len` tokens as far as blocks are free; returns for how many tokens
        there is room.
        """
        num_computed, num_held = occupancy.num_computed, len(occupancy.blocks)
        wanted = num_computed + q_len
        if self._pool.num_tokens_in(num_held, wanted) == wanted:
            return q_len
        end = self._pool.num_tokens_in(num_held + self.num_free_blocks, wanted)
        num_more = self._pool.num_blocks_for(end) - num_held
        if num_more > 0:
            occupancy.blocks += self._pool.allocate(self.partition, num_more) or ()
        return end - num_computed

    def num_blocks_to_grow(self, occupancy: Occupancy) -> int:
        """How many blocks it takes for its next column."""
        return self._pool.num_blocks_to_grow(len(occupancy.blocks))

    def is_draining(self) -> bool:
        """Whether some occupancy ends as soon as its launched steps have completed."""
        return any(occupancy.is_draining for occupancy in self._occupancies)

    @property
    def is_empty(self) -> bool:
        return not self._occupancies

    def running(self) -> list[Occupancy]:
        """The occupancies that still schedule steps, in their order."""
        return [occupancy for occupancy in self._occupancies if occupancy.is_running]
