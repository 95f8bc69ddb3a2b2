"""Mooncake Store's processes are stopped, killed and started again: all is a miss, soon, and comes back."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.tier import MissCause
from moonshard.serving.store.native import NativeProcess
from moonshard.serving.store.ports import StorePorts
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings
from tests.kv.store.mooncake.store_blocks import (
    BLOCK_BYTES,
    LAYOUT,
    are_right,
    await_on,
    await_that,
    names_of,
)
from tests.kv.store.mooncake.store_room import (
    AT_ONCE_S,
    LONG_S,
    NUM_BLOCKS,
    SETTINGS,
    config_for,
    give_way,
    go_on,
    keep,
    keep_until_kept,
    kill,
    misses,
    num_store_threads,
    process_of,
    seconds_of,
    start_again,
    stop,
    store_of,
    tier_on,
    worker_on,
)

pytestmark = pytest.mark.xdist_group("mooncake")


def assert_all_are_misses_at_once(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> None:
    for _ in range(3):
        assert seconds_of(lambda: tier.find(names)) < AT_ONCE_S
        assert seconds_of(lambda: are_right(tier, names)) < AT_ONCE_S
        assert seconds_of(lambda: keep(tier, names)) < AT_ONCE_S
        assert tier.find(names) == are_right(tier, names) == [False] * NUM_BLOCKS


@pytest.mark.parametrize("which", ["master", "client"])
def test_while_a_process_is_stopped_all_is_a_miss_at_once_and_then_it_serves_again(
    which: str, own_store: MooncakeProcesses, hasty: MooncakeStoreTier
):
    names = names_of("stopped", NUM_BLOCKS)
    keep_until_kept(hasty, names)
    process = process_of(own_store, which)
    stop(process)
    assert_all_are_misses_at_once(hasty, names)
    assert hasty.counters.num_misses[MissCause.TIMED_OUT] > 0
    assert hasty.counters.num_misses[MissCause.OFF] > 0
    go_on(process)
    keep_until_kept(hasty, names)
    await_that(lambda: all(are_right(hasty, names)))


def test_what_waits_for_a_stopped_master_does_not_hang(own_store: MooncakeProcesses, hasty: MooncakeStoreTier):
    """The library's own limit is 30 s."""
    stop(process_of(own_store, "master"))
    hasty.find(names_of("wait", 1))
    hasty.close()
    await_that(lambda: num_store_threads() == 0, timeout_s=15.0)
    go_on(process_of(own_store, "master"))


@pytest.fixture
def forgetful_store() -> Iterator[MooncakeProcesses]:
    """Its master soon forgets what a client had that is gone."""
    yield from store_of(StoreSettings(segment_bytes=SETTINGS.segment_bytes, client_ttl_s=3))


@pytest.mark.parametrize("which", ["master", "client"])
def test_after_a_process_was_killed_all_is_a_miss_at_once_and_a_new_one_serves_empty(
    which: str, forgetful_store: MooncakeProcesses
):
    names, process = names_of("killed", NUM_BLOCKS), process_of(forgetful_store, which)
    with tier_on(forgetful_store, timeout_s=0.1) as tier:
        keep_until_kept(tier, names)
        kill(process)
        assert_all_are_misses_at_once(tier, names)
        start_again(process)
        await_that(lambda: all(keep(tier, names)) and all(are_right(tier, names)))


def test_a_store_that_starts_later_than_the_worker_is_used_from_then_on():
    processes = MooncakeProcesses(StorePorts.free(), SETTINGS)
    config, names = config_for(processes), names_of("later", 2)
    start_s = time.perf_counter()
    tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config)
    try:
        longest_s = time.perf_counter() - start_s
        while time.perf_counter() - start_s < 1:  # several attempts
            longest_s = max(longest_s, seconds_of(lambda: tier.find(names)))
        assert longest_s < AT_ONCE_S
        assert are_right(tier, names) == keep(tier, names) == [False, False]
        assert set(tier.counters.num_misses) == {MissCause.OFF}
        processes.start()
        await_on(tier)
        assert keep(tier, names) == are_right(tier, names) == [True, True]
    finally:
        tier.close()
        processes.stop()


@pytest.mark.parametrize("how", [stop, kill])
def test_after_one_failure_the_store_is_left_alone(how: Callable[[NativeProcess], None], own_store: MooncakeProcesses):
    with tier_on(own_store, timeout_s=1.0, rest_s=600.0) as tier:
        names = names_of("rest", 2)
        assert keep(tier, names) == [True, True]
        how(own_store.client)
        assert tier.find(names) == [False, False]
        assert sum(misses(tier).values()) == 2
        num_off = tier.counters.num_misses.get(MissCause.OFF, 0)
        if how is stop:
            go_on(own_store.client)
        else:
            start_again(own_store.client)
        for _ in range(3):
            assert tier.find(names) == are_right(tier, names) == keep(tier, names) == [False, False]
        assert tier.counters.num_misses[MissCause.OFF] == num_off + 12
        assert sum(misses(tier).values()) == 2
        assert not tier.is_on


def test_at_most_four_calls_hang_and_then_it_is_off_until_one_returns(
    own_store: MooncakeProcesses, hasty: MooncakeStoreTier
):
    def num_timed_out() -> int:
        return hasty.counters.num_misses.get(MissCause.TIMED_OUT, 0)

    def is_off_for_good() -> bool:
        """Over five rests nothing was attempted."""
        before, start_s = num_timed_out(), time.perf_counter()
        while time.perf_counter() - start_s < 0.5:
            assert hasty.find(names) == are_right(hasty, names) == [False, False]
        return num_timed_out() == before

    names = names_of("hang", 2)
    keep_until_kept(hasty, names)
    stop(own_store.client)
    await_that(is_off_for_good)
    assert num_timed_out() >= 4 * len(names)
    go_on(own_store.client)
    await_that(lambda: all(are_right(hasty, names)))


def test_what_nobody_waits_for_is_given_the_time_that_keeping_has(own_store: MooncakeProcesses):
    with tier_on(own_store, timeout_s=0.1, unhurried_timeout_s=LONG_S) as tier, ThreadPoolExecutor() as threads:
        names = names_of("patient", 2)
        keep_until_kept(tier, names)
        stop(own_store.client)
        found = threads.submit(tier.has, names)
        await_that(lambda: are_right(tier, names) == [False, False] and MissCause.TIMED_OUT in tier.counters.num_misses)
        assert not found.done()
        go_on(own_store.client)
        assert found.result(LONG_S) == [True, True]


def test_what_nobody_waits_for_switches_nothing_off_for_requests_when_it_is_late(own_store: MooncakeProcesses):
    with tier_on(own_store, timeout_s=LONG_S, unhurried_timeout_s=0.1, rest_s=600.0) as tier:
        names = names_of("late", 2)
        keep_until_kept(tier, names)
        stop(own_store.client)
        assert tier.has(names) == [None, None]
        assert tier.is_on
        go_on(own_store.client)
        assert tier.has(names) == [None, None]  # it is left alone itself
        assert tier.find(names) == are_right(tier, names) == [True, True]


def test_its_threads_have_the_priority_of_whoever_starts_it(shared_store: MooncakeProcesses):
    """Also where who gives way to all others is the first to call."""
    with tier_on(shared_store) as tier, ThreadPoolExecutor(initializer=give_way) as threads:
        for _ in range(8):
            threads.submit(tier.has, names_of("nice", 1)).result()
        lanes = [thread for thread in threading.enumerate() if thread.name.startswith("mooncake-store-")]
        assert len(lanes) == MooncakeStoreConfig(address="").max_calls
        priorities = {os.getpriority(os.PRIO_PROCESS, lane.native_id or 0) for lane in lanes}
        assert priorities == {os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}


def test_what_comes_through_pauses_is_right_or_a_miss(own_store: MooncakeProcesses, hasty: MooncakeStoreTier):
    """Calls that were given up end when the client goes on, and must not write into what is fetched by then."""
    chains = [names_of(f"pause {index}", 5) for index in range(6)]
    for names in chains:
        keep_until_kept(hasty, names)
    num_came = 0
    for round_ in range(6):
        stop(own_store.client)
        for names in chains:
            are_right(hasty, names)
        go_on(own_store.client)
        await_on(hasty)
        num_came += sum(sum(are_right(hasty, names)) for names in chains[round_:])
    assert num_came > 0
    assert MissCause.CORRUPT not in hasty.counters.num_misses


@pytest.mark.slow
def test_a_worker_that_was_stopped_for_long_uses_the_store_again(shared_store: MooncakeProcesses):
    """The client forgets its memory after 10 s."""
    with worker_on(shared_store) as worker:
        assert worker.ask("keep", "long", 2) == [True, True]
        os.kill(worker.process.pid, signal.SIGSTOP)
        threading.Event().wait(15)
        os.kill(worker.process.pid, signal.SIGCONT)
        await_that(lambda: worker.ask("fetch", "long", 2) == [True, True])
        assert worker.ask("keep", "long after", 2) == [True, True]


def test_who_writes_is_not_told_that_a_block_lacks_where_nothing_answers(own_store: MooncakeProcesses):
    with tier_on(own_store, timeout_s=0.1) as tier:
        names = names_of("asked", 3)
        keep_until_kept(tier, names[:2])
        assert tier.has(names) == [True, True, False]
        before = misses(tier)
        kill(own_store.client)
        assert tier.has(names) == [None] * 3
        assert misses(tier) == before  # nobody was to read them
