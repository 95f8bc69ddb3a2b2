"""The tier on an SSD: blocks in a file of extents, found again by the process that opens the folder next.

A block is here once its header is. To write one into an extent: the extent's old header is wiped, the payload is
written, then the new header. That is the order in which a process that is killed leaves them, and the system's page
cache outlives it, so every block that was told to be kept is found again, without a sync. If the machine itself stops,
the disk may have any of what was written since the last `flush`, in any order and in parts. Syncing between the steps
would not make such blocks more of a hit and would cost milliseconds each; what tells a torn one is the checksum, which
every read is compared with, whoever wrote, and whatever else the disk did. `flush` syncs payloads before headers.

The index is read from the headers alone. Order and frequency of use are written into them by `flush` and `close`: after
a kill they are as of the last of those, and what came later counts as kept in that order and never read.

Lookups wait for no I/O: the lock is held while something is decided, never while it is done. An extent may be taken
from a block that is being read; then its bytes do not match, and the block is absent. No thread is started here: call
`flush` now and then (it writes 64 bytes a block), and `scrub` in slices, from any thread.
"""

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

import numpy as np

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.retention import Policy
from moonshard.kv.store.ssd.disk import DirectPayload, Payload, PlainPayload, Read, Table
from moonshard.kv.store.ssd.extents import (
    block_checksum,
    extent_bytes,
    num_extents_within,
    store_bytes,
    table_bytes,
)
from moonshard.kv.store.ssd.faults import FolderUnusable, LimitTooLarge, LimitTooSmall, NoDirectIo
from moonshard.kv.store.ssd.folder import PAYLOAD, TABLE, Folder, open_folder
from moonshard.kv.store.ssd.space import Pending, Place, Space
from moonshard.kv.store.tier import MissCause, TierCounters

_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_CLOSE_S = 2.0  # that calls may take which are under way
_SCRUBBED_BYTES = 64 * 1024**2  # each time
_BLOCKS_AT_ONCE = 4096  # whose order is noted under the lock
_ROOM_EXTENTS = 8  # that a disk must have free after it was full

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrubbed:
    """Of one slice."""

    num_checked: int
    num_dropped: int
    is_round_complete: bool  # the next slice begins at the first extent again


class FileTier:
    """Blocks of one layout in one folder, which this process alone has while the tier is open."""

    name = "ssd"
    is_shared = False

    def __init__(self, *, folder: Folder, payload: Payload, table: Table, space: Space, block_bytes: int):
        self.block_bytes = block_bytes
        self._folder = folder
        self._payload = payload
        self._table = table
        self._space = space
        self._lock = threading.Lock()  # of the space and of all that is counted; no I/O under it
        self._table_lock = threading.Lock()  # taken first: of two headers of one extent the later is written later
        self._is_idle = threading.Condition(self._lock)
        self._is_closed = False
        self._num_calls = 0  # that use the descriptors now
        self._next_scrubbed = 0
        self._is_deleted = False  # as was last told
        self._counts = Counter[str]()
        self._misses = Counter[MissCause]()
        self._io_errors = Counter[str]()

    @classmethod
    def open(
        cls, path: Path, *, block_bytes: int, layout: bytes, max_bytes: int, policy: Policy, direct: bool = False
    ) -> "FileTier":
        """The tier of one layout under `path`, with what it had when it was closed, or killed. Raises StoreError.

        `layout` is a digest of all that other blocks of as many bytes could differ in. `max_bytes` holds for this
        layout alone, headers included; blocks beyond a limit that is lower than last time are lost. `policy` is new.
        """
        with ExitStack() as undo:
            folder = open_folder(path, layout=layout, block_bytes=block_bytes)
            undo.callback(folder.close)
            try:
                num_extents = _num_extents(folder, max_bytes, block_bytes)
                table_file = folder.open_file(TABLE)
                undo.callback(os.close, table_file)
                payload_file = _open_payload(folder, direct=direct)
                undo.callback(os.close, payload_file)
                num_touched = _fit(table_file, payload_file, num_extents, block_bytes)
                table = Table(table_file, num_extents)
                space = Space(table.read(), block_bytes=block_bytes, num_touched=num_touched, policy=policy)
            except OSError as error:
                raise FolderUnusable(folder.path, error) from error
            payload = (DirectPayload if direct else PlainPayload)(payload_file, block_bytes)
            undo.pop_all()
        return cls(folder=folder, payload=payload, table=table, space=space, block_bytes=block_bytes)

    # ---- what is told of it

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            return TierCounters(
                num_hits=self._counts["hits"],
                num_misses={cause: num for cause, num in self._misses.items() if num},
                num_kept=self._counts["kept"],
                num_not_kept=self._counts["not kept"],
                num_evicted=self._counts["evicted"],
                bytes_read=self._counts["hits"] * self.block_bytes,
                bytes_written=self._counts["kept"] * self.block_bytes,
                bytes_held=self._space.num_kept * self.block_bytes,
            )

    @property
    def io_errors(self) -> Mapping[str, int]:
        """What the operating system said no to, by errno's name, since the tier was opened."""
        with self._lock:
            return dict(self._io_errors)

    @property
    def max_blocks(self) -> int:
        """How many fit: fewer than `max_bytes` has room for while the disk is full, or where extents could not be
        written.
        """
        with self._lock:
            return self._space.limit

    # ---- of the protocol

    def held(self) -> list[BlockName]:
        with self._lock:
            return [] if self._is_closed else self._space.names

    def upkeep(self) -> None:
        """Syncs, checks some blocks that nobody asked for, and sees whether a disk that was full has room again."""
        self.flush()
        self.scrub(_SCRUBBED_BYTES)
        with self._while_open() as is_open:
            if is_open:
                self._look_at_disk()

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        with self._lock:
            if self._is_closed:
                return [False] * len(names)
            self._space.link(names)
            return [name in self._space for name in names]

    def has(self, names: Sequence[BlockName]) -> Sequence[bool | None]:
        return self.find(names)

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        self._check_shape(names, out)
        with self._while_open() as is_open:
            if not is_open:
                return self._refuse_fetch(len(names))
            with self._lock:
                places = self._space.places(names)
            places.sort(key=lambda place: place.extent)
            causes = self._read(places, [out[place.row] for place in places])
            return self._settle_fetch(names, places, causes)

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        """True: it is here when the call ends. A block that another call is writing at the time may still be coming."""
        self._check_shape(names, blocks)
        with self._while_open() as is_open:
            if not is_open:
                return self._refuse_keep(len(names))
            with self._lock:
                reserved = self._space.reserve(names)
                self._counts["evicted"] += reserved.num_evicted
            written = self._write(reserved.pending, blocks)
            with self._lock:
                kept = self._space.commit(written)
                self._counts["kept"] += len(kept)
                self._counts["not kept"] += reserved.num_refused + len(reserved.pending) - len(kept)
                return [name in self._space for name in names]

    def close(self) -> None:
        """Waits for calls on other threads, and writes down what `flush` does. Later calls find nothing.

        A call that hangs keeps the files open, and their last order of use unwritten.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_idle = self._is_idle.wait_for(lambda: not self._num_calls, _CLOSE_S)
        if was_closed or not is_idle:
            return
        self._save()
        for held in (self._payload, self._table, self._folder):
            try:
                held.close()
            except OSError as error:
                self._note_errors([error])

    # ---- from time to time

    def flush(self) -> bool:
        """Whether all that was kept before, and in which order it was used, outlives the machine."""
        with self._while_open() as is_open:
            return is_open and self._save()

    def scrub(self, max_bytes: int) -> Scrubbed:
        """Reads the blocks in the next extents, about so many bytes, and drops those that are not what was written.

        Unless payloads are read directly, it sees what the system's page cache has of them.
        """
        with self._while_open() as is_open:
            if not is_open:
                return Scrubbed(num_checked=0, num_dropped=0, is_round_complete=True)
            with self._lock:
                start, end = self._next_scrubbed, self._space.num_touched
                extents = range(start, min(end, start + max(1, max_bytes // self.block_bytes)))
                self._next_scrubbed = 0 if extents.stop >= end else extents.stop
                places = self._space.places_in(extents)
            causes = self._read(places, list(np.empty((len(places), self.block_bytes), np.uint8)))
            with self._lock:
                dropped = self._drop_unreadable(places, causes)
            self._write_headers(dropped)
            return Scrubbed(num_checked=len(places), num_dropped=len(dropped), is_round_complete=extents.stop >= end)

    # ---- reading

    def _read(self, places: Sequence[Place], rows: Sequence[Bytes]) -> list[MissCause | None]:
        """Why each was not read as it was written; None: it was."""
        outcomes = self._payload.read([place.extent for place in places], rows)
        self._note_errors([outcome for outcome in outcomes if isinstance(outcome, OSError)])
        return [self._cause(*read) for read in zip(places, rows, outcomes, strict=True)]

    def _cause(self, place: Place, row: Bytes, outcome: Read) -> MissCause | None:
        if isinstance(outcome, OSError):
            return MissCause.IO_ERROR
        if outcome != self.block_bytes:
            return MissCause.WRONG_LENGTH
        return None if block_checksum(place.name, row) == place.checksum else MissCause.CORRUPT

    def _settle_fetch(
        self, names: Sequence[BlockName], places: Sequence[Place], causes: Sequence[MissCause | None]
    ) -> list[bool]:
        came = [False] * len(names)
        with self._lock:
            self._misses[MissCause.ABSENT] += len(names) - len(places)
            for place, cause in zip(places, causes, strict=True):
                came[place.row] = cause is None
                if cause is None:
                    self._counts["hits"] += 1
                else:
                    self._misses[cause if self._space.has(place) else MissCause.ABSENT] += 1
            dropped = self._drop_unreadable(places, causes)
            self._space.touch(names)
        self._write_headers(dropped)
        return came

    def _drop_unreadable(self, places: Sequence[Place], causes: Sequence[MissCause | None]) -> list[int]:
        """The extents whose headers are to be wiped. An extent that was taken for another block is left to that."""
        dropped = list[int]()
        for place, cause in zip(places, causes, strict=True):
            if cause is not None and self._space.has(place):
                self._space.drop(place)
                dropped.append(place.extent)
        return dropped

    # ---- writing

    def _write(self, pending: Sequence[Pending], blocks: Bytes) -> list[Pending]:
        """Those of which payload and header are written."""
        if not self._write_headers([extent for _, _, extent in pending]):
            return self._abandon(pending)
        outcomes = self._payload.write([extent for _, _, extent in pending], [blocks[row] for row, _, _ in pending])
        errors = {block.extent: error for block, error in zip(pending, outcomes, strict=True) if error is not None}
        self._note_errors(list(errors.values()))
        written = [block for block in pending if block.extent not in errors]
        checksums = [block_checksum(name, blocks[row]) for row, name, _ in written]
        with self._lock:
            was_full = self._space.lacks_room
            for block in pending:
                if (error := errors.get(block.extent)) is not None:
                    has_no_room = error.errno in _NO_SPACE
                    self._space.abandon(block, is_bad=error.errno == errno.EIO, is_without_room=has_no_room)
            if self._space.lacks_room and not was_full:
                self._give_up_fresh()
            self._space.fill_headers(written, checksums)
        if not self._write_headers([extent for _, _, extent in written]):
            return self._abandon(written)
        return written

    def _abandon(self, pending: Sequence[Pending]) -> list[Pending]:
        with self._lock:
            for block in pending:
                self._space.abandon(block)
        return []

    def _give_up_fresh(self) -> None:
        """Under the lock."""
        self._space.give_up_fresh()
        logger.warning("%s: its disk is full; it keeps %d blocks at most", self._folder.path, self._space.limit)

    def _look_at_disk(self) -> None:
        try:
            free_bytes, is_deleted = self._folder.free_bytes(), self._folder.is_deleted()
        except OSError as error:
            self._note_errors([error])
            return
        with self._lock:
            has_room = free_bytes >= _ROOM_EXTENTS * extent_bytes(self.block_bytes)
            if self._space.lacks_room and has_room:
                self._space.has_room_again()
                logger.warning("%s: its disk has room again, for %d blocks", self._folder.path, self._space.limit)
            if is_deleted and not self._is_deleted:
                logger.warning("%s: was deleted; what it keeps ends with this process", self._folder.path)
            self._is_deleted = is_deleted

    def _write_headers(self, extents: Sequence[int]) -> bool:
        """As the space has them now. A header that could not be wiped stays: its block is as good as it was."""
        if not extents:
            return True
        extents = sorted(extents)
        try:
            with self._table_lock:
                with self._lock:
                    headers = self._space.headers_of(extents)
                self._table.write(extents, headers)
        except OSError as error:
            self._note_errors([error])
            return False
        return True

    def _save(self) -> bool:
        with self._lock:
            names, first_order = self._space.order()
        for some in batched(names, _BLOCKS_AT_ONCE):
            with self._lock:
                self._space.note_order(some, first_order)
            first_order += len(some)
        try:
            self._payload.sync()
            with self._table_lock:
                with self._lock:
                    headers = self._space.all_headers()
                self._table.write(range(len(headers)), headers)
            self._table.sync()
        except OSError as error:
            self._note_errors([error])
            return False
        return True

    # ---- who is let in

    @contextmanager
    def _while_open(self) -> Generator[bool, None, None]:
        """The descriptors stay open meanwhile: another file could have their numbers otherwise."""
        with self._lock:
            is_open = not self._is_closed
            self._num_calls += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._num_calls -= is_open
                self._is_idle.notify_all()

    def _check_shape(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        if blocks.shape != (len(names), self.block_bytes):
            raise ValueError(f"{len(names)} blocks of {self.block_bytes} bytes, got an array of shape {blocks.shape}")

    def _refuse_fetch(self, num: int) -> list[bool]:
        with self._lock:
            self._misses[MissCause.OFF] += num
        return [False] * num

    def _refuse_keep(self, num: int) -> list[bool]:
        with self._lock:
            self._counts["not kept"] += num
        return [False] * num

    def _note_errors(self, errors: Sequence[OSError]) -> None:
        with self._lock:
            self._io_errors.update(errno.errorcode.get(error.errno or 0, "unknown") for error in errors)


def _num_extents(folder: Folder, max_bytes: int, block_bytes: int) -> int:
    num_extents = num_extents_within(max_bytes, block_bytes)
    if num_extents < 1:
        raise LimitTooSmall(folder.path, max_bytes=max_bytes, least_bytes=store_bytes(1, block_bytes))
    held_bytes, free_bytes = folder.held_bytes(), folder.free_bytes()
    if max_bytes > held_bytes + free_bytes:
        raise LimitTooLarge(folder.path, max_bytes=max_bytes, held_bytes=held_bytes, free_bytes=free_bytes)
    return num_extents


def _open_payload(folder: Folder, *, direct: bool) -> int:
    try:
        return folder.open_file(PAYLOAD, os.O_DIRECT if direct else 0)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise NoDirectIo(folder.path) from None
        raise


def _fit(table_file: int, payload_file: int, num_extents: int, block_bytes: int) -> int:
    """Takes room for all headers, and gives back what is beyond the limit. Gives the number of extents in the file."""
    os.posix_fallocate(table_file, 0, table_bytes(num_extents))
    os.ftruncate(table_file, table_bytes(num_extents))
    max_payload_bytes = num_extents * extent_bytes(block_bytes)
    if (payload_bytes := os.fstat(payload_file).st_size) > max_payload_bytes:
        os.ftruncate(payload_file, payload_bytes := max_payload_bytes)
    return -(-payload_bytes // extent_bytes(block_bytes))
