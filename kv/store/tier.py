"""A tier: a place below the device's pages where KV blocks are kept by name, and what all of them promise.

A block comes as the bytes that `Engine.export` gives it: [layers, block_size, features] of the pages' dtype, the same
on every mesh. Its name says what it holds (`kv.prefix`), so a tier never overwrites and never has two versions.
Whatever goes wrong in a tier, serving goes on: a block that cannot be read, in time and as it was written, is a miss
with a cause. Needs no device.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes


class MissCause(enum.StrEnum):
    """Why a block that was asked for did not come."""

    ABSENT = "absent"  # never kept, or evicted
    CORRUPT = "corrupt"  # other bytes than were written, of that length
    WRONG_LENGTH = "wrong_length"  # fewer or more of them
    IO_ERROR = "io_error"  # the disk, or the network, said no
    TIMED_OUT = "timed_out"
    OFF = "off"  # switched off for a while, after what went wrong before


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounters:
    """Of one tier since it began. Blocks but for the bytes."""

    num_hits: int = 0
    num_misses: Mapping[MissCause, int] = field(default_factory=dict)
    num_kept: int = 0
    num_not_kept: int = 0  # no room, or the disk or the network said no
    num_evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_held: int | None = None  # None: nobody here knows
    is_up: bool | None = None  # whether it answered when it was last asked; None: it always does


def together(counters: Sequence[TierCounters]) -> TierCounters:
    """Of one tier in several processes. It is up where all that can tell say so."""
    causes = dict.fromkeys(cause for each in counters for cause in each.num_misses)
    held = [each.bytes_held for each in counters if each.bytes_held is not None]
    up = [each.is_up for each in counters if each.is_up is not None]
    return TierCounters(
        num_hits=sum(each.num_hits for each in counters),
        num_misses={cause: sum(each.num_misses.get(cause, 0) for each in counters) for cause in causes},
        num_kept=sum(each.num_kept for each in counters),
        num_not_kept=sum(each.num_not_kept for each in counters),
        num_evicted=sum(each.num_evicted for each in counters),
        bytes_read=sum(each.bytes_read for each in counters),
        bytes_written=sum(each.bytes_written for each in counters),
        bytes_held=sum(held) if held else None,
        is_up=all(up) if up else None,
    )


@runtime_checkable
class Tier(Protocol):
    """Every method may block, may be called from any thread, and raises nothing that a disk or a network did."""

    name: str  # "host", "store" or "ssd": as metrics and answers call it
    block_bytes: int
    is_shared: bool  # every worker finds here what any has kept

    @property
    def counters(self) -> TierCounters: ...

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        """Which of these blocks are here, as far as is known without reading them.

        `names` is one chain, each block behind the one before it: what is asked for together is kept together, and a
        chain is lost from its end.
        """
        ...

    def has(self, names: Sequence[BlockName]) -> Sequence[bool | None]:
        """As `find`, for whoever writes: with as much time as keeping has, and None where it is not known. It counts as
        no look-up, and where others evict without knowing chains, it counts as a use.
        """
        ...

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        """Reads blocks into the rows of `out` [len(names), block_bytes]; False: that row means nothing."""
        ...

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        """Keeps the rows of `blocks` [len(names), block_bytes], of one chain; True also where it has one already."""
        ...

    def held(self) -> list[BlockName]:
        """What is here that this process did not put here. Asked once, at the start; empty where that is not known."""
        ...

    def upkeep(self) -> None:
        """What has to be done now and then, and nobody waits for."""
        ...

    def close(self) -> None:
        """What was kept before stays, where the tier outlives its process. May be called again."""
        ...
