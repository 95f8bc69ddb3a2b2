"""Which KV blocks are taken, per partition: the pool's bookkeeping, without the pages themselves.

Needs no device. A block is free, used (held by one or more sequences, counted), leased (promised to a transfer that
writes it) or quarantined (a transfer that may still write it was given up):

    free --allocate--> used --release--> free
    free --hold--> used, of a block that is worth keeping
    free --lease--> leased --land--> used
                    leased --quarantine--> quarantined --restore--> free

Always `free + used + leased + quarantined == total`, per partition. A free block may be worth keeping: until it is
reused, it can be held again with what it has. Free blocks are reused in the order in which they became free, those
worth keeping last: so release a chain from its end, and the end is lost first. What a block holds is known in
`kv.prefix`; when a quarantine ends is the caller's decision.

A block holds some tokens of one KV group's layers, and any block may be of any group: `BlockGroups` says of which group
and which tokens each block of a sequence is.
Source: PagedAttention (Kwon et al. 2023, arXiv:2309.06180, section 4); vLLM's automatic prefix caching for the order,
and its hybrid KV cache manager for groups that share a pool.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """A KV group as the bookkeeping sees it. A window and a bound come together, or neither."""

    window: int | None = None  # how many tokens back from its own, itself included, a position sees; None: all
    max_blocks: int | None = None  # that a sequence has of the group; None: as many as its tokens take

    @classmethod
    def sliding(cls, window: int, step_tokens: int, block_size: int) -> "BlockGroup":
        """A group with a window, of whose sequences a step writes at most so many tokens. Those, and what the first of
        them sees, lie in blocks of their own, wherever in a block they begin.

        ValueError for a window of fewer than 2 tokens: it would see nothing that was written before.
        """
        if window < 2:
            raise ValueError(f"a window of {window} tokens sees none but its own")
        return cls(window=window, max_blocks=-(-(window - 2 + step_tokens) // block_size) + 1)


class SeenBlock(NamedTuple):
    """A block of a prompt that the position behind it sees: of which column, and its place in the sequence."""

    column: int
    place: int


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """Which block of a sequence holds what. A column is as many tokens as a block has, counted from the beginning.

    A sequence's blocks are one tuple in the order in which they are taken: for each column a block of each group. A
    group with a window takes no more than its `max_blocks`, and its further columns are written over those, round and
    round. So where there is one group and it has no window, a block's place in the tuple is its column.
    """

    groups: tuple[BlockGroup, ...] = (BlockGroup(),)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether a block's place is its column."""
        return len(self.groups) == 1 and self.groups[0].max_blocks is None

    def num_blocks(self, num_columns: int) -> int:
        """How many blocks a sequence of so many columns takes."""
        return sum(num_columns if g.max_blocks is None else min(num_columns, g.max_blocks) for g in self.groups)

    def num_columns(self, num_blocks: int) -> int | None:
        """For how many whole columns so many blocks are enough; None: for any number."""
        num_columns = 0
        for bound in sorted({group.max_blocks for group in self.groups if group.max_blocks is not None}):
            if self.num_blocks(bound) > num_blocks:
                break
            num_columns = bound
        num_growing = sum(group.max_blocks is None or group.max_blocks > num_columns for group in self.groups)
        if not num_growing:
            return None
        return num_columns + (num_blocks - self.num_blocks(num_columns)) // num_growing

    def place(self, group: int, column: int) -> int:
        """Where the block of a group's column stands among the blocks of the sequence."""
        bound = self.groups[group].max_blocks
        own = column if bound is None else column % bound
        beside = sum(other.max_blocks is None or other.max_blocks > own for other in self.groups[:group])
        return self.num_blocks(own) + beside

    def seen(self, num_tokens: int, block_size: int) -> tuple[SeenBlock, ...]:
        """The blocks that the position behind so many tokens sees, in the order of columns, then of groups."""
        num_columns = -(-num_tokens // block_size)
        if self.is_plain:
            return tuple(SeenBlock(column, column) for column in range(num_columns))
        firsts = [0 if g.window is None else max(0, num_tokens - g.window + 1) // block_size for g in self.groups]
        return tuple(
            SeenBlock(column, self.place(group, column))
            for column in range(num_columns)
            for group, first in enumerate(firsts)
            if column >= first
        )

    def places_to_share(self, num_columns: int) -> Collection[int]:
        """The places of the first columns' blocks that are never written again: those of groups without a window."""
        if self.is_plain:
            return range(num_columns)
        of_groups = (index for index, group in enumerate(self.groups) if group.max_blocks is None)
        return frozenset(self.place(index, column) for index in of_groups for column in range(num_columns))

    def places_to_copy(self, num_tokens: int, block_size: int) -> Collection[int]:
        """The places of what another choice of a prompt of so many tokens sees and may not share."""
        num_full = num_tokens // block_size
        if self.is_plain:
            return range(num_full, -(-num_tokens // block_size))
        shared = self.places_to_share(num_full)
        return tuple(block.place for block in self.seen(num_tokens, block_size) if block.place not in shared)


PLAIN = BlockGroups()


class _Partition:
    """One partition's states, reference counts and free list. Every operation costs O(1) per block."""

    def __init__(self, num_blocks: int):
        self.states = [BlockState.FREE] * num_blocks
        self.num_refs = [0] * num_blocks  # above 0 exactly where the state is USED
        self.is_kept = [False] * num_blocks
        self.free = deque(range(num_blocks))  # least recently freed first, without those worth keeping
        self.free_kept = OrderedDict[int, None]()  # likewise
        self.counts = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.free_kept)

    def check(self, blocks: Collection[int], *states: BlockState) -> None:
        if len(set(blocks)) != len(blocks):
            raise BlockMisuse(f"blocks named twice: {list(blocks)}")
        for block in blocks:
            if not 0 <= block < len(self.states):
                raise BlockMisuse(f"no block {block}: there are {len(self.states)}")
            if self.states[block] not in states:
                wanted = " or ".join(state.value for state in states)
                raise BlockMisuse(f"block {block} is {self.states[block].value}, not {wanted}")

    def move(self, blocks: Collection[int], source: BlockState, target: BlockState) -> None:
        self.counts[source] -= len(blocks)
        self.counts[target] += len(blocks)
        num_refs = 1 if target is BlockState.USED else 0
        for block in blocks:
            self.states[block] = target
            self.num_refs[block] = num_refs
            if target is BlockState.FREE:
                self._line_up(block)

    def _line_up(self, block: int) -> None:
        if self.is_kept[block]:
            self.free_kept[block] = None
        else:
            self.free.append(block)

    def take(self, num: int, target: BlockState) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """`num` free blocks, and those of them that were worth keeping; None where fewer are free."""
        if num > self.num_free:
            return None
        plain = [self.free.popleft() for _ in range(min(num, len(self.free)))]
        lost = [self.free_kept.popitem(last=False)[0] for _ in range(num - len(plain))]
        for block in lost:
            self.is_kept[block] = False
        blocks = (*plain, *lost)
        self.move(blocks, BlockState.FREE, target)
        return blocks, tuple(lost)

    def hold(self, blocks: Collection[int]) -> None:
        fresh = [block for block in blocks if self.states[block] is BlockState.FREE]
        for block in fresh:
            del self.free_kept[block]
        self.move(fresh, BlockState.FREE, BlockState.USED)
        for block in set(blocks).difference(fresh):
            self.num_refs[block] += 1


class BlockPool:
    """The blocks of a worker. Ids count from 0 within a partition and mean nothing in another."""

    def __init__(self, num_partitions: int, blocks_per_partition: int, block_size: int, groups: BlockGroups = PLAIN):
        if min(num_partitions, blocks_per_partition, block_size) < 1:
            raise ValueError("a pool has at least one partition, one block per partition and one token per block")
        self.num_partitions = num_partitions
        self.blocks_per_partition = blocks_per_partition
        self.block_size = block_size
        self.groups = groups
        self._is_plain = groups.is_plain  # asked for every row of every step
        self._num_columns = () if self._is_plain else tuple(map(groups.num_columns, range(blocks_per_partition + 1)))
        self._lost: list[tuple[int, int]] = []  # (partition, block), until `take_lost`
        self._partitions = tuple(_Partition(blocks_per_partition) for _ in range(num_partitions))

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks a sequence of so many tokens takes, of all groups together."""
        num_columns = -(-num_tokens // self.block_size)
        return num_columns if self._is_plain else self.groups.num_blocks(num_columns)

    def num_tokens_in(self, num_blocks: int, most_tokens: int) -> int:
        """How long a sequence of at most so many tokens may be with so many blocks of a partition."""
        num_columns = num_blocks if self._is_plain else self._num_columns[num_blocks]
        return most_tokens if num_columns is None else min(most_tokens, num_columns * self.block_size)

    def num_blocks_to_grow(self, num_blocks: int) -> int:
        """How many blocks a sequence that has so many takes for its next column."""
        if self._is_plain:
            return 1
        num_columns = self._num_columns[num_blocks]
        return 0 if num_columns is None else self.groups.num_blocks(num_columns + 1) - num_blocks

    def seen(self, num_tokens: int) -> tuple[SeenBlock, ...]:
        """The blocks of a prompt of so many tokens that whoever decodes it needs."""
        return self.groups.seen(num_tokens, self.block_size)

    def num_seen(self, num_tokens: int) -> int:
        """How many those are."""
        return self.num_blocks_for(num_tokens) if self._is_plain else len(self.seen(num_tokens))

    def num_free(self, partition: int) -> int:
        """Free blocks, those worth keeping included."""
        return self._partitions[partition].num_free

    def counts(self, partition: int) -> PartitionCounts:
        return PartitionCounts(**{state.value: num for state, num in self._partitions[partition].counts.items()})

    def num_refs(self, partition: int, block: int) -> int:
        return self._partitions[partition].num_refs[block]

    def allocate(self, partition: int, num: int) -> tuple[int, ...] | None:
        """`num` blocks, each with one reference; or None, and nothing changes, where fewer are free."""
        return self._take(partition, num, BlockState.USED)

    def retain(self, partition: int, blocks: Collection[int]) -> None:
        """Adds a reference to each used block."""
        pool = self._partitions[partition]
        pool.check(blocks, BlockState.USED)
        for block in blocks:
            pool.num_refs[block] += 1

    def keep(self, partition: int, block: int) -> None:
        """Marks a used block as worth keeping once it is free, until it is taken for something else."""
        pool = self._partitions[partition]
        pool.check((block,), BlockState.USED)
        pool.is_kept[block] = True

    def hold(self, partition: int, blocks: Collection[int]) -> None:
        """One more reference to each kept block, whether it is used or free."""
        pool = self._partitions[partition]
        pool.check(blocks, BlockState.USED, BlockState.FREE)
        if strangers := [block for block in blocks if not pool.is_kept[block]]:
            raise BlockMisuse(f"blocks that nobody kept: {strangers}")
        pool.hold(blocks)

    def renew(self, partition: int, blocks: Iterable[int]) -> None:
        """Those of `blocks` that are kept and free now count as freed just now, in this order."""
        free_kept = self._partitions[partition].free_kept
        for block in blocks:
            if block in free_kept:
                free_kept.move_to_end(block)

    def take_lost(self) -> list[tuple[int, int]]:
        """(partition, block) of the kept blocks that were reused for something else since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def num_needed(self, partition: int, num_blocks: int, found: Collection[int]) -> int:
        """How many blocks have to be free for a table of `num_blocks` that begins with `found`.

        Those are the rest, and of `found` the free ones, which are taken as well.
        """
        states = self._partitions[partition].states
        return num_blocks - len(found) + sum(states[block] is BlockState.FREE for block in found)

    def release(self, partition: int, blocks: Collection[int]) -> None:
        """Removes one reference from each used block; a block without any is free."""
        pool = self._partitions[partition]
        pool.check(blocks, BlockState.USED)
        for block in blocks:
            pool.num_refs[block] -= 1
        unreferenced = [block for block in blocks if pool.num_refs[block] == 0]
        pool.move(unreferenced, BlockState.USED, BlockState.FREE)

    def lease(self, partition: int, num: int) -> tuple[int, ...] | None:
        """`num` blocks for a transfer to write; or None, and nothing changes, where fewer are free."""
        return self._take(partition, num, BlockState.LEASED)

    def land(self, partition: int, blocks: Collection[int]) -> None:
        """The transfer wrote the leased blocks: they are used, with one reference each."""
        self._move(partition, blocks, BlockState.LEASED, BlockState.USED)

    def quarantine(self, partition: int, blocks: Collection[int]) -> None:
        """The transfer was given up, and may still write: the blocks may not be reused until `restore`."""
        self._move(partition, blocks, BlockState.LEASED, BlockState.QUARANTINED)

    def restore(self, partition: int, blocks: Collection[int]) -> None:
        """Nobody can write the quarantined blocks any more: they are free."""
        self._move(partition, blocks, BlockState.QUARANTINED, BlockState.FREE)

    def _take(self, partition: int, num: int, target: BlockState) -> tuple[int, ...] | None:
        taken = self._partitions[partition].take(num, target)
        if taken is None:
            return None
        blocks, lost = taken
        self._lost += ((partition, block) for block in lost)
        return blocks

    def _move(self, partition: int, blocks: Collection[int], source: BlockState, target: BlockState) -> None:
        pool = self._partitions[partition]
        pool.check(blocks, source)
        pool.move(blocks, source, target)
