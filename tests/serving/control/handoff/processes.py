"""The memory and processes of a modelled handoff, without the events that move them.

Memory is modelled as bytes are: a cell or block holds two halves, each tagged with who wrote it (writer's epoch,
handoff, block of the prompt), so that a write that arrives late or by half leaves a mixture. A checksum is the hash of
both.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.handoff.reservations import Reservations, ReservationsConfig
from moonshard.serving.control.request import Request

BLOCK_SIZE = 2
LEASE_S = 20.0
QUARANTINE_S = 2.0  # short: safety must not rest on it
WRITE_TIMEOUT_S = 30.0
QUEUE_TIMEOUT_S = 6.0
MAX_QUEUED = 3
NUM_SLOTS = 2  # of each partition of a decode process
GATEWAY = "gateway"
CACHED_NAME = b"cached".ljust(
    16
)  # of the block that a decode process holds in each partition, with which prompts begin
type Half = Hashable
type Bytes = tuple[Half, Half]
EMPTY: Bytes = ("empty", "empty")


def checksum(content: Bytes) -> int:
    return hash(content)


@dataclass
class PrefillTask:
    """A prompt being prefilled; its blocks are taken when it first runs."""

    target: m.Target
    partition: int
    blocks: tuple[int, ...] = ()
    num_done: int = 0


@dataclass
class WriteUnderWay:
    write: m.Write
    contents: tuple[Bytes, ...]
    began_s: float


@dataclass
class LateWrite:
    """Bytes that a dead or timed-out writer left in a socket's buffer."""

    session: int
    partition: int
    cell: int
    content: Bytes


class PrefillProcess:
    def __init__(self, epoch: int, num_partitions: int):
        self.epoch = epoch
        self.pool = BlockPool(num_partitions, 7, BLOCK_SIZE)
        self.slab = BlockPool(num_partitions, 3, 1)
        self.side = PrefillSide(epoch, self.pool, self.slab, QUARANTINE_S)
        self.pages: dict[tuple[int, int], Bytes] = {}
        self.staging: dict[tuple[int, int], Bytes] = {}
        self.tasks: dict[bytes, PrefillTask] = {}
        self.stages: list[m.CopyIn] = []
        self.writes: list[WriteUnderWay] = []


class DecodeProcess:
    """It is its own scheduler: whoever has joined runs, in a slot or not, until it leaves."""

    def __init__(self, epoch: int, num_partitions: int):
        self.epoch = epoch
        self.pool = BlockPool(num_partitions, 8, BLOCK_SIZE)
        self.slab = BlockPool(num_partitions, 4, 1)
        config = DecodeSideConfig(
            session=str(epoch),
            lease_s=LEASE_S,
            quarantine_s=QUARANTINE_S,
            max_cells_per_handoff=2,
        )
        self.side = DecodeSide(config, epoch, self.pool, self.slab)
        cache = PrefixCache(self.pool)
        self.reservations = Reservations[str](
            ReservationsConfig(max_queued=MAX_QUEUED, queue_timeout_s=QUEUE_TIMEOUT_S),
            self.side,
            pool=self.pool,
            slab=self.slab,
            cache=cache,
            batch=self,
        )
        self.cached = tuple(self.pool.allocate(partition, 1) or () for partition in range(num_partitions))
        for partition, blocks in enumerate(self.cached):
            for block in blocks:
                cache.note(partition, block, CACHED_NAME)
        self.cells: dict[tuple[int, int], Bytes] = {}
        self.pages: dict[tuple[int, int], Bytes] = {}
        self.copies: list[m.CopyOut] = []
        self.private: dict[int, tuple[Bytes, ...]] = {}
        self.running: dict[bytes, m.Join] = {}
        self.granted: set[int] = set()
        self.writers: dict[bytes, int] = {}  # as asked
        self.waiting: tuple[list[bytes], ...] = tuple([] for _ in range(num_partitions))  # for room, as they asked

    def check(self, request: Request, partition: int | None = None) -> None:
        del request, partition

    def num_spare_slots(self, partition: int) -> int:
        return NUM_SLOTS - self.num_blocks_to_grow(partition)

    def num_blocks_to_grow(self, partition: int) -> int:
        return sum(join.partition == partition for join in self.running.values())

    def num_blocks_due(self, partition: int) -> int:
        del partition
        return 0


@dataclass
class Packet:
    channel: tuple[str, str]  # from, to
    epoch: int | None  # of the process it is for, None for the gateway
    message: object


@dataclass
class Tally:
    """How often each interesting event happened."""

    num_finished: int = 0
    num_mismatches: int = 0
    num_late: int = 0
    failures: set[m.Cause] = field(default_factory=set)


def late_writes(under_way: WriteUnderWay) -> list[LateWrite]:
    target = under_way.write.target
    return [
        LateWrite(int(target.session), target.partition, grant.cell, content)
        for grant, content in zip(under_way.write.grants, under_way.contents, strict=True)
    ]
