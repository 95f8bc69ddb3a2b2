"""What is wrong with a folder is told when it is opened; and what no store put there is left as it is."""

import os
import shutil
from pathlib import Path

import pytest

from moonshard.kv.store.retention import Lru
from moonshard.kv.store.ssd.extents import store_bytes
from moonshard.kv.store.ssd.faults import (
    AnotherLayout,
    AnotherVersion,
    FolderInUse,
    FolderUnusable,
    ForeignFolder,
    LimitTooLarge,
    LimitTooSmall,
    NoDirectIo,
    NotAFolder,
    StoreError,
)
from moonshard.kv.store.ssd.files import FileTier
from tests.kv.store.ssd.blocks_on_disk import BLOCK_BYTES, LAYOUT, chain, fetch, keep, open_tier, store_folder
from tests.kv.store.ssd.mounts import mounted


def all_files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("where", ["", "a"])
def test_a_folder_with_files_of_others_is_refused_and_left_as_it_is(tmp_path: Path, where: str):
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "thesis.tex").write_text("years of work")
    before = all_files(tmp_path)
    with pytest.raises(ForeignFolder, match=f"{tmp_path}: holds '{where or 'thesis.tex'}'"):
        open_tier(tmp_path, 2)
    assert all_files(tmp_path) == before


def test_files_of_others_where_a_layout_would_be_are_left_as_they_are(tmp_path: Path):
    open_tier(tmp_path, 2).close()
    shutil.rmtree(store_folder(tmp_path))
    store_folder(tmp_path).mkdir()
    (store_folder(tmp_path) / "payload").write_text("of something else")
    before = all_files(tmp_path)
    with pytest.raises(ForeignFolder, match="'payload'"):
        open_tier(tmp_path, 2)
    assert all_files(tmp_path) == before


@pytest.mark.parametrize("name", ["moonshard-kv", "identity.json"])
def test_files_of_others_with_names_of_ours_are_left_as_they_are(tmp_path: Path, name: str):
    open_tier(tmp_path, 2).close()
    next(tmp_path.rglob(name)).write_text("{}")
    before = all_files(tmp_path)
    with pytest.raises(ForeignFolder, match=name):
        open_tier(tmp_path, 2)
    assert all_files(tmp_path) == before


def test_the_root_of_a_new_disk_is_a_folder_like_any(tmp_path: Path):
    (tmp_path / "lost+found").mkdir()
    open_tier(tmp_path, 2).close()


def test_a_claim_that_was_interrupted_is_taken_up(tmp_path: Path):
    open_tier(tmp_path, 2).close()
    (tmp_path / "moonshard-kv").rename(tmp_path / ".moonshard-unfinished")
    shutil.rmtree(store_folder(tmp_path))
    open_tier(tmp_path, 2).close()
    (store_folder(tmp_path) / "identity.json").rename(store_folder(tmp_path) / ".moonshard-unfinished")
    for name in ("table", "payload"):
        (store_folder(tmp_path) / name).unlink()
    tier = open_tier(tmp_path, 2)
    assert keep(tier, chain(0, 2)) == [True, True]
    tier.close()


def test_another_version_of_the_format_is_refused(tmp_path: Path):
    open_tier(tmp_path, 2).close()
    identity = store_folder(tmp_path) / "identity.json"
    identity.write_bytes(identity.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(AnotherVersion, match=f"{store_folder(tmp_path)}: has format 2, .* for format 1"):
        open_tier(tmp_path, 2)


def test_a_digest_that_stands_for_another_layout_is_refused(tmp_path: Path):
    open_tier(tmp_path, 2).close()
    with pytest.raises(AnotherLayout, match=f"holds blocks of {BLOCK_BYTES} bytes .* expected blocks of 7 bytes"):
        open_tier(tmp_path, 2, block_bytes=7)
    store_folder(tmp_path).rename(tmp_path / b"other".hex())
    with pytest.raises(AnotherLayout, match=f"in layout {LAYOUT.hex()}, expected .* in layout {b'other'.hex()}"):
        open_layout(tmp_path, b"other")


def open_layout(path: Path, layout: bytes) -> FileTier:
    max_bytes = store_bytes(2, BLOCK_BYTES)
    return FileTier.open(path, block_bytes=BLOCK_BYTES, layout=layout, max_bytes=max_bytes, policy=Lru())


def test_two_layouts_share_a_path_and_no_blocks(tmp_path: Path):
    one, other, names = open_layout(tmp_path, b"one"), open_layout(tmp_path, b"other"), chain(0, 2)
    keep(one, names)
    assert other.find(names) == [False, False]
    assert keep(other, names) == fetch(one, names) == [True, True]
    one.close()
    other.close()


def test_a_folder_has_one_owner_until_it_is_closed(tmp_path: Path):
    tier = open_tier(tmp_path, 2)
    with pytest.raises(FolderInUse, match=f"{store_folder(tmp_path)}: is in use by process {os.getpid()}"):
        open_tier(tmp_path, 2)
    assert keep(tier, chain(0, 2)) == [True, True]
    tier.close()
    tier = open_tier(tmp_path, 2)
    assert fetch(tier, chain(0, 2)) == [True, True]
    tier.close()


def test_a_folder_that_was_refused_is_free_again(tmp_path: Path):
    with pytest.raises(LimitTooSmall):
        open_tier(tmp_path, 0)
    open_tier(tmp_path, 2).close()


def test_what_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "nowhere"):
        with pytest.raises(NotAFolder, match=f"{path}: is no folder"):
            open_tier(path, 2)


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    with mounted(tmp_path, "ro"), pytest.raises(FolderUnusable, match=f"{tmp_path}: cannot .* Read-only file system"):
        open_tier(tmp_path, 2)
    with pytest.raises(FolderUnusable, match="/proc/kv"):
        open_tier(Path("/proc/kv"), 2)


def test_a_limit_below_one_block_is_refused(tmp_path: Path):
    least = store_bytes(1, BLOCK_BYTES)
    assert least == 8192 + 4096
    with pytest.raises(LimitTooSmall, match=f"of {least - 1} bytes holds no block, the least is {least}"):
        FileTier.open(tmp_path, block_bytes=BLOCK_BYTES, layout=LAYOUT, max_bytes=least - 1, policy=Lru())


def test_a_limit_beyond_the_disk_is_refused_and_what_is_in_the_store_counts(tmp_path: Path):
    with mounted(tmp_path, "size=1m"):
        with pytest.raises(LimitTooLarge, match=r"a limit of 0\.00 GiB, where the disk has"):
            open_tier(tmp_path, 130)
        tier = open_tier(tmp_path, 110)
        for number in range(20):
            keep(tier, chain(number, 8, start=2))
        assert tier.counters.bytes_held == 110 * BLOCK_BYTES
        tier.close()
        tier = open_tier(tmp_path, 110)
        assert tier.counters.bytes_held == 110 * BLOCK_BYTES
        tier.close()


def test_direct_reads_that_a_disk_does_not_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def without_direct(path: Path, flags: int, mode: int = 0o777, **where: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **where)

    monkeypatch.setattr(os, "open", without_direct)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NoDirectIo, match=f"{store_folder(tmp_path)}: its file system has no direct I/O"):
        open_tier(tmp_path, 2, direct=True)
    assert set(os.listdir("/proc/self/fd")) == before
    open_tier(tmp_path, 2).close()


def test_all_that_is_wrong_is_one_kind_of_error_with_the_path(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        open_tier(tmp_path / "file", 2)
    assert isinstance(caught.value, ValueError)
    assert caught.value.path == tmp_path / "file"


def test_no_descriptor_is_left_open_by_a_refusal_or_a_close(tmp_path: Path):
    before = set(os.listdir("/proc/self/fd"))
    tier = open_tier(tmp_path, 2)
    for num_blocks in (2, 0, 10**12):
        with pytest.raises(StoreError):
            open_tier(tmp_path, num_blocks)
    tier.close()
    with pytest.raises(LimitTooLarge):
        open_tier(tmp_path, 10**12)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_marker_tells_a_person_what_the_folder_is(tmp_path: Path):
    open_tier(tmp_path, 2).close()
    assert "may be deleted" in (tmp_path / "moonshard-kv").read_text()
    assert sorted(os.listdir(tmp_path)) == [LAYOUT.hex(), "moonshard-kv"]
    assert sorted(os.listdir(store_folder(tmp_path))) == ["identity.json", "lock", "payload", "table"]
