"""Calls that meet: what is read is what was kept or a miss, nobody waits for another's disk, and nothing leaks."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moonshard.kv.store.retention import Lru, Policy, S3Fifo
from moonshard.kv.store.ssd.files import FileTier
from moonshard.kv.store.tier import MissCause
from tests.kv.store.ssd.blocks_on_disk import BLOCK_BYTES, blocks, chain, extent_on_disk, fetch, keep, open_tier
from tests.kv.store.ssd.writes import name_of

LONG_S = 60.0


def before_the_next(monkeypatch: pytest.MonkeyPatch, call: str, file: str, act: Callable[[], object]) -> None:
    """Does something between a decision and the first call on the disk that follows from it."""
    real = getattr(os, call)

    def acting(descriptor: int, buffers: Sequence, offset: int) -> int:
        if name_of(descriptor) == file:
            monkeypatch.setattr(os, call, real)
            act()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, call, acting)


@pytest.mark.parametrize("policy", [Lru, S3Fifo])
@pytest.mark.parametrize("direct", [False, True])
def test_eight_threads_get_only_what_was_kept(tmp_path: Path, policy: Callable[[], Policy], direct: bool):
    tier, barrier, capacity = open_tier(tmp_path, 12, policy=policy(), direct=direct), threading.Barrier(8), 12

    def work(seed: int) -> int:
        rng, num_asked = np.random.default_rng(seed), 0
        barrier.wait()
        for _ in range(60):
            names = chain(int(rng.integers(5)), int(rng.integers(1, 7)))
            keep(tier, names)
            fetch(tier, names)
            num_asked += len(names)
            if seed == 0:
                tier.flush()
            if seed == 1:
                assert tier.scrub(4 * BLOCK_BYTES).num_dropped == 0
            assert (tier.counters.bytes_held or 0) <= capacity * BLOCK_BYTES
        return num_asked

    with ThreadPoolExecutor(8) as threads:
        num_asked = sum(threads.map(work, range(8)))
    counters = tier.counters
    assert counters.num_hits + sum(counters.num_misses.values()) == num_asked
    assert set(counters.num_misses) <= {MissCause.ABSENT}
    assert counters.num_kept - counters.num_evicted == (counters.bytes_held or 0) // BLOCK_BYTES
    assert (tier.max_blocks, tier.io_errors) == (capacity, {})
    fill_up(tier, capacity)
    tier.close()
    tier = open_tier(tmp_path, 12)
    assert tier.counters.bytes_held == capacity * BLOCK_BYTES
    assert tier.scrub(100 * BLOCK_BYTES).num_dropped == 0
    tier.close()


def fill_up(tier: FileTier, capacity: int) -> None:
    """No extent was lost on the way."""
    keep(tier, chain(100, 2 + capacity, start=2))
    keep(tier, chain(102, 2 + capacity, start=2))
    assert tier.counters.bytes_held == capacity * BLOCK_BYTES


def test_an_extent_that_is_taken_while_it_is_read_is_a_miss_and_the_new_block_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier, names, others = open_tier(tmp_path, 2), chain(0, 2), chain(2, 4, start=2)
    keep(tier, names)
    before_the_next(monkeypatch, "preadv", "payload", lambda: keep(tier, others))
    assert fetch(tier, names) == [False, False]
    assert tier.counters.num_misses == {MissCause.ABSENT: 2}
    assert fetch(tier, others) == [True, True]
    tier.close()


def test_a_block_that_left_and_came_back_while_it_was_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To the same extent; the reader saw another block in between."""
    tier, [name], [other] = open_tier(tmp_path, 1), chain(0, 3, start=2), chain(1, 3, start=2)
    keep(tier, [name])
    read = os.preadv

    def reading(descriptor: int, buffers: Sequence, offset: int) -> int:
        monkeypatch.setattr(os, "preadv", read)
        keep(tier, [other])
        num_bytes = read(descriptor, buffers, offset)
        keep(tier, [name])
        return num_bytes

    monkeypatch.setattr(os, "preadv", reading)
    assert fetch(tier, [name]) == [False]
    assert tier.counters.num_misses == {MissCause.ABSENT: 1}
    assert fetch(tier, [name]) == [True]
    tier.close()


def test_a_block_that_has_to_go_while_it_is_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names, others = open_tier(tmp_path, 2), chain(0, 2), chain(2, 4, start=2)
    results = list[list[bool]]()
    before_the_next(monkeypatch, "pwritev", "payload", lambda: results.append(keep(tier, others)))
    assert keep(tier, names) == [False, False]
    assert results == [[False, False]]  # its extents were not free yet
    assert (tier.counters.num_kept, tier.counters.num_not_kept, tier.counters.num_evicted) == (0, 4, 0)
    fill_up(tier, 2)
    tier.close()


def test_a_block_is_written_once_though_two_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names = open_tier(tmp_path, 8), chain(0, 2)
    results = list[list[bool]]()
    before_the_next(monkeypatch, "pwritev", "payload", lambda: results.append(keep(tier, names)))
    assert keep(tier, names) == [True, True]
    assert results == [[False, False]]  # not here yet, and not given up either
    assert (tier.counters.num_kept, tier.counters.num_not_kept) == (2, 0)
    tier.close()


def test_a_block_is_not_found_before_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names = open_tier(tmp_path, 8), chain(0, 2)
    found = list[list[bool]]()
    before_the_next(monkeypatch, "pwritev", "payload", lambda: found.append(tier.find(names)))
    before_the_next(monkeypatch, "pwritev", "table", lambda: found.append(fetch(tier, names)))
    assert keep(tier, names) == [True, True]
    assert found == [[False, False], [False, False]]
    tier.close()


@pytest.mark.parametrize(("call", "file"), [("pwritev", "payload"), ("pwritev", "table"), ("preadv", "payload")])
def test_lookups_and_reads_do_not_wait_for_another_calls_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, file: str
):
    tier, kept, names = open_tier(tmp_path, 8), chain(0, 2), chain(2, 4, start=2)
    keep(tier, kept)
    answers = list[object]()

    def meanwhile() -> None:
        with ThreadPoolExecutor(1) as other:
            answers.append(other.submit(tier.find, kept).result(LONG_S))
            answers.append(other.submit(fetch, tier, kept).result(LONG_S))
            answers.append(other.submit(lambda: tier.counters.num_kept).result(LONG_S))

    before_the_next(monkeypatch, call, file, meanwhile)
    fetch(tier, kept) if call == "preadv" else keep(tier, names)
    assert answers == [[True, True], [True, True], 2]
    tier.close()


def test_blocks_are_written_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names, others = open_tier(tmp_path, 8), chain(0, 2), chain(2, 4, start=2)
    answers = list[list[bool]]()

    def meanwhile() -> None:
        with ThreadPoolExecutor(1) as other:
            answers.append(other.submit(keep, tier, others).result(LONG_S))

    before_the_next(monkeypatch, "pwritev", "payload", meanwhile)
    assert keep(tier, names) == [True, True]
    assert answers == [[True, True]]
    assert all(fetch(tier, [*names, *others]))
    tier.close()


def test_the_end_waits_for_calls_and_their_blocks_are_there_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names = open_tier(tmp_path, 8), chain(0, 2)
    with ThreadPoolExecutor(1) as other:
        closing = list[object]()

        def meanwhile() -> None:
            closing.append(other.submit(tier.close))
            while keep(tier, [names[0]]) is not None and tier.counters.num_not_kept == 0:
                pass  # until it is closed to others

        before_the_next(monkeypatch, "pwritev", "payload", meanwhile)
        tier.keep(names, blocks(names))
    tier = open_tier(tmp_path, 8)
    assert all(fetch(tier, names))
    tier.close()


def test_the_end_does_not_wait_for_a_call_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier, names = open_tier(tmp_path, 8), chain(0, 2)
    keep(tier, names)
    hangs, may_go = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        may_go.wait()

    before_the_next(monkeypatch, "preadv", "payload", hang)
    with ThreadPoolExecutor(1) as other:
        hanging = other.submit(fetch, tier, names)
        assert hangs.wait(LONG_S)
        tier.close()
        assert not hanging.done()
        may_go.set()
        assert hanging.result(LONG_S) == [True, True]


def test_orders_that_are_noted_while_blocks_come_and_go_harm_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A flush writes all headers; one that is older than its extent's last use would bring a lost block back."""
    tier, names, others = open_tier(tmp_path, 2), chain(0, 2), chain(2, 4, start=2)
    keep(tier, names)
    real = os.fdatasync

    def syncing(descriptor: int) -> None:
        monkeypatch.setattr(os, "fdatasync", real)
        keep(tier, others)

    monkeypatch.setattr(os, "fdatasync", syncing)
    assert tier.flush()
    assert {extent_on_disk(tmp_path, name) for name in others} == {0, 1}
    assert all(fetch(tier, others))
    tier.close()
