"""Who holds which slot and which blocks: the stays of a worker, in the order of their arrival.

Stands between the block pool, which knows no sequences, and the scheduler, which decides who enters and who leaves.
Entering takes a slot and blocks together or neither; leaving gives back both. Left out: when a stay may leave.
"""

import heapq
from bisect import insort
from collections.abc import Iterator

from moonshard.kv.blocks import BlockPool
from moonshard.serving.request import SlotId
from moonshard.serving.sequence import Sequence, Stay


class Residents:
    """Iterates oldest first, over a copy, so that members may leave meanwhile."""

    def __init__(self, pool: BlockPool, slots_per_partition: int):
        self._pool = pool
        self._stays: list[Stay] = []
        self._free_slots = tuple(list(range(slots_per_partition)) for _ in range(pool.num_partitions))  # heaps

    def __iter__(self) -> Iterator[Stay]:
        return iter(tuple(self._stays))

    def num_free_slots(self, partition: int) -> int:
        return len(self._free_slots[partition])

    def roomiest(self) -> int | None:
        """The partition with the most free blocks among those with a free slot; the lowest of equals."""
        with_slot = [partition for partition, slots in enumerate(self._free_slots) if slots]
        return max(with_slot, key=self._pool.num_free, default=None)

    def enter(self, sequence: Sequence, partition: int, num_blocks: int, shared: tuple[int, ...] = ()) -> Stay | None:
        """A stay that begins with `shared` blocks, held by reference; None where a slot or blocks are lacking."""
        has_slot = bool(self._free_slots[partition])
        own = self._pool.allocate(partition, num_blocks - len(shared)) if has_slot else None
        if own is None:
            return None
        self._pool.retain(partition, shared)
        return self.seat(sequence, partition, shared + own)

    def seat(self, sequence: Sequence, partition: int, blocks: tuple[int, ...]) -> Stay:
        """A stay with blocks that are held already and go over to it. The caller has seen that a slot is free."""
        slot = SlotId(partition, heapq.heappop(self._free_slots[partition]))
        stay = Stay(sequence=sequence, slot=slot, blocks=blocks)
        insort(self._stays, stay, key=lambda stay: stay.sequence.order)
        return stay

    def leave(self, stay: Stay) -> None:
        """Give back the slot and the blocks. The last block first: it is the least likely to be asked for again."""
        self._stays.remove(stay)
        self._pool.release(stay.slot.partition, stay.blocks[::-1])
        heapq.heappush(self._free_slots[stay.slot.partition], stay.slot.index)

    def grow(self, stay: Stay) -> bool:
        """Make sure that the next token's KV has a block; False where the partition has none free."""
        if stay.num_computed < len(stay.blocks) * self._pool.block_size:
            return True
        fresh = self._pool.allocate(stay.slot.partition, 1)
        stay.blocks += fresh or ()
        return fresh is not None

    def is_draining(self, partition: int) -> bool:
        """Whether some stay of the partition ends as soon as its launched steps have completed."""
        return any(stay.is_draining for stay in self._stays if stay.slot.partition == partition)

    def is_empty(self, partition: int) -> bool:
        return not any(stay.slot.partition == partition for stay in self._stays)

    def running(self, partition: int) -> list[Stay]:
        """Those that still schedule steps, oldest first."""
        return [stay for stay in self._stays if stay.slot.partition == partition and stay.is_running]
