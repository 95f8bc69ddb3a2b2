"""The tier in Mooncake Store: memory of a process beside the workers, which all of them read and write.

A worker asks that process, `mooncake_client`, over loopback, and the bytes go through memory that both have mapped
(the library calls this a dummy client). So a worker opens no port, and what it has kept outlives it. What the library
does, as seen with 0.3.13.post1, shapes this file:
- Memory for blocks must be the library's own (`alloc_from_mem_pool`): with one other address a whole batch is -600.
  Not even `close` gives it back; its pages are given back here.
- A call takes 0.1 to 0.5 ms: `batch_is_exist` 0.1 ms for 2 keys and 9 ms for 4096, `batch_get_into` 0.1 ms for 256 KiB
  and 0.4 ms for seven of them. Of a stored length other than asked for it tells, where there is room; -600 where not.
- A put onto a key that is there is 0 and changes nothing: wrong bytes stay until they are removed.
- No space is -200, for the rest of the batch. Blocks are given up in the background, a share of them at each -200, and
  none for which somebody has asked within the lease. What was just put has no lease.
- A killed client: -900 at once, then after 4.3 s once or twice, then at once. A new one is found within 3.5 s, unless
  it starts so fast that the library has not missed the old one: then gets and puts are -600 for good, while
  `batch_is_exist` works. So they are where the worker was stopped for 10 s. New memory and a new setup help.
  Until the master forgets the old client, 10 s, it has all blocks, gets are -800, and so are some puts.
- A killed master: as a killed client; the next one knows no block, and the client finds it within 3 s.
- A stopped client: every call blocks for 30 s, whatever MC_RPC_TIMEOUT_MS says, and is -900. When the client went on,
  such a get still wrote, and such a put stored what its memory held by then. So only a checksum is believed, of a copy.
  When the master has forgotten a stopped client, it comes back empty.
- A stopped master: calls block for MC_RPC_TIMEOUT_MS of the client's environment; by itself for 30 s.
- `setup_dummy` and `close` hold Python's lock, so that no other thread runs: for 30 s where the client is stopped,
  4.3 s where it is gone, and `close` up to 1 s where all is well. Neither is called before the client has just
  answered. All other calls let go of it. A call before a setup crashes the process.
- A process that ends while the client is stopped takes 30 s for it, and aborts if a call hangs.
- While the client is gone, the library logs a line every 2 s, and one for every key that it is asked for.
The other way, a segment in each worker (`setup`), works too and was not taken: its blocks go with the worker, each
worker listens on all interfaces, a get from a stopped one blocks for 60 s, and the bytes go over TCP, 0.4 to 18 ms for
256 KiB.
Source: Mooncake (Qin et al. 2025, FAST), https://github.com/kvcache-ai/Mooncake.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash

from moonshard.kv.mooncake import INSTALL
from moonshard.kv.native_stderr import stderr_without
from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.breaker import Attempt, Breaker
from moonshard.kv.store.lanes import Lane, Lanes
from moonshard.kv.store.mooncake_processes import StoreUnavailable, answers
from moonshard.kv.store.tier import MissCause, TierCounters

MAGIC = b"moonKV\x00\x01"  # the last byte is the version
TRAILER = struct.Struct("<8sQQ")  # the magic, the block's bytes, their checksum
ROW_ALIGNMENT_BYTES = 64
PROBE_TIMEOUT_S = 0.5  # of a client that is well, on a busy machine
CLOSE_S = 1.0
REMAPPED_S = 4.0  # within which the library tells a new client of the memory by itself
LOGGED_AT_EVERY_END = ("Logging before InitGoogleLogging() is written to STDERR", "Dummy Client not connected")

HEALTHY = 0  # the client answered when the library last asked, which it does once a second; not so at first
FAILED = -1  # `batch_is_exist`, for every reason
BAD_PARAMETERS = -600
NOT_FOUND = -704
RPC_FAILED = -900  # or less
WRONG_CAUSES = (MissCause.CORRUPT, MissCause.WRONG_LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeStoreConfig:
    """Limits of one worker's end."""

    address: str  # host:port of `mooncake_client` on this machine
    timeout_s: float = 0.05  # of one call, besides what its bytes may take
    min_bytes_per_second: float = 0.5e9  # what is slower counts as hung
    max_call_bytes: int = 16 * 1024 * 1024  # of one call: more blocks go in several
    max_calls: int = 4  # at once; so many may hang
    rest_s: float = 5.0  # after a failure
    max_tries: int = 3  # to keep what finds no space
    retry_pause_s: float = 0.02


class MooncakeStoreTier:
    """One worker's end, made by `start`. It is off until the store answers, and comes back when the store does.

    Counters are of this worker alone, and `mooncake_processes.read_usage` says what the store holds. `find` counts
    misses only where it got no answer.
    """

    name = "store"
    is_shared = True

    def __init__(self, *, layout: bytes, block_bytes: int, config: MooncakeStoreConfig):
        self.block_bytes = block_bytes
        self._config = config
        self._values = _Values(layout, block_bytes)
        self._row_bytes = -(-self._values.num_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        self._rows_per_call = max(1, config.max_call_bytes // self._row_bytes)
        self._lanes = Lanes(config.max_calls, "mooncake-store")
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the three below
        self._breaker = Breaker(rest_s=config.rest_s)
        self._session: _Session | None = None  # always there while the breaker is closed
        self._counts = Counter[str]()

    @classmethod
    def start(cls, *, layout: bytes, block_bytes: int, config: MooncakeStoreConfig) -> "MooncakeStoreTier":
        """Returns before the store has answered. Blocks of another `layout` than this are not found.

        StoreUnavailable where the library cannot be loaded, ValueError where the address is not host:port.
        """
        int(config.address.rpartition(":")[2])
        os.environ["MC_LOG_LEVEL"] = "ERROR"  # the library takes it from the environment alone, when it loads
        _new_library()
        tier = cls(layout=layout, block_bytes=block_bytes, config=config)
        with contextlib.suppress(_NoAnswer), tier._turn(0):
            pass
        return tier

    @property
    def is_on(self) -> bool:
        """Whether the store answered when it was last asked."""
        with self._lock:
            return self._breaker.is_closed and not self._closing.is_set()

    @property
    def buffer_bytes(self) -> int:
        """Of this machine's memory, taken when the store answers first, and never given back to it."""
        return self._config.max_calls * self._rows_per_call * self._row_bytes

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            counts = self._counts.copy()
        return TierCounters(
            num_hits=counts["hits"],
            num_misses={cause: counts[cause] for cause in MissCause if counts[cause]},
            num_kept=counts["kept"],
            num_not_kept=counts["not kept"],
            bytes_read=counts["hits"] * self.block_bytes,
            bytes_written=counts["kept"] * self.block_bytes,
        )

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        if not names:
            return []
        keys = self._values.keys(names)
        try:
            with self._turn(0) as turn:
                return [code == 1 for code in turn.ask(lambda library: library.batch_is_exist(keys))]
        except _NoAnswer as none:
            self._count(none.cause, len(names))
            return [False] * len(names)

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        return self._in_parts(self._fetch, names, out)

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        """See `Tier`. Counts what is there already as kept: the library does not tell."""
        return self._in_parts(self._keep, names, blocks)

    def held(self) -> list[BlockName]:
        """What others kept is found when it is asked for."""
        return []

    def upkeep(self) -> None:
        """The master does what there is to do."""

    def close(self) -> None:
        """See `Tier`. No other thread runs while the library closes, for up to a second."""
        self._closing.set()
        with self._lock:
            session, self._session = self._session, None
        self._lanes.close(timeout_s=CLOSE_S)
        if session is not None:
            session.close(self._config.address)

    # ---- as many blocks as one call takes

    def _in_parts(
        self, do: Callable[[Sequence[BlockName], Bytes], list[bool]], names: Sequence[BlockName], rows: Bytes
    ) -> list[bool]:
        parts = [slice(start, start + self._rows_per_call) for start in range(0, len(names), self._rows_per_call)]
        return list(itertools.chain.from_iterable(do(names[part], rows[part]) for part in parts))

    def _fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        try:
            with self._turn(len(names)) as turn:
                causes = self._read(turn, names, out)
        except _NoAnswer as none:
            causes = [none.cause] * len(names)
        for cause, number in Counter(causes).items():
            self._count(cause or "hits", number)
        return [cause is None for cause in causes]

    def _read(self, turn: "_Turn", names: Sequence[BlockName], out: Bytes) -> list[MissCause | None]:
        """What was wrong with each. What was is removed: otherwise the block could never be kept again."""
        keys = self._values.keys(names)
        addresses, sizes = turn.addresses(range(len(names))), [self._row_bytes] * len(names)
        codes = turn.ask(lambda library: library.batch_get_into(keys, addresses, sizes))
        seems_lost = all(code == BAD_PARAMETERS for code in codes)
        if seems_lost:
            [num_bytes] = turn.ask(lambda library: [library.get_size(keys[0])])
            seems_lost = num_bytes <= self._row_bytes  # so it is not that they are too long
        turn.check_mapping(seems_lost=seems_lost)
        causes = [
            self._values.read(name, code, row, into)
            for name, code, row, into in zip(names, codes, turn.rows[: len(names)], out, strict=True)
        ]
        wrong = [key for key, cause in zip(keys, causes, strict=True) if cause in WRONG_CAUSES]
        if wrong:
            turn.leave_with(lambda library: library.batch_remove(wrong, True))
        return causes

    def _keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        left: Sequence[int] = range(len(names))
        with contextlib.suppress(_NoAnswer), self._turn(len(names)) as turn:
            for name, block, row in zip(names, blocks, turn.rows[: len(names)], strict=True):
                self._values.write(name, block, row)
            left = self._write(turn, names, left)
            for _ in range(self._config.max_tries - 1):
                if not left or self._closing.wait(self._config.retry_pause_s):
                    break
                left = self._write(turn, names, left)
        self._count("kept", len(names) - len(left))
        self._count("not kept", len(left))
        return [index not in left for index in range(len(names))]

    def _write(self, turn: "_Turn", names: Sequence[BlockName], rows: Sequence[int]) -> list[int]:
        """Those of the rows that found no space."""
        keys = self._values.keys([names[row] for row in rows])
        addresses, sizes = turn.addresses(rows), [self._values.num_bytes] * len(rows)
        codes = turn.ask(lambda library: library.batch_put_from(keys, addresses, sizes))
        turn.check_mapping(seems_lost=all(code == BAD_PARAMETERS for code in codes))
        return [row for row, code in zip(rows, codes, strict=True) if code != 0]

    # ---- whether to ask, and what came of it

    @contextlib.contextmanager
    def _turn(self, num_blocks: int) -> Iterator["_Turn"]:
        """The right to ask, with a lane and its memory. _NoAnswer where the store is not to be asked now."""
        limit_s = self._config.timeout_s + num_blocks * self._row_bytes / self._config.min_bytes_per_second
        deadline_s = time.perf_counter() + limit_s
        with self._lanes.lane(timeout_s=limit_s) as lane:
            if self._closing.is_set() or self._lanes.are_stuck:
                raise _NoAnswer(MissCause.OFF)
            if lane is None:
                raise _NoAnswer(MissCause.TIMED_OUT)
            now_s = time.perf_counter()
            with self._lock:
                is_probe = not self._breaker.is_closed
                attempt, session = self._breaker.begin(now_s), self._session
            if attempt is None:
                raise _NoAnswer(MissCause.OFF)
            if session is None:
                lane.start(partial(self._set_up, attempt))
                raise _NoAnswer(MissCause.OFF)
            turn = _Turn(self, session, lane, attempt, is_probe=is_probe, limit_s=deadline_s - now_s)
            try:
                yield turn
            finally:
                turn.end()

    def _set_up(self, attempt: Attempt) -> None:
        session = None
        try:
            num_rows = self._config.max_calls * self._rows_per_call
            session = _Session.open(self._config.address, num_rows=num_rows, row_bytes=self._row_bytes)
        finally:
            with self._lock:
                is_wanted = session is not None and not self._closing.is_set()
                self._session = session if is_wanted else None
            self._settle(attempt, is_good=is_wanted)
        if session is not None and not is_wanted:
            session.close(self._config.address)

    def _settle(self, attempt: Attempt, *, is_good: bool) -> None:
        with self._lock:
            if is_good:
                self._breaker.succeed(attempt)
            else:
                self._breaker.fail(attempt, time.perf_counter())

    def _replace(self, session: "_Session") -> None:
        """The next turn sets up another one."""
        with self._lock:
            if self._session is not session:
                return
            self._session = None
            self._breaker.trip(time.perf_counter())
        session.abandon()

    def _count(self, what: str, number: int) -> None:
        with self._lock:
            self._counts[what] += number


class _NoAnswer(Exception):
    """Every block that was asked for is a miss."""

    def __init__(self, cause: MissCause):
        super().__init__(cause)
        self.cause = cause


class _Turn:
    """The calls of one caller, one after another on its lane. Whatever goes wrong with one leaves the store alone."""

    def __init__(
        self,
        tier: MooncakeStoreTier,
        session: "_Session",
        lane: Lane,
        attempt: Attempt,
        *,
        is_probe: bool,
        limit_s: float,
    ):
        self._tier = tier
        self._session = session
        self._lane = lane
        self._attempt = attempt
        self._is_probe = is_probe
        self._limit_s = limit_s
        self._is_settled = False
        num_rows = len(session.rows) // tier._config.max_calls
        self._first_row = lane.index * num_rows
        self.rows = session.rows[self._first_row : self._first_row + num_rows]  # nobody else's until the calls return

    def addresses(self, rows: Sequence[int]) -> list[int]:
        return [self._session.address(self._first_row + row) for row in rows]

    def ask(self, call: "Callable[[_Library], list[int]]") -> list[int]:
        """What the library says of each key. _NoAnswer where it says nothing in time, or that it could not ask."""
        if self._is_probe and self._session.library.health_check() != HEALTHY:  # a call would log a line per key
            raise self._failed(MissCause.IO_ERROR)
        try:
            codes = self._lane.call(partial(call, self._session.library), timeout_s=self._limit_s)
        except TimeoutError:
            raise self._failed(MissCause.TIMED_OUT) from None
        except RuntimeError:  # what C++ throws
            raise self._failed(MissCause.IO_ERROR) from None
        if any(code == FAILED or code <= RPC_FAILED for code in codes):
            raise self._failed(MissCause.IO_ERROR)
        self._settle(is_good=True)
        return codes

    def leave_with(self, call: "Callable[[_Library], list[int]]") -> None:
        """A last call, for which nobody waits."""
        self._lane.start(partial(call, self._session.library))

    def check_mapping(self, *, seems_lost: bool) -> None:
        """_NoAnswer where the client does not know the memory: a new one soon will, any other never again."""
        if not seems_lost:
            self._session.lost_since_s = None
            return
        now_s = time.perf_counter()
        if self._session.lost_since_s is None:
            self._session.lost_since_s = now_s
        elif now_s - self._session.lost_since_s > REMAPPED_S:
            self._tier._replace(self._session)
        raise self._failed(MissCause.IO_ERROR)

    def end(self) -> None:
        """A turn without a call, as when the caller's arrays have other shapes, must not look like one that goes on."""
        if not self._is_settled:
            self._settle(is_good=False)

    def _failed(self, cause: MissCause) -> _NoAnswer:
        self._settle(is_good=False)
        return _NoAnswer(cause)

    def _settle(self, *, is_good: bool) -> None:
        self._is_settled = True
        self._tier._settle(self._attempt, is_good=is_good)


class _Values:
    """What is stored: a block's bytes and a trailer that no other bytes, block or layout have."""

    def __init__(self, layout: bytes, block_bytes: int):
        self._layout = layout
        self._block_bytes = block_bytes
        self.num_bytes = block_bytes + TRAILER.size

    def keys(self, names: Sequence[BlockName]) -> list[str]:
        return [f"{self._layout.hex()}-{name.hex()}" for name in names]

    def write(self, name: BlockName, block: Bytes, row: Bytes) -> None:
        row[: self._block_bytes] = block
        row[self._block_bytes : self.num_bytes] = np.frombuffer(self._trailer(name, block), np.uint8)

    def read(self, name: BlockName, code: int, row: Bytes, out: Bytes) -> MissCause | None:
        """Copies a block out of a row that may still be written to, and says what is wrong with the copy."""
        if code in (NOT_FOUND, BAD_PARAMETERS):
            return MissCause.ABSENT if code == NOT_FOUND else MissCause.WRONG_LENGTH
        if code != self.num_bytes:
            return MissCause.WRONG_LENGTH if code >= 0 else MissCause.IO_ERROR
        out[:] = row[: self._block_bytes]
        is_good = row[self._block_bytes : self.num_bytes].tobytes() == self._trailer(name, out)
        return None if is_good else MissCause.CORRUPT

    def _trailer(self, name: BlockName, block: Bytes) -> bytes:
        seed = xxhash.xxh3_64_intdigest(self._layout + name)
        checksum = xxhash.xxh3_64_intdigest(np.ascontiguousarray(block), seed)
        return TRAILER.pack(MAGIC, self._block_bytes, checksum)


@runtime_checkable
class _Library(Protocol):
    """What is used of mooncake.store.MooncakeDistributedStore; addresses are plain integers."""

    def setup_dummy(self, pool_bytes: int, buffer_bytes: int, address: str, /) -> int: ...
    def alloc_from_mem_pool(self, num_bytes: int, /) -> int: ...
    def register_buffer(self, address: int, num_bytes: int, /) -> int: ...
    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]: ...
    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]: ...
    def batch_remove(self, keys: list[str], is_forced: bool, /) -> list[int]: ...
    def get_size(self, key: str, /) -> int: ...
    def health_check(self) -> int: ...
    def close(self) -> int: ...


class _Session:
    """The library, set up, and the memory that the client maps too."""

    def __init__(self, library: _Library, address: int, num_rows: int, row_bytes: int):
        self.library = library
        self._address = address
        self.lost_since_s: float | None = None  # when it first seemed that the client does not know the memory
        memory = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(address)
        self.rows: Bytes = np.frombuffer(memory, np.uint8).reshape(num_rows, row_bytes)

    @classmethod
    def open(cls, address: str, *, num_rows: int, row_bytes: int) -> "_Session | None":
        """None where there is no client, or no memory."""
        if not answers(address, timeout_s=PROBE_TIMEOUT_S):
            return None
        library = _new_library()
        if library.setup_dummy(0, 0, address) != 0:
            return None
        memory = library.alloc_from_mem_pool(num_rows * row_bytes)
        if memory == 0 or library.register_buffer(memory, num_rows * row_bytes) != 0:
            library.close()
            return None
        return cls(library, memory, num_rows, row_bytes)

    def address(self, row: int) -> int:
        return self._address + row * self.rows.shape[1]

    def close(self, address: str) -> None:
        """Only where the client answers: with Python's lock held, the library would wait for it for 30 s."""
        if not answers(address, timeout_s=PROBE_TIMEOUT_S):
            self.abandon()
            return
        with stderr_without(LOGGED_AT_EVERY_END):
            self.library.close()
        self._give_pages_back()

    def abandon(self) -> None:
        """Leaves the library to itself until the process ends, for not even its destructor may run."""
        self._give_pages_back()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.library))

    def _give_pages_back(self) -> None:
        """What is read here from now on is zero."""
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(self.rows.nbytes), mmap.MADV_REMOVE)


def _new_library() -> _Library:
    """StoreUnavailable where it cannot be loaded."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StoreUnavailable(INSTALL.format(error=error)) from error
    return MooncakeDistributedStore()
