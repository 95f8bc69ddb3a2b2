"""What a store keeps, by itself and where the disk takes nothing."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.gateway.batches import journal
from moonshard.serving.gateway.batches.journal import opened_store
from moonshard.serving.gateway.batches.records import BatchRecord, CheckedLine, LineResult, PendingLine
from moonshard.serving.gateway.batches.store import Store
from tests.serving.gateway.batches.asking import create, ended, line, upload
from tests.serving.gateway.fake_worker import FakeWorker

LINES = [CheckedLine(PendingLine(number=number, start=0, num_bytes=2)) for number in (1, 2, 3)]


def a_batch(batch_id: str = "batch_1", input_file_id: str = "file-1") -> BatchRecord:
    return BatchRecord(
        id=batch_id,
        tenant="t",
        endpoint="/v1/completions",
        input_file_id=input_file_id,
        completion_window="24h",
        metadata=None,
        status="validating",
        created_at=1,
        expires_at=2,
        stamps={},
    )


def result(number: int, row: bytes = b"{}", *, is_error: bool = False) -> LineResult:
    return LineResult(batch_id="batch_1", number=number, row=row, is_error=is_error)


def begun(path: Path) -> Store:
    store = Store(path)
    store.add_batch(a_batch())
    store.begin("batch_1", LINES)
    return store


def test_a_line_keeps_its_first_result_and_is_counted_once(batches_path: Path):
    store = begun(batches_path)
    store.put([result(1, b'{"a":1}'), result(2, is_error=True)])
    store.put([result(1, b'{"a":2}'), result(1, is_error=True)])
    batch = store.batch("batch_1")
    assert batch is not None
    assert (batch.num_completed, batch.num_failed) == (1, 1)
    assert [pending.number for pending in store.pending("batch_1", 0, 10)] == [3]
    store.put([result(3, b'{"a":3}')])
    store.finish(batch, "completed")
    [output, mistakes] = store.files("t", purpose=None, after=None, limit=9, is_oldest_first=True)
    assert store.path_of(output.id).read_bytes() == b'{"a":1}\n{"a":3}\n'
    assert store.path_of(mistakes.id).read_bytes() == b"{}\n"
    store.close()


def test_lines_that_fail_to_be_checked_leave_none_behind(batches_path: Path):
    store = Store(batches_path)
    store.add_batch(a_batch())

    def broken():
        yield from LINES
        raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        store.begin("batch_1", broken())
    batch = store.batch("batch_1")
    assert batch is not None
    assert (batch.status, store.pending("batch_1", 0, 10)) == ("validating", [])
    store.close()


def test_what_was_not_named_is_gone_at_the_next_start(batches_path: Path):
    store = Store(batches_path)
    part = store.new_part()
    part.write_bytes(b"{}")
    kept = store.add_file(part, "t", "a", "batch")
    store.new_part().write_bytes(b"half")
    store.path_of("file-unnamed").write_bytes(b"written, and the process killed")
    store.close()
    again = Store(batches_path)
    assert [path.name for path in (batches_path / "files").iterdir()] == [kept.id]
    assert list((batches_path / "parts").iterdir()) == []
    assert again.file("t", kept.id) == kept
    again.close()


def test_files_written_before_a_kill_are_written_again_and_come_once(batches_path: Path, monkeypatch):
    store = begun(batches_path)
    store.put([result(number) for number in (1, 2, 3)])
    batch = store.batch("batch_1")
    assert batch is not None
    monkeypatch.setattr(Store, "_name", lambda *_: 1 / 0)  # killed between the files and their names
    with pytest.raises(ZeroDivisionError):
        store.finish(batch, "completed")
    monkeypatch.undo()
    store.close()
    again = Store(batches_path)
    assert again.unfinished() == ["batch_1"]
    again.finish(batch, "completed")
    assert len(list((batches_path / "files").iterdir())) == 1
    again.close()


def test_a_folder_that_cannot_be_had_ends_the_start_by_its_key(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"batches\.path"):
        opened_store(tmp_path / "taken")
    (tmp_path / "batches.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"batches\.path"):
        opened_store(tmp_path)


async def test_a_full_disk_pauses_a_batch_which_says_so_and_goes_on(
    http: httpx.AsyncClient, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "RETRY_S", 0.01)
    put, is_full = Store.put, True

    def put_if_there_is_room(*asked: Any) -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        put(*asked)

    monkeypatch.setattr(Store, "put", put_if_there_is_room)
    created = (await create(http, await upload(http, [line(str(number)) for number in range(30)]))).json()
    while (batch := (await http.get(f"/v1/batches/{created['id']}")).json())["errors"] is None:
        pass
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("in_progress", "paused")
    assert "disk is full" in json.dumps(batch["errors"])
    assert (await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})).status_code == 200
    is_full = False
    batch = await ended(http, created["id"])
    assert (batch["status"], batch["errors"], batch["request_counts"]["completed"]) == ("completed", None, 30)
    assert len(worker.runs) == 31
    told = (await http.get("/metrics")).text
    assert "moonshard_batch_store_failures_total 0.0" not in told
    assert "moonshard_batch_store_failures_total" in told


async def test_what_must_be_written_is_refused_where_the_disk_is_full(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    file_id = await upload(http, [line("a")])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("add_file", "add_batch"):
        monkeypatch.setattr(Store, name, full)
    response = await http.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
    assert (response.status_code, "batches.path" in response.text) == (503, True)
    assert (await create(http, file_id)).status_code == 503
    assert (await http.get("/health")).status_code == 200
