"""Every row once, whole, whatever the disk does; and what tokens cost."""

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving import ledger as module
from moonshard.serving.ledger import Ledger, LedgerError, Row, read_ledger
from moonshard.serving.prices import Prices

ROW = Row(
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


def rows(count: int) -> list[Row]:
    return [replace(ROW, request_id=f"r{number}") for number in range(count)]


def write(path: Path, added: list[Row]) -> Ledger:
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

    def ftruncate(self, file: int, size: int) -> None:
        self.room += os.fstat(file).st_size - size
        self._truncate(file, size)


def test_rows_come_back_in_their_order_and_a_file_is_gone_on_with(tmp_path: Path):
    write(tmp_path / "ledger", rows(3))
    ledger = write(tmp_path / "ledger", rows(2))
    assert list(read_ledger(tmp_path / "ledger")) == [*rows(3), *rows(2)]
    assert (ledger.num_lost, ledger.num_failures) == (0, 0)


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


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path):
    write(tmp_path / "ledger", rows(2))
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b'{"request_id"')
    assert list(read_ledger(tmp_path / "ledger")) == rows(2)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"request_id": "x"}'])
def test_a_line_that_is_no_row_is_refused_with_its_number(tmp_path: Path, line: str):
    write(tmp_path / "ledger", rows(1))
    with (tmp_path / "ledger").open("a") as file:
        file.write(line + "\n")
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
