"""The tier in memory gives back what it was given, within its bound, and loses chains from their ends."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import block_names
from moonshard.kv.store.host import HostTier

BLOCK_BYTES, NUM_ROWS, SIZE = 24, 6, 4
chains = st.tuples(st.integers(0, 3), st.integers(1, 8))  # which, and how far


def chain(number: int, length: int) -> list[bytes]:
    return block_names(bytes([number]), range(length * SIZE), SIZE)


def block_of(name: bytes) -> np.ndarray:
    return np.frombuffer((name * 2)[:BLOCK_BYTES], np.uint8)


def blocks_of(names: list[bytes]) -> np.ndarray:
    return np.array([block_of(name) for name in names])


def a_tier(num_rows: int = NUM_ROWS) -> HostTier:
    return HostTier(block_bytes=BLOCK_BYTES, max_bytes=num_rows * BLOCK_BYTES + 1)


@given(st.lists(st.tuples(st.sampled_from(["keep", "fetch"]), chains), max_size=40))
def test_what_comes_is_what_was_kept_and_the_bound_holds(moves: list):
    tier = a_tier()
    for move, (number, length) in moves:
        names = chain(number, length)
        before = tier.find(names)
        if move == "keep":
            kept = tier.keep(names, blocks_of(names))
            assert tier.find(names) == kept
        else:
            out = np.zeros((length, BLOCK_BYTES), np.uint8)
            assert tier.fetch(names, out) == before
            for name, row, is_here in zip(names, out, before, strict=True):
                assert np.array_equal(row, block_of(name)) or not is_here
        assert (tier.counters.bytes_held or 0) <= NUM_ROWS * BLOCK_BYTES
        for each in range(4):  # never an end without what is before it
            found = tier.find(chain(each, 8))
            assert found == sorted(found, reverse=True)


def test_of_a_chain_that_does_not_fit_the_beginning_stays():
    tier, names = a_tier(), chain(0, 8)
    assert tier.keep(names, blocks_of(names)) == [True] * NUM_ROWS + [False] * 2
    assert tier.counters.num_not_kept == 2


def test_a_chain_that_comes_piece_by_piece_is_one():
    tier, names, others = a_tier(), chain(0, 4), chain(1, 4)
    tier.keep(names[:2], blocks_of(names[:2]))
    tier.find(names)
    tier.keep(names[2:], blocks_of(names[2:]))
    tier.find(names)  # as whoever asks for it does
    tier.keep(others, blocks_of(others))
    assert tier.find(names) == [True, True, False, False]


def test_the_least_recently_used_goes_first():
    tier = a_tier()
    for number in range(3):
        tier.keep(chain(number, 2), blocks_of(chain(number, 2)))
    tier.fetch(chain(0, 2), np.zeros((2, BLOCK_BYTES), np.uint8))
    tier.keep(chain(3, 2), blocks_of(chain(3, 2)))
    assert [all(tier.find(chain(number, 2))) for number in range(4)] == [True, False, True, True]


def test_counters_add_up():
    tier, names = a_tier(), chain(0, 3)
    tier.keep(names, blocks_of(names))
    tier.keep(names, blocks_of(names))
    tier.fetch(chain(0, 4), np.zeros((4, BLOCK_BYTES), np.uint8))
    counters = tier.counters
    assert (counters.num_kept, counters.num_hits, dict(counters.num_misses)) == (3, 3, {"absent": 1})
    assert (counters.bytes_written, counters.bytes_read, counters.bytes_held) == (72, 72, 72)


def test_a_bound_below_one_block_is_refused():
    with pytest.raises(ValueError, match="hold no block"):
        HostTier(block_bytes=BLOCK_BYTES, max_bytes=BLOCK_BYTES - 1)


def test_after_its_end_nothing_is_kept():
    tier, names = a_tier(), chain(0, 2)
    tier.keep(names, blocks_of(names))
    tier.close()
    tier.close()
    assert tier.find(names) == [False, False]
    assert tier.keep(names, blocks_of(names)) == [False, False]


def test_eight_threads_get_only_whole_blocks():
    tier, barrier = a_tier(), threading.Barrier(8)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        barrier.wait()
        for _ in range(300):
            names = chain(int(rng.integers(4)), int(rng.integers(1, 8)))
            tier.keep(names, blocks_of(names))
            out = np.zeros((len(names), BLOCK_BYTES), np.uint8)
            for name, row, is_here in zip(names, out, tier.fetch(names, out), strict=True):
                assert not is_here or np.array_equal(row, block_of(name))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
