"""Whenever a process is killed or a machine stops, what is found again is what was kept, or it is a miss."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.store.ssd.faults import FolderInUse
from tests.kv.store.ssd.blocks_on_disk import (
    IN_MEMORY,
    chain,
    fetch,
    flip,
    headers_on_disk,
    keep,
    left_behind,
    open_tier,
    store_folder,
)
from tests.kv.store.ssd.writes import Killed, Write, Writes

SMALL_BYTES = 24  # of a block, where every byte is a case
SECTOR_BYTES = 512
BEFORE, KEPT = chain(0, 2), chain(1, 4, start=2)  # the second takes an extent of the first, and a new one


def cuts(write: Write) -> list[int]:
    """After how many bytes a write is cut: anywhere, but of the gaps between blocks only at their ends."""
    everywhere = range(len(write.data))
    return [cut for cut in everywhere if write.file == "table" or cut % 4096 <= SMALL_BYTES or cut % 4096 == 4095]


def a_store_with_two_blocks(path: Path) -> None:
    tier = open_tier(path, 3, block_bytes=SMALL_BYTES)
    keep(tier, BEFORE)
    tier.close()


def test_a_write_that_is_cut_at_any_byte_leaves_blocks_or_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a_store_with_two_blocks(tmp_path / "before")
    writes = Writes(monkeypatch)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    tier = open_tier(tmp_path / "whole", 3, block_bytes=SMALL_BYTES)
    assert all(keep(tier, KEPT))
    whole = list(writes.done)
    assert [write.file for write in whole] == ["table", "payload", "table"]
    tier.close()
    cases = [(number, cut) for number, write in enumerate(whole) for cut in cuts(write)]
    assert len(cases) > 300
    numbers_kept = set[int]()
    for case in cases:
        numbers_kept.add(num_kept_after(case, tmp_path, writes))
    assert numbers_kept == {0, 1, 2}  # each block is found as soon as its header is there


def num_kept_after(case: tuple[int, int], path: Path, writes: Writes) -> int:
    killed = path / "killed"
    shutil.copytree(path / "before", killed)
    writes.done.clear()
    tier = open_tier(killed, 3, block_bytes=SMALL_BYTES)
    writes.kill_at = case
    with pytest.raises(Killed):
        keep(tier, KEPT)
    writes.kill_at = None
    left = left_behind(killed, path / "left")
    tier.close()
    found = open_tier(left, 3, block_bytes=SMALL_BYTES)
    assert fetch(found, BEFORE)[0]
    kept = fetch(found, KEPT)
    assert keep(found, KEPT) == [True] * 2
    assert all(fetch(found, KEPT))
    found.close()
    shutil.rmtree(killed)
    shutil.rmtree(left)
    return sum(kept)


def test_an_extent_has_no_header_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that a kill leaves no block that is found and then is not as it was."""
    a_store_with_two_blocks(tmp_path)
    writes = Writes(monkeypatch)
    tier = open_tier(tmp_path, 3, block_bytes=SMALL_BYTES)
    keep(tier, KEPT)
    wiped, payload, header = writes.done
    assert (wiped.offset, payload.offset, header.offset) == (1 * 64, 1 * 4096, 1 * 64)
    assert not any(wiped.data)
    tier.close()


@given(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=True))
def test_of_what_was_flushed_nothing_is_lost_whatever_came_of_later_writes(
    num_before: int, numbers: list[int], chance: Random
):
    """The disk has any sectors of what was written since, in any order, as after a loss of power."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        root = Path(tempfile.mkdtemp(dir=IN_MEMORY)) / "store"
        writes = Writes(monkeypatch)
        tier = open_tier(root, 6)
        for number in range(num_before):
            keep(tier, chain(number, 4))
        tier.flush()
        safe = {name for number in range(4) for name in chain(number, 4) if tier.find([name])[0]}
        image = left_behind(root, root.with_name("image"))
        writes.done.clear()
        for number in numbers:
            keep(tier, chain(number, 5))
            safe = {name for name in safe if tier.find([name])[0]}
        later = list(writes.done)
        tier.close()
    for write in chance.sample(later, len(later)):
        with (store_folder(image) / write.file).open("r+b") as file:
            for start in range(0, len(write.data), SECTOR_BYTES):
                if chance.random() < 0.7:
                    file.seek(write.offset + start)
                    file.write(write.data[start : start + SECTOR_BYTES])
    found = open_tier(image, 6)
    for number in range(5):
        names = chain(number, 5)
        assert all(came or name not in safe for name, came in zip(names, fetch(found, names), strict=True))
    found.close()
    shutil.rmtree(root.parent)


def test_a_flipped_bit_anywhere_in_a_header_is_a_miss(tmp_path: Path):
    a_store_with_two_blocks(tmp_path / "whole")
    table = store_folder(tmp_path / "whole") / "table"
    sound = table.read_bytes()
    for bit in range(0, 64 * 8, 5):
        flip(table, 64 + bit // 8, bit % 8)
        tier = open_tier(tmp_path / "whole", 3, block_bytes=SMALL_BYTES)
        assert fetch(tier, BEFORE) == [True, False]
        tier.close()
        table.write_bytes(sound)


def test_a_flipped_bit_anywhere_in_a_payload_is_a_miss(tmp_path: Path):
    a_store_with_two_blocks(tmp_path)
    payload = store_folder(tmp_path) / "payload"
    for bit in range(0, SMALL_BYTES * 8, 5):
        tier = open_tier(tmp_path, 4, block_bytes=SMALL_BYTES)
        flip(payload, 4096 + bit // 8, bit % 8)
        assert fetch(tier, BEFORE) == [True, False]
        assert tier.find(BEFORE) == [True, False]
        assert keep(tier, BEFORE) == [True, True]
        tier.close()


def test_a_payload_that_was_cut_off_is_a_miss(tmp_path: Path):
    a_store_with_two_blocks(tmp_path)
    for num_bytes, is_found in ((4096 + SMALL_BYTES - 1, True), (4096, False), (4095, False), (SMALL_BYTES - 1, False)):
        tier = open_tier(tmp_path, 4, block_bytes=SMALL_BYTES)
        keep(tier, BEFORE)
        tier.close()
        os.truncate(store_folder(tmp_path) / "payload", num_bytes)
        tier = open_tier(tmp_path, 4, block_bytes=SMALL_BYTES)
        assert tier.find(BEFORE) == [True, is_found]
        assert fetch(tier, BEFORE) == [num_bytes > SMALL_BYTES, False]
        tier.close()


WRITER = """
import sys
from pathlib import Path
from tests.kv.store.ssd.blocks_on_disk import chain, keep, open_tier
tier = open_tier(Path(sys.argv[1]), 400)
print("open", flush=True)
for number in range(10**6):
    names = chain(number, 8, start=2)
    print(number, all(keep(tier, names)), flush=True)
"""


def test_a_killed_writer_leaves_all_that_it_was_told_is_kept(tmp_path: Path):
    command = [sys.executable, "-c", WRITER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(FolderInUse, match=f"in use by process {writer.pid}"):
            open_tier(tmp_path, 400)
        told = [writer.stdout.readline() for _ in range(50)]
        writer.kill()
        told += writer.stdout.readlines()
    numbers = [int(line.split()[0]) for line in told if line.endswith("True\n")]
    assert len(numbers) >= 50
    tier = open_tier(tmp_path, 400)
    for number in numbers[-60:]:  # ten more chains than these fit
        assert all(fetch(tier, chain(number, 8, start=2)))
    assert headers_on_disk(tmp_path)["magic"].astype(bool).sum() <= 400
    tier.close()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
