"""Which KV blocks are taken, per partition: the pool's bookkeeping, without the pages themselves.

Stands apart from `pages` so that a scheduler, a simulator or a test runs it without a device. A block is free, used
(held by one or more sequences, counted), leased (promised to a transfer that writes it) or quarantined (a transfer that
may still write it was given up):

    free --allocate--> used --release--> free
    free --lease--> leased --land--> used
                    leased --quarantine--> quarantined --restore--> free

Always `free + used + leased + quarantined == total`, per partition. Free blocks are reused in the order in which they
became free, so that what was freed last stays intact longest. Left out: what a block holds, and when a quarantine ends.
Source: PagedAttention (Kwon et al. 2023, arXiv:2309.06180, section 4).
"""

import enum
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass


class BlockState(enum.Enum):
    FREE = "free"
    USED = "used"
    LEASED = "leased"
    QUARANTINED = "quarantined"


class BlockMisuse(Exception):
    """A transition that the block's state does not have: a fault of the caller, found before anything changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionCounts:
    """Blocks of one partition by state."""

    free: int
    used: int
    leased: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.used + self.leased + self.quarantined


class _Partition:
    """One partition's states, reference counts and free list. Every operation costs O(1) per block."""

    def __init__(self, num_blocks: int):
        self.states = [BlockState.FREE] * num_blocks
        self.num_refs = [0] * num_blocks  # above 0 exactly where the state is USED
        self.free = deque(range(num_blocks))  # least recently freed first
        self.counts = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}

    def check(self, blocks: Collection[int], state: BlockState) -> None:
        if len(set(blocks)) != len(blocks):
            raise BlockMisuse(f"blocks named twice: {list(blocks)}")
        for block in blocks:
            if not 0 <= block < len(self.states):
                raise BlockMisuse(f"no block {block}: there are {len(self.states)}")
            if self.states[block] is not state:
                raise BlockMisuse(f"block {block} is {self.states[block].value}, not {state.value}")

    def move(self, blocks: Collection[int], source: BlockState, target: BlockState) -> None:
        self.counts[source] -= len(blocks)
        self.counts[target] += len(blocks)
        num_refs = 1 if target is BlockState.USED else 0
        for block in blocks:
            self.states[block] = target
            self.num_refs[block] = num_refs
        if target is BlockState.FREE:
            self.free.extend(blocks)

    def take(self, num: int, target: BlockState) -> tuple[int, ...] | None:
        if num > len(self.free):
            return None
        blocks = tuple(self.free.popleft() for _ in range(num))
        self.move(blocks, BlockState.FREE, target)
        return blocks


class BlockPool:
    """The blocks of a worker. Ids count from 0 within a partition and mean nothing in another."""

    def __init__(self, num_partitions: int, blocks_per_partition: int, block_size: int):
        if min(num_partitions, blocks_per_partition, block_size) < 1:
            raise ValueError("a pool has at least one partition, one block per partition and one token per block")
        self.num_partitions = num_partitions
        self.blocks_per_partition = blocks_per_partition
        self.block_size = block_size
        self._partitions = tuple(_Partition(blocks_per_partition) for _ in range(num_partitions))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_free(self, partition: int) -> int:
        return len(self._partitions[partition].free)

    def counts(self, partition: int) -> PartitionCounts:
        return PartitionCounts(**{state.value: num for state, num in self._partitions[partition].counts.items()})

    def num_refs(self, partition: int, block: int) -> int:
        return self._partitions[partition].num_refs[block]

    def allocate(self, partition: int, num: int) -> tuple[int, ...] | None:
        """`num` blocks, each with one reference; or None, and nothing changes, where fewer are free."""
        return self._partitions[partition].take(num, BlockState.USED)

    def retain(self, partition: int, blocks: Collection[int]) -> None:
        """One more reference to each used block."""
        pool = self._partitions[partition]
        pool.check(blocks, BlockState.USED)
        for block in blocks:
            pool.num_refs[block] += 1

    def release(self, partition: int, blocks: Collection[int]) -> None:
        """One reference less to each used block; a block without any is free."""
        pool = self._partitions[partition]
        pool.check(blocks, BlockState.USED)
        for block in blocks:
            pool.num_refs[block] -= 1
        unreferenced = [block for block in blocks if pool.num_refs[block] == 0]
        pool.move(unreferenced, BlockState.USED, BlockState.FREE)

    def lease(self, partition: int, num: int) -> tuple[int, ...] | None:
        """`num` blocks for a transfer to write; or None, and nothing changes, where fewer are free."""
        return self._partitions[partition].take(num, BlockState.LEASED)

    def land(self, partition: int, blocks: Collection[int]) -> None:
        """The transfer wrote them: used, with one reference each."""
        self._move(partition, blocks, BlockState.LEASED, BlockState.USED)

    def quarantine(self, partition: int, blocks: Collection[int]) -> None:
        """The transfer was given up, and may still write."""
        self._move(partition, blocks, BlockState.LEASED, BlockState.QUARANTINED)

    def restore(self, partition: int, blocks: Collection[int]) -> None:
        """Nobody can write them any more."""
        self._move(partition, blocks, BlockState.QUARANTINED, BlockState.FREE)

    def _move(self, partition: int, blocks: Collection[int], source: BlockState, target: BlockState) -> None:
        pool = self._partitions[partition]
        pool.check(blocks, source)
        pool.move(blocks, source, target)
