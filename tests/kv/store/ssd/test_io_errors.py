"""Whatever a disk says no to is a miss or a block that is not kept, counted, and serving goes on."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moonshard.kv.store.retention import S3Fifo
from moonshard.kv.store.tier import MissCause
from tests.kv.store.ssd.blocks_on_disk import (
    BLOCK_BYTES,
    chain,
    extent_on_disk,
    fetch,
    headers_on_disk,
    keep,
    left_behind,
    open_tier,
    rot,
    store_folder,
)
from tests.kv.store.ssd.mounts import mounted
from tests.kv.store.ssd.writes import name_of

EXTENT_BYTES = 8192
Badness = Callable[[str, int, int], bool]  # of a file, from a byte to another
either_way = pytest.mark.parametrize("direct", [False, True])


class BadDisk:
    """Says no to the calls that are named, wherever `is_bad` says so of a file and the bytes of it that are touched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = set[str]()
        self.error = errno.EIO
        self.is_bad: Badness = lambda file, start, end: True
        for call in ("preadv", "pwritev", "fdatasync"):
            monkeypatch.setattr(os, call, self._failing(call, getattr(os, call)))

    def refuse(self, *calls: str, error: int = errno.EIO, is_bad: Badness | None = None) -> None:
        self.calls, self.error = set(calls), error
        self.is_bad = is_bad or (lambda file, start, end: True)

    def _failing(self, name: str, real: Callable) -> Callable:
        def call(descriptor: int, buffers: list | None = None, offset: int = 0):
            num_bytes = sum(len(bytes(buffer)) for buffer in buffers or [])
            if name in self.calls and self.is_bad(name_of(descriptor), offset, offset + num_bytes):
                raise OSError(self.error, os.strerror(self.error))
            return real(descriptor) if buffers is None else real(descriptor, buffers, offset)

        return call


def in_extent(number: int) -> Badness:
    first = number * EXTENT_BYTES
    return lambda file, start, end: file == "payload" and start < first + EXTENT_BYTES and first < end


@either_way
def test_a_place_that_cannot_be_read_costs_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool):
    tier, names, disk = open_tier(tmp_path, 8, direct=direct), chain(0, 5), BadDisk(monkeypatch)
    keep(tier, names)
    disk.refuse("preadv", is_bad=in_extent(extent_on_disk(tmp_path, names[2])))
    assert fetch(tier, names) == [True, True, False, True, True]
    assert tier.counters.num_misses == {MissCause.IO_ERROR: 1}
    assert tier.io_errors == {"EIO": 1}
    disk.refuse()
    assert fetch(tier, names) == [True, True, False, True, True]  # it is not asked for again
    assert keep(tier, names) == fetch(tier, names) == [True] * 5
    tier.close()


@either_way
def test_a_place_that_cannot_be_written_costs_one_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
):
    tier, names, disk = open_tier(tmp_path, 8, direct=direct), chain(0, 5), BadDisk(monkeypatch)
    disk.refuse("pwritev", is_bad=in_extent(2))
    assert keep(tier, names) == fetch(tier, names) == [True, True, False, True, True]
    assert (tier.counters.num_kept, tier.counters.num_not_kept, tier.io_errors) == (4, 1, {"EIO": 1})
    assert tier.max_blocks == 7
    assert all(keep(tier, names))  # elsewhere
    assert all(fetch(tier, names))
    for number in range(1, 5):
        assert all(keep(tier, chain(number, 6)))
    assert tier.counters.num_not_kept == 1
    tier.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EBADF, errno.ENODEV])
@pytest.mark.parametrize("file", ["table", "payload"])
def test_nothing_is_raised_and_nothing_lost_while_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: int
):
    tier, names, others, disk = open_tier(tmp_path, 8), chain(0, 3), chain(1, 6, start=2), BadDisk(monkeypatch)
    keep(tier, names)
    disk.refuse("pwritev", error=error, is_bad=lambda bad, start, end: bad == file)
    assert keep(tier, others) == fetch(tier, others) == [False] * 4
    assert (tier.counters.num_kept, tier.counters.num_not_kept) == (3, 4)
    assert set(tier.io_errors) == {errno.errorcode[error]}
    assert all(fetch(tier, names))
    disk.refuse()
    assert all(fetch(tier, names))
    tier.close()
    tier = open_tier(tmp_path, 8)
    assert all(fetch(tier, names))
    assert keep(tier, others) == fetch(tier, others) == [True] * 4
    tier.close()


def test_headers_that_cannot_be_written_leave_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second time: the extents were wiped and filled by then."""
    tier, names, disk = open_tier(tmp_path, 8), chain(0, 3), BadDisk(monkeypatch)
    num_table_writes = iter(range(100))
    disk.refuse("pwritev", is_bad=lambda file, start, end: file == "table" and next(num_table_writes) == 1)
    assert keep(tier, names) == tier.find(names) == [False] * 3
    assert keep(tier, names) == fetch(tier, names) == [True] * 3
    assert tier.max_blocks == 8
    tier.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADF, errno.ENODEV])
def test_nothing_is_raised_while_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int):
    tier, names, disk = open_tier(tmp_path, 8), chain(0, 3), BadDisk(monkeypatch)
    keep(tier, names)
    disk.refuse("preadv", error=error)
    assert fetch(tier, names) == [False] * 3
    assert tier.counters.num_misses == {MissCause.IO_ERROR: 3}
    assert tier.io_errors == {errno.errorcode[error]: 3}
    disk.refuse()
    assert keep(tier, names) == fetch(tier, names) == [True] * 3
    tier.close()


def test_a_flush_tells_when_it_failed_and_a_close_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names, disk = open_tier(tmp_path, 8), chain(0, 3), BadDisk(monkeypatch)
    keep(tier, names)
    for file in ("table", "payload"):
        disk.refuse("fdatasync", is_bad=lambda bad, start, end, file=file: bad == file)
        assert not tier.flush()
    assert tier.io_errors == {"EIO": 2}
    tier.close()
    disk.refuse()
    tier = open_tier(tmp_path, 8)
    assert tier.flush()
    assert all(fetch(tier, names))
    tier.close()


def test_payloads_are_safe_before_headers_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, synced = open_tier(tmp_path, 8), list[str]()
    keep(tier, chain(0, 3))
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(name_of(descriptor)))
    tier.flush()
    assert synced == ["payload", "table"]
    tier.close()


@either_way
def test_writes_and_reads_in_parts_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool):
    tier, names = open_tier(tmp_path, 8, direct=direct), chain(0, 5)
    read, write = os.preadv, os.pwritev
    part = 4096 if direct else 1000
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: write(file, [buffers[0][:part]], offset))
    assert keep(tier, names) == [True] * 5
    if not direct:  # a direct read ends early at the end of the file alone
        monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:part]], offset))
    assert fetch(tier, names) == [True] * 5
    monkeypatch.undo()
    tier.close()


@either_way
def test_a_read_that_ends_too_early_is_a_miss_of_the_wrong_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
):
    tier, names = open_tier(tmp_path, 8, direct=direct), chain(0, 3)
    keep(tier, names)
    os.truncate(store_folder(tmp_path) / "payload", EXTENT_BYTES + BLOCK_BYTES - 1)
    assert fetch(tier, names) == [True, False, False]
    assert tier.counters.num_misses == {MissCause.WRONG_LENGTH: 2}
    assert tier.find(names) == [True, False, False]
    tier.close()


def test_a_disk_that_takes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names = open_tier(tmp_path, 8), chain(0, 3)
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: 0)
    assert keep(tier, names) == [False] * 3
    monkeypatch.undo()
    tier.close()


@either_way
def test_a_full_disk_lowers_the_limit_to_what_fits(tmp_path: Path, direct: bool):
    with mounted(tmp_path, "size=1m"):
        tier = open_tier(tmp_path / "kv", 100, direct=direct)
        with (tmp_path / "others").open("wb") as others:
            others.write(bytes(600 * 1024))
        for number in range(20):
            assert keep(tier, chain(number, 8, start=2)) == fetch(tier, chain(number, 8, start=2))
        assert 40 <= tier.max_blocks <= 52
        assert set(tier.io_errors) == {"ENOSPC"}
        assert tier.counters.bytes_held == tier.max_blocks * BLOCK_BYTES
        num_not_kept, errors = tier.counters.num_not_kept, tier.io_errors
        assert num_not_kept <= 12
        for number in range(20, 40):
            assert all(keep(tier, chain(number, 8, start=2)))
            assert all(fetch(tier, chain(number, 8, start=2)))
        assert (tier.counters.num_not_kept, tier.io_errors) == (num_not_kept, errors)
        tier.close()
        (tmp_path / "others").unlink()
        tier = open_tier(tmp_path / "kv", 100, direct=direct)
        assert tier.max_blocks == 100
        assert all(fetch(tier, chain(39, 8, start=2)))
        tier.close()


@either_way
@pytest.mark.parametrize("left", [0, 200 * 1024])
def test_a_disk_that_has_room_again_is_used_again(tmp_path: Path, direct: bool, left: int, caplog):
    """Also where there was none for the first block."""
    with mounted(tmp_path, "size=1m"):
        tier, names = open_tier(tmp_path / "kv", 100, direct=direct), chain(0, 60)
        free = os.statvfs(tmp_path)
        (tmp_path / "others").write_bytes(bytes(free.f_bavail * free.f_frsize - left))
        assert not all(keep(tier, names))
        max_blocks = tier.max_blocks
        assert max_blocks <= left // EXTENT_BYTES
        tier.upkeep()
        assert tier.max_blocks == max_blocks  # there is none yet
        assert caplog.text.count("disk is full") == 1
        (tmp_path / "others").unlink()
        tier.upkeep()
        assert tier.max_blocks == 100
        assert all(keep(tier, names))
        assert all(fetch(tier, names))
        assert caplog.text.count("has room again") == 1
        tier.close()
        tier = open_tier(tmp_path / "kv", 100, direct=direct)
        assert all(fetch(tier, names))
        tier.close()


def test_files_that_are_deleted_are_told_of_once(tmp_path: Path, caplog):
    tier, names = open_tier(tmp_path / "kv", 8), chain(0, 3)
    keep(tier, names)
    tier.upkeep()
    assert "deleted" not in caplog.text
    shutil.rmtree(tmp_path / "kv")
    for _ in range(2):
        tier.upkeep()
    assert caplog.text.count("was deleted") == 1
    assert all(fetch(tier, names))
    tier.close()


def test_a_store_that_nothing_fits_into_keeps_nothing_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, disk = open_tier(tmp_path, 4, policy=S3Fifo()), BadDisk(monkeypatch)
    disk.refuse("pwritev", error=errno.ENOSPC, is_bad=lambda file, start, end: file == "payload")
    for number in range(4):
        assert keep(tier, chain(number, 4)) == tier.find(chain(number, 4)) == [False] * 4
    assert tier.max_blocks == 0
    assert tier.io_errors == {"ENOSPC": 4}
    assert tier.counters.num_not_kept == 16
    tier.close()


def test_a_corrupt_block_is_gone_for_the_next_process_too(tmp_path: Path):
    path, names = tmp_path / "kv", chain(0, 3)
    tier = open_tier(path, 4)
    keep(tier, names)
    rot(path, names[1])
    assert fetch(tier, names) == [True, False, True]
    assert names[1] not in headers_on_disk(path)["name"].tolist()
    left = left_behind(path, tmp_path / "left")
    tier.close()
    tier = open_tier(left, 4)
    assert tier.find(names) == [True, False, True]
    tier.close()
