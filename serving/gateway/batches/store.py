"""What outlives a kill: files as files, and what is known of them and of batches in SQLite.

SQLite, since its journal is what we would write ourselves: a line's result is there whole or not at all, a line has at
most one by its primary key, and a batch changes its state together with all that goes with that. Each transaction is on
disk (`synchronous = FULL`) before anybody hears of it. Files are written beside their place, synced and renamed, and
then named in a transaction; what a kill leaves without a name is removed at the next start. One process has a store,
and holds its lock. Every method blocks: `journal` runs them on a thread.
"""

import fcntl
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from moonshard.serving.gateway.batches.lines import MAX_CUSTOM_ID_CHARS
from moonshard.serving.gateway.batches.records import (
    ENDED,
    STAMPS,
    BatchRecord,
    CheckedLine,
    FileRecord,
    LineError,
    LineResult,
    PendingLine,
    Status,
)
from moonshard.serving.gateway.batches.rows import unasked_row

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, tenant TEXT, filename TEXT, purpose TEXT,
    num_bytes INTEGER, created_at INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, tenant TEXT, endpoint TEXT, input_file_id TEXT,
    completion_window TEXT, metadata TEXT, status TEXT, created_at INTEGER, expires_at INTEGER,
    {", ".join(f"{stamp} INTEGER" for stamp in STAMPS)},
    num_total INTEGER DEFAULT 0, num_completed INTEGER DEFAULT 0, num_failed INTEGER DEFAULT 0,
    output_file_id TEXT, error_file_id TEXT, errors TEXT);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT, number INTEGER, start INTEGER, num_bytes INTEGER, row BLOB, is_error INTEGER,
    PRIMARY KEY (batch_id, number));
"""
_VERSION = 1
OUTPUT_PURPOSE = "batch_output"


class StoreInUse(OSError):
    """Another process has this store."""


class Store:
    def __init__(self, folder: Path) -> None:
        """Makes the folder where it is missing. Raises StoreInUse, OSError, sqlite3.Error."""
        self._files, self._parts = folder / "files", folder / "parts"
        for each in (folder, self._files, self._parts):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _locked(folder / "lock")
        self._db = sqlite3.connect(folder / "batches.sqlite", isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        for pragma in ("journal_mode = WAL", "synchronous = FULL", f"user_version = {_VERSION}"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)
        self._remove_unnamed()

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    # ---- files

    def path_of(self, file_id: str) -> Path:
        """Where a file of the store lies; only for ids that a record has."""
        return self._files / file_id

    def new_part(self) -> Path:
        """Where a file may grow until it is added."""
        return self._parts / secrets.token_hex(16)

    def add_file(self, part: Path, tenant: str, filename: str, purpose: str) -> FileRecord:
        """Takes over a part that is whole and synced."""
        record = self._placed(part, tenant, filename, purpose)
        with self._transaction():
            self._name(record)
        return record

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        found = self._db.execute("SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        return None if found is None else _file(found)

    def files(self, tenant: str, *, purpose: str | None, after: str | None, limit: int, is_oldest_first: bool):
        """Those after the file `after`, at most `limit`."""
        sql = "SELECT * FROM files WHERE tenant = :tenant AND (:purpose IS NULL OR purpose = :purpose)"
        return [_file(row) for row in self._page(sql, "files", tenant, after, limit, is_oldest_first, purpose=purpose)]

    def delete_file(self, record: FileRecord) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", (record.id,))
        self.path_of(record.id).unlink(missing_ok=True)

    def user_of(self, file_id: str) -> str | None:
        """The id of a batch that has not ended and reads this file."""
        for row in self._db.execute("SELECT id, status FROM batches WHERE input_file_id = ?", (file_id,)):
            if row["status"] not in ENDED:
                return row["id"]
        return None

    def num_bytes(self) -> int:
        """Of all files, and of the results that are not in one yet."""
        files = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM files").fetchone()[0]
        return files + self._db.execute("SELECT coalesce(sum(length(row)), 0) FROM lines").fetchone()[0]

    # ---- batches

    def add_batch(self, batch: BatchRecord) -> None:
        values = {
            "id": batch.id,
            "tenant": batch.tenant,
            "endpoint": batch.endpoint,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "metadata": None if batch.metadata is None else json.dumps(batch.metadata),
            "status": batch.status,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
        }
        names = ", ".join(values)
        with self._transaction():
            self._db.execute(
                f"INSERT INTO batches ({names}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
            )

    def batch(self, batch_id: str, tenant: str | None = None) -> BatchRecord | None:
        """`tenant`: None for any."""
        sql = "SELECT * FROM batches WHERE id = ? AND (? IS NULL OR tenant = ?)"
        found = self._db.execute(sql, (batch_id, tenant, tenant)).fetchone()
        return None if found is None else _batch(found)

    def batches(self, tenant: str, *, after: str | None, limit: int) -> list[BatchRecord]:
        """The newest first."""
        sql = "SELECT * FROM batches WHERE tenant = :tenant"
        return [_batch(row) for row in self._page(sql, "batches", tenant, after, limit, is_oldest_first=False)]

    def unfinished(self, tenant: str | None = None) -> list[str]:
        """The ids of batches that have not ended, the oldest first."""
        sql = "SELECT id, status FROM batches WHERE ? IS NULL OR tenant = ? ORDER BY seq"
        return [row["id"] for row in self._db.execute(sql, (tenant, tenant)) if row["status"] not in ENDED]

    def begin(self, batch_id: str, lines: Iterable[CheckedLine]) -> None:
        """The batch is in progress, with these lines: all of them or, where `lines` raises, none."""
        with self._transaction():
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            self._db.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)",
                ((batch_id, *astuple(each.place), each.row, each.row is not None) for each in lines),
            )
            self._db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = :now,"
                " num_total = (SELECT count(*) FROM lines WHERE batch_id = :id),"
                " num_failed = (SELECT count(*) FROM lines WHERE batch_id = :id AND row IS NOT NULL)"
                " WHERE id = :id AND status = 'validating'",
                {"id": batch_id, "now": _now()},
            )

    def pending(self, batch_id: str, after: int, limit: int) -> list[PendingLine]:
        """Lines without a result behind that number."""
        sql = "SELECT * FROM lines WHERE batch_id = ? AND row IS NULL AND number > ? ORDER BY number LIMIT ?"
        rows = self._db.execute(sql, (batch_id, after, limit))
        return [PendingLine(number=row["number"], start=row["start"], num_bytes=row["num_bytes"]) for row in rows]

    def put(self, results: Sequence[LineResult]) -> None:
        """All of them in one transaction. A line that has a result keeps it."""
        with self._transaction():
            for each in results:
                sql = "UPDATE lines SET row = ?, is_error = ? WHERE batch_id = ? AND number = ? AND row IS NULL"
                done = self._db.execute(sql, (each.row, each.is_error, each.batch_id, each.number))
                column = "num_failed" if each.is_error else "num_completed"
                sql = f"UPDATE batches SET {column} = {column} + ? WHERE id = ?"
                self._db.execute(sql, (done.rowcount, each.batch_id))

    def move(self, batch_id: str, status: Status, *, of: Sequence[Status]) -> bool:
        """Changes the state, and stamps it, where it is one `of` those."""
        sql = f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ? AND status IN ({','.join('?' * len(of))})"
        with self._transaction():
            return self._db.execute(sql, (status, _now(), batch_id, *of)).rowcount > 0

    def finish(self, batch: BatchRecord, status: Status, errors: Sequence[LineError] = ()) -> None:
        """Writes the files, and ends the batch: both or neither. Lines without a result get a row that says why."""
        if status != "completed":
            self._fill_in(batch, status)
        output = self._write_rows(batch, is_error=False)
        mistakes = self._write_rows(batch, is_error=True)
        with self._transaction():
            for record in (output, mistakes):
                if record is not None:
                    self._name(record)
            self._db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, errors = ?"
                " WHERE id = ?",
                (
                    status,
                    _now(),
                    None if output is None else output.id,
                    None if mistakes is None else mistakes.id,
                    json.dumps([asdict(each) for each in errors]),
                    batch.id,
                ),
            )
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch.id,))

    def _fill_in(self, batch: BatchRecord, status: Status) -> None:
        """A row for each line that has none. Its custom id is read again."""
        while lines := self.pending(batch.id, 0, 1000):
            with open(self.path_of(batch.input_file_id), "rb") as file:
                rows = [(unasked_row(_custom_id(file, line), status), line.number) for line in lines]
            self.put([LineResult(batch_id=batch.id, number=number, row=row, is_error=True) for row, number in rows])

    def _write_rows(self, batch: BatchRecord, *, is_error: bool) -> FileRecord | None:
        """The output or the error file, in the order of the input's lines; None where it would be empty."""
        sql = "SELECT row FROM lines WHERE batch_id = ? AND row IS NOT NULL AND is_error = ? ORDER BY number"
        rows = self._db.execute(sql, (batch.id, is_error))
        first = rows.fetchone()
        if first is None:
            return None
        part = self.new_part()
        try:
            with open(part, "xb") as file:
                file.write(first["row"] + b"\n")
                file.writelines(row["row"] + b"\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            part.unlink(missing_ok=True)
            raise
        kind = "error" if is_error else "output"
        return self._placed(part, batch.tenant, f"{batch.id}_{kind}.jsonl", OUTPUT_PURPOSE)

    # ---- what they have in common

    def _placed(self, part: Path, tenant: str, filename: str, purpose: str) -> FileRecord:
        record = FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=part.stat().st_size,
            created_at=_now(),
        )
        part.rename(self.path_of(record.id))
        _sync_folder(self._files)
        return record

    def _name(self, record: FileRecord) -> None:
        self._db.execute(
            "INSERT INTO files (id, tenant, filename, purpose, num_bytes, created_at) VALUES (?, ?, ?, ?, ?, ?)",
            (record.id, record.tenant, record.filename, record.purpose, record.num_bytes, record.created_at),
        )

    def _page(
        self, sql: str, table: str, tenant: str, after: str | None, limit: int, is_oldest_first: bool, **more: Any
    ) -> Iterator[sqlite3.Row]:
        sign, order = (">", "ASC") if is_oldest_first else ("<", "DESC")
        if after is not None:
            sql += f" AND seq {sign} (SELECT seq FROM {table} WHERE id = :after AND tenant = :tenant)"
        sql += f" ORDER BY seq {order} LIMIT :limit"
        return iter(self._db.execute(sql, {"tenant": tenant, "after": after, "limit": limit, **more}).fetchall())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _remove_unnamed(self) -> None:
        for part in self._parts.iterdir():
            part.unlink()
        named = {row["id"] for row in self._db.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in named:
                path.unlink()


def _locked(path: Path) -> int:
    """An open file that is locked for as long as it is open. Raises StoreInUse."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StoreInUse(error.errno, "another gateway has it") from error
    except OSError:
        os.close(lock)
        raise
    return lock


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _custom_id(file: Any, line: PendingLine) -> str | None:
    file.seek(line.start)
    try:
        return str(json.loads(file.read(line.num_bytes))["custom_id"])[:MAX_CUSTOM_ID_CHARS]
    except (ValueError, KeyError, TypeError):
        return None


def _file(row: sqlite3.Row) -> FileRecord:
    return FileRecord(**{name: row[name] for name in FileRecord.__slots__})


def _batch(row: sqlite3.Row) -> BatchRecord:
    given = {name: row[name] for name in row.keys() if name in BatchRecord.__slots__}  # noqa: SIM118
    metadata = None if row["metadata"] is None else json.loads(row["metadata"])
    errors = tuple(LineError(**each) for each in json.loads(row["errors"] or "[]"))
    stamps = {stamp: row[stamp] for stamp in STAMPS if row[stamp] is not None}
    return BatchRecord(**given | {"metadata": metadata, "errors": errors, "stamps": stamps})


def _now() -> int:
    return int(time.time())
