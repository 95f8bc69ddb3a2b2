"""Every row once, whole, whatever the disk does; and what tokens cost."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.config.prices import Prices
from moonshard.serving.gateway.records.accounts import ledger as module
from moonshard.serving.gateway.records.accounts.ledger import Ledger, LedgerError, LedgerRow, read_ledger

ROW = LedgerRow(
    request_id="r0",
    ended_at="2026-11-22T10:00:00Z",
    tenant="a",
    session="",
    model="kimi",
    outcome="stop",
    prompt_tokens=100,
    cached_tokens=64,
    completion_tokens=5,
    usd=0.1,
)


def rows(count: int) -> list[LedgerRow]:
    return [replace(ROW, request_id=f"r{number}") for number in range(count)]


def write(path: Path, added: list[LedgerRow]) -> Ledger:
    ledger = Ledger(path)
    ledger.start()
    for row in added:
        ledger.add(row)
    ledger.close()
    return ledger


class SmallDisk:
    """`os.write` on a disk that has room for so many bytes, and takes them piece by piece."""

    def __init__(self, room: int):
        self.room = room
        self._write, self._truncate = os.write, os.ftruncate

    def write(self, file: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: min(self.room, 7)])
        self.room -= written
        return written

    @staticmethod
    def refuse(*_: object) -> None:
        """Some file systems need room to give room back."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def ftruncate(self, file: int, size: int) -> None:
        self.room += os.fstat(file).st_size - size
        self._truncate(file, size)


def test_rows_come_back_in_their_order_and_a_file_is_gone_on_with(tmp_path: Path):
    write(tmp_path / "ledger", rows(3))
    ledger = write(tmp_path / "ledger", rows(2))
    assert list(read_ledger(tmp_path / "ledger")) == [*rows(3), *rows(2)]
    assert (ledger.num_lost, ledger.num_failures) == (0, 0)


def test_what_tiers_gave_comes_back_and_a_row_of_before_has_none(tmp_path: Path):
    older = asdict(ROW)
    del older["cached_by_tier"]
    (tmp_path / "ledger").write_text(json.dumps(older) + "\n")
    write(tmp_path / "ledger", added := [replace(ROW, cached_by_tier={"host": 48, "ssd": 16})])
    assert list(read_ledger(tmp_path / "ledger")) == [ROW, *added]
    assert ROW.cached_by_tier == {}
    assert (tmp_path / "ledger").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("room", [0, 1, 100, 500, 1000, 1001])
def test_on_a_full_disk_what_is_there_is_whole_and_what_is_not_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
):
    disk = SmallDisk(room)
    monkeypatch.setattr(module.os, "write", disk.write)
    monkeypatch.setattr(module.os, "ftruncate", disk.ftruncate)
    ledger = write(tmp_path / "ledger", rows(10))
    found = list(read_ledger(tmp_path / "ledger"))
    assert found == rows(10)[: len(found)]
    assert ledger.num_lost == 10 - len(found) > 0
    assert ledger.num_failures > 0
    assert (tmp_path / "ledger").read_bytes().count(b"\n") == len(found)


def test_what_could_not_be_taken_back_at_once_is_taken_back_before_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = SmallDisk(300)
    monkeypatch.setattr(module.os, "write", disk.write)
    ledger = Ledger(tmp_path / "ledger")
    monkeypatch.setattr(module.os, "ftruncate", SmallDisk.refuse)
    for row in rows(3):
        ledger._pending.append(json.dumps(asdict(row)).encode() + b"\n")
    ledger._try_pending()
    assert (tmp_path / "ledger").stat().st_size == 300  # the second row's beginning too
    disk.room = 10_000
    ledger._try_pending()
    assert (ledger.num_pending, (tmp_path / "ledger").stat().st_size) == (2, 300)
    monkeypatch.setattr(module.os, "ftruncate", disk.ftruncate)
    ledger._try_pending()
    assert ledger.num_pending == 0
    assert list(read_ledger(tmp_path / "ledger")) == rows(3)


def test_rows_that_waited_are_written_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = SmallDisk(300)
    monkeypatch.setattr(module.os, "write", disk.write)
    monkeypatch.setattr(module.os, "ftruncate", disk.ftruncate)
    ledger = Ledger(tmp_path / "ledger")
    for row in rows(5):
        ledger._pending.append(json.dumps(asdict(row)).encode() + b"\n")
    ledger._try_pending()
    assert ledger.num_pending == 4
    disk.room = 10_000
    ledger._try_pending()
    assert ledger.num_pending == 0
    assert list(read_ledger(tmp_path / "ledger")) == rows(5)


def test_when_too_many_wait_the_oldest_are_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 3)
    monkeypatch.setattr(module.os, "write", SmallDisk(0).write)
    assert write(tmp_path / "ledger", rows(5)).num_lost == 5


def test_while_a_disk_hangs_so_many_rows_wait_and_the_oldest_of_the_others_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 4)
    is_writing, may_write, write_now = threading.Event(), threading.Event(), os.write

    def write_later(file: int, data: memoryview) -> int:
        is_writing.set()
        assert may_write.wait(60)
        return write_now(file, data)

    monkeypatch.setattr(module.os, "write", write_later)
    ledger, added = Ledger(tmp_path / "ledger"), rows(10)
    ledger.start()
    ledger.add(added[0])
    assert is_writing.wait(60)
    for row in added[1:]:
        ledger.add(row)
    assert (ledger.num_pending, ledger.num_lost, ledger.num_failures) == (4, 6, 6)
    may_write.set()
    ledger.close()
    assert list(read_ledger(tmp_path / "ledger")) == [added[0], *added[-3:]]
    assert (ledger.num_pending, ledger.num_lost) == (0, 6)


def test_nobody_else_may_read_it(tmp_path: Path):
    write(tmp_path / "ledger", rows(1))
    assert (tmp_path / "ledger").stat().st_mode & 0o077 == 0


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path):
    write(tmp_path / "ledger", rows(2))
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b'{"request_id"')
    assert list(read_ledger(tmp_path / "ledger")) == rows(2)


WRONG_TYPE = json.dumps(asdict(rows(1)[0]) | {"prompt_tokens": "many"}).encode()
ONE_TOO_MANY = json.dumps(asdict(rows(1)[0]) | {"colour": "red"}).encode()
ONE_TOO_FEW = json.dumps({name: value for name, value in asdict(rows(1)[0]).items() if name != "usd"}).encode()


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"{}", b'{"request_id": "x"}', b"\xff\xfe", WRONG_TYPE, ONE_TOO_MANY, ONE_TOO_FEW]
)
def test_a_line_that_is_no_row_is_refused_with_its_number(tmp_path: Path, line: bytes):
    write(tmp_path / "ledger", rows(1))
    with (tmp_path / "ledger").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(LedgerError, match="line 2: "):
        list(read_ledger(tmp_path / "ledger"))


def test_a_ledger_that_cannot_be_opened_says_so_at_once(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        Ledger(tmp_path / "nowhere" / "ledger")


@given(prompt=st.integers(0, 10**7), cached=st.floats(0, 1), completion=st.integers(0, 10**6))
def test_cached_tokens_cost_less_and_every_token_is_paid_once(prompt: int, cached: float, completion: int):
    num_cached = int(prompt * cached)
    paid = Prices().usd(prompt_tokens=prompt, cached_tokens=num_cached, completion_tokens=completion)
    expected = (prompt - num_cached) * 0.6e-6 + num_cached * 0.1e-6 + completion * 3e-6
    assert paid == pytest.approx(expected)


def test_a_row_that_a_killed_process_began_is_taken_back_and_the_file_gone_on_with(tmp_path: Path):
    path = tmp_path / "ledger"
    for torn in (b"{", b'{"request_id"', b'{"request_id":"r1","ended_at":"20'):
        write(path, rows(2))
        with path.open("ab") as file:
            file.write(torn)
        write(path, rows(1))
        assert list(read_ledger(path)) == [*rows(2), *rows(1)]
        path.unlink()


@pytest.mark.parametrize("text", ["gateway.port = 1", '{"a": 1}', "x" * 100_000])
def test_a_file_of_another_kind_is_neither_cut_nor_added_to(tmp_path: Path, text: str):
    (tmp_path / "other").write_text(text)
    with pytest.raises(LedgerError, match="no row of a ledger"):
        Ledger(tmp_path / "other")
    assert (tmp_path / "other").read_text() == text


def test_on_a_device_that_is_full_every_try_is_counted_and_no_row_is_said_to_be_written():
    ledger = write(Path("/dev/full"), rows(3))
    assert (ledger.num_failures, ledger.num_lost) == (4, 3)  # once more at the end


def test_two_processes_do_not_write_to_one_ledger(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.start()
    with pytest.raises(LedgerError, match="another process"):
        Ledger(tmp_path / "ledger")
    ledger.close()
    Ledger(tmp_path / "ledger").start()


def until_written(path: Path, num_rows: int) -> None:
    """Bounded by the test's own timeout."""
    while not path.is_file() or len(list(read_ledger(path))) < num_rows:
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["moved", "deleted", "folder deleted", "replaced by an empty file"])
def test_a_file_that_is_gone_is_begun_anew_and_said_once(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, kept = tmp_path / "folder" / "ledger.jsonl", tmp_path / "ledger.jsonl.1"
    path.parent.mkdir()
    first, *others = rows(4)
    ledger = Ledger(path)
    ledger.start()
    ledger.add(first)
    until_written(path, 1)
    assert list(read_ledger(path)) == [first]
    if how == "deleted":
        path.unlink()
    elif how == "folder deleted":
        shutil.rmtree(path.parent)
    else:
        path.rename(kept)
        if how != "moved":
            path.touch()
    for row in others:
        ledger.add(row)
    ledger.close()
    assert list(read_ledger(path)) == others
    is_moved = kept.exists()
    assert (ledger.num_lost, ledger.num_failures) == (0 if is_moved else 1, 0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"it was {'moved away' if is_moved else 'deleted, with 1 rows,'} and is begun anew" in record.message
    if is_moved:
        assert list(read_ledger(kept)) == [first]


def test_rows_wait_while_the_file_cannot_be_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    path = tmp_path / "folder" / "ledger.jsonl"
    path.parent.mkdir()
    ledger = Ledger(path)
    ledger.start()
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    for row in (added := rows(3)):
        ledger.add(row)
    while ledger.num_pending < 3 or not ledger.num_failures:
        time.sleep(0.001)
    path.parent.unlink()
    until_written(path, 3)  # no further row comes
    assert list(read_ledger(path)) == added
    ledger.close()
    assert ledger.num_lost == 0
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING", "WARNING"]
    assert "rows are written again; 0 were lost" in caplog.messages[-1]


def test_a_disk_that_has_room_again_gets_the_rows_that_wait_without_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    disk = SmallDisk(0)
    monkeypatch.setattr(module.os, "write", disk.write)
    ledger = Ledger(path := tmp_path / "ledger.jsonl")
    ledger.start()
    ledger.add(ROW)
    while not ledger.num_failures:
        time.sleep(0.001)
    disk.room = 1 << 20
    until_written(path, 1)
    ledger.close()
    assert list(read_ledger(path)) == [ROW]
