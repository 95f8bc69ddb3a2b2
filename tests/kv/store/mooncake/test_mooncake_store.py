"""Mooncake Store for real: its two processes are stopped, killed and started again under a worker."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from moonshard.kv.prefix import BlockName
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.tier import MissCause, Tier
from moonshard.serving.store.native import NativeProcess
from moonshard.serving.store.ports import StorePorts, free_ports
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings
from tests.kv.store.mooncake.store_blocks import (
    BLOCK_BYTES,
    LAYOUT,
    are_right,
    await_on,
    await_that,
    blocks_of,
    names_of,
)
from tests.kv.store.mooncake.store_usage import read_usage

pytestmark = pytest.mark.xdist_group("mooncake")

ROOT = Path(__file__).parents[4]
SETTINGS = StoreSettings(segment_bytes=64 * 1024 * 1024)
AT_ONCE_S = 1.0  # on a machine that does other things too: the library's own limit is 30 s
LONG_S = 20.0
NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def shared_store() -> Iterator[MooncakeProcesses]:
    """For tests that let it live."""
    yield from _store(SETTINGS)


@pytest.fixture
def own_store() -> Iterator[MooncakeProcesses]:
    yield from _store(SETTINGS)


def _store(settings: StoreSettings) -> Iterator[MooncakeProcesses]:
    processes = MooncakeProcesses(StorePorts.free(), settings)
    processes.start()
    pids = processes.pids
    yield processes
    processes.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def config_for(
    processes: MooncakeProcesses, timeout_s: float = 10.0, rest_s: float = 0.1, unhurried_timeout_s: float | None = None
) -> MooncakeStoreConfig:
    address = processes.ports.client_address
    return MooncakeStoreConfig(
        address=address,
        timeout_s=timeout_s,
        unhurried_timeout_s=timeout_s if unhurried_timeout_s is None else unhurried_timeout_s,
        max_call_bytes=5 * BLOCK_BYTES,
        rest_s=rest_s,
    )


@contextmanager
def tier_on(
    processes: MooncakeProcesses,
    *,
    layout: bytes = LAYOUT,
    timeout_s: float = 10.0,
    rest_s: float = 0.1,
    unhurried_timeout_s: float | None = None,
) -> Iterator[MooncakeStoreTier]:
    config = config_for(processes, timeout_s, rest_s, unhurried_timeout_s)
    tier = MooncakeStoreTier.start(layout=layout, block_bytes=BLOCK_BYTES, config=config)
    try:
        await_on(tier)
        yield tier
    finally:
        tier.close()


@pytest.fixture
def tier(shared_store: MooncakeProcesses) -> Iterator[MooncakeStoreTier]:
    with tier_on(shared_store) as tier:
        yield tier


@pytest.fixture
def hasty(own_store: MooncakeProcesses) -> Iterator[MooncakeStoreTier]:
    """A tier that does not wait long, on a store of its own."""
    with tier_on(own_store, timeout_s=0.1) as tier:
        yield tier


def misses(tier: MooncakeStoreTier) -> dict[MissCause, int]:
    """But for those while it was not yet on."""
    return {cause: number for cause, number in tier.counters.num_misses.items() if cause is not MissCause.OFF}


def keep(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> list[bool]:
    return tier.keep(names, blocks_of(names))


def keep_until_kept(tier: MooncakeStoreTier, names: Sequence[BlockName]) -> None:
    await_that(lambda: all(keep(tier, names)))


class WorkerProcess:
    def __init__(self, processes: MooncakeProcesses, timeout_s: float):
        address = processes.ports.client_address
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv.store.mooncake.store_worker", address, str(timeout_s)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("await_on")

    def ask(self, *command: object):
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def worker_on(processes: MooncakeProcesses, *, timeout_s: float = 10.0) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(processes, timeout_s)
    try:
        yield worker
    finally:
        worker.kill()


def give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def stop(process: NativeProcess) -> None:
    """Returns once it has stopped."""
    assert process.pid
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def go_on(process: NativeProcess) -> None:
    assert process.pid
    os.kill(process.pid, signal.SIGCONT)


def kill(process: NativeProcess) -> None:
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    await_that(lambda: process.pid is None)


def start_again(process: NativeProcess) -> None:
    process.start()
    process.wait_until_it_answers(20.0)


def num_store_threads() -> int:
    return sum(thread.name.startswith("mooncake-store") for thread in threading.enumerate())


def process_of(processes: MooncakeProcesses, which: str) -> NativeProcess:
    return next(process for process in processes.all if process.name == f"mooncake_{which}")


def seconds_of(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


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


# ---- the store fails


@pytest.mark.parametrize("which", ["master", "client"])
def test_while_a_process_is_stopped_all_is_a_miss_at_once_and_then_it_serves_again(
    which: str, own_store: MooncakeProcesses, hasty: MooncakeStoreTier
):
    names = names_of("stopped", NUM_BLOCKS)
    keep_until_kept(hasty, names)
    process = process_of(own_store, which)
    stop(process)
    for _ in range(3):
        assert seconds_of(lambda: hasty.find(names)) < AT_ONCE_S
        assert seconds_of(lambda: are_right(hasty, names)) < AT_ONCE_S
        assert seconds_of(lambda: keep(hasty, names)) < AT_ONCE_S
        assert hasty.find(names) == are_right(hasty, names) == [False] * NUM_BLOCKS
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
    yield from _store(StoreSettings(segment_bytes=SETTINGS.segment_bytes, client_ttl_s=3))


@pytest.mark.parametrize("which", ["master", "client"])
def test_after_a_process_was_killed_all_is_a_miss_at_once_and_a_new_one_serves_empty(
    which: str, forgetful_store: MooncakeProcesses
):
    names, process = names_of("killed", NUM_BLOCKS), process_of(forgetful_store, which)
    with tier_on(forgetful_store, timeout_s=0.1) as tier:
        keep_until_kept(tier, names)
        kill(process)
        for _ in range(3):
            assert seconds_of(lambda: tier.find(names)) < AT_ONCE_S
            assert seconds_of(lambda: are_right(tier, names)) < AT_ONCE_S
            assert seconds_of(lambda: keep(tier, names)) < AT_ONCE_S
            assert tier.find(names) == are_right(tier, names) == [False] * NUM_BLOCKS
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


def test_who_writes_is_not_told_that_a_block_lacks_where_nothing_answers(own_store: MooncakeProcesses):
    with tier_on(own_store, timeout_s=0.1) as tier:
        names = names_of("asked", 3)
        keep_until_kept(tier, names[:2])
        assert tier.has(names) == [True, True, False]
        before = misses(tier)
        kill(own_store.client)
        assert tier.has(names) == [None] * 3
        assert misses(tier) == before  # nobody was to read them


# ---- beginnings and ends


def test_a_closed_tier_has_no_threads_and_answers_with_misses(shared_store: MooncakeProcesses):
    before = set(threading.enumerate())
    with tier_on(shared_store) as tier:
        names = names_of("closed", 2)
        assert keep(tier, names) == [True, True]
        tier.close()
        assert set(threading.enumerate()) == before
        num_off = tier.counters.num_misses.get(MissCause.OFF, 0)
        assert tier.find(names) == are_right(tier, names) == keep(tier, names) == [False, False]
        assert tier.counters.num_misses == {MissCause.OFF: num_off + 4}
        assert not tier.is_on
    with tier_on(shared_store) as tier:
        assert are_right(tier, names) == [True, True]


def test_closing_while_the_store_hangs_takes_little(own_store: MooncakeProcesses):
    with worker_on(own_store, timeout_s=0.1) as worker:
        stop(own_store.client)
        assert worker.ask("find", "hang", 1) == [False]
        assert seconds_of(lambda: worker.ask("close")) < 5
    go_on(own_store.client)


def test_a_process_that_uses_the_store_says_nothing(shared_store: MooncakeProcesses):
    code = (
        "import sys; from tests.kv.store.mooncake.store_worker import *\n"
        "worker = Worker(sys.argv[1], 10.0); worker.await_on()\n"
        "assert worker.keep('quiet', 2) == worker.fetch('quiet', 2) == [True, True]; worker.close()"
    )
    argv = [sys.executable, "-c", code, shared_store.ports.client_address]
    done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_process_whose_store_is_gone_says_nothing_of_it_by_itself(own_store: MooncakeProcesses):
    """The library would, once for every key."""
    argv = [sys.executable, "-m", "tests.kv.store.mooncake.store_worker", own_store.ports.client_address, "10.0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        for command, answer in [("await_on", None), ("keep", [True] * 3), ("find", [False] * 3)]:
            process.stdin.write(json.dumps([command, *(() if answer is None else ("gone", 3))]) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == answer
            if command == "keep":
                kill(own_store.client)
        _, said = process.communicate(timeout=LONG_S)
    assert said == ""


@contextmanager
def someone(kind: str) -> Iterator[str]:
    """Where nothing answers, or somebody who is no client of Mooncake Store."""
    if kind == "nobody":
        [port] = free_ports(1)
        yield f"127.0.0.1:{port}"
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("kind", "told"),
    [("nobody", "nothing answers at {}"), ("http", "what answers at {} is no mooncake_client of this machine")],
)
def test_a_wrong_address_is_told_once_and_all_is_a_miss(kind: str, told: str):
    changes = list[str | None]()
    with someone(kind) as address:
        config = MooncakeStoreConfig(address=address, rest_s=0.01)
        tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config, on_change=changes.append)
        try:
            await_that(lambda: bool(changes))
            names = names_of("wrong", 2)
            for _ in range(20):  # each may be an attempt
                assert tier.find(names) == [False, False]
                assert tier.counters.is_up is False
        finally:
            tier.close()
    assert changes == [told.format(address)]


@pytest.mark.parametrize(("how", "why"), [(stop, "does not answer in time"), (kill, "fails")])
def test_that_a_client_goes_and_comes_back_is_told_once_each(
    how: Callable[[NativeProcess], None], why: str, own_store: MooncakeProcesses
):
    changes = list[str | None]()
    address = own_store.ports.client_address
    config = config_for(own_store, timeout_s=0.1)
    tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config, on_change=changes.append)
    try:
        await_on(tier)
        assert (tier.counters.is_up, changes) == (True, [])
        how(own_store.client)
        names = names_of("gone", 2)
        await_that(lambda: tier.find(names) == [False, False] and f"mooncake_client at {address} {why}" in changes)
        assert tier.counters.is_up is False
        if how is stop:
            go_on(own_store.client)
        else:
            start_again(own_store.client)
        await_on(tier)
        assert changes[-1] is None
        assert all(change != after for change, after in itertools.pairwise(changes))
    finally:
        tier.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    config = MooncakeStoreConfig(address="127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="mooncake-transfer-engine"):
        MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config)


def test_an_address_that_is_none_is_told_at_the_start():
    with pytest.raises(ValueError, match="nowhere"):
        MooncakeStoreTier.start(
            layout=LAYOUT, block_bytes=BLOCK_BYTES, config=MooncakeStoreConfig(address="127.0.0.1:nowhere")
        )
