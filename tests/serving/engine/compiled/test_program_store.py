"""A stored program is read back whole or not at all, whoever else writes, and a faulty folder is reported once."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonshard.serving.engine.compiled.store import MAGIC, ProgramStore

BODY = bytes(range(256)) * 100


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path / "deep" / "programs")


def entry(store: ProgramStore, key: str = "a") -> Path:
    (path,) = store.folder.glob(f"{key}.program")
    return path


def test_what_was_saved_is_found_by_its_key_and_by_no_other(store: ProgramStore):
    assert store.load("a") is None
    store.save("a", BODY)
    store.save("b", b"")
    assert (store.load("a"), store.load("b"), store.load("c")) == (BODY, b"", None)
    assert ProgramStore(store.folder).load("a") == BODY


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: whole.replace(MAGIC, b"moonshard program 0\n"),
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
        lambda whole: b"something else altogether",
    ],
    ids=("empty", "half", "a byte short", "a byte long", "another version", "a bit turned", "foreign"),
)
def test_an_entry_that_is_not_whole_is_none_is_said_once_and_can_be_made_anew(store, spoiled, caplog):
    for key in ("a", "b"):
        store.save(key, BODY)
        path = entry(store, key)
        path.write_bytes(spoiled(path.read_bytes()))
    assert (store.load("a"), store.load("b")) == (None, None)
    assert len(caplog.messages) == 1
    assert "a.program is damaged; what is not found is compiled" in caplog.messages[0]
    store.save("a", BODY)
    assert store.load("a") == BODY


def test_a_folder_that_cannot_be_made_is_said_once_and_nothing_is_kept(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("in the way")
    store = ProgramStore(tmp_path / "file" / "programs")
    for key in ("a", "b"):
        with store.claim(key) as is_ours:
            assert is_ours
            store.save(key, BODY)
        assert store.load(key) is None
    assert len(caplog.messages) == 1
    assert str(tmp_path / "file") in caplog.messages[0]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file can grow beyond a few bytes, which the kernel says in the middle of a write as it does of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_part_of_an_entry(store: ProgramStore, caplog):
    store.save("a", BODY)
    assert list(store.folder.iterdir()) == []
    assert "File too large" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_to_is_not_used(store: ProgramStore, mode: int, caplog):
    store.save("a", BODY)
    store.folder.chmod(mode)
    other = ProgramStore(store.folder)
    assert other.load("a") is None
    other.save("b", BODY)
    assert [path.name for path in store.folder.glob("*.program")] == ["a.program"]
    assert "can be written by other users" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(store: ProgramStore, caplog):
    store.save("a", BODY)
    os.chown(store.folder, 12345, 12345)
    assert ProgramStore(store.folder).load("a") is None
    assert "belongs to another user" in caplog.text


@pytest.mark.usefixtures("group_writable")
def test_an_entry_is_for_its_owner_alone_and_one_that_others_may_write_to_is_not_used(store: ProgramStore, caplog):
    store.save("a", BODY)
    (entry,) = store.folder.glob("*.program")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    entry.chmod(0o620)
    assert store.load("a") is None
    assert f"{entry} can be written by other users" in caplog.text
    store.save("a", BODY)
    assert store.load("a") == BODY


@pytest.fixture
def group_writable() -> Iterator[None]:
    """New folders are open to the user's group, as several distributions have it."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("group_writable")
def test_a_folder_that_is_wiped_is_filled_again_and_others_take_what_is_in_it(store: ProgramStore):
    store.save("a", BODY)
    shutil.rmtree(store.folder)
    assert store.load("a") is None
    with store.claim("a") as is_ours:
        assert is_ours
        shutil.rmtree(store.folder)
        store.save("a", BODY)
    assert ProgramStore(store.folder).load("a") == BODY


def test_what_can_only_be_read_is_used(store: ProgramStore, monkeypatch: pytest.MonkeyPatch, caplog):
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    store.save("a", BODY)
    monkeypatch.setattr(os, "utime", refuse)
    assert store.load("a") == BODY
    assert not caplog.messages


def test_where_no_lock_can_be_had_programs_are_made_all_the_same(store: ProgramStore, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with store.claim("a") as is_ours:
        assert is_ours
        store.save("a", BODY)
    assert store.load("a") == BODY
    assert "No locks available" in caplog.text


def test_one_at_a_time_makes_an_entry(store: ProgramStore):
    found = []

    def claim() -> None:
        with store.claim("a") as is_ours:
            found.append(is_ours)

    with store.claim("a") as is_ours, store.claim("b") as is_other_ours:
        assert is_ours
        assert is_other_ours
        for _ in range(2):
            thread = threading.Thread(target=claim)
            thread.start()
            thread.join(10)
    claim()
    assert found == [False, False, True]
    assert not list(store.folder.glob("*.lock"))


CLAIM_AND_HANG = """
import sys, time
from collections.abc import Iterator
from pathlib import Path
from moonshard.serving.engine.compiled.store import ProgramStore
with ProgramStore(Path(sys.argv[1])).claim("a") as is_ours:
    print(is_ours, flush=True)
    time.sleep(600)
"""


def test_the_claim_of_a_killed_process_ends_with_it(store: ProgramStore):
    command = [sys.executable, "-c", CLAIM_AND_HANG, str(store.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        with store.claim("a") as is_ours:
            assert not is_ours
        process.send_signal(signal.SIGKILL)
        process.wait()
        with store.claim("a") as is_ours:
            assert is_ours


def test_many_who_write_one_entry_leave_one_whole(store: ProgramStore):
    bodies = [bytes([number]) * 200_000 for number in range(8)]
    threads = [threading.Thread(target=store.save, args=("a", body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.load("a") in bodies


def test_what_was_unused_for_longest_is_removed_first(store: ProgramStore):
    for age, key in enumerate("abcd"):
        store.save(key, bytes(1000))
        os.utime(entry(store, key), (1000 - age, 1000 - age))  # d is the oldest
    assert store.load("d") is not None  # and of use again
    store.prune(max_bytes=2 * entry(store, "a").stat().st_size)
    assert {path.stem for path in store.folder.glob("*.program")} == {"a", "d"}
