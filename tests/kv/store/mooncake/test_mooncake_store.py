"""Mooncake Store for real: what one kept all find, as it was, while there is room."""

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.tier import MissCause, Tier
from moonshard.serving.store.processes import MooncakeProcesses
from tests.kv.store.mooncake.store_blocks import (
    BLOCK_BYTES,
    LAYOUT,
    are_right,
    await_on,
    await_that,
    names_of,
)
from tests.kv.store.mooncake.store_room import SETTINGS, keep, keep_until_kept, misses, tier_on, worker_on
from tests.kv.store.mooncake.store_usage import read_usage

pytestmark = pytest.mark.xdist_group("mooncake")


# ---- what is kept comes back


def test_blocks_come_back_as_they_were_and_others_do_not(tier: MooncakeStoreTier):
    names = names_of("back", 12)  # three calls' worth
    kept = names[:5] + names[6:]
    assert keep(tier, kept) == [True] * 11
    expected = [name in kept for name in names]
    assert tier.find(names) == expected
    assert are_right(tier, names) == expected
    counters = tier.counters
    assert (counters.num_hits, misses(tier)) == (11, {MissCause.ABSENT: 1})
    assert (counters.num_kept, counters.num_not_kept) == (11, 0)
    assert (counters.bytes_read, counters.bytes_written) == (11 * BLOCK_BYTES, 11 * BLOCK_BYTES)


def test_it_is_a_tier(tier: MooncakeStoreTier):
    assert isinstance(tier, Tier)
    assert (tier.name, tier.is_shared, tier.block_bytes) == ("store", True, BLOCK_BYTES)
    assert tier.find([]) == tier.fetch([], np.zeros((0, BLOCK_BYTES), np.uint8)) == []


def test_a_block_that_is_there_is_kept_again_without_harm(tier: MooncakeStoreTier):
    names = names_of("again", 2)
    assert keep(tier, names) == keep(tier, names) == [True, True]
    assert are_right(tier, names) == [True, True]


def test_several_threads_get_each_its_own_blocks(tier: MooncakeStoreTier):
    chains = [names_of(f"thread {index}", 5) for index in range(6)]
    came = dict[int, list[list[bool]]]()

    def use(index: int) -> None:
        keep(tier, chains[index])
        came[index] = [are_right(tier, chains[index]) for _ in range(10)]

    threads = [threading.Thread(target=use, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == {index: [[True] * 5] * 10 for index in range(6)}


def test_another_layout_has_blocks_of_its_own(tier: MooncakeStoreTier, shared_store: MooncakeProcesses):
    names = names_of("layout", 2)
    keep(tier, names)
    with tier_on(shared_store, layout=b"another") as other:
        assert other.find(names) == [False, False]


def test_another_worker_reads_what_one_has_kept(tier: MooncakeStoreTier, shared_store: MooncakeProcesses):
    keep(tier, names_of("mine", 3))
    with worker_on(shared_store) as worker:
        assert worker.ask("find", "mine", 3) == [True] * 3
        assert worker.ask("fetch", "mine", 3) == [True] * 3
        assert worker.ask("keep", "theirs", 3) == [True] * 3
    assert are_right(tier, names_of("theirs", 3)) == [True] * 3


def test_what_a_killed_worker_kept_is_found_by_the_next(shared_store: MooncakeProcesses):
    with worker_on(shared_store) as worker:
        worker.ask("keep", "legacy", 3)
    assert worker.process.returncode == -signal.SIGKILL
    with worker_on(shared_store) as worker:
        assert worker.ask("fetch", "legacy", 3) == [True] * 3


# ---- wrong values


class RawStore:
    """The library itself, past the tier."""

    def __init__(self, processes: MooncakeProcesses):
        os.environ["MC_LOG_LEVEL"] = "ERROR"
        from mooncake.store import MooncakeDistributedStore

        self._library = MooncakeDistributedStore()
        assert self._library.setup_dummy(0, 4 * 1024 * 1024, processes.ports.client_address) == 0

    def get(self, name: BlockName, layout: bytes = LAYOUT) -> bytes:
        return self._library.get(self._key(name, layout))

    def replace(self, name: BlockName, value: bytes, layout: bytes = LAYOUT) -> None:
        self._library.remove(self._key(name, layout), True)
        assert self._library.put(self._key(name, layout), value) == 0
        assert self.get(name, layout) == value

    def close(self) -> None:
        self._library.close()

    def _key(self, name: BlockName, layout: bytes) -> str:
        return f"{layout.hex()}-{name.hex()}"


@pytest.fixture(scope="module")
def raw(shared_store: MooncakeProcesses) -> Iterator[RawStore]:
    raw = RawStore(shared_store)
    yield raw
    raw.close()


WRONG = {
    "a bit of the block": (lambda value, other: bytes([value[0] ^ 1]) + value[1:], MissCause.CORRUPT),
    "the last bit of the block": (
        lambda value, other: value[: BLOCK_BYTES - 1] + bytes([value[BLOCK_BYTES - 1] ^ 128]) + value[BLOCK_BYTES:],
        MissCause.CORRUPT,
    ),
    "a bit of the trailer": (lambda value, other: value[:-1] + bytes([value[-1] ^ 1]), MissCause.CORRUPT),
    "zeros": (lambda value, other: bytes(len(value)), MissCause.CORRUPT),
    "another block's value": (lambda value, other: other, MissCause.CORRUPT),
    "one byte less": (lambda value, other: value[:-1], MissCause.WRONG_LENGTH),
    "one byte more": (lambda value, other: value + b"\0", MissCause.WRONG_LENGTH),
    "far more": (lambda value, other: 2 * value, MissCause.WRONG_LENGTH),
    "one byte": (lambda value, other: b"\0", MissCause.WRONG_LENGTH),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_value_is_a_miss_with_its_cause_and_the_block_can_be_kept_again(
    what: str, tier: MooncakeStoreTier, raw: RawStore
):
    make, cause = WRONG[what]
    names = names_of(what, 3)
    keep(tier, names)
    raw.replace(names[1], make(raw.get(names[1]), raw.get(names[0])))
    assert are_right(tier, names) == [True, False, True]
    assert misses(tier) == {cause: 1}
    await_that(lambda: tier.find(names) == [True, False, True])  # it is removed
    assert keep(tier, names) == [True] * 3
    assert are_right(tier, names) == [True] * 3


def test_a_wrong_length_alone_does_not_look_like_a_store_that_fails(tier: MooncakeStoreTier, raw: RawStore):
    names = names_of("alone", 1)
    keep(tier, names)
    raw.replace(names[0], 2 * raw.get(names[0]))
    assert are_right(tier, names) == [False]
    assert misses(tier) == {MissCause.WRONG_LENGTH: 1}
    assert tier.is_on


def test_the_same_bytes_under_another_layout_are_wrong(
    tier: MooncakeStoreTier, shared_store: MooncakeProcesses, raw: RawStore
):
    names = names_of("moved", 1)
    keep(tier, names)
    with tier_on(shared_store, layout=b"another") as other:
        raw.replace(names[0], raw.get(names[0]), b"another")
        assert are_right(other, names) == [False]
        assert misses(other) == {MissCause.CORRUPT: 1}


# ---- a store that is full


def test_what_finds_no_space_is_not_kept_and_the_store_goes_on(own_store: MooncakeProcesses):
    """As a block that is larger than all of it."""
    config = MooncakeStoreConfig(address=own_store.ports.client_address, timeout_s=10.0, max_calls=1)
    tier = MooncakeStoreTier.start(layout=b"large", block_bytes=SETTINGS.segment_bytes + 1, config=config)
    try:
        await_on(tier)
        [name] = names_of("large", 1)
        assert tier.keep([name], np.zeros((1, tier.block_bytes), np.uint8)) == [False]
        assert (tier.counters.num_kept, tier.counters.num_not_kept) == (0, 1)
        assert tier.is_on
        assert tier.find([name]) == [False]
    finally:
        tier.close()


def test_a_full_store_gives_up_what_nobody_asks_for(own_store: MooncakeProcesses):
    with tier_on(own_store) as tier:
        chains = [names_of(f"more {index}", 20) for index in range(45)]
        for names in chains:
            keep_until_kept(tier, names)
        usage = read_usage(own_store.ports.metrics)
        assert usage.num_evicted > 0
        assert usage.num_blocks * BLOCK_BYTES <= usage.bytes_held <= usage.bytes_capacity == SETTINGS.segment_bytes
        assert are_right(tier, chains[-1]) == [True] * 20


def test_what_a_writer_asks_about_now_and_then_is_not_given_up(own_store: MooncakeProcesses):
    """As the beginning of a chain that devices have, which nobody reads here."""
    with tier_on(own_store) as tier:
        hot, cold = names_of("hot", 20), names_of("cold", 20)
        keep_until_kept(tier, hot)
        keep_until_kept(tier, cold)
        for index in range(90):
            keep_until_kept(tier, names_of(f"more {index}", 20))
            assert tier.has(hot) == [True] * 20
        assert read_usage(own_store.ports.metrics).num_evicted > 0
        assert not any(tier.has(cold))
