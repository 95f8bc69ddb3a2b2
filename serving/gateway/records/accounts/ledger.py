"""One row for every request that a worker got, appended to a file as it ends: what it used and what that costs.

A row is a line of JSON, written whole or not at all: what a full disk cut off is taken back, and the row waits for the
next try. A file that was moved away or deleted is begun anew. So the sum over the file never counts anything twice,
and a reader need not know who wrote it. Writing happens on a thread of its own, since a disk may be slow. One process
writes a file, and holds its lock; several gateways have a file each. Which requests get a row is `accounts`'.
"""

import fcntl
import json
import logging
import os
import queue
import stat
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)
MAX_PENDING_ROWS = 100_000  # that wait for the disk; of more the oldest are lost
MAX_ROW_BYTES = 1 << 16  # so far back the last row is looked for
READ_BYTES = 1 << 20  # at once, of a file whose rows are counted
RETRY_S = 5.0  # rows that wait are tried again, also where no other comes
ROW_START = b'{"request_id":'


class LedgerError(ValueError):
    """A file that is no ledger; the message names the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """The row of one request. `outcome` is the finish reason of its first choice, `cancelled`, or the code of its
    error.
    """

    request_id: str
    ended_at: str  # UTC, ISO 8601 with seconds
    tenant: str
    session: str  # hashed; empty without one
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    usd: float
    cached_by_tier: dict[str, int] = field(default_factory=dict)  # of the cached, from tiers below a device's pages

    @property
    def day(self) -> str:
        return self.ended_at[:10]


class Ledger:
    """Appends rows. Serving goes on whatever happens here: `num_failures`, `num_pending` and `num_lost` tell of it."""

    def __init__(self, path: Path):
        """OSError where the file cannot be opened; LedgerError where another process has it, or it is no ledger."""
        self._path = path
        self._file = _open(path)
        self._rows: queue.SimpleQueue[LedgerRow | None] = queue.SimpleQueue()
        self._pending: deque[bytes] = deque()
        self._whole_bytes: int | None = None  # of the file, where the row behind them was cut off and is still there
        self._is_failing = False
        self._num_lost = self._num_failures = 0  # counted by the thread
        self._num_overtaken = 0  # rows lost while the thread was writing another: counted by who adds
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)

    @property
    def num_pending(self) -> int:
        return len(self._pending) + self._rows.qsize()

    @property
    def num_lost(self) -> int:
        return self._num_lost + self._num_overtaken

    @property
    def num_failures(self) -> int:
        """How many rows could not be written. A disk that hangs fails nothing, but rows that are lost meanwhile count
        as failed.
        """
        return self._num_failures + self._num_overtaken

    def start(self) -> None:
        self._thread.start()

    def add(self, row: LedgerRow) -> None:
        """Never blocks. One thread adds."""
        while self.num_pending >= MAX_PENDING_ROWS:
            try:
                self._rows.get_nowait()
            except queue.Empty:
                break  # all are the writer's, which drops some itself once it has tried again
            if not self._num_overtaken:
                logger.error("ledger %s: more rows wait than may; the oldest are lost", self._path)
            self._num_overtaken += 1
        self._rows.put(row)

    def close(self) -> None:
        """Writes what has been added, once more tries what is pending, and ends the thread."""
        self._rows.put(None)
        self._thread.join()
        os.close(self._file)

    def _write_all(self) -> None:
        while True:
            try:
                if (row := self._rows.get(timeout=RETRY_S if self._pending else None)) is None:
                    break
                self._pending.append(json.dumps(asdict(row), separators=(",", ":")).encode() + b"\n")
            except queue.Empty:
                pass
            self._try_pending()
            while len(self._pending) > MAX_PENDING_ROWS:
                self._pending.popleft()
                self._num_lost += 1
        self._try_pending()
        self._num_lost += len(self._pending)

    def _try_pending(self) -> None:
        while self._pending:
            try:
                self._follow_path()
                self._append(self._pending[0])
            except (OSError, LedgerError) as error:
                if not self._is_failing:
                    logger.error("ledger %s: %s; rows wait", self._path, getattr(error, "strerror", None) or error)
                self._is_failing = True
                self._num_failures += 1
                return
            self._pending.popleft()
        if self._is_failing:
            self._is_failing = False
            logger.warning("ledger %s: rows are written again; %d were lost", self._path, self.num_lost)

    def _follow_path(self) -> None:
        """Begin the file anew where it is no longer the one at its path: moved as logs are rotated, or deleted.

        OSError or LedgerError where that cannot be: the rows wait, and none goes where nobody would look for it.
        """
        ours = os.fstat(self._file)
        if not stat.S_ISREG(ours.st_mode) or _is_at(self._path, ours):
            return
        num_rows = 0 if ours.st_nlink else _num_lines(self._file)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        anew = _open(self._path)  # last of what may fail: from here on it is ours to close
        if ours.st_nlink:
            logger.warning("ledger %s: it was moved away and is begun anew", self._path)
        else:
            self._num_lost += num_rows
            logger.warning("ledger %s: it was deleted, with %d rows, and is begun anew", self._path, num_rows)
        os.close(self._file)
        self._file, self._whole_bytes = anew, None

    def _append(self, line: bytes) -> None:
        """Appends the whole line, or nothing and raises OSError."""
        self._take_back()
        start = os.fstat(self._file).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if len(rest) < len(line):
                self._whole_bytes = start
                self._take_back()
            raise

    def _take_back(self) -> None:
        """Removes what was written of a line. OSError where that has to wait too: file systems that copy on write need
        room for it.
        """
        if self._whole_bytes is not None:
            os.ftruncate(self._file, self._whole_bytes)
            self._whole_bytes = None


def _num_lines(file: int) -> int:
    """The number of lines of a file that nobody else can open any more."""
    found = start = 0
    while part := os.pread(file, READ_BYTES, start):
        found += part.count(b"\n")
        start += len(part)
    return found


def _is_at(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), file)
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            _claim(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def _claim(file: int, path: Path) -> None:
    """Ours alone from here on, and without the row that a killed process began."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LedgerError(f"{path}: another process writes to it; each gateway needs a ledger of its own") from error
    size = os.fstat(file).st_size
    _, _, torn = os.pread(file, MAX_ROW_BYTES, max(0, size - MAX_ROW_BYTES)).rpartition(b"\n")
    if not (torn.startswith(ROW_START) or ROW_START.startswith(torn)):
        raise LedgerError(f"{path}: it ends in something that is no row of a ledger")
    os.ftruncate(file, size - len(torn))


def read_ledger(path: Path) -> Iterator[LedgerRow]:
    """The rows of a file, also while it is written to. LedgerError for a line that is no row.

    A row that was written before it was said what tiers gave has nothing of these.
    """
    names = {each.name for each in fields(LedgerRow)}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # being written
            try:
                raw: Any = json.loads(line)
                if not isinstance(raw, dict) or not raw.keys() <= names:
                    raise LedgerError("not a row of a ledger")
                yield msgspec.convert(raw, LedgerRow)
            except (ValueError, RecursionError, msgspec.ValidationError) as error:
                raise LedgerError(f"{path}, line {number}: {error}") from error
