"""Rows of one process, kept in columns until a thread writes them: recording never waits for a disk, nor ends serving.

A row costs whoever appends it a microsecond or two. Memory is bounded: what the disk is too slow for, or has no room
for, is lost and counted. A process that is killed loses the rows of the last `max_age_s`.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from moonshard.serving.config import TraceConfig
from moonshard.serving.trace.origin import this_process
from moonshard.serving.trace.parts import encode_part, load_polars, write_part
from moonshard.serving.trace.schema import Row, Table, Value

logger = logging.getLogger(__name__)
MAX_WAITING_PARTS = 8  # full ones of all tables; more are lost

type Columns = list[list[Value]]


class Rows:
    """One table's rows that are not written yet. Any thread may append."""

    def __init__(self, table: Table, max_rows: int, on_full: "queue.SimpleQueue[_Part | None]") -> None:
        self.table = table
        self.num_lost = 0
        self._max_rows = max_rows
        self._on_full = on_full
        self._lock = threading.Lock()  # held for a microsecond, by whoever appends or takes
        self._begin()

    def append(self, row: Row) -> None:
        """Never waits for the disk."""
        with self._lock:
            for add, value in zip(self._adds, row, strict=True):
                add(value)
            if len(self._columns[0]) >= self._max_rows:
                self._hand_over()

    def take(self) -> Columns | None:
        """What is there, which then is the caller's; None for nothing."""
        with self._lock:
            if not self._columns[0]:
                return None
            columns = self._columns
            self._begin()
            return columns

    def _hand_over(self) -> None:
        if self._on_full.qsize() < MAX_WAITING_PARTS:
            self._on_full.put((self, self._columns))
        else:
            self.num_lost += len(self._columns[0])
        self._begin()

    def _begin(self) -> None:
        self._columns: Columns = [[] for _ in self.table.columns]
        self._adds = [column.append for column in self._columns]  # looked up once, called for each row


type _Part = tuple[Rows, Columns]


class Recorder:
    """The tables of one process, in folders of `path` that have their names. `close` writes what is left."""

    def __init__(self, path: Path, tables: Sequence[Table], *, max_rows: int, max_age_s: float) -> None:
        self._path = path
        self._max_age_s = max_age_s
        self._full: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()  # None: the end
        self._rows = {table.name: Rows(table, max_rows, self._full) for table in tables}
        self._origin = this_process()
        self._prefix = f"{self._origin.host}-{self._origin.pid}-{time.time_ns() // 1_000_000}"
        self._numbers = itertools.count()
        self._num_unwritten = 0
        self.num_failures = 0
        self._thread = threading.Thread(target=self._write_all, name="trace", daemon=True)

    @property
    def num_lost(self) -> int:
        """Rows that are in no part and never will be."""
        return self._num_unwritten + sum(rows.num_lost for rows in self._rows.values())

    def rows(self, table: Table) -> Rows:
        """Where to append."""
        return self._rows[table.name]

    def start(self) -> None:
        load_polars()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once it has written all that was appended, or failed to."""
        self._full.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        is_over = False
        due_s = time.monotonic() + self._max_age_s
        while not is_over:
            try:
                part = self._full.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                self._write_young()
                due_s = time.monotonic() + self._max_age_s
                continue
            is_over = part is None
            if part is not None:
                self._write(*part)
        self._write_young()

    def _write_young(self) -> None:
        """Those that are not full, so that no row waits for ever."""
        for rows in self._rows.values():
            if (columns := rows.take()) is not None:
                self._write(rows, columns)

    def _write(self, rows: Rows, columns: Columns) -> None:
        path = self._path / rows.table.name / f"{self._prefix}-{next(self._numbers):06}.parquet"
        try:
            write_part(path, encode_part(rows.table, columns, self._origin.row()))
        except Exception as error:  # whatever it was: a record is never worth a request
            if not self.num_failures:
                logger.error("trace %s: %s; what cannot be written is lost", path, error)
            self.num_failures += 1
            self._num_unwritten += len(columns[0])


@contextlib.asynccontextmanager
async def recording(config: TraceConfig, *tables: Table) -> AsyncIterator[Recorder | None]:
    """A recorder that runs during the block; None where nothing is to be recorded."""
    if config.path is None:
        yield None
        return
    recorder = Recorder(config.path, tables, max_rows=config.max_rows, max_age_s=config.max_age_s)
    await asyncio.to_thread(recorder.start)
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)
