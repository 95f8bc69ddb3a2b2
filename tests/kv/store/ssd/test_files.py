"""The tier on an SSD against a model of it: what is kept, what goes, what is found again, whatever comes in between."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonshard.kv.store.retention import Lru, S3Fifo
from moonshard.kv.store.ssd.extents import store_bytes
from moonshard.kv.store.ssd.files import FileTier, Scrubbed
from moonshard.kv.store.tier import MissCause, Tier
from tests.kv.store.oldest_first import OldestFirst
from tests.kv.store.ssd.blocks_on_disk import (
    BLOCK_BYTES,
    IN_MEMORY,
    block,
    blocks,
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

CHAINS = [chain(number, 6) for number in range(4)]
parts = st.sampled_from(
    [names[start:end] for names in CHAINS for end in range(1, 7) for start in (0, 0, 2) if start < end]
)


class KeptOnDisk(RuleBasedStateMachine):
    """The model knows to the block what is here: the policy's order is its own, by brute force."""

    @initialize(limit=st.integers(1, 12), direct=st.booleans())
    def begin(self, limit: int, direct: bool):
        self.limit, self.direct = limit, direct
        self.path = Path(tempfile.mkdtemp(dir=IN_MEMORY)) / "store"
        self.tier = self.open()
        self.model = OldestFirst()
        self.rotten = set[bytes]()

    def open(self) -> FileTier:
        return open_tier(self.path, self.limit, direct=self.direct)

    @rule(names=parts)
    def keep(self, names: list[bytes]):
        for gone in self.model.keep(names, self.limit):
            self.rotten.discard(gone)
        assert keep(self.tier, names) == [name in self.model.used_at for name in names]

    @rule(names=parts)
    def fetch(self, names: list[bytes]):
        assert fetch(self.tier, names) == [name in self.model.used_at.keys() - self.rotten for name in names]
        for name in self.rotten & set(names):
            self.model.remove(name)
            self.rotten.remove(name)
        self.model.use(names)

    @rule(names=parts)
    def find(self, names: list[bytes]):
        assert self.tier.find(names) == [name in self.model.used_at for name in names]
        self.model.learn(names)

    @rule()
    def flush(self):
        assert self.tier.flush()

    @rule()
    def scrub(self):
        found = self.tier.scrub(1000 * BLOCK_BYTES)
        assert (found.num_checked, found.num_dropped) == (len(self.model.used_at), len(self.rotten))
        for name in self.rotten:
            self.model.remove(name)
        self.rotten.clear()

    @rule(which=st.integers(0, 100), offset=st.integers(0, BLOCK_BYTES - 1))
    def rot(self, which: int, offset: int):
        """One flip: a second of the same bit would undo it."""
        sound = sorted(self.model.used_at.keys() - self.rotten)
        if sound:
            name = sound[which % len(sound)]
            rot(self.path, name, offset)
            self.rotten.add(name)

    @rule()
    def reopen(self):
        self.tier.close()
        self.tier = self.open()

    @rule()
    def kill(self):
        """All blocks are found again. In which order they were used is not, so both are told anew."""
        dead, self.path = self.path, left_behind(self.path, self.path.with_name(f"{self.path.name}_"))
        self.tier.close()
        shutil.rmtree(dead)
        self.tier = self.open()
        for names in CHAINS:
            self.fetch(names)

    @invariant()
    def is_within_limit(self):
        files = [store_folder(self.path) / name for name in ("table", "payload")]
        assert sum(file.stat().st_size for file in files) <= store_bytes(self.limit, BLOCK_BYTES)
        assert self.tier.counters.bytes_held == len(self.model.used_at) * BLOCK_BYTES
        assert not self.tier.io_errors

    def teardown(self):
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.path.parent)


KeptOnDisk.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestKeptOnDisk = KeptOnDisk.TestCase


def test_it_is_a_tier(tmp_path: Path):
    tier = open_tier(tmp_path / "kv", 2)
    assert isinstance(tier, Tier)
    assert (tier.name, tier.block_bytes, tier.max_blocks) == ("ssd", BLOCK_BYTES, 2)
    tier.close()


def test_counters_add_up(tmp_path: Path):
    tier, names = open_tier(tmp_path, 5), chain(0, 4)
    keep(tier, names)
    keep(tier, names)
    keep(tier, chain(1, 6))
    assert fetch(tier, names) == [False] * 4
    assert fetch(tier, chain(1, 6)) == [True] * 5 + [False]
    rot(tmp_path, chain(1, 1)[0])
    fetch(tier, chain(1, 1))
    counters = tier.counters
    assert (counters.num_kept, counters.num_not_kept, counters.num_evicted, counters.num_hits) == (9, 1, 4, 5)
    assert counters.num_misses == {MissCause.ABSENT: 5, MissCause.CORRUPT: 1}
    assert counters.bytes_written == 9 * BLOCK_BYTES
    assert (counters.bytes_read, counters.bytes_held) == (5 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    tier.close()


def test_the_wrong_number_of_rows_is_refused_before_anything_is_reserved(tmp_path: Path):
    tier, names = open_tier(tmp_path, 3), chain(0, 2)
    for shape in ((1, BLOCK_BYTES), (2, BLOCK_BYTES - 1)):
        with pytest.raises(ValueError, match=f"2 blocks of {BLOCK_BYTES} bytes"):
            tier.keep(names, np.zeros(shape, np.uint8))
        with pytest.raises(ValueError, match="2 blocks"):
            tier.fetch(names, np.zeros(shape, np.uint8))
    assert keep(tier, names) == [True, True]
    tier.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 3 * 4096])
def test_blocks_of_any_size_come_back(tmp_path: Path, block_bytes: int, direct: bool):
    tier = open_tier(tmp_path, 9, block_bytes=block_bytes, direct=direct)
    for names in (chain(0, 6), chain(2, 5)):
        assert all(keep(tier, names))
    assert fetch(tier, chain(2, 5)[::-1]) == [True] * 5
    tier.close()
    tier = open_tier(tmp_path, 9, block_bytes=block_bytes, direct=not direct)
    assert all(fetch(tier, chain(2, 5)))
    tier.close()


@pytest.mark.parametrize("direct", [False, True])
def test_a_chain_longer_than_one_call_on_the_disk_takes_comes_back(tmp_path: Path, direct: bool):
    num_blocks = 2 * os.sysconf("SC_IOV_MAX") + 3  # of one byte, so more than a buffer for direct calls has as well
    tier, names = open_tier(tmp_path, num_blocks, block_bytes=1, direct=direct), chain(0, num_blocks)
    assert all(keep(tier, names))
    assert all(fetch(tier, names))
    tier.close()


def test_what_is_read_out_of_order_comes_in_order(tmp_path: Path):
    tier = open_tier(tmp_path, 9)
    names = chain(0, 6)
    for name in reversed(names):
        keep(tier, [name])
    assert [extent_on_disk(tmp_path, name) for name in names] == [5, 4, 3, 2, 1, 0]
    assert all(fetch(tier, names))
    tier.close()


def test_keeping_what_is_here_is_a_use_of_it(tmp_path: Path):
    tier, early, late = open_tier(tmp_path, 4), chain(0, 2), chain(2, 4, start=2)
    for names in (early, late, early, chain(3, 4, start=2)):
        keep(tier, names)
    assert [tier.find(names) for names in (early, late)] == [[True, True], [False, False]]
    tier.close()


def test_how_often_and_in_which_order_blocks_were_used_outlives_the_process(tmp_path: Path):
    tier = open_tier(tmp_path, 20, policy=S3Fifo())
    used = chain(0, 5)
    keep(tier, used)
    fetch(tier, used)
    fetch(tier, used)
    tier.close()
    tier = open_tier(tmp_path, 20, policy=S3Fifo())
    for number in range(1, 30):
        keep(tier, chain(number, 8, start=3))
    assert all(tier.find(used))
    tier.close()


def test_links_learnt_from_a_question_outlive_the_process(tmp_path: Path):
    tier, names = open_tier(tmp_path, 4, policy=S3Fifo()), chain(0, 4)
    for name in names:
        keep(tier, [name])
    tier.find(names)
    tier.close()
    tier = open_tier(tmp_path, 4, policy=S3Fifo())
    assert keep(tier, chain(1, 2)) == [True, True]
    assert tier.find(names) == [True, True, False, False]
    tier.close()


def test_after_a_kill_the_order_is_that_of_the_last_flush(tmp_path: Path):
    tier, early, late = open_tier(tmp_path / "kv", 4), chain(0, 2), chain(2, 4, start=2)
    keep(tier, early)
    keep(tier, late)
    fetch(tier, early)
    unflushed = left_behind(tmp_path / "kv", tmp_path / "unflushed")
    tier.flush()
    flushed = left_behind(tmp_path / "kv", tmp_path / "flushed")
    for path, survivors in ((unflushed, late), (flushed, early)):
        found = open_tier(path, 4)
        keep(found, chain(3, 4, start=2))
        assert [all(found.find(names)) for names in (early, late)] == [names == survivors for names in (early, late)]
        found.close()
    tier.close()


def test_of_a_block_that_is_there_twice_the_later_is_found(tmp_path: Path):
    tier, names = open_tier(tmp_path, 4), chain(0, 2)
    keep(tier, names)
    tier.close()
    headers = headers_on_disk(tmp_path)
    headers[2] = headers[1]
    headers.tofile(store_folder(tmp_path) / "table")
    with (store_folder(tmp_path) / "payload").open("r+b") as payload:
        payload.truncate(3 * 8192)  # the copy has a header, and other bytes
    tier = open_tier(tmp_path, 4)
    assert tier.counters.bytes_held == 2 * BLOCK_BYTES
    assert fetch(tier, names) == [True, False]
    assert keep(tier, names) == fetch(tier, names) == [True, True]
    tier.close()


def test_a_lower_limit_gives_room_back_and_keeps_what_is_within_it(tmp_path: Path):
    tier, names = open_tier(tmp_path, 6), chain(0, 6)
    keep(tier, names)
    tier.close()
    tier = open_tier(tmp_path, 2)
    assert fetch(tier, names) == [True, True] + [False] * 4
    assert (store_folder(tmp_path) / "payload").stat().st_size <= 2 * 8192
    tier.close()
    tier = open_tier(tmp_path, 6)
    assert keep(tier, names) == fetch(tier, names) == [True] * 6
    tier.close()


def test_after_the_end_nothing_is_found_or_kept(tmp_path: Path):
    tier, names = open_tier(tmp_path, 4), chain(0, 2)
    keep(tier, names)
    tier.close()
    tier.close()
    assert tier.find(names) == keep(tier, names) == fetch(tier, names) == [False, False]
    assert not tier.flush()
    assert tier.scrub(10**9) == Scrubbed(num_checked=0, num_dropped=0, is_round_complete=True)
    assert tier.counters.num_misses == {MissCause.OFF: 2}
    assert tier.counters.num_not_kept == 2


def test_slices_of_a_scrub_go_round_and_find_what_has_rotted(tmp_path: Path):
    tier, names = open_tier(tmp_path, 8), chain(0, 6)
    keep(tier, names)
    rot(tmp_path, names[4], offset=BLOCK_BYTES - 1)
    slices = [tier.scrub(2 * BLOCK_BYTES) for _ in range(4)]
    assert [found.num_checked for found in slices] == [2, 2, 2, 2]
    assert [found.num_dropped for found in slices] == [0, 0, 1, 0]
    assert [found.is_round_complete for found in slices] == [False, False, True, False]
    assert tier.find(names) == [True] * 4 + [False, True]
    assert not headers_on_disk(tmp_path)["magic"][4]
    tier.close()


def test_what_is_held_is_told_by_the_process_that_opens_it_next(tmp_path: Path):
    tier, names = open_tier(tmp_path, 4), chain(0, 3)
    assert tier.held() == []
    keep(tier, names)
    tier.close()
    assert tier.held() == []
    tier = open_tier(tmp_path, 4)
    assert sorted(tier.held()) == sorted(names)
    tier.close()


def test_upkeep_syncs_and_drops_what_has_rotted(tmp_path: Path):
    tier, early, late = open_tier(tmp_path / "kv", 4), chain(0, 2), chain(2, 4, start=2)
    for names in (early, late, early):
        keep(tier, names)
    rot(tmp_path / "kv", late[1])
    tier.upkeep()
    assert [tier.find(names) for names in (early, late)] == [[True, True], [True, False]]
    found = open_tier(left_behind(tmp_path / "kv", tmp_path / "left"), 4)
    keep(found, chain(3, 4, start=2))
    assert [found.find(names)[0] for names in (early, late)] == [True, False]  # in the order of their last use
    found.close()
    tier.close()


@pytest.mark.parametrize("policy", [Lru, S3Fifo])
def test_a_chain_longer_than_the_limit_is_kept_from_its_beginning(tmp_path: Path, policy: type[Lru | S3Fifo]):
    tier = open_tier(tmp_path, 4, policy=policy())
    keep(tier, chain(1, 4))
    assert keep(tier, chain(0, 6)) == [True] * 4 + [False] * 2 or policy is S3Fifo
    found = tier.find(chain(0, 6))
    assert any(found)
    assert found == sorted(found, reverse=True)
    tier.close()


def test_rows_of_a_larger_array_are_read_into_alone(tmp_path: Path):
    tier, names = open_tier(tmp_path, 4), chain(0, 3)
    tier.keep(names, blocks(names))
    out = np.full((5, BLOCK_BYTES), 7, np.uint8)
    assert all(tier.fetch(names, out[1:4]))
    assert np.array_equal(out[2], block(names[1]))
    assert (out[[0, 4]] == 7).all()
    tier.close()
