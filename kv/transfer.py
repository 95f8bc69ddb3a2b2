"""Moving KV bytes between processes: what every transport does, and how the receiver knows what it was sent.

A transport writes ranges of the local slab into ranges of a remote one, one-sided: the receiver takes no part, and is
told by a manifest, which travels on another way. Nothing fences such a write. Measured with Mooncake over TCP: bytes
of a writer that was killed, of a write that had timed out, and of a range that was no longer registered all landed
later. So a slab is never trusted: `copy_verified` copies out first and checks the copy, which nobody else can
reach. The manifest, which cells are free and when a cell may be used again are the caller's part
(`serving.control.handoff`).
"""

import enum
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from moonshard.kv.slab import Bytes, Slab, find_slab

Addresses = NDArray[np.int64]


class FailureCause(enum.StrEnum):
    REFUSED = "refused"  # nobody listens at that session
    TIMED_OUT = "timed_out"  # nothing landed for too long, and may still land
    BAD_RANGE = "bad_range"  # outside of what is registered, here or there
    PEER_GONE = "peer_gone"  # the connection broke
    CLOSED = "closed"  # this transport was closed


class TransferFailed(Exception):
    """A publish that did not complete. Part of it may have landed; with `may_still_land` the rest may at any time."""

    def __init__(self, cause: FailureCause, detail: str, *, may_still_land: bool):
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.may_still_land = may_still_land


def worst_of(failures: Sequence[BaseException]) -> BaseException:
    """Of several writes of one handoff: what is no failed transfer first, then one whose bytes may still land."""
    return min(failures, key=lambda failure: (isinstance(failure, TransferFailed), not _may_still_land(failure)))


def _may_still_land(failure: BaseException) -> bool:
    return isinstance(failure, TransferFailed) and failure.may_still_land


class TransportUnavailable(OSError):
    """A transport that cannot run on this machine, and what to do about it."""


class ChecksumMismatch(Exception):
    """A cell whose copied bytes are not those that were staged: it was overwritten, or has not fully arrived."""

    def __init__(self, cell: int, expected: int, found: int):
        super().__init__(f"slot {cell}: expected checksum {expected:016x}, found {found:016x}")
        self.cell = cell
        self.expected = expected
        self.found = found


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Ranges to write, in three arrays of one length. Ranges may have any alignment; an empty one is a fault."""

    local_addresses: Addresses
    remote_addresses: Addresses
    num_bytes: Addresses

    def __post_init__(self):
        shapes = {self.local_addresses.shape, self.remote_addresses.shape, self.num_bytes.shape}
        if len(shapes) != 1 or self.num_bytes.ndim != 1:
            raise ValueError(f"copies need three arrays of one length, got shapes {shapes}")
        if (self.num_bytes < 1).any():
            raise ValueError("a copy has no bytes")

    def rows(self) -> list[tuple[int, int, int]]:
        """Each range as (local address, remote address, bytes)."""
        columns = (self.local_addresses, self.remote_addresses, self.num_bytes)
        return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResult:
    """All copies landed."""

    num_bytes: int
    num_transfers: int
    duration_s: float

    @classmethod
    def of_all(cls, results: Iterable["PublishResult"]) -> "PublishResult":
        """Of several that were made at once, or of none."""
        results = list(results)
        return cls(
            num_bytes=sum(result.num_bytes for result in results),
            num_transfers=sum(result.num_transfers for result in results),
            duration_s=max((result.duration_s for result in results), default=0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportCounters:
    """Counts since the transport started. Bytes and transfers are those of publishes that completed."""

    num_bytes: int
    num_transfers: int
    busy_s: float  # summed over publishes, also where they overlap
    num_failures: Mapping[FailureCause, int]

    def __add__(self, other: "TransportCounters") -> "TransportCounters":
        causes = {*self.num_failures, *other.num_failures}
        return TransportCounters(
            num_bytes=self.num_bytes + other.num_bytes,
            num_transfers=self.num_transfers + other.num_transfers,
            busy_s=self.busy_s + other.busy_s,
            num_failures={
                cause: self.num_failures.get(cause, 0) + other.num_failures.get(cause, 0) for cause in causes
            },
        )


@runtime_checkable
class Transport(Protocol):
    """One process's end of a transport."""

    @property
    def session(self) -> str:
        """Where peers reach this end. The caller makes sure that no later epoch uses the same session again."""
        ...

    @property
    def counters(self) -> TransportCounters: ...

    def register(self, slab: Slab) -> None:
        """Lets peers write into the slab, and this end read from it, until `close`; keeps it alive as long."""
        ...

    def publish(self, target_session: str, copies: Copies) -> Future[PublishResult]:
        """Writes all copies, in no order, without blocking. The future fails with `TransferFailed`.

        Cancelling the future does not stop the writes.
        """
        ...

    def close(self) -> None:
        """Fails what is under way. May be called again."""
        ...


class TransferMeter:
    """Counts for `TransportCounters`; any thread may add."""

    def __init__(self):
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_transfers = 0
        self._busy_s = 0.0
        self._num_failures = Counter[FailureCause]()

    def add(self, result: PublishResult) -> None:
        with self._lock:
            self._num_bytes += result.num_bytes
            self._num_transfers += result.num_transfers
            self._busy_s += result.duration_s

    def add_failure(self, cause: FailureCause, duration_s: float) -> None:
        with self._lock:
            self._busy_s += duration_s
            self._num_failures[cause] += 1

    def read(self) -> TransportCounters:
        with self._lock:
            return TransportCounters(
                num_bytes=self._num_bytes,
                num_transfers=self._num_transfers,
                busy_s=self._busy_s,
                num_failures=dict(self._num_failures),
            )


def registered_bytes(slabs: Sequence[Slab], address: int, num_bytes: int) -> Bytes:
    """A view of a range of one of these slabs. Raises `TransferFailed` (bad range) where none holds all of it."""
    slab = find_slab(slabs, address, num_bytes)
    if slab is None:
        detail = f"{num_bytes} bytes at {address:#x} are in no registered slab"
        raise TransferFailed(FailureCause.BAD_RANGE, detail, may_still_land=False)
    return slab.bytes[address - slab.address : address - slab.address + num_bytes]


def checksum(data: Bytes) -> int:
    """xxh3, 64 bits: runs at memory speed, and guards against accidents, not against an attacker."""
    return xxhash.xxh3_64_intdigest(data.data)


@runtime_checkable
class Cells(Protocol):
    """Cells that can be copied out: those of a slab, or of one whose cells are cut (`kv.slab_shards`)."""

    cell_bytes: int

    def copy_cell(self, index: int, out: Bytes) -> None:
        """Copy a cell as a whole block into `out` [cell_bytes]. IndexError where there is no such cell."""
        ...


@runtime_checkable
class Pieces(Protocol):
    """What is checked of a cell: `num_pieces` pieces of a block, of which some may be elsewhere (`kv.pieces`)."""

    @property
    def num_pieces(self) -> int: ...

    def checksums(self, block: Bytes) -> Mapping[int, int]:
        """Of the pieces that are in `block` [cell_bytes], by the piece's number."""
        ...


class _Whole:
    """A block in one piece."""

    num_pieces = 1

    def checksums(self, block: Bytes) -> Mapping[int, int]:
        return {0: checksum(block)}


WHOLE: Pieces = _Whole()


def copy_verified(slab: Cells, cells: Sequence[int], checksums: Sequence[int], pieces: Pieces = WHOLE) -> Bytes:
    """One private copy [len(cells), cell_bytes] of these cells, with the bytes that were sent.

    `checksums`: of each cell those of all pieces. Copied before it is checked: a write may land between a check of the
    slab and a copy of it. All or nothing: raises `ChecksumMismatch` for the first cell that differs, IndexError for one
    that the slab does not have, ValueError for another number of checksums.
    """
    num_pieces = pieces.num_pieces
    if len(checksums) != len(cells) * num_pieces:
        raise ValueError(f"{len(checksums)} checksums for {len(cells)} cells of {num_pieces} pieces")
    private = np.empty((len(cells), slab.cell_bytes), np.uint8)
    for row, cell in zip(private, cells, strict=True):
        slab.copy_cell(cell, row)
    for index, (row, cell) in enumerate(zip(private, cells, strict=True)):
        for piece, found in pieces.checksums(row).items():
            expected = checksums[index * num_pieces + piece]
            if found != expected:
                raise ChecksumMismatch(cell, expected, found)
    return private
