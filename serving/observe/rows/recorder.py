"""Rows of one process, kept in columns until a thread writes them: recording never waits for a disk, nor ends serving.

A row costs whoever appends it a microsecond or two. Memory and disk are bounded: what the disk is too slow for, or has
no room for, is lost and counted; beyond `max_bytes` the process deletes its own oldest files. A process that is killed
loses the rows of the last `max_age_s`.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from moonshard.serving.config.keys import ConfigError, TraceConfig
from moonshard.serving.observe.rows.origin import this_process
from moonshard.serving.observe.rows.parts import check_writable, encode_part, load_polars, without_unfit, write_part
from moonshard.serving.observe.rows.schema import Table, TableRow, Value

logger = logging.getLogger(__name__)
MAX_WAITING_PARTS = 8  # full ones of one table; more are lost
CLOSE_TIMEOUT_S = 5.0  # at the process's end, for what is not written yet

type Columns = list[list[Value]]


class UnwrittenRows:
    """One table's rows that are not written yet. Any thread may append."""

    def __init__(self, table: Table, max_rows: int, on_full: "queue.SimpleQueue[UnwrittenRows | None]") -> None:
        self.table = table
        self.num_lost = 0
        self._max_rows = max_rows
        self._on_full = on_full
        self._full: deque[Columns] = deque()
        self._lock = threading.Lock()  # held for a microsecond, by whoever appends or takes
        self._begin()

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._columns[0]) + sum(len(columns[0]) for columns in self._full)

    def append(self, row: TableRow) -> None:
        """Never waits for the disk."""
        with self._lock:
            for add, value in zip(self._adds, row, strict=True):
                add(value)
            if len(self._columns[0]) >= self._max_rows:
                self._hand_over()

    def take_full(self) -> Columns | None:
        """The oldest part that is full, which then is the caller's; None where there is none."""
        with self._lock:
            return self._full.popleft() if self._full else None

    def take_young(self) -> Columns | None:
        """The rows that are in no full part, likewise."""
        with self._lock:
            if not self._columns[0]:
                return None
            columns = self._columns
            self._begin()
            return columns

    def _hand_over(self) -> None:
        if len(self._full) < MAX_WAITING_PARTS:
            self._full.append(self._columns)
            self._on_full.put(self)
        else:
            self.num_lost += len(self._columns[0])
        self._begin()

    def _begin(self) -> None:
        self._columns: Columns = [[] for _ in self.table.columns]
        self._adds = [column.append for column in self._columns]  # looked up once, called for each row


class Recorder:
    """The tables of one process, in folders of `path` that have their names. `close` writes what is left."""

    def __init__(self, path: Path, tables: Sequence[Table], *, max_rows: int, max_age_s: float, max_bytes: int) -> None:
        self._path = path
        self._max_age_s = max_age_s
        self._full = queue.SimpleQueue[UnwrittenRows | None]()  # those with a full part; None: the end
        self._rows = {table.name: UnwrittenRows(table, max_rows, self._full) for table in tables}
        self._origin = this_process()
        self._prefix = f"{self._origin.host}-{self._origin.pid}-{time.time_ns() // 1_000_000}"
        self._numbers = itertools.count()
        self._written = _WrittenParts(max_bytes)
        self._num_unwritten = 0
        self._num_writing = 0  # rows that are being written
        self._is_given_up = False
        self._is_thinned = False  # said once: whoever deletes some goes on with it
        self._failing: set[Table] = set()  # those whose last part had rows that are lost
        self.num_failures = 0
        self._thread = threading.Thread(target=self._write_all, name="trace", daemon=True)

    @property
    def num_lost(self) -> int:
        """Rows that are in no part and never will be."""
        return self._num_unwritten + sum(rows.num_lost for rows in self._rows.values())

    def rows(self, table: Table) -> UnwrittenRows:
        """The rows of one table, to append to."""
        return self._rows[table.name]

    def start(self) -> None:
        """OSError where nothing can be written."""
        check_writable(self._path)
        load_polars()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once it has written all that was appended, or failed to; what takes too long is lost."""
        self._full.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._is_given_up = True
            self._num_unwritten += self._num_writing
            logger.error("trace %s: the disk takes longer than %g s", self._path, CLOSE_TIMEOUT_S)
        self._num_unwritten += sum(rows.num_waiting for rows in self._rows.values())  # also what came too late
        if self.num_lost:
            logger.error("trace %s: %d rows are lost", self._path, self.num_lost)

    def _write_all(self) -> None:
        is_over = False
        due_s = time.monotonic() + self._max_age_s
        while not is_over:
            with contextlib.suppress(queue.Empty):
                rows = self._full.get(timeout=max(0.0, due_s - time.monotonic()))
                is_over = rows is None
                if rows is not None and (columns := rows.take_full()) is not None:
                    self._write(rows, columns)
            if time.monotonic() >= due_s:
                self._write_young()
                due_s = time.monotonic() + self._max_age_s
        self._write_full()
        self._write_young()

    def _write_full(self) -> None:
        """Writes the full parts that were handed over after the thread was told to end."""
        for rows in self._rows.values():
            while (columns := rows.take_full()) is not None:
                self._write(rows, columns)

    def _write_young(self) -> None:
        """Writes parts that are not full, so that no row waits for ever."""
        for rows in self._rows.values():
            if (columns := rows.take_young()) is not None:
                self._write(rows, columns)

    def _write(self, rows: UnwrittenRows, columns: Columns) -> None:
        if self._is_given_up:
            return  # they are counted
        self._num_writing = num_rows = len(columns[0])
        path = self._path / rows.table.name / f"{self._prefix}-{next(self._numbers):06}.parquet"
        try:
            num_lost, trouble = self._write_part(path, rows.table, columns)
        except Exception as error:  # whatever it was: a record is never worth a request
            num_lost, trouble = num_rows, str(error)
        self._num_writing = 0
        if not self._is_given_up:
            self._note(path, rows.table, num_lost, trouble)

    def _write_part(self, path: Path, table: Table, columns: Columns) -> tuple[int, str | None]:
        """How many of the rows are lost, and why. OSError where all are."""
        num_unfit, trouble = 0, None
        try:
            data = encode_part(table, columns, self._origin.row())
        except Exception as error:  # of one row, or of several, which the others need not pay for
            fit = without_unfit(table, columns)
            num_unfit, trouble = len(columns[0]) - len(fit[0]), f"no column holds it: {error}"
            data = encode_part(table, fit, self._origin.row())
        write_part(path, data)
        self._written.add(path, len(data))
        if (num_gone := self._written.forget_gone()) and not self._is_thinned:
            self._is_thinned = True
            logger.warning("trace %s: %d parts were deleted by somebody else", self._path, num_gone)
        return num_unfit, trouble

    def _note(self, path: Path, table: Table, num_lost: int, trouble: str | None) -> None:
        """Log once that a table's rows are lost, not once per part; and once that they are not any more."""
        self._num_unwritten += num_lost
        if trouble is not None:
            self.num_failures += 1
            if table not in self._failing:
                logger.error("trace %s: %s; what cannot be written is lost", path, trouble)
            self._failing.add(table)
        elif table in self._failing:
            logger.warning("trace %s: rows are written again; %d were lost", path, self.num_lost)
            self._failing.remove(table)


class _WrittenParts:
    """The parts that this process has written and not deleted. Used on one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: deque[tuple[Path, int]] = deque()  # the oldest first
        self._num_bytes = 0

    def add(self, path: Path, num_bytes: int) -> None:
        """Adds a part, and deletes the oldest ones where all take too much; the newest is kept, whatever its size."""
        self._parts.append((path, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and len(self._parts) > 1:
            oldest, num_oldest_bytes = self._parts.popleft()
            self._num_bytes -= num_oldest_bytes
            with contextlib.suppress(OSError):  # somebody else deleted it, or nobody may any more
                oldest.unlink()

    def forget_gone(self) -> int:
        """How many of the oldest parts others have deleted since the last call; they take no room any more.

        Only the oldest are looked for: to look for each of thousands at every write would cost more than it tells.
        """
        num_gone = 0
        while self._parts and not self._parts[0][0].exists():
            self._num_bytes -= self._parts.popleft()[1]
            num_gone += 1
        return num_gone


@contextlib.asynccontextmanager
async def recording(config: TraceConfig, *tables: Table) -> AsyncIterator[Recorder | None]:
    """A recorder that runs during the block; None where nothing is to be recorded. ConfigError where nothing can be."""
    if config.path is None:
        yield None
        return
    recorder = Recorder(
        config.path, tables, max_rows=config.max_rows, max_age_s=config.max_age_s, max_bytes=config.max_bytes
    )
    try:
        await asyncio.to_thread(recorder.start)
    except OSError as error:
        raise ConfigError([f"trace.path: {config.path}: {error.strerror}"]) from error
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)
