"""Which blocks hold what: token sequences named by a chain of hashes, so that a common beginning is computed once.

A block's name is the hash of all that its KV depends on: its own tokens, and, through its parent's name, the tokens
before it, the model, the dtype and the tenant's salt. So equal names mean equal KV, on any mesh and in any worker. The
cache knows the names of a worker's used blocks, and of its free ones until the pool reuses them. Needs no device. The
scheduler says when a block is complete; which worker has which names is known in
`serving.control.routing.prefix_index`.
Source: vLLM (automatic prefix caching), for chained hashes of full blocks.
"""

import enum
import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moonshard.kv.blocks import BlockPool

BlockName = bytes
NAME_BYTES = 16
MAX_EVENTS = 65_536  # kept for a reader that lags; whoever lags more asks for a snapshot
MAX_BELOW = 1 << 20  # names in tiers below that are remembered, of each kind: those that were seen last


def root_name(*parts: bytes) -> BlockName:
    """What the first block's name depends on besides its tokens: fingerprint, dtype, salt, and whatever else."""
    return _hash(parts)


def block_names(root: BlockName, tokens: Sequence[int] | np.ndarray, block_size: int) -> list[BlockName]:
    """The names of all full blocks of a sequence; of what follows a known block, with its name as the root."""
    packed = np.asarray(tokens, "<i4")
    names, parent = list[BlockName](), root
    for end in range(block_size, len(packed) + 1, block_size):
        parent = _hash((parent, packed[end - block_size : end].tobytes()))
        names.append(parent)
    return names


def split_names(joined: bytes) -> list[BlockName]:
    """Names as a message carries them: one after another."""
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]


def _before_any_again(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The names before the first repeated one: a chain of hashes repeats none; a sequence holds no block twice."""
    seen = set[int]()
    return tuple(itertools.takewhile(lambda block: not (block in seen or seen.add(block)), blocks))


def _hash(parts: Iterable[bytes]) -> BlockName:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[:NAME_BYTES]


class Below(enum.Enum):
    """Where blocks are below the device's pages."""

    OWN = enum.auto()  # in tiers that only this worker reads; of a gang, only that member of it
    SHARED = enum.auto()  # in one that every worker reads


@dataclass(frozen=True, slots=True)
class Spaces:
    """Spaces of names in a worker, by number: its partitions, then for each of its processes the tiers that only this
    one reads, then what every worker reads. The partitions are shared out evenly among the processes, in their order.
    """

    num_partitions: int
    num_processes: int = 1

    def __len__(self) -> int:
        return self.num_partitions + self.num_processes + 1

    def process_of(self, partition: int) -> int:
        return partition * self.num_processes // self.num_partitions

    def partitions_of(self, process: int) -> range:
        each = self.num_partitions // self.num_processes
        return range(process * each, (process + 1) * each)

    def below(self, below: Below, process: int) -> int:
        return self.num_partitions + (process if below is Below.OWN else self.num_processes)


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """A space gained or lost a name. Numbers count a worker's events from 0."""

    number: int
    partition: int  # or another one of `Spaces`
    name: BlockName
    is_known: bool
    parent: BlockName | None = None  # the block before a gained one, where that has a name


class PrefixCache:
    """The names of the blocks in one worker's pool. A cache that is switched off knows none.

    It is off where a model has several KV groups, or one with a window: a name stands for one block that is not written
    over.

    Where it `has_next_token_kv`, a block's last token has KV that depends on the token behind it, as of a draft model,
    and no name says which that was. So whoever found a chain writes the last token of its last block again, in a copy.
    """

    def __init__(self, pool: BlockPool, *, is_on: bool = True, has_next_token_kv: bool = False, num_processes: int = 1):
        self._pool = pool
        self.spaces = Spaces(pool.num_partitions, num_processes)
        self._below = tuple(OrderedDict[BlockName, None]() for _ in range(num_processes + 1))
        self.has_next_token_kv = has_next_token_kv
        self.is_on = is_on and pool.groups.is_plain
        self._blocks: tuple[dict[BlockName, int], ...] = tuple({} for _ in range(pool.num_partitions))
        self._names: tuple[dict[int, BlockName], ...] = tuple({} for _ in range(pool.num_partitions))
        self._num_events = 0
        self._events: deque[PrefixEvent] = deque(maxlen=MAX_EVENTS)

    def match(self, partition: int, names: Sequence[BlockName]) -> tuple[int, ...]:
        """The blocks of the longest known beginning. Nobody holds them for it: `hold` before anything is allocated."""
        self._forget_lost()
        known = self._blocks[partition]
        found = tuple(known[name] for name in itertools.takewhile(known.__contains__, names))
        return found if len(set(found)) == len(found) else _before_any_again(found)

    def shareable(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """Of a chain as `match` gave it, the blocks that may be read as they are by whoever goes on from it."""
        return found[:-1] if self.has_next_token_kv else found

    def hold(self, partition: int, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these blocks, as `match` gave them."""
        self._pool.hold(partition, blocks)

    def renew(self, partition: int, names: Sequence[BlockName]) -> None:
        """Marks a chain as just used: its free blocks are reused last of all, the end of the chain first.

        For callers that could not release the blocks from the end on, or that held other blocks of the same names.
        """
        self._forget_lost()
        known = self._blocks[partition]
        self._pool.renew(partition, [known[name] for name in reversed(names) if name in known])

    def note(self, partition: int, block: int, name: BlockName, parent: BlockName | None = None) -> None:
        """Names a used block that is complete, and that is never written again while it is held. `parent`: the block
        before it.

        A second block of the same name stays without one: it is free as soon as it is released.
        """
        self._forget_lost()
        if not self.is_on or name in self._blocks[partition] or block in self._names[partition]:
            return
        self._pool.keep(partition, block)
        self._blocks[partition][name] = block
        self._names[partition][block] = name
        self._tell(partition, name, is_known=True, parent=parent)

    def note_below(self, below: Below, names: Iterable[BlockName], *, is_known: bool = True, process: int = 0) -> None:
        """Blocks were seen in a tier below, or were not there any more. Only for others to know: nothing here finds
        them. `process`: in whose tier, where it is that one's own.
        """
        space = self.spaces.below(below, process)
        known = self._below[space - self._pool.num_partitions]
        for name in names:
            if is_known and name not in known:
                self._tell(space, name, is_known=True)
            if is_known:
                known[name] = None
                known.move_to_end(name)
            elif name in known:
                del known[name]
                self._tell(space, name, is_known=False)
        while len(known) > MAX_BELOW:
            self._tell(space, known.popitem(last=False)[0], is_known=False)

    # ---- what others may know

    @property
    def num_events(self) -> int:
        """The number of the next event."""
        self._forget_lost()
        return self._num_events

    def events_from(self, number: int) -> tuple[PrefixEvent, ...] | None:
        """The events from that number on; None where some are no longer kept: then a snapshot is needed."""
        self._forget_lost()
        num_asked = max(0, self._num_events - number)
        if num_asked > len(self._events):
            return None
        return tuple(itertools.islice(reversed(self._events), num_asked))[::-1]  # whoever asks lags little

    def snapshot(self, partition: int) -> tuple[BlockName, ...]:
        """All names known there, after all events so far; of a space below, too."""
        self._forget_lost()
        num_partitions = self._pool.num_partitions
        return tuple(self._blocks[partition] if partition < num_partitions else self._below[partition - num_partitions])

    def _forget_lost(self) -> None:
        for partition, block in self._pool.take_lost():
            name = self._names[partition].pop(block)
            del self._blocks[partition][name]
            self._tell(partition, name, is_known=False)

    def _tell(self, partition: int, name: BlockName, *, is_known: bool, parent: BlockName | None = None) -> None:
        self._events.append(PrefixEvent(self._num_events, partition, name, is_known, parent))
        self._num_events += 1
